#include "prefill_kernels.h"

#include "../ptx/wgmma.cuh"
#include "prefill_product.cuh"
#include "ring.cuh"

namespace coli {

namespace {

/* Two or three warpgroups multiply; of the last one warp fills stages, and its registers go to the others. */
constexpr int kFillRegisters = 40;
COLI_FN constexpr int multiply_registers(int warps) {
    return warps == kPrefillWarps ? 232 : 152;
}
COLI_FN constexpr int max_tile(int warps) {
    return warps == kPrefillWarps ? kMaxTokenTile : kMaxManyWarpsTokenTile;
}

template <int N> class WgmmaUnit {
  public:
    static constexpr int kMaxGroupSteps = 4;
    __device__ __forceinline__ WgmmaUnit(const uint8_t *tokens, int) : tokens_(wgmma_operand(tokens)) {}
    __device__ __forceinline__ void begin() const { wgmma_fence(); }
    /* chunk += or = a times columns 16 step ... of the tokens. */
    __device__ __forceinline__ void multiply(float (&chunk)[N / 8][4], const uint32_t (&a)[4], int step, bool add) const {
        wgmma(chunk, a, tokens_ + (step / 4 * N * kTokenBytes + step % 4 * 32) / 16, add);
    }
    __device__ __forceinline__ void next() const {}
    __device__ __forceinline__ void end() const { wgmma_commit(); }
    template <int GROUPS> __device__ __forceinline__ void wait() const { wgmma_wait<GROUPS>(); }
    __device__ __forceinline__ void settle(float (&chunk)[N / 8][4]) const { wgmma_settle(chunk); }

  private:
    uint64_t tokens_;
};

/* The ring of stages: one warp fills it, the others take from it. */
__device__ RingMemory make_ring(const PrefillProduct &plan, uint8_t *shared) {
    const RingMemory ring{shared + plan.ring_offset, reinterpret_cast<uint64_t *>(shared + plan.barriers_offset),
                          plan.stage_bytes, plan.stages};
    if (threadIdx.x == 0) init_ring(ring, plan.warps);
    return ring;
}

__device__ void fill_stages(const PrefillJob &job, const RingMemory &ring, int lane) {
    RingPosition position(ring);
    for (StageWalk walk(job); !walk.done(); walk.next(), position.advance()) {
        barrier_wait(position.emptied(), position.phase() ^ 1);
        if (lane == 0) barrier_expect(position.filled(), walk.bytes());
        for (int i = lane; i < walk.pieces(); i += kWarp) {
            const StagePiece piece = walk.piece(i);
            if (piece.once)
                copy_bulk(position.slot() + piece.to, piece.from, piece.bytes, position.filled());
            else
                copy_bulk_kept(position.slot() + piece.to, piece.from, piece.bytes, position.filled());
        }
    }
}

template <bool EXACT, int WARPS>
__global__ void __launch_bounds__((WARPS + kPrefillFillWarps) * kWarp, 1)
    prefill_wgmma(const __grid_constant__ GroupParams p, const __grid_constant__ PrefillProduct plan, const Tokens tokens) {
    dependency_trigger();
    uint8_t *shared = dynamic_shared();
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
    const PrefillJob job{p, plan, tokens};
    const RingMemory ring = make_ring(plan, shared);
    if (plan.codebook) spread_codebook(reinterpret_cast<uint2 *>(shared), *p.tables);
    __syncthreads();
    dependency_wait();
    if (warp >= WARPS) {
        give_registers<kFillRegisters>();
        if (warp == WARPS) fill_stages(job, ring, lane);
    } else {
        take_registers<multiply_registers(WARPS)>();
        const KernelTables tables{codebook_of(reinterpret_cast<const uint2 *>(shared), lane), p.tables->fp8};
        FedRing stages(ring, lane);
        multiply_items<WgmmaUnit, EXACT, max_tile(WARPS)>(job, stages, tables, warp, lane);
    }
}

} // namespace

PrefillKernel prefill_wgmma_kernel(bool exact, int warps) {
    if (warps == kPrefillWarps) return exact ? prefill_wgmma<true, kPrefillWarps> : prefill_wgmma<false, kPrefillWarps>;
    return exact ? prefill_wgmma<true, kPrefillManyWarps> : prefill_wgmma<false, kPrefillManyWarps>;
}

} // namespace coli
