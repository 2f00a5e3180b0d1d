/* kernels/expert_kernels.cuh - the two products of an expert: gate and up with the activation, and down. */
#ifndef COLI_CUDA_KERNELS_EXPERT_KERNELS_CUH
#define COLI_CUDA_KERNELS_EXPERT_KERNELS_CUH

#include "../ptx/dependent.cuh"
#include "../ptx/wgmma.cuh"
#include "../vendor.h"
#include "expert_variants.h"
#include "outputs.cuh"
#include "product.cuh"
#include "rotate.cuh"

namespace coli {

struct PlainPath {
    static constexpr Path kPath = Path::kPlain;
    static constexpr bool kTensorCores = false, kCopyEngine = false;
    using Tiles = OwnTiles<PlainRing>;
    using Team = OwnMultipliers;
};
struct AmperePath {
    static constexpr Path kPath = Path::kAmpere;
    static constexpr bool kTensorCores = true, kCopyEngine = false;
    using Tiles = OwnTiles<AsyncRing>;
    using Team = OwnMultipliers;
};
struct HopperPath {
    static constexpr Path kPath = Path::kHopper;
    static constexpr bool kTensorCores = true, kCopyEngine = true;
    using Tiles = FedTiles;
    using Team = FedMultipliers;
};

/* Grids are (shares of an expert's weight rows, experts). Weights and codebook do not depend on the launch before: blocks
 * fetch them first, and wait for that launch before they touch activations. */

__device__ inline Share share_of_block(int O, int I, int blocks) {
    const int strips = tile_strips(O), pairs = coli_ceil_div(strips, 2);
    const int first = pairs * static_cast<int>(blockIdx.x) / blocks;
    Share share{};
    share.O = O, share.I = I;
    share.strips = strips, share.tiles = tile_count(I);
    share.first_pair = first, share.pairs = pairs * (static_cast<int>(blockIdx.x) + 1) / blocks - first;
    return share;
}

/* Activation rows of an expert as its product finds them. */
struct RowSource {
    FloatRows rows;
    bool rotate; /* on the way */
};

/* Slices first ... of `count` rows, by all warps that multiply. A warp loads some slices before it prepares the first, so
 * that it waits for memory once. */
template <class Scheme, int TOGETHER, class Team>
__device__ void prepare_rows(const Team &team, const FloatRows &x, int count, int first, int slices,
                             const SplitRows &split) {
    const int warp = warp_of_block(), warps = team.count / kWarp, lane = threadIdx.x % kWarp, all = count * slices;
    for (int i = warp; i < all; i += TOGETHER * warps) {
        SliceValues values[TOGETHER];
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
            const int j = min(i + k * warps, all - 1), row = j / slices;
            load_slice(x, row, first + j - row * slices, lane, values[k]);
        }
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
            const int j = i + k * warps, row = j / slices;
            if (j < all) Scheme::prepare(values[k], row, j - row * slices, split, lane);
        }
    }
}

/* Rows that are rotated on the way, in shared memory. */
struct RotationMemory {
    float *rows;    /* [kMostRotatedRows][columns] */
    uint8_t *signs; /* the table as far as it is needed */
};

__device__ inline RotationMemory rotation_memory(const ProductPlan &plan, uint8_t *shared) {
    return {reinterpret_cast<float *>(shared + plan.rotated_offset), shared + plan.signs_offset};
}

template <class Path, class Team> __device__ void fetch_rows(const Team &team, const FloatRows &x, int count, float *rows) {
    const int quads = count * x.columns / 4; /* the rows are one behind the other */
    if (x.columns % 4 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0) {
        for (int i = threadIdx.x; i < quads; i += team.count) {
            if (Path::kTensorCores)
                copy_async_16(rows + 4 * i, x.data + 4 * i);
            else
                *reinterpret_cast<float4 *>(rows + 4 * i) = *reinterpret_cast<const float4 *>(x.data + 4 * i);
        }
        if (Path::kTensorCores) {
            copy_async_commit();
            copy_async_wait<0>();
        }
    } else {
        for (int i = threadIdx.x; i < count * x.columns; i += team.count) rows[i] = x.data[i];
    }
}

/* All slices of `count` rows. */
template <class Path, class Scheme, int TOGETHER, class Team>
__device__ void rotate_and_prepare_rows(const Team &team, const FloatRows &x, int count, int slices,
                                        const RotationMemory &memory, const SplitRows &split) {
    for (int first = 0; first < count; first += kMostRotatedRows) {
        const int rows = min(kMostRotatedRows, count - first);
        if (first > 0) team.sync(); /* the last ones were read */
        fetch_rows<Path>(team, {x.data + first * x.stride, x.stride, x.columns}, rows, memory.rows);
        team.sync();
        rotate_rows(team, memory.rows, rows, x.columns, memory.signs);
        team.sync();
        const FloatRows rotated{memory.rows, static_cast<size_t>(x.columns), x.columns};
        prepare_rows<Scheme, TOGETHER>(team, rotated, rows, 0, slices, rows_from<typename Scheme::Planes>(split, first));
    }
}

/* Multiplies the share with an expert's rows, ROWS at a time, and gives each output its totals:
 * store(row of the expert, weight row, total of the first matrix, total of the second). */
template <class OnPath, class Scheme, int ROWS, int TOGETHER, class Store>
__device__ __forceinline__ void multiply_expert(Share &share, const RowSource &source, int rows, const ProductPlan &plan,
                                                const DeviceTables &device_tables, Store store) {
    const int warp = warp_of_block(), lane = threadIdx.x % kWarp;
    ProductMemory memory = product_memory<Scheme>(plan, dynamic_shared());
    const RotationMemory rotation = rotation_memory(plan, dynamic_shared());
    const ByteTables tables{codebook_of(memory.codebook, lane), device_tables.fp8};
    const typename OnPath::Team team(plan);
    typename OnPath::Tiles stream(ring_memory(plan, dynamic_shared(), warp), walk_of_warp(plan, dynamic_shared(), warp),
                                  lane);

    for (int first = 0; first < rows; first += ROWS) {
        share.rows = memory.activations.rows = min(ROWS, rows - first);
        stream.start(share, plan, warp);
        if (first == 0) {
            if (plan.codebook) spread_codebook(memory.codebook, device_tables, team.count);
            if (source.rotate) load_signs(team, source.rows.columns, device_tables.signs, rotation.signs);
            team.meet_feeders();
            dependency_wait();
        }
        const FloatRows x{source.rows.data + first * source.rows.stride, source.rows.stride, source.rows.columns};
        multiply_share<Scheme>(team, stream, share, plan, memory, tables, [&](int slice, int slices) {
            if (source.rotate)
                rotate_and_prepare_rows<OnPath, Scheme, TOGETHER>(team, x, share.rows, slices, rotation,
                                                                  memory.activations);
            else
                prepare_rows<Scheme, TOGETHER>(team, x, share.rows, slice, slices, memory.activations);
            if (slice == 0) stream.fill();
            if (slice == 0 && first == 0) team.meet_feeders();
        });
        team.sync();
        const int outputs = share.pairs * share.rows * kPairRows;
        for (int i = threadIdx.x; i < outputs; i += team.count) {
            const int row = i % kPairRows, s = i / kPairRows % share.rows, pair = i / (kPairRows * share.rows);
            const int o = kPairRows * (share.first_pair + pair) + row;
            if (o < share.O) store(first + s, o, memory.totals[i], memory.totals[(share.matrix_count - 1) * outputs + i]);
        }
    }
}

/* The scheme of an expert depends on its own matrices alone, so that company does not change its bits. */
template <class OnPath, int ROWS, bool LIMBS_ONLY, class Store>
__device__ __forceinline__ void multiply_in_scheme(Share &share, const RowSource &source, int rows, const ProductPlan &plan,
                                                   const DeviceTables &tables, Store store) {
    /* where registers run out otherwise */
    constexpr bool kRolled = kCompiledFor >= 100 || !LIMBS_ONLY || ROWS > 4;
    constexpr int kTogether = ROWS == 1 || !LIMBS_ONLY ? 1
                              : OnPath::kCopyEngine    ? 4
                                                       : 2; /* slices: where registers suffice */
    if constexpr (LIMBS_ONLY) {
        multiply_expert<OnPath, LimbScheme<ROWS, kRolled>, ROWS, kTogether>(share, source, rows, plan, tables, store);
    } else if (OnPath::kTensorCores && multiplies_bytes(*share.first_matrix) && multiplies_bytes(*share.second_matrix)) {
        multiply_expert<OnPath, LimbScheme<ROWS, kRolled>, ROWS, kTogether>(share, source, rows, plan, tables, store);
    } else {
        multiply_expert<OnPath, HalfScheme<OnPath, ROWS>, ROWS, kTogether>(share, source, rows, plan, tables, store);
    }
}

/* What a block multiplies: of gate and up a share of the H hidden columns, of down one of the D outputs. */
__device__ inline Share share_of_expert(const GroupParams &p, const ProductPlan &plan, const ExpertEntry &expert) {
    Share share = plan.gate_up ? share_of_block(p.H, p.D, plan.blocks) : share_of_block(p.D, p.H, plan.blocks);
    share.first_matrix = plan.gate_up ? &expert.gate : &expert.down;
    share.second_matrix = plan.gate_up ? &expert.up : &expert.down;
    share.matrix_count = plan.gate_up ? 2 : 1;
    return share;
}

__device__ inline RowSource source_of_expert(const GroupParams &p, const ProductPlan &plan, const ExpertEntry &expert) {
    const size_t first_row = expert.first_row, D = p.D, H = p.H;
    if (plan.gate_up) return {{p.x + first_row * D, D, p.D}, false};
    const bool rotate = plan.rotate && expert.rotate_hidden;
    return {{(expert.rotate_hidden && !rotate ? p.rotated : p.hidden) + first_row * H, H, p.H}, rotate};
}

/* Whether a plan for the GPU at hand may be this kernel. */
template <class OnPath, bool LIMBS_ONLY> __device__ constexpr bool taken_by_plans(int rows) {
    return product_path(kCompiledFor, OnPath::kPath, LIMBS_ONLY) == OnPath::kPath &&
           rows >= least_pass_rows(kCompiledFor, OnPath::kPath, LIMBS_ONLY) &&
           rows <= most_pass_rows(kCompiledFor, OnPath::kPath) && (kCompiledFor >= 90 || !OnPath::kCopyEngine) &&
           (kCompiledFor >= 80 || !OnPath::kTensorCores);
}

/* Parts the warps of a block whose rings the copy engine fills: the first plan.warps of MOST_THREADS multiply, those
 * behind them all feed. False where the warp is done. Of Hopper's registers multiplying warps take what others do not need.
 */
template <int MOST_THREADS, int ROWS>
__device__ __forceinline__ bool stays_to_multiply(const GroupParams &p, const ProductPlan &plan) {
    constexpr int kMostWarps = MOST_THREADS / kWarp, kGiven = 32;
    constexpr int kEach = 65536 / (MOST_THREADS + 4 * kWarp) / 8 * 8; /* at the start */
    constexpr int kTaken = (kEach * (kMostWarps + 4) - 4 * kGiven) / kMostWarps / 8 * 8;
    const int warp = warp_of_block();
    if (warp >= plan.first_feeder) {
        if (kHandsRegistersOver) give_registers<kGiven>();
        const ExpertEntry &expert = p.experts[blockIdx.y];
        feed_rings(share_of_expert(p, plan, expert), plan, dynamic_shared(), warp - plan.first_feeder,
                   coli_ceil_div(expert.rows, ROWS));
        return false;
    }
    if (kHandsRegistersOver) take_registers<kTaken>();
    return warp < plan.warps;
}

template <class OnPath, int ROWS, bool LIMBS_ONLY>
__global__ void __launch_bounds__(product_threads(kCompiledFor, OnPath::kPath, ROWS, LIMBS_ONLY) +
                                      service_threads(kCompiledFor, OnPath::kPath),
                                  1)
    expert_product(const __grid_constant__ GroupParams p, const __grid_constant__ ProductPlan plan) {
    if (!taken_by_plans<OnPath, LIMBS_ONLY>(ROWS)) { /* nothing more to compile */
        __trap();                                    /* a plan for another GPU than this was compiled for */
        return;
    }
    constexpr int kMostThreads = product_threads(kCompiledFor, OnPath::kPath, ROWS, LIMBS_ONLY);
    dependency_trigger();
    const ExpertEntry &expert = p.experts[blockIdx.y];
    if (expert.rows == 0) return;
    if constexpr (OnPath::kCopyEngine) {
        if (!stays_to_multiply<kMostThreads, ROWS>(p, plan)) return;
    }
    Share share = share_of_expert(p, plan, expert);
    const size_t first_row = expert.first_row;
    const auto store = [&](int row, int o, float first, float second) {
        first *= row_scale(*share.first_matrix, o);
        if (plan.gate_up)
            p.hidden[(first_row + row) * p.H + o] =
                activate(p.activation, first, second * row_scale(*share.second_matrix, o));
        else
            p.y[(first_row + row) * p.D + o] = first;
    };
    multiply_in_scheme<OnPath, ROWS, LIMBS_ONLY>(share, source_of_expert(p, plan, expert), expert.rows, plan, *p.tables,
                                                 store);
}

} // namespace coli

#endif
