#include "prefill_kernels.h"

#include <algorithm>
#include <array>

#include "../ptx/lookup.cuh"
#include "launch.h"
#include "prefill_product.cuh"
#include "rotate.cuh"

namespace coli {

namespace {

/*------   Preparing rows   ------*/

constexpr int kHeldQuads = 8;            /* enough for rows of 8192 */
constexpr int kMostPrepareBlocks = 4096; /* of an expert; they go on to further rows */

/* Rows of x or, if HIDDEN, of the hidden rows to tokens; grid (rows, experts). */
template <bool HIDDEN, bool EXACT>
__global__ void __launch_bounds__(kPrepareThreads, EXACT ? 3 : 4)
    prepare_tokens(const __grid_constant__ GroupParams p, const Tokens tokens) {
    __shared__ float of_warps[kPrepareThreads / kWarp];
    dependency_trigger();
    const ExpertEntry &expert = p.experts[blockIdx.y];
    const int columns = HIDDEN ? p.H : p.D;
    const int first = first_token(expert.first_row - p.experts[0].first_row, blockIdx.y);
    const ExpertTokens of_expert = expert_tokens(tokens, first, expert.rows, columns, EXACT);
    const float *x = (HIDDEN ? p.hidden : p.x) + static_cast<size_t>(expert.first_row) * columns;
    dependency_wait();
    for (int row = blockIdx.x; row < expert.rows; row += gridDim.x) {
        prepare_token<kHeldQuads, EXACT>(x + static_cast<size_t>(row) * columns, columns, of_expert, row, of_warps);
        __syncthreads();
    }
}

/* Hidden rows to tokens, rotated where the expert wants it. */
template <bool EXACT>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    rotate_and_prepare(const __grid_constant__ GroupParams p, const Tokens tokens) {
    __shared__ __align__(16) float buffer[kRotationPiece];
    __shared__ float of_warps[kPrepareThreads / kWarp];
    dependency_trigger();
    const ExpertEntry &expert = p.experts[blockIdx.y];
    const int first = first_token(expert.first_row - p.experts[0].first_row, blockIdx.y);
    const ExpertTokens of_expert = expert_tokens(tokens, first, expert.rows, p.H, EXACT);
    dependency_wait();
    for (int row = blockIdx.x; row < expert.rows; row += gridDim.x) {
        const size_t start = (static_cast<size_t>(expert.first_row) + row) * p.H;
        const float *hidden = p.hidden + start;
        if (expert.rotate_hidden) hidden = rotate_row(hidden, p.rotated + start, p.H, p.tables->signs, buffer);
        prepare_token<2, EXACT>(hidden, p.H, of_expert, row, of_warps);
        __syncthreads();
    }
}

/*------   Products with mma   ------*/

template <int N> class MmaUnit {
  public:
    static constexpr int kMaxGroupSteps = 1, kBuffers = 2;
    __device__ __forceinline__ MmaUnit(const uint8_t *tokens, int lane)
        : row_(tokens + lane / 4 * kTokenBytes + lane % 4 * 4), place_(lane / 4) {}
    /* Keeps the compiler from loading tokens long before it has registers for them. */
    __device__ __forceinline__ void begin() const { compiler_fence(); }
    __device__ __forceinline__ void multiply(float (&chunk)[N / 8][4], const uint32_t (&a)[4], int step, bool add) const {
        const uint8_t *block = row_ + step / 4 * N * kTokenBytes;
        const int first = (2 * (step % 4) ^ place_) * kPieceBytes, second = first ^ kPieceBytes;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const uint8_t *row = block + j * kTokenGroup * kTokenBytes;
            if (!add) chunk[j][0] = chunk[j][1] = chunk[j][2] = chunk[j][3] = 0.0f;
            mma_m16n8k16(chunk[j], a, *reinterpret_cast<const uint32_t *>(row + first),
                         *reinterpret_cast<const uint32_t *>(row + second));
        }
    }
    __device__ __forceinline__ void next() const { compiler_fence(); }
    __device__ __forceinline__ void end() const { compiler_fence(); }
    template <int GROUPS> __device__ __forceinline__ void wait() const {}
    __device__ __forceinline__ void settle(float (&)[N / 8][4]) const {}

  private:
    const uint8_t *row_; /* of this lane's token, in the first block */
    int place_;
};

/* The ring of stages that all threads fill and take from, in step. */
class AsyncStages {
  public:
    __device__ AsyncStages(const PrefillJob &job, uint8_t *stages, int warp, int lane)
        : plan_(job.plan), walk_(job), stages_(stages), warp_(warp), lane_(lane) {
        for (int i = 0; i < plan_.stages; i++) push(i);
    }
    __device__ __forceinline__ const uint8_t *front() const {
        if (plan_.stages > 2)
            copy_async_wait<2>();
        else if (plan_.stages == 2)
            copy_async_wait<1>();
        else
            copy_async_wait<0>();
        __syncthreads();
        return stages_ + index_ * plan_.stage_bytes;
    }
    __device__ __forceinline__ void pop() {
        __syncthreads();
        push(index_);
        index_ = index_ + 1 == plan_.stages ? 0 : index_ + 1;
    }

  private:
    /* Ends a group of copies even when nothing is left to copy: front() counts groups. */
    __device__ void push(int index) {
        if (!walk_.done()) {
            for (int i = warp_; i < walk_.pieces(); i += plan_.warps) {
                const StagePiece piece = walk_.piece(i);
                for (int offset = kPieceBytes * lane_; offset < piece.bytes; offset += kPieceBytes * kWarp)
                    copy_async_16(stages_ + index * plan_.stage_bytes + piece.to + offset, piece.from + offset);
            }
            walk_.next();
        }
        copy_async_commit();
    }

    const PrefillProduct &plan_;
    StageWalk walk_;
    uint8_t *stages_;
    int warp_, lane_, index_ = 0;
};

template <bool EXACT>
__global__ void __launch_bounds__(kPrefillWarps *kWarp, 1)
    prefill_mma(const __grid_constant__ GroupParams p, const __grid_constant__ PrefillProduct plan, const Tokens tokens) {
    dependency_trigger();
    uint8_t *shared = dynamic_shared();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const PrefillJob job{p, plan, tokens};
    if (plan.codebook) spread_codebook(reinterpret_cast<uint2 *>(shared), *p.tables);
    dependency_wait();
    AsyncStages stages(job, shared + plan.ring_offset, warp, lane);
    const KernelTables tables{codebook_of(reinterpret_cast<const uint2 *>(shared), lane)};
    multiply_items<MmaUnit, EXACT, kMaxMmaTokenTile>(job, stages, tables, warp, lane);
}

/*------   Plans   ------*/

bool has_operands(const MatrixView &matrix) {
    switch (matrix.kind) {
    case TileKind::kE8:
    case TileKind::kInt8:
    case TileKind::kInt4:
    case TileKind::kInt2:
    case TileKind::kInt4Groups32:
    case TileKind::kInt4Groups:
    case TileKind::kMxfp4:
    case TileKind::kFp8:
        return true;
    default:
        return false;
    }
}

/* wgmma is of compute capability 9.0 alone. */
bool has_wgmma(const GpuTraits &gpu) {
    return gpu.capability == 90 && path_of(gpu) == Path::kHopper;
}

/* Clocks of a set, fitted to an H200: decoding and products overlap in part. With wgmma most of it is waiting, which a
 * third warpgroup shares; few warps of mma have more to wait for. */
int set_cost(const PrefillProduct &plan) {
    const int products = (plan.exact ? 28 : 20) * plan.token_tile;
    if (!plan.wgmma) return (600 + products) * kPrefillWarps / plan.warps;
    return plan.warps == kPrefillWarps ? 2100 + products : (2100 + products) * 6 / 5;
}

/* Clocks of an item's stage; copies take their time too. */
int stage_cost(const PrefillProduct &plan) {
    constexpr int kBytesPerClock = 24;
    const int busy = std::max(plan.sets * set_cost(plan), plan.stage_bytes / kBytesPerClock);
    return plan.stages > 1 ? busy : 2 * busy;
}

/* The warps to try. */
std::array<int, 2> warps_to_try(const PrefillProduct &plan) {
    if (!plan.wgmma) return {kPrefillWarps, kPrefillWarps / 2};
    return {plan.token_tile <= kMaxManyWarpsTokenTile ? kPrefillManyWarps : kPrefillWarps, kPrefillWarps};
}

/* Lays out shared memory with as many stages as fit; false when none does. */
bool place_stages(const GpuTraits &gpu, PrefillProduct &plan) {
    constexpr int kMaxStages = 4, kAlignment = 1024;
    const int slots = plan.sets * plan.warps * plan.slot_bytes, tokens = token_stage_bytes(plan);
    plan.barriers_offset = plan.codebook ? kCodebookBytes : 0;
    plan.ring_offset = plan.barriers_offset + kAlignment;
    plan.stage_bytes = static_cast<int>(align_up(tokens + slots, kAlignment));
    plan.stages = std::min((gpu.shared_bytes - plan.ring_offset) / plan.stage_bytes, plan.wgmma ? kMaxStages : 3);
    plan.shared_bytes = plan.ring_offset + plan.stages * plan.stage_bytes;
    return plan.stages > 0;
}

int count_items(const GroupParams &params, int rows, const PrefillProduct &plan) {
    const int strips = plan.hidden ? plan.warps : plan.sets * plan.warps;
    int items = 0;
    for (int e = 0; e < params.count; e++)
        items += coli_ceil_div(tile_strips(rows), strips) * coli_ceil_div(params.experts[e].rows, plan.token_tile);
    return items;
}

/* The cheapest launch, of no stages if none is possible. */
PrefillProduct plan_launch(const GpuTraits &gpu, const GroupParams &params, bool hidden) {
    PrefillProduct base{}, best{};
    base.wgmma = has_wgmma(gpu);
    base.exact = params.exact;
    base.hidden = hidden;
    for (int e = 0; e < params.count; e++) {
        const ExpertEntry &expert = params.experts[e];
        for (const MatrixView *matrix : {hidden ? &expert.gate : &expert.down, hidden ? &expert.up : &expert.down}) {
            base.slot_bytes = std::max(base.slot_bytes, matrix->tile_bytes);
            base.codebook |= matrix->kind == TileKind::kE8;
        }
    }
    long long best_cost = 0;
    for (int tile = 32; tile <= (base.wgmma ? kMaxTokenTile : kMaxMmaTokenTile); tile += 32) {
        if (tile > 32 && params.max_rows <= tile - 32) break;
        for (int sets = hidden ? 2 : 1; sets <= 2; sets++) {
            PrefillProduct plan = base;
            plan.token_tile = tile, plan.sets = sets;
            for (int warps : warps_to_try(plan)) {
                plan.warps = warps;
                if (!place_stages(gpu, plan)) continue;
                plan.items = count_items(params, hidden ? params.H : params.D, plan);
                plan.blocks = std::min(plan.items, gpu.multiprocessors);
                if (plan.items == 0) return plan;
                const long long cost = 1LL * coli_ceil_div(plan.items, plan.blocks) * stage_cost(plan);
                if (best_cost == 0 || cost < best_cost) best = plan, best_cost = cost;
            }
        }
    }
    return best;
}

/*------   Launches   ------*/

PrefillKernel kernel_of(const PrefillProduct &plan) {
    if (plan.wgmma) return prefill_wgmma_kernel(plan.exact, plan.warps);
    return plan.exact ? prefill_mma<true> : prefill_mma<false>;
}

cudaError_t launch_product(const GroupParams &params, const PrefillProduct &plan, const Tokens &tokens,
                           cudaStream_t stream) {
    const int threads = (plan.wgmma ? plan.warps + kPrefillFillWarps : plan.warps) * kWarp;
    return launch(kernel_of(plan), dim3(plan.blocks), threads, plan.shared_bytes, plan.wgmma, stream, params, plan, tokens);
}

/* Rows from the first expert's to the last one's. */
int spanned_rows(const GroupParams &params) {
    const ExpertEntry &last = params.experts[params.count - 1];
    return last.first_row + last.rows - params.experts[0].first_row;
}

size_t factors_bytes(int rows, int experts) {
    return align_up(first_token(rows, experts) * sizeof(float), kPlaneAlignment);
}

Tokens tokens_in(const GroupParams &params, void *workspace) {
    uint8_t *memory = static_cast<uint8_t *>(workspace);
    return {memory + factors_bytes(spanned_rows(params), params.count), reinterpret_cast<float *>(memory)};
}

cudaError_t launch_hidden_tokens(const GroupParams &params, const PrefillPlan &plan, const Tokens &tokens,
                                 cudaStream_t stream) {
    const auto prepare = plan.rotates   ? params.exact ? rotate_and_prepare<true> : rotate_and_prepare<false>
                         : params.exact ? prepare_tokens<true, true>
                                        : prepare_tokens<true, false>;
    return launch(prepare, dim3(plan.prepare_blocks, params.count), kPrepareThreads, 0, plan.down.wgmma, stream, params,
                  tokens);
}

} // namespace

bool prefill_supports_down(const GroupParams &params) {
    return std::all_of(params.experts, params.experts + params.count,
                       [](const ExpertEntry &expert) { return has_operands(expert.down); });
}

bool prefill_supports(const GroupParams &params) {
    return prefill_supports_down(params) &&
           std::all_of(params.experts, params.experts + params.count,
                       [](const ExpertEntry &expert) { return has_operands(expert.gate) && has_operands(expert.up); });
}

PrefillPlan plan_prefill_down(const GpuTraits &gpu, const GroupParams &params) {
    PrefillPlan plan{};
    plan.down = plan_launch(gpu, params, false);
    plan.possible = plan.down.stages > 0;
    plan.prepare_blocks = std::min(params.max_rows, kMostPrepareBlocks);
    plan.rotates = std::any_of(params.experts, params.experts + params.count,
                               [](const ExpertEntry &expert) { return expert.rotate_hidden && expert.rows > 0; });
    return plan;
}

PrefillPlan plan_prefill(const GpuTraits &gpu, const GroupParams &params) {
    PrefillPlan plan = plan_prefill_down(gpu, params);
    plan.hidden = plan_launch(gpu, params, true);
    plan.possible = plan.possible && plan.hidden.stages > 0;
    return plan;
}

size_t prefill_workspace_bytes(int rows, int columns, int experts) {
    return factors_bytes(rows, experts) + first_token(rows, experts) * token_row_bytes(columns, true);
}

cudaError_t launch_prefill_down(const GroupParams &params, const PrefillPlan &plan, void *workspace, cudaStream_t stream) {
    if (plan.down.items == 0) return cudaSuccess;
    const Tokens tokens = tokens_in(params, workspace);
    cudaError_t result = launch_hidden_tokens(params, plan, tokens, stream);
    if (result == cudaSuccess) result = launch_product(params, plan.down, tokens, stream);
    return result;
}

cudaError_t launch_prefill_group(const GroupParams &params, const PrefillPlan &plan, void *workspace, cudaStream_t stream) {
    if (plan.hidden.items == 0) return cudaSuccess;
    const Tokens tokens = tokens_in(params, workspace);
    cudaError_t result =
        launch(params.exact ? prepare_tokens<false, true> : prepare_tokens<false, false>,
               dim3(plan.prepare_blocks, params.count), kPrepareThreads, 0, plan.hidden.wgmma, stream, params, tokens);
    if (result == cudaSuccess) result = launch_product(params, plan.hidden, tokens, stream);
    return result == cudaSuccess ? launch_prefill_down(params, plan, workspace, stream) : result;
}

cudaError_t prepare_prefill_kernels(const GpuTraits &gpu) {
    const auto allow = [&](PrefillKernel kernel) {
        return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    gpu.shared_bytes);
    };
    cudaError_t result = cudaSuccess;
    for (bool exact : {false, true}) {
        if (result == cudaSuccess) result = allow(exact ? prefill_mma<true> : prefill_mma<false>);
        for (int warps : {kPrefillWarps, kPrefillManyWarps}) {
            if (result == cudaSuccess && gpu.capability == 90) result = allow(prefill_wgmma_kernel(exact, warps));
        }
    }
    return result;
}

} // namespace coli
