#include "expert.h"

#include "../ptx/dependent.cuh"
#include "product.cuh"
#include "rotate.cuh"

namespace coli {

namespace {

struct PlainPath {
    static constexpr bool kTensorCores = false;
    using Ring = PlainRing;
};
struct AmperePath {
    static constexpr bool kTensorCores = true;
    using Ring = AsyncRing;
};
struct HopperPath {
    static constexpr bool kTensorCores = true;
    using Ring = BulkRing;
};

/* Grids are (shares of an expert's weight rows, experts). Weights and codebook do not depend on the launch before: blocks
 * fetch them first, and wait for that launch before they touch activations. */

__device__ Share share_of_block(int O, int I, int blocks) {
    const int strips = tile_strips(O), pairs = coli_ceil_div(strips, 2);
    const int first = pairs * static_cast<int>(blockIdx.x) / blocks;
    Share share{};
    share.O = O, share.I = I;
    share.strips = strips, share.tiles = tile_count(I);
    share.first_pair = first, share.pairs = pairs * (static_cast<int>(blockIdx.x) + 1) / blocks - first;
    return share;
}

__device__ float row_scale(const MatrixView &matrix, int row) {
    return matrix.row_scales ? static_cast<const float *>(matrix.scales)[row] : 1.0f;
}

__device__ float activate(const Activation &activation, float gate, float up) {
    const float sigmoid = 1.0f / (1.0f + expf(-gate));
    if (activation.kind == Activation::kSilu) return gate * sigmoid * up;
    const float b1 = activation.b1, b2 = activation.b2;
    return b1 * tanhf(gate / b1) * sigmoid * (b2 * tanhf(up / b2));
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
template <class Path, class Scheme, int ROWS, class Store>
__device__ void multiply_expert(Share &share, const RowSource &source, int rows, const ProductPlan &plan,
                                const DeviceTables &device_tables, Store store) {
    const int warp = warp_of_block(), lane = threadIdx.x % kWarp;
    const ProductMemory memory = product_memory<Scheme>(plan, dynamic_shared(), warp);
    const ByteTables tables{codebook_of(memory.codebook, lane), device_tables.fp8};
    typename Path::Ring ring(memory.ring, lane);
    __syncthreads(); /* its barriers exist */

    for (int first = 0; first < rows; first += ROWS) {
        share.rows = min(ROWS, rows - first);
        TileStream<typename Path::Ring> stream(ring, share, plan, warp);
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
            if (slice == 0) stream.fill(plan.stages);
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
template <class Path, int ROWS, bool LIMBS_ONLY, class Store>
__device__ void multiply_in_scheme(Share &share, const RowSource &source, int rows, const ProductPlan &plan,
                                   const DeviceTables &tables, Store store) {
    if constexpr (LIMBS_ONLY) {
        multiply_expert<Path, LimbScheme<ROWS>, ROWS>(share, source, rows, plan, tables, store);
    } else if (Path::kTensorCores && multiplies_bytes(*share.first_matrix) && multiplies_bytes(*share.second_matrix)) {
        multiply_expert<Path, LimbScheme<ROWS>, ROWS>(share, source, rows, plan, tables, store);
    } else {
        multiply_expert<Path, HalfScheme<Path, ROWS>, ROWS>(share, source, rows, plan, tables, store);
    }
}

template <class Path, int ROWS, bool LIMBS_ONLY>
__global__ void __launch_bounds__(product_threads(ROWS), 1)
    expert_hidden(const __grid_constant__ GroupParams p, const __grid_constant__ ProductPlan plan) {
    dependency_trigger();
    const ExpertEntry &expert = p.experts[blockIdx.y];
    if (expert.rows == 0) return;
    Share share = share_of_block(p.H, p.D, plan.blocks);
    share.first_matrix = &expert.gate, share.second_matrix = &expert.up;
    share.matrix_count = 2;
    const size_t first_row = expert.first_row;
    float *hidden = const_cast<float *>(p.hidden) + first_row * p.H;
    const RowSource source{{p.x + first_row * p.D, static_cast<size_t>(p.D), p.D}, false};
    multiply_in_scheme<Path, ROWS, LIMBS_ONLY>(
        share, source, expert.rows, plan, *p.tables, [&](int row, int h, float gate, float up) {
            hidden[static_cast<size_t>(row) * p.H + h] =
                activate(p.activation, gate * row_scale(expert.gate, h), up * row_scale(expert.up, h));
        });
}

template <class Path, int ROWS, bool LIMBS_ONLY>
__global__ void __launch_bounds__(product_threads(ROWS), 1)
    expert_down(const __grid_constant__ GroupParams p, const __grid_constant__ ProductPlan plan) {
    dependency_trigger();
    const ExpertEntry &expert = p.experts[blockIdx.y];
    if (expert.rows == 0) return;
    Share share = share_of_block(p.D, p.H, plan.blocks);
    share.first_matrix = share.second_matrix = &expert.down;
    share.matrix_count = 1;
    const size_t first_row = expert.first_row;
    const bool rotate = plan.rotate && expert.rotate_hidden;
    const float *hidden = (expert.rotate_hidden && !rotate ? p.rotated : p.hidden) + first_row * p.H;
    const RowSource source{{hidden, static_cast<size_t>(p.H), p.H}, rotate};
    multiply_in_scheme<Path, ROWS, LIMBS_ONLY>(
        share, source, expert.rows, plan, *p.tables,
        [&](int row, int d, float total, float) { p.y[(first_row + row) * p.D + d] = total * row_scale(expert.down, d); });
}

__global__ void __launch_bounds__(kRotationThreads) expert_rotate(const __grid_constant__ GroupParams p) {
    __shared__ float buffer[kRotationPiece];
    dependency_trigger();
    const ExpertEntry &expert = p.experts[blockIdx.z];
    if (!expert.rotate_hidden) return;
    const RotationPiece piece = rotation_piece(p.H, blockIdx.x);
    dependency_wait();
    for (int r = blockIdx.y; r < expert.rows; r += gridDim.y) {
        const size_t start = (static_cast<size_t>(expert.first_row) + r) * p.H;
        rotate_piece(p.hidden + start, p.rotated + start, piece, false, p.tables->signs, buffer);
        __syncthreads(); /* the buffer was read */
    }
}

using ProductKernel = void (*)(GroupParams, ProductPlan);

template <class Path, int ROWS, bool LIMBS_ONLY> ProductKernel kernel_of(bool hidden) {
    return hidden ? expert_hidden<Path, ROWS, LIMBS_ONLY> : expert_down<Path, ROWS, LIMBS_ONLY>;
}

template <class Path> ProductKernel kernel_of(const ProductPlan &plan, bool hidden) {
    if (plan.limbs_only) {
        switch (plan.pass_rows) {
        case 1:
            return kernel_of<Path, 1, true>(hidden);
        case 2:
            return kernel_of<Path, 2, true>(hidden);
        case 4:
            return kernel_of<Path, 4, true>(hidden);
        case 8:
            return kernel_of<Path, 8, true>(hidden);
        default:
            return kernel_of<Path, 16, true>(hidden);
        }
    }
#ifndef LIMBS
    switch (plan.pass_rows) {
    case 4:
        return kernel_of<Path, 4, false>(hidden);
    case 8:
        return kernel_of<Path, 8, false>(hidden);
    default:
        return kernel_of<Path, 16, false>(hidden);
    }
#else
    return nullptr;
#endif
}

ProductKernel kernel_of(const ProductPlan &plan, bool hidden) {
    switch (plan.path) {
    case Path::kHopper:
        return kernel_of<HopperPath>(plan, hidden);
#ifndef LIMBS
    case Path::kAmpere:
        return kernel_of<AmperePath>(plan, hidden);
    default:
        return kernel_of<PlainPath, 4, false>(hidden);
#else
    default:
        return nullptr;
#endif
    }
}

/* On Hopper a kernel starts while the one before it ends. */
template <class... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes, bool overlapping,
                   cudaStream_t stream, const Params &...params) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = overlapping ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, params...);
}

cudaError_t launch_product(bool hidden, const GroupParams &params, const ProductPlan &plan, cudaStream_t stream) {
    return launch(kernel_of(plan, hidden), dim3(plan.blocks, params.count), kWarp * plan.warps, plan.shared_bytes,
                  plan.path == Path::kHopper, stream, params, plan);
}

} // namespace

cudaError_t launch_down(const GroupParams &params, const ProductPlan &plan, cudaStream_t stream) {
    return launch_product(false, params, plan, stream);
}

cudaError_t launch_expert_group(const GroupParams &params, const GroupPlan &plan, cudaStream_t stream) {
    cudaError_t result = launch_product(true, params, plan.hidden, stream);
    if (result == cudaSuccess && plan.rotation.rows > 0)
        result = launch(expert_rotate, dim3(plan.rotation.pieces, plan.rotation.rows, params.count), kRotationThreads, 0,
                        plan.down.path == Path::kHopper, stream, params);
    if (result == cudaSuccess) result = launch_product(false, params, plan.down, stream);
    return result;
}

cudaError_t prepare_expert_kernels(int shared_bytes) {
    for (Path path : {Path::kPlain, Path::kAmpere, Path::kHopper}) {
        for (bool limbs_only : {false, true}) {
            for (int pass_rows : {1, 2, 4, 8, 16}) {
                ProductPlan plan{};
                plan.path = path, plan.limbs_only = limbs_only, plan.pass_rows = pass_rows;
                for (bool hidden : {true, false}) {
                    const void *kernel = reinterpret_cast<const void *>(kernel_of(plan, hidden));
                    if (!kernel) continue;
                    const cudaError_t result =
                        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
                    if (result != cudaSuccess) return result;
                }
            }
        }
    }
    return cudaSuccess;
}

} // namespace coli
