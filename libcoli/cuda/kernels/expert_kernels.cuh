/* kernels/expert_kernels.cuh - the two products of an expert: gate and up with the activation, and down. */
#ifndef COLI_CUDA_KERNELS_EXPERT_KERNELS_CUH
#define COLI_CUDA_KERNELS_EXPERT_KERNELS_CUH

#include "../ptx/dependent.cuh"
#include "../vendor.h"
#include "expert_variants.h"
#include "outputs.cuh"
#include "product.cuh"
#include "rotate.cuh"

namespace coli {

struct PlainPath {
    static constexpr Path kPath = Path::kPlain;
    static constexpr bool kTensorCores = false, kCopyEngine = false;
    using Ring = PlainRing;
};
struct AmperePath {
    static constexpr Path kPath = Path::kAmpere;
    static constexpr bool kTensorCores = true, kCopyEngine = false;
    using Ring = AsyncRing;
};
struct HopperPath {
    static constexpr Path kPath = Path::kHopper;
    static constexpr bool kTensorCores = true, kCopyEngine = true;
    using Ring = BulkRing;
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

/* All warps prepare slices first ... of `count` rows. */
template <class Scheme>
__device__ void prepare_rows(const FloatRows &x, int count, int first, int slices, const SplitRows &split) {
    const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    for (int i = warp; i < count * slices; i += warps)
        Scheme::prepare(x, i / slices, i / slices, first + i % slices, i % slices, split, threadIdx.x % kWarp);
}

/* The same for rows that are rotated on the way, one after another. */
template <class Scheme>
__device__ void rotate_and_prepare_rows(const FloatRows &x, int count, int slices, const uint8_t *signs, float *scratch,
                                        const SplitRows &split) {
    const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    for (int s = 0; s < count; s++) {
        if (s > 0) __syncthreads(); /* the last row was read */
        rotate_row(x.data + s * x.stride, scratch, x.columns, signs);
        __syncthreads();
        for (int slice = warp; slice < slices; slice += warps)
            Scheme::prepare({scratch, 0, x.columns}, 0, s, slice, slice, split, threadIdx.x % kWarp);
    }
}

/* Multiplies the share with an expert's rows, ROWS at a time, and gives each output its totals:
 * store(row of the expert, weight row, total of the first matrix, total of the second). */
template <class OnPath, class Scheme, int ROWS, class Store>
__device__ void multiply_expert(Share &share, const RowSource &source, int rows, const ProductPlan &plan,
                                const DeviceTables &device_tables, Store store) {
    const int warp = warp_of_block(), lane = threadIdx.x % kWarp;
    const ProductMemory memory = product_memory<Scheme>(plan, dynamic_shared(), warp);
    const ByteTables tables{codebook_of(memory.codebook, lane), device_tables.fp8};
    typename OnPath::Ring ring(memory.ring, lane);

    for (int first = 0; first < rows; first += ROWS) {
        share.rows = min(ROWS, rows - first);
        TileStream<typename OnPath::Ring> stream(ring, *memory.walk, share, plan, warp, lane);
        if (first == 0) {
            if (plan.codebook) spread_codebook(memory.codebook, device_tables);
            dependency_wait();
        }
        const FloatRows x{source.rows.data + first * source.rows.stride, source.rows.stride, source.rows.columns};
        multiply_share<Scheme>(stream, share, plan, memory, tables, [&](int slice, int slices) {
            if (source.rotate)
                rotate_and_prepare_rows<Scheme>(x, share.rows, slices, device_tables.signs, memory.scratch,
                                                memory.activations);
            else
                prepare_rows<Scheme>(x, share.rows, slice, slices, memory.activations);
            if (slice == 0) stream.fill();
        });
        __syncthreads();
        const int outputs = share.pairs * share.rows * kPairRows;
        for (int i = threadIdx.x; i < outputs; i += blockDim.x) {
            const int row = i % kPairRows, s = i / kPairRows % share.rows, pair = i / (kPairRows * share.rows);
            const int o = kPairRows * (share.first_pair + pair) + row;
            if (o < share.O) store(first + s, o, memory.totals[i], memory.totals[(share.matrix_count - 1) * outputs + i]);
        }
    }
}

/* The scheme of an expert depends on its own matrices alone, so that company does not change its bits. */
template <class OnPath, int ROWS, bool LIMBS_ONLY, class Store>
__device__ void multiply_in_scheme(Share &share, const RowSource &source, int rows, const ProductPlan &plan,
                                   const DeviceTables &tables, Store store) {
    /* where registers run out otherwise */
    constexpr int kMostUnrolled = OnPath::kCopyEngine ? 16 : 2;
    constexpr bool kRolled = kCompiledFor >= 100 || !LIMBS_ONLY || ROWS == 8 || ROWS > kMostUnrolled;
    if constexpr (LIMBS_ONLY) {
        multiply_expert<OnPath, LimbScheme<ROWS, kRolled>, ROWS>(share, source, rows, plan, tables, store);
    } else if (OnPath::kTensorCores && multiplies_bytes(*share.first_matrix) && multiplies_bytes(*share.second_matrix)) {
        multiply_expert<OnPath, LimbScheme<ROWS, kRolled>, ROWS>(share, source, rows, plan, tables, store);
    } else {
        multiply_expert<OnPath, HalfScheme<OnPath, ROWS>, ROWS>(share, source, rows, plan, tables, store);
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
template <class OnPath> __device__ constexpr bool taken_by_plans(int rows) {
    return rows <= most_pass_rows(kCompiledFor, OnPath::kPath) && (kCompiledFor >= 90 || !OnPath::kCopyEngine) &&
           (kCompiledFor >= 80 || !OnPath::kTensorCores);
}

template <class OnPath, int ROWS, bool LIMBS_ONLY>
__global__ void __launch_bounds__(product_threads(kCompiledFor, OnPath::kPath, ROWS, LIMBS_ONLY), 1)
    expert_product(const __grid_constant__ GroupParams p, const __grid_constant__ ProductPlan plan) {
    if (!taken_by_plans<OnPath>(ROWS)) return; /* nothing more to compile */
    dependency_trigger();
    const ExpertEntry &expert = p.experts[blockIdx.y];
    if (expert.rows == 0) return;
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
