#include "expert_group.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>

#include "kernels/matmul.h"

namespace coli {

namespace {

size_t row_bytes(size_t rows, int dim) {
    return rows * static_cast<size_t>(dim) * sizeof(float);
}

bool profiling() {
    const char *wanted = getenv("COLI_CUDA_PROFILE");
    return wanted && strcmp(wanted, "0") != 0;
}

/* Marks of a synchronous group on its stream; without COLI_CUDA_PROFILE it does nothing. */
class GroupTimer {
  public:
    explicit GroupTimer(Context &context) : context_(context), active_(profiling()) {
        for (cudaEvent_t &mark : marks_) attempt(active_ ? cudaEventCreate(&mark) : cudaSuccess);
    }
    ~GroupTimer() {
        for (cudaEvent_t mark : marks_) {
            if (mark) ignore(cudaEventDestroy(mark));
        }
    }
    void mark(int index) {
        if (active_) attempt(cudaEventRecord(marks_[index], context_.stream));
    }
    /* After the stream was waited for. */
    void count() {
        if (!active_) return;
        float h2d = 0, kernel = 0, d2h = 0;
        attempt(cudaEventElapsedTime(&h2d, marks_[0], marks_[1]));
        attempt(cudaEventElapsedTime(&kernel, marks_[1], marks_[2]));
        attempt(cudaEventElapsedTime(&d2h, marks_[2], marks_[3]));
        if (!active_) return;
        std::lock_guard<std::mutex> lock(context_.counters->times_mutex);
        context_.counters->h2d_ms += h2d;
        context_.counters->kernel_ms += kernel;
        context_.counters->d2h_ms += d2h;
    }

  private:
    /* Times are a courtesy: where they cannot be had, the group goes on without. */
    void attempt(cudaError_t result) {
        ignore(result);
        active_ = active_ && result == cudaSuccess;
    }

    Context &context_;
    bool active_;
    cudaEvent_t marks_[4] = {};
};

bool check_expert(const GroupCall &call, int c, const ColiCudaTensor &first, int least_rows) {
    const ColiCudaTensor *gate = call.gates[c], *up = call.ups[c], *down = call.downs[c];
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

/* Copies x to the device through pinned memory, runs the group and copies y back to pinned memory; waits for nothing. */
bool enqueue_group(Context &context, GroupParams &params, CallBuffers &buffers, int total_rows, const float *x,
                   GroupTimer *timer) {
    const size_t bytes = row_bytes(total_rows, params.D);
    COLI_FORWARD(buffers.host_x.reserve(bytes, "activations") && buffers.host_y.reserve(bytes, "results") &&
                 buffers.x.reserve(bytes, "activations") && buffers.y.reserve(bytes, "results") &&
                 buffers.workspace.reserve(workspace_bytes(total_rows, params.H), "hidden rows"));
    memcpy(buffers.host_x.floats(), x, bytes);
    params.x = buffers.x.as<float>();
    params.y = buffers.y.as<float>();
    params.tables = context.tables;
    place_workspace(&params, total_rows, buffers.workspace.as<void>());

    const cudaStream_t stream = context.stream;
    if (timer) timer->mark(0);
    COLI_FORWARD(
        succeeded(cudaMemcpyAsync(buffers.x.as<float>(), buffers.host_x.floats(), bytes, cudaMemcpyHostToDevice, stream),
                  "copying %d rows to device %d", total_rows, context.device));
    if (timer) timer->mark(1);
    COLI_FORWARD(succeeded(launch_expert_group(params, stream), "launching %d expert(s) with %d rows on device %d",
                           params.count, total_rows, context.device));
    if (timer) timer->mark(2);
    COLI_FORWARD(
        succeeded(cudaMemcpyAsync(buffers.host_y.floats(), buffers.y.as<float>(), bytes, cudaMemcpyDeviceToHost, stream),
                  "copying %d rows from device %d", total_rows, context.device));
    if (timer) timer->mark(3);
    return true;
}

/* After a failure half-way: nothing of the call may still run when its buffers are used again. */
bool abandon(Context &context) {
    ignore(cudaStreamSynchronize(context.stream));
    return false;
}

} // namespace

bool prepare_group(const GroupCall &call, int least_rows, Context **context, GroupParams *params, int *total_rows) {
    COLI_REFUSE_IF(!call.gates || !call.ups || !call.downs || !call.rows, COLI_E_ARGUMENT,
                   "gates, ups, downs and rows must not be NULL");
    COLI_REFUSE_IF(call.count < 1 || call.count > COLI_CUDA_MAX_EXPERTS, COLI_E_ARGUMENT,
                   "a group of %d experts, expected 1 to %d", call.count, COLI_CUDA_MAX_EXPERTS);
    COLI_FORWARD(tensor_usable(call.gates[0], "gate"));
    const ColiCudaTensor &first = *call.gates[0];
    long long total = 0;
    for (int c = 0; c < call.count; c++) {
        COLI_FORWARD(check_expert(call, c, first, least_rows));
        const ColiCudaTensor *down = call.downs[c];
        params->experts[c] = {call.gates[c]->view(),   call.ups[c]->view(), down->view(),
                              static_cast<int>(total), call.rows[c],        down->format == COLI_E8 && down->rotated};
        total += call.rows[c];
        COLI_REFUSE_IF(total > INT_MAX, COLI_E_ARGUMENT, "a group of %lld rows and more, expected at most %d", total,
                       INT_MAX);
    }
    params->D = first.I;
    params->H = first.O;
    params->count = call.count;
    params->max_rows = *std::max_element(call.rows, call.rows + call.count);
    *context = first.context;
    *total_rows = static_cast<int>(total);
    return true;
}

size_t workspace_bytes(int total_rows, int H) {
    return 2 * align_up(row_bytes(total_rows, H), kPlaneAlignment);
}

void place_workspace(GroupParams *params, int total_rows, void *workspace) {
    params->hidden = static_cast<float *>(workspace);
    params->rotated = params->hidden + workspace_bytes(total_rows, params->H) / 2 / sizeof(float);
}

bool run_group(Context &context, GroupParams &params, int total_rows, float *y, const float *x) {
    GroupTimer timer(context);
    if (!enqueue_group(context, params, context.synchronous, total_rows, x, &timer)) return abandon(context);
    COLI_FORWARD(succeeded(cudaStreamSynchronize(context.stream), "running %d expert(s) with %d rows on device %d",
                           params.count, total_rows, context.device));
    memcpy(y, context.synchronous.host_y.floats(), row_bytes(total_rows, params.D));
    timer.count();
    return true;
}

bool issue_group(Context &context, GroupParams &params, int total_rows, const float *x) {
    COLI_REFUSE_IF(context.pending, COLI_E_STATE, "device %d has a group that was issued and not taken yet",
                   context.device);
    const bool queued = enqueue_group(context, params, context.issued, total_rows, x, nullptr) &&
                        succeeded(cudaEventRecord(context.issued_done, context.stream),
                                  "marking the end of a group on device %d", context.device);
    if (!queued) return abandon(context);
    context.pending = true;
    return true;
}

bool take_group(Context &context) {
    COLI_REFUSE_IF(!context.pending, COLI_E_STATE, "device %d has no issued group to take", context.device);
    context.pending = false;
    return succeeded(cudaEventSynchronize(context.issued_done), "waiting for the issued group on device %d",
                     context.device);
}

bool run_matmul(const ColiCudaTensor &w, float *y, const float *x, int S) {
    Context &context = *w.context;
    CallBuffers &buffers = context.synchronous;
    const size_t x_bytes = row_bytes(S, w.I), y_bytes = row_bytes(S, w.O);
    COLI_FORWARD(buffers.host_x.reserve(x_bytes, "activations") && buffers.host_y.reserve(y_bytes, "results") &&
                 buffers.x.reserve(x_bytes, "activations") && buffers.y.reserve(y_bytes, "results"));
    memcpy(buffers.host_x.floats(), x, x_bytes);

    const cudaStream_t stream = context.stream;
    const MatmulParams params{w.view(), w.O, w.I, S, buffers.x.as<float>(), buffers.y.as<float>(), context.tables};
    cudaError_t result =
        cudaMemcpyAsync(buffers.x.as<float>(), buffers.host_x.floats(), x_bytes, cudaMemcpyHostToDevice, stream);
    if (result == cudaSuccess) result = launch_matmul(params, stream);
    if (result == cudaSuccess)
        result = cudaMemcpyAsync(buffers.host_y.floats(), buffers.y.as<float>(), y_bytes, cudaMemcpyDeviceToHost, stream);
    if (!succeeded(result, "multiplying %d rows with a matrix [%d, %d] on device %d", S, w.O, w.I, context.device))
        return abandon(context);
    COLI_FORWARD(succeeded(cudaStreamSynchronize(stream), "multiplying %d rows with a matrix [%d, %d] on device %d", S, w.O,
                           w.I, context.device));
    memcpy(y, buffers.host_y.floats(), y_bytes);
    return true;
}

} // namespace coli
