#include "group.h"

#include <algorithm>
#include <climits>

namespace coli {

static_assert(sizeof(GroupParams) <= 32764, "kernel parameters end there");

namespace {

bool check_expert(const GroupCall &call, int c, int least_rows) {
    const ColiCudaTensor *gate = call.gates[c], *up = call.ups[c], *down = call.downs[c];
    const ColiCudaTensor &first = *call.gates[0];
    COLI_FORWARD(tensor_usable(gate, "gate") && tensor_usable(up, "up") && tensor_usable(down, "down"));
    COLI_REFUSE_IF(gate->context != first.context || up->context != first.context || down->context != first.context,
                   COLI_E_ARGUMENT, "expert %d: gate, up and down are on devices %d, %d and %d, expected all on device %d",
                   c, gate->context->device, up->context->device, down->context->device, first.context->device);
    const int H = first.O, D = first.I;
    COLI_REFUSE_IF(gate->O != H || gate->I != D || up->O != H || up->I != D || down->O != D || down->I != H, COLI_E_SHAPE,
                   "expert %d: gate [%d, %d], up [%d, %d], down [%d, %d], expected [%d, %d], [%d, %d], [%d, %d]", c,
                   gate->O, gate->I, up->O, up->I, down->O, down->I, H, D, H, D, D, H);
    COLI_REFUSE_IF(call.rows[c] < least_rows, COLI_E_ARGUMENT, "expert %d has %d rows, expected at least %d", c,
                   call.rows[c], least_rows);
    return true;
}

ProductTask empty_task(const GpuTraits &gpu, int O, int I, int rows, int matrices) {
    ProductTask task{};
    task.path = path_of(gpu);
    task.O = O, task.I = I;
    task.rows = rows;
    task.matrices = matrices;
    return task;
}

ProductPlan plan_task(const GpuTraits &gpu, PlanCache *plans, const ProductTask &task) {
    return plans ? plans->product(gpu, task) : plan_product(gpu, task);
}

void add_matrix(const MatrixView &matrix, ProductTask *task) {
    task->tile_bytes = std::max(task->tile_bytes, matrix.tile_bytes);
    task->codebook |= matrix.kind == TileKind::kE8 || matrix.kind == TileKind::kE8AnyCodebook;
}

/* Notes how a product of these matrices together is computed. */
void add_scheme(bool bytes, ProductTask *task) {
    task->bytes |= bytes;
    task->halves |= !bytes;
}

} // namespace

Context *context_of(const GroupCall &call) {
    if (!call.gates || !call.ups || !call.downs || !call.rows) {
        fail(COLI_E_ARGUMENT, "gates, ups, downs and rows must not be NULL");
        return nullptr;
    }
    if (call.count < 1) {
        fail(COLI_E_ARGUMENT, "a group of %d experts, expected 1 or more", call.count);
        return nullptr;
    }
    return tensor_alive(call.gates[0], "gate") ? call.gates[0]->context : nullptr;
}

bool check_group(const GroupCall &call, int least_rows, int *total_rows) {
    long long total = 0;
    for (int c = 0; c < call.count; c++) {
        COLI_FORWARD(check_expert(call, c, least_rows));
        total += call.rows[c];
        COLI_REFUSE_IF(total > INT_MAX, COLI_E_ARGUMENT, "a group of %lld rows and more, expected at most %d", total,
                       INT_MAX);
    }
    *total_rows = static_cast<int>(total);
    return true;
}

GroupParams group_params(const GroupCall &call, int begin, int first_row) {
    GroupParams params{};
    params.D = call.gates[0]->I;
    params.H = call.gates[0]->O;
    params.count = std::min(call.count - begin, COLI_CUDA_MAX_EXPERTS);
    for (int e = 0; e < params.count; e++) {
        const int c = begin + e;
        const ColiCudaTensor *gate = call.gates[c], *up = call.ups[c], *down = call.downs[c];
        const bool rotate_hidden = down->format == COLI_E8 && down->rotated;
        params.experts[e] = {gate->view(), up->view(), down->view(), first_row, call.rows[c], rotate_hidden};
        params.max_rows = std::max(params.max_rows, call.rows[c]);
        first_row += call.rows[c];
    }
    return params;
}

GroupPlan plan_of(const GpuTraits &gpu, PlanCache *plans, const GroupParams &params) {
    ProductTask hidden = empty_task(gpu, params.H, params.D, params.max_rows, 2);
    bool rotates = false;
    for (int e = 0; e < params.count; e++) {
        const ExpertEntry &expert = params.experts[e];
        if (expert.rows == 0) continue;
        hidden.experts++;
        rotates = rotates || expert.rotate_hidden;
        add_matrix(expert.gate, &hidden);
        add_matrix(expert.up, &hidden);
        add_scheme(multiplies_bytes(expert.gate) && multiplies_bytes(expert.up), &hidden);
    }
    GroupPlan plan{};
    plan.hidden = plan_task(gpu, plans, hidden);
    plan.down = plan_of_product(gpu, plans, params);
    plan.rotation = plan_rotation(params.H, rotates && !plan.down.rotate ? params.max_rows : 0);
    return plan;
}

GroupParams product_params(const ColiCudaTensor &w, float *y, const float *x, int S) {
    GroupParams params{};
    params.D = w.O;
    params.H = w.I;
    params.count = 1;
    params.max_rows = S;
    params.hidden = const_cast<float *>(x); /* down reads it alone */
    params.y = y;
    params.experts[0].down = w.view();
    params.experts[0].rows = S;
    return params;
}

ProductPlan plan_of_product(const GpuTraits &gpu, PlanCache *plans, const GroupParams &params) {
    ProductTask task = empty_task(gpu, params.D, params.H, params.max_rows, 1);
    for (int e = 0; e < params.count; e++) {
        const ExpertEntry &expert = params.experts[e];
        if (expert.rows == 0) continue;
        task.experts++;
        task.rotates = task.rotates || expert.rotate_hidden;
        add_matrix(expert.down, &task);
        add_scheme(multiplies_bytes(expert.down), &task);
    }
    return plan_task(gpu, plans, task);
}

size_t rows_bytes(int rows, int dim) {
    return align_up(static_cast<size_t>(rows) * dim * sizeof(float), kPlaneAlignment);
}

} // namespace coli
