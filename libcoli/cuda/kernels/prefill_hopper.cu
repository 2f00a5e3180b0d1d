#include "prefill_kernels.h"

#include "prefill_product.cuh"
#include "ring.cuh"
#include "wgmma_unit.cuh"

namespace coli {

namespace {

/* Two or three warpgroups multiply; the last one fills stages, and its registers go to the others. */
constexpr int kFillRegisters = 40;
COLI_FN constexpr int multiply_registers(int warps) {
    return warps == kPrefillWarps ? 232 : 152;
}
COLI_FN constexpr int max_tile(int warps) {
    return warps == kPrefillWarps ? kMaxTokenTile : kMaxManyWarpsTokenTile;
}

/* The ring of stages: the filling warps share out its copies, the others take from it. */
__device__ RingMemory make_ring(const PrefillProduct &plan, uint8_t *shared) {
    const RingMemory ring{shared + plan.ring_offset, reinterpret_cast<uint64_t *>(shared + plan.barriers_offset),
                          plan.stage_bytes, plan.stages};
    if (threadIdx.x == 0) init_ring(ring, plan.warps, kPrefillFillWarps);
    return ring;
}

__device__ void fill_stages(const PrefillJob &job, const RingMemory &ring, int warp, int lane) {
    const int mine = warp + kPrefillFillWarps * lane;
    RingPosition position(ring);
    for (StageWalk walk(job); !walk.done(); walk.next(), position.advance()) {
        const StagePiece piece = mine < walk.pieces() ? walk.piece(mine) : StagePiece{};
        const int bytes = sum_of_warp(piece.bytes);
        barrier_wait(position.emptied(), position.phase() ^ 1);
        if (lane == 0) barrier_expect(position.filled(), bytes);
        if (piece.bytes == 0) continue;
        if (piece.once)
            copy_bulk(position.slot() + piece.to, piece.from, piece.bytes, position.filled());
        else
            copy_bulk_kept(position.slot() + piece.to, piece.from, piece.bytes, position.filled());
    }
}

static_assert(kTokenBytes == kWgmmaRowBytes && kTokenGroup == kWgmmaRows, "tokens lie as the matrix unit wants them");

/* Steps whose products are under way together: losses take registers. */
template <int N> using ExactUnit = WgmmaUnit<N, N <= 64 ? 2 : 1>;
template <int N> using RoundedUnit = WgmmaUnit<N, 4>;

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
        fill_stages(job, ring, warp - WARPS, lane);
    } else {
        take_registers<multiply_registers(WARPS)>();
        const KernelTables tables{codebook_of(reinterpret_cast<const uint2 *>(shared), lane)};
        FedRing stages(ring, lane);
        if constexpr (EXACT)
            multiply_items<ExactUnit, true, max_tile(WARPS)>(job, stages, tables, warp, lane);
        else
            multiply_items<RoundedUnit, false, max_tile(WARPS)>(job, stages, tables, warp, lane);
    }
}

} // namespace

PrefillKernel prefill_wgmma_kernel(bool exact, int warps) {
    if (warps == kPrefillWarps) return exact ? prefill_wgmma<true, kPrefillWarps> : prefill_wgmma<false, kPrefillWarps>;
    return exact ? prefill_wgmma<true, kPrefillManyWarps> : prefill_wgmma<false, kPrefillManyWarps>;
}

} // namespace coli
