#include "prefill_kernels.h"

#include "../ptx/wgmma.cuh"
#include "prefill_product.cuh"

namespace coli {

namespace {

/* Two warpgroups multiply; of the third one warp fills stages, and its registers go to the others. */
constexpr int kThreads = kPrefillWgmmaWarps * kWarp;
constexpr int kFillRegisters = 40, kMultiplyRegisters = 232;

template <int N> class WgmmaUnit {
  public:
    static constexpr int kMaxGroupSteps = 4;
    __device__ __forceinline__ WgmmaUnit(const uint8_t *tokens, int) : tokens_(wgmma_operand(tokens)) {}
    __device__ __forceinline__ void begin() const { wgmma_fence(); }
    /* chunk += or = a times columns 16 step ... of the tokens. */
    __device__ __forceinline__ void multiply(float (&chunk)[N / 8][4], const uint32_t (&a)[4], int step, bool add) const {
        wgmma(chunk, a, tokens_ + (step / 4 * N * kTokenBytes + step % 4 * 32) / 16, add);
    }
    __device__ __forceinline__ void end() const { wgmma_commit(); }
    template <int GROUPS> __device__ __forceinline__ void wait() const { wgmma_wait<GROUPS>(); }
    __device__ __forceinline__ void settle(float (&chunk)[N / 8][4]) const { wgmma_settle(chunk); }

  private:
    uint64_t tokens_;
};

/* The ring of stages: one warp fills it, the others take from it. */
struct Ring {
    uint8_t *stages;
    uint64_t *filled, *emptied;
    int stage_bytes, count;
};

class RingPosition {
  public:
    __device__ explicit RingPosition(const Ring &ring) : ring_(ring) {}
    __device__ __forceinline__ uint8_t *stage() const { return ring_.stages + index_ * ring_.stage_bytes; }
    __device__ __forceinline__ uint64_t *filled() const { return ring_.filled + index_; }
    __device__ __forceinline__ uint64_t *emptied() const { return ring_.emptied + index_; }
    __device__ __forceinline__ unsigned phase() const { return phase_; }
    __device__ __forceinline__ void advance() {
        if (++index_ == ring_.count) index_ = 0, phase_ ^= 1;
    }

  private:
    const Ring &ring_;
    int index_ = 0;
    unsigned phase_ = 0;
};

class FullStages {
  public:
    __device__ FullStages(const Ring &ring, int lane) : position_(ring), lane_(lane) {}
    __device__ __forceinline__ const uint8_t *front() const {
        barrier_wait(position_.filled(), position_.phase());
        return position_.stage();
    }
    __device__ __forceinline__ void pop() {
        __syncwarp();
        if (lane_ == 0) barrier_arrive(position_.emptied());
        position_.advance();
    }

  private:
    RingPosition position_;
    int lane_;
};

__device__ Ring make_ring(const PrefillProduct &plan, uint8_t *shared) {
    uint64_t *barriers = reinterpret_cast<uint64_t *>(shared + plan.barriers_offset);
    const Ring ring{shared + plan.ring_offset, barriers, barriers + plan.stages, plan.stage_bytes, plan.stages};
    if (threadIdx.x == 0) {
        for (int i = 0; i < plan.stages; i++) {
            barrier_init(ring.filled + i, 1);
            barrier_init(ring.emptied + i, plan.warps);
        }
        barrier_init_fence();
    }
    return ring;
}

__device__ void fill_stages(const PrefillJob &job, const Ring &ring, int lane) {
    RingPosition position(ring);
    for (StageWalk walk(job); !walk.done(); walk.next(), position.advance()) {
        barrier_wait(position.emptied(), position.phase() ^ 1);
        if (lane == 0) barrier_expect(position.filled(), walk.bytes());
        for (int i = lane; i < walk.pieces(); i += kWarp) {
            const StagePiece piece = walk.piece(i);
            if (piece.once)
                copy_bulk(position.stage() + piece.to, piece.from, piece.bytes, position.filled());
            else
                copy_bulk_kept(position.stage() + piece.to, piece.from, piece.bytes, position.filled());
        }
    }
}

__global__ void __launch_bounds__(kThreads, 1)
    prefill_wgmma(const __grid_constant__ GroupParams p, const __grid_constant__ PrefillProduct plan, const Tokens tokens) {
    dependency_trigger();
    uint8_t *shared = dynamic_shared();
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
    const PrefillJob job{p, plan, tokens};
    const Ring ring = make_ring(plan, shared);
    if (plan.codebook) spread_codebook(reinterpret_cast<uint2 *>(shared), *p.tables);
    __syncthreads();
    dependency_wait();
    if (warp >= plan.warps) {
        give_registers<kFillRegisters>();
        if (warp == plan.warps) fill_stages(job, ring, lane);
    } else {
        take_registers<kMultiplyRegisters>();
        const KernelTables tables{codebook_of(reinterpret_cast<const uint2 *>(shared), lane), p.tables->fp8};
        FullStages stages(ring, lane);
        multiply_items<WgmmaUnit, kMaxTokenTile>(job, stages, tables, warp, lane);
    }
}

} // namespace

PrefillKernel prefill_wgmma_kernel() {
    return prefill_wgmma;
}

} // namespace coli
