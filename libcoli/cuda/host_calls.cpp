#include "host_calls.h"

#include <cstring>

#include "environment.h"

namespace coli {

namespace {

size_t row_bytes(size_t rows, int dim) {
    return rows * static_cast<size_t>(dim) * sizeof(float);
}

/* Marks of a synchronous group on its stream; without COLI_CUDA_PROFILE it does nothing. */
class GroupTimer {
  public:
    explicit GroupTimer(Context &context) : context_(context), active_(switched_on("COLI_CUDA_PROFILE")) {
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
    COLI_FORWARD(succeeded(launch_expert_group(params, plan_of(context.gpu, &context.plans, params), stream),
                           "launching %d expert(s) with %d rows on device %d", params.count, total_rows, context.device));
    if (timer) timer->mark(2);
    COLI_FORWARD(
        succeeded(cudaMemcpyAsync(buffers.host_y.floats(), buffers.y.as<float>(), bytes, cudaMemcpyDeviceToHost, stream),
                  "copying %d rows from device %d", total_rows, context.device));
    if (timer) timer->mark(3);
    return true;
}

} // namespace

bool run_group(Context &context, GroupParams &params, int total_rows, float *y, const float *x) {
    GroupTimer timer(context);
    if (!enqueue_group(context, params, context.synchronous, total_rows, x, &timer)) return context.abandon();
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
    if (!queued) return context.abandon();
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
    GroupParams params = product_params(w, buffers.y.as<float>(), buffers.x.as<float>(), S);
    params.tables = context.tables;
    cudaError_t result =
        cudaMemcpyAsync(buffers.x.as<float>(), buffers.host_x.floats(), x_bytes, cudaMemcpyHostToDevice, stream);
    if (result == cudaSuccess) result = launch_down(params, plan_of_product(context.gpu, &context.plans, params), stream);
    if (result == cudaSuccess)
        result = cudaMemcpyAsync(buffers.host_y.floats(), buffers.y.as<float>(), y_bytes, cudaMemcpyDeviceToHost, stream);
    if (!succeeded(result, "multiplying %d rows with a matrix [%d, %d] on device %d", S, w.O, w.I, context.device))
        return context.abandon();
    COLI_FORWARD(succeeded(cudaStreamSynchronize(stream), "multiplying %d rows with a matrix [%d, %d] on device %d", S, w.O,
                           w.I, context.device));
    memcpy(y, buffers.host_y.floats(), y_bytes);
    return true;
}

} // namespace coli
