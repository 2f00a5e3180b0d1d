#include "dispatch.h"

#include <algorithm>

namespace coli {

namespace {

bool exact_required = true;

/* Whether the prefill kernels may compute so many rows: they need tensor cores. */
bool may_prefill(const GpuTraits &gpu, const GroupParams &params) {
    return !params.pinned && params.max_rows > kMaxPassRows && path_of(gpu) != Path::kPlain;
}

/* Whether they are not to round activations. The bounded activation would magnify what rounding takes away. */
bool needs_exact(const GroupParams &params) {
    return exact_required || params.activation.kind != Activation::kSilu;
}

/* Rows from which on the batch kernels are the faster ones, on an H200 for every format. */
constexpr int kLeastBatchRows = 5;

bool may_batch_down(const GpuTraits &gpu, const ExpertEntry &expert) {
    return expert.rows >= kLeastBatchRows && expert.rows <= kMaxPassRows && has_batch_kernels(gpu) &&
           multiplies_bytes(expert.down);
}
bool may_batch(const GpuTraits &gpu, const ExpertEntry &expert) {
    return may_batch_down(gpu, expert) && multiplies_bytes(expert.gate) && multiplies_bytes(expert.up);
}

/* The experts of a group that `belongs` takes. */
template <class Belongs> GroupParams part_of(const GroupParams &params, Belongs belongs) {
    GroupParams part = params;
    part.count = part.max_rows = 0;
    for (int e = 0; e < params.count; e++) {
        const ExpertEntry &expert = params.experts[e];
        if (expert.rows == 0 || !belongs(expert)) continue;
        part.experts[part.count++] = expert;
        part.max_rows = std::max(part.max_rows, expert.rows);
    }
    return part;
}

} // namespace

void require_exact(bool exact) {
    exact_required = exact;
}

size_t workspace_bytes(int total_rows, int D, int H, int experts) {
    const int columns = std::max(D, H),
              most_batched = std::min({experts, COLI_CUDA_MAX_EXPERTS, total_rows / kLeastBatchRows});
    const size_t tokens = total_rows > kMaxPassRows ? prefill_workspace_bytes(total_rows, columns, experts) : 0;
    return 2 * rows_bytes(total_rows, H) + std::max(tokens, batch_workspace_bytes(columns, most_batched));
}

void place_workspace(GroupParams *params, int total_rows, void *workspace) {
    const size_t floats = rows_bytes(total_rows, params->H) / sizeof(float);
    params->hidden = static_cast<float *>(workspace);
    params->rotated = params->hidden + floats;
    params->prepared = params->rotated + floats;
}

GroupParts split_group(const GpuTraits &gpu, PlanCache *plans, const GroupParams &params) {
    GroupParts parts{};
    const auto has_many = [](const ExpertEntry &expert) { return expert.rows > kMaxPassRows; };
    if (may_prefill(gpu, params)) {
        parts.many = part_of(params, has_many);
        parts.many.exact = needs_exact(params);
        if (prefill_supports(parts.many)) parts.of_many = plan_prefill(gpu, parts.many);
        if (!parts.of_many.possible) parts.many.count = 0;
    }
    const auto has_some = [&](const ExpertEntry &expert) { return may_batch(gpu, expert); };
    if (has_batch_kernels(gpu)) parts.some = part_of(params, has_some);
    if (parts.some.count) parts.of_some = plan_batch(gpu, parts.some);
    if (!parts.of_some.possible) parts.some.count = 0;
    parts.few = part_of(params, [&](const ExpertEntry &expert) {
        return !(parts.many.count && has_many(expert)) && !(parts.some.count && has_some(expert));
    });
    if (parts.few.count) parts.of_few = plan_of(gpu, plans, parts.few);
    return parts;
}

cudaError_t launch_group(Context &context, const GroupParams &params, cudaStream_t stream) {
    if (params.max_rows < kLeastBatchRows) /* as they mostly are: no parts to copy */
        return launch_expert_group(params, plan_of(context.gpu, &context.plans, params), stream);
    const GroupParts parts = split_group(context.gpu, &context.plans, params);
    cudaError_t result = parts.few.count ? launch_expert_group(parts.few, parts.of_few, stream) : cudaSuccess;
    if (result == cudaSuccess && parts.some.count)
        result = launch_batch_group(parts.some, parts.of_some, params.prepared, stream);
    if (result == cudaSuccess && parts.many.count)
        result = launch_prefill_group(parts.many, parts.of_many, params.prepared, stream);
    return result;
}

size_t product_workspace_bytes(int S, int I) {
    if (S > kMaxPassRows) return prefill_workspace_bytes(S, I, 1);
    return S >= kLeastBatchRows ? batch_workspace_bytes(I, 1) : 0;
}

cudaError_t launch_product(Context &context, const GroupParams &params, void *workspace, cudaStream_t stream) {
    if (workspace && may_batch_down(context.gpu, params.experts[0])) {
        const BatchPlan plan = plan_batch_down(context.gpu, params);
        if (plan.possible) return launch_batch_down(params, plan, workspace, stream);
    }
    /* an exact product of more rows has the bits of the call without a workspace */
    if (workspace && !exact_required && may_prefill(context.gpu, params) && prefill_supports_down(params)) {
        const PrefillPlan plan = plan_prefill_down(context.gpu, params);
        if (plan.possible) return launch_prefill_down(params, plan, workspace, stream);
    }
    return launch_expert_product(params, plan_of_product(context.gpu, &context.plans, params), stream);
}

} // namespace coli
