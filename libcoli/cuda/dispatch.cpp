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

/* The experts with few rows, or with many. */
GroupParams part_of(const GroupParams &params, bool many) {
    GroupParams part = params;
    part.count = part.max_rows = 0;
    for (int e = 0; e < params.count; e++) {
        const ExpertEntry &expert = params.experts[e];
        if (expert.rows == 0 || (expert.rows > kMaxPassRows) != many) continue;
        part.experts[part.count++] = expert;
        part.max_rows = std::max(part.max_rows, expert.rows);
    }
    return part;
}

cudaError_t launch_exact(Context &context, const GroupParams &params, cudaStream_t stream) {
    return launch_expert_group(params, plan_of(context.gpu, &context.plans, params), stream);
}

} // namespace

void require_exact(bool exact) {
    exact_required = exact;
}

size_t workspace_bytes(int total_rows, int D, int H, int experts) {
    const size_t prepared = total_rows > kMaxPassRows ? prefill_workspace_bytes(total_rows, std::max(D, H), experts) : 0;
    return 2 * rows_bytes(total_rows, H) + prepared;
}

void place_workspace(GroupParams *params, int total_rows, void *workspace) {
    const size_t floats = rows_bytes(total_rows, params->H) / sizeof(float);
    params->hidden = static_cast<float *>(workspace);
    params->rotated = params->hidden + floats;
    params->prepared = params->rotated + floats;
}

bool plan_prefill_part(const GpuTraits &gpu, const GroupParams &params, GroupParams *part, PrefillPlan *plan) {
    if (!may_prefill(gpu, params)) return false;
    *part = part_of(params, true);
    part->exact = needs_exact(params);
    if (!prefill_supports(*part)) return false;
    *plan = plan_prefill(gpu, *part);
    return plan->possible;
}

cudaError_t launch_group(Context &context, const GroupParams &params, cudaStream_t stream) {
    GroupParams many;
    PrefillPlan plan;
    if (!plan_prefill_part(context.gpu, params, &many, &plan)) return launch_exact(context, params, stream);
    const GroupParams few = part_of(params, false);
    const cudaError_t result = few.count ? launch_exact(context, few, stream) : cudaSuccess;
    return result == cudaSuccess ? launch_prefill_group(many, plan, many.prepared, stream) : result;
}

size_t product_workspace_bytes(int S, int I) {
    return S > kMaxPassRows ? prefill_workspace_bytes(S, I, 1) : 0;
}

cudaError_t launch_product(Context &context, const GroupParams &params, void *workspace, cudaStream_t stream) {
    /* an exact product has the bits of the call without a workspace */
    if (workspace && !exact_required && may_prefill(context.gpu, params) && prefill_supports_down(params)) {
        const PrefillPlan plan = plan_prefill_down(context.gpu, params);
        if (plan.possible) return launch_prefill_down(params, plan, workspace, stream);
    }
    return launch_expert_product(params, plan_of_product(context.gpu, &context.plans, params), stream);
}

} // namespace coli
