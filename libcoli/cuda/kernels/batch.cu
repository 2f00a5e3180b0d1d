#include "batch_kernels.h"

#include <algorithm>
#include <cstdio>

#include "../ptx/dependent.cuh"
#include "launch.h"
#include "limb_tokens.cuh"
#include "rotate.cuh"

namespace coli {

namespace {

/*------   Cutting rows into limbs   ------*/

constexpr int kCutThreads = 256;
constexpr int kCutWarps = kCutThreads / kWarp;

/* One row of expert blockIdx.z as limbs, by some warps; rows that pad the pass are zero. */
__device__ __forceinline__ void cut_row(const float *x, bool exists, int columns, const Limbs &limbs, int row, int warp,
                                        int warps) {
    const int lane = threadIdx.x % kWarp;
    for (int slice = warp; slice < slice_count(columns); slice += warps) {
        SliceValues values{};
        if (exists) load_slice({x, 0, columns}, 0, slice, lane, values);
        cut_slice(values, limb_pass(limbs, blockIdx.z, columns), limbs.pass_rows, row, slice, tile_count(columns), lane);
    }
}

/* Rows of x or, if HIDDEN, of the hidden rows to limbs; grid (blocks of a row, rows of a pass, experts). */
template <bool HIDDEN>
__global__ void __launch_bounds__(kCutThreads) cut_rows(const __grid_constant__ GroupParams p, const Limbs limbs) {
    dependency_trigger();
    const ExpertEntry &expert = p.experts[blockIdx.z];
    const int row = blockIdx.y, columns = HIDDEN ? p.H : p.D;
    const float *x = (HIDDEN ? p.hidden : p.x) + (static_cast<size_t>(expert.first_row) + row) * columns;
    dependency_wait();
    cut_row(x, row < expert.rows, columns, limbs, row, kCutWarps * blockIdx.x + threadIdx.x / kWarp, kCutWarps * gridDim.x);
}

/* Hidden rows to limbs, rotated where the expert wants it; grid (1, rows of a pass, experts). */
__global__ void __launch_bounds__(kCutThreads)
    rotate_and_cut_rows(const __grid_constant__ GroupParams p, const Limbs limbs) {
    __shared__ __align__(16) float buffer[kRotationPiece];
    dependency_trigger();
    const ExpertEntry &expert = p.experts[blockIdx.z];
    const int row = blockIdx.y;
    const size_t start = (static_cast<size_t>(expert.first_row) + row) * p.H;
    const float *hidden = p.hidden + start;
    dependency_wait();
    if (expert.rotate_hidden && row < expert.rows)
        hidden = rotate_row(hidden, p.rotated + start, p.H, p.tables->signs, buffer);
    cut_row(hidden, row < expert.rows, p.H, limbs, row, threadIdx.x / kWarp, kCutWarps);
}

/*------   Plans   ------*/

/* Clocks of a stage, fitted to an H200. */
int stage_cost(const BatchProduct &plan) {
    return 600 + (plan.pass_rows == kRowGroup ? 170 : 245) * plan.warps;
}

/* Lays out shared memory with as many stages as fit; false when there are not two. */
bool place_stages(const GpuTraits &gpu, BatchProduct &plan) {
    constexpr int kMaxStages = 6, kAlignment = 1024;
    const int totals = plan.warps * kStripRows * plan.pass_rows * static_cast<int>(sizeof(float));
    plan.barriers_offset = plan.codebook ? kCodebookBytes : 0;
    plan.totals_offset = plan.barriers_offset + 2 * kMaxStages * static_cast<int>(sizeof(uint64_t));
    plan.ring_offset = static_cast<int>(align_up(plan.totals_offset + totals, kAlignment));
    plan.stage_bytes =
        static_cast<int>(align_up(pass_stage_bytes(plan.pass_rows) + plan.warps * plan.slot_bytes, kAlignment));
    plan.stages = std::min((gpu.shared_bytes - plan.ring_offset) / plan.stage_bytes, kMaxStages);
    plan.shared_bytes = plan.ring_offset + plan.stages * plan.stage_bytes;
    return plan.stages > 1;
}

/* The cheapest launch, of no stages if none is possible. */
BatchProduct plan_launch(const GpuTraits &gpu, const GroupParams &params, bool hidden) {
    BatchProduct base{}, best{};
    bool mixed = false;
    base.hidden = hidden;
    base.pass_rows = params.max_rows <= kRowGroup ? kRowGroup : kMaxPassRows;
    for (int e = 0; e < params.count; e++) {
        const ExpertEntry &expert = params.experts[e];
        for (const MatrixView *matrix : {hidden ? &expert.gate : &expert.down, hidden ? &expert.up : &expert.down}) {
            base.slot_bytes = std::max(base.slot_bytes, matrix->tile_bytes);
            base.codebook |= matrix->kind == TileKind::kE8;
        }
        mixed |= expert.gate.kind != expert.up.kind;
    }
    /* a warpgroup multiplies as one: it cannot have two kinds of weights */
    const int step = hidden && mixed ? 8 : 4;
    long long best_cost = 0;
    for (int warps = kBatchWarps; warps > 0; warps -= step) {
        BatchProduct plan = base;
        plan.warps = warps;
        if (!place_stages(gpu, plan)) continue;
        plan.items = params.count * coli_ceil_div(tile_strips(hidden ? params.H : params.D), item_strips(plan));
        plan.blocks = std::min(plan.items, gpu.multiprocessors);
        const long long cost = 1LL * coli_ceil_div(plan.items, plan.blocks) * stage_cost(plan);
        if (best_cost == 0 || cost < best_cost) best = plan, best_cost = cost;
    }
    return best;
}

/*------   Launches   ------*/

/* Blocks that share a row. */
int cut_blocks(int columns) {
    return coli_ceil_div(slice_count(columns), kCutWarps);
}

template <class Kernel>
cudaError_t launch_cut(Kernel kernel, int blocks, const GroupParams &params, const Limbs &limbs, cudaStream_t stream) {
    const dim3 grid(blocks, limbs.pass_rows, params.count);
    return launch(kernel, grid, kCutThreads, 0, true, stream, params, limbs);
}

cudaError_t launch_product(const GroupParams &params, const BatchProduct &plan, const Limbs &limbs, cudaStream_t stream) {
    return launch(batch_kernel(plan), dim3(plan.blocks), (plan.warps + kBatchFillWarps) * kWarp, plan.shared_bytes, true,
                  stream, params, plan, limbs);
}

} // namespace

bool has_batch_kernels(const GpuTraits &gpu) {
    return gpu.capability == 90 && path_of(gpu) == Path::kHopper;
}

BatchPlan plan_batch_down(const GpuTraits &gpu, const GroupParams &params) {
    BatchPlan plan{};
    plan.down = plan_launch(gpu, params, false);
    plan.possible = plan.down.stages > 0;
    plan.rotates = std::any_of(params.experts, params.experts + params.count,
                               [](const ExpertEntry &expert) { return expert.rotate_hidden; });
    return plan;
}

BatchPlan plan_batch(const GpuTraits &gpu, const GroupParams &params) {
    BatchPlan plan = plan_batch_down(gpu, params);
    plan.hidden = plan_launch(gpu, params, true);
    plan.possible = plan.possible && plan.hidden.stages > 0;
    return plan;
}

size_t batch_workspace_bytes(int columns, int experts) {
    return align_up(experts * pass_bytes(kMaxPassRows, columns), kPlaneAlignment);
}

cudaError_t launch_batch_down(const GroupParams &params, const BatchPlan &plan, void *workspace, cudaStream_t stream) {
    const Limbs limbs{static_cast<uint8_t *>(workspace), plan.down.pass_rows};
    const cudaError_t result = plan.rotates ? launch_cut(rotate_and_cut_rows, 1, params, limbs, stream)
                                            : launch_cut(cut_rows<true>, cut_blocks(params.H), params, limbs, stream);
    return result == cudaSuccess ? launch_product(params, plan.down, limbs, stream) : result;
}

cudaError_t launch_batch_group(const GroupParams &params, const BatchPlan &plan, void *workspace, cudaStream_t stream) {
    const Limbs limbs{static_cast<uint8_t *>(workspace), plan.hidden.pass_rows};
    cudaError_t result = launch_cut(cut_rows<false>, cut_blocks(params.D), params, limbs, stream);
    if (result == cudaSuccess) result = launch_product(params, plan.hidden, limbs, stream);
    return result == cudaSuccess ? launch_batch_down(params, plan, workspace, stream) : result;
}

cudaError_t prepare_batch_kernels(const GpuTraits &gpu) {
    cudaError_t result = cudaSuccess;
    for (int rows : {kRowGroup, kMaxPassRows}) {
        BatchProduct plan{};
        plan.pass_rows = rows;
        if (result == cudaSuccess)
            result = cudaFuncSetAttribute(reinterpret_cast<const void *>(batch_kernel(plan)),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, gpu.shared_bytes);
    }
    return result;
}

int describe(const BatchProduct &plan, const char *name, int experts, char *text, size_t capacity) {
    return snprintf(text, capacity,
                    "%-6s hopper batch on wgmma, %d expert(s), %d rows at a time, %d items in %d blocks of %d warps, %d "
                    "stages, %d bytes shared",
                    name, experts, plan.pass_rows, plan.items, plan.blocks, plan.warps, plan.stages, plan.shared_bytes);
}

} // namespace coli
