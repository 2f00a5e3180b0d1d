#include "host_calls.h"

#include <cstring>

#include "environment.h"
#include "kernels/combine.h"
#include "kernels/fetch.h"

namespace coli {

namespace {

size_t row_bytes(size_t rows, int dim) {
    return rows * static_cast<size_t>(dim) * sizeof(float);
}

/* Up to here kernels read and write pinned memory themselves: the copy engine would take longer to begin than to copy. */
constexpr size_t kDirectBytes = size_t{512} << 10;

/* Room for the rows of a call on their way to the device and back; its results go to *y. */
bool reserve_rows(CallBuffers &buffers, size_t x_bytes, size_t y_bytes, float **y) {
    const bool direct = y_bytes <= kDirectBytes;
    COLI_FORWARD(buffers.host_x.reserve(align_up(x_bytes, kPieceBytes), "activations") &&
                 buffers.x.reserve(align_up(x_bytes, kPieceBytes), "activations") &&
                 buffers.host_y.reserve(y_bytes, "results") && (direct || buffers.y.reserve(y_bytes, "results")));
    *y = direct ? buffers.host_y.floats() : buffers.y.as<float>();
    return true;
}

/* From pinned memory to the device, and back. */
cudaError_t send_rows(CallBuffers &buffers, size_t bytes, cudaStream_t stream) {
    if (bytes <= kDirectBytes)
        return launch_fetch(buffers.x.as<void>(), buffers.host_x.floats(), align_up(bytes, kPieceBytes), stream);
    return cudaMemcpyAsync(buffers.x.as<void>(), buffers.host_x.floats(), bytes, cudaMemcpyHostToDevice, stream);
}
cudaError_t return_rows(CallBuffers &buffers, size_t bytes, cudaStream_t stream) {
    if (bytes <= kDirectBytes) return cudaSuccess;
    return cudaMemcpyAsync(buffers.host_y.floats(), buffers.y.as<void>(), bytes, cudaMemcpyDeviceToHost, stream);
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
    COLI_FORWARD(reserve_rows(buffers, bytes, bytes, &params.y) &&
                 buffers.workspace.reserve(workspace_bytes(total_rows, params.D, params.H, params.count), "hidden rows"));
    memcpy(buffers.host_x.floats(), x, bytes);
    params.x = buffers.x.as<float>();
    params.tables = context.tables;
    place_workspace(&params, total_rows, buffers.workspace.as<void>());

    const cudaStream_t stream = context.stream;
    if (timer) timer->mark(0);
    COLI_FORWARD(succeeded(send_rows(buffers, bytes, stream), "copying %d rows to device %d", total_rows, context.device));
    if (timer) timer->mark(1);
    COLI_FORWARD(succeeded(launch_group(context, params, stream), "launching %d expert(s) with %d rows on device %d",
                           params.count, total_rows, context.device));
    if (timer) timer->mark(2);
    COLI_FORWARD(
        succeeded(return_rows(buffers, bytes, stream), "copying %d rows from device %d", total_rows, context.device));
    if (timer) timer->mark(3);
    return true;
}

/* Where a sum's parts lie: rows, row_tokens and row_weights behind each other in host_x and x; the experts' rows and,
 * unless kernels write them to pinned memory, the sums in y. */
struct SumLayout {
    size_t tokens, weights, staged; /* offsets in bytes, and the end */
    size_t results, sums;           /* bytes */

    SumLayout(int total_rows, int sum_rows, int D) {
        results = align_up(row_bytes(total_rows, D), kPieceBytes);
        sums = row_bytes(sum_rows, D);
        tokens = results;
        weights = tokens + align_up(static_cast<size_t>(total_rows) * sizeof(int), kPieceBytes);
        staged = weights + align_up(static_cast<size_t>(total_rows) * sizeof(float), kPieceBytes);
    }
    bool direct() const { return sums <= kDirectBytes; }
};

void stage_sum(const SumLayout &layout, uint8_t *staged, int total_rows, int D, const float *x, const RowSums &sums) {
    const size_t row = row_bytes(1, D);
    for (int r = 0; r < total_rows; r++) memcpy(staged + r * row, x + static_cast<size_t>(sums.x_index[r]) * D, row);
    memcpy(staged + layout.tokens, sums.row_tokens, total_rows * sizeof(int));
    memcpy(staged + layout.weights, sums.row_weights, total_rows * sizeof(float));
}

/* Copies rows to the device, runs the group and sums its rows up to pinned memory; waits for nothing. */
bool enqueue_sum(Context &context, GroupParams &params, CallBuffers &buffers, int total_rows, const float *x,
                 const RowSums &sums) {
    const SumLayout layout(total_rows, sums.tokens, params.D);
    COLI_FORWARD(buffers.host_x.reserve(layout.staged, "activations") && buffers.x.reserve(layout.staged, "activations") &&
                 buffers.host_y.reserve(layout.sums, "results") &&
                 buffers.y.reserve(layout.results + (layout.direct() ? 0 : layout.sums), "results") &&
                 buffers.workspace.reserve(workspace_bytes(total_rows, params.D, params.H, params.count), "hidden rows"));
    stage_sum(layout, buffers.host_x.bytes(), total_rows, params.D, x, sums);
    params.x = buffers.x.as<float>();
    params.y = buffers.y.as<float>();
    params.tables = context.tables;
    place_workspace(&params, total_rows, buffers.workspace.as<void>());

    uint8_t *staged = buffers.x.as<uint8_t>(), *device_sums = buffers.y.as<uint8_t>() + layout.results;
    const CombineParams combine{params.y,
                                reinterpret_cast<const int *>(staged + layout.tokens),
                                reinterpret_cast<const float *>(staged + layout.weights),
                                layout.direct() ? buffers.host_y.floats() : reinterpret_cast<float *>(device_sums),
                                total_rows,
                                sums.tokens,
                                params.D};
    const cudaStream_t stream = context.stream;
    cudaError_t result = send_rows(buffers, layout.staged, stream);
    if (result == cudaSuccess) result = launch_group(context, params, stream);
    if (result == cudaSuccess) result = launch_combine(combine, path_of(context.gpu) == Path::kHopper, stream);
    if (result == cudaSuccess && !layout.direct())
        result = cudaMemcpyAsync(buffers.host_y.floats(), device_sums, layout.sums, cudaMemcpyDeviceToHost, stream);
    return succeeded(result, "launching the sums of %d expert(s) with %d rows on device %d", params.count, total_rows,
                     context.device);
}

/* Ends an issue that was put on the stream, or failed on the way there. */
bool mark_issued(Context &context, bool queued) {
    queued = queued && succeeded(cudaEventRecord(context.issued_done, context.stream),
                                 "marking the end of a group on device %d", context.device);
    if (!queued) return context.abandon();
    context.pending = true;
    return true;
}

bool nothing_pending(const Context &context) {
    COLI_REFUSE_IF(context.pending, COLI_E_STATE, "device %d has a group that was issued and not taken yet",
                   context.device);
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
    return nothing_pending(context) &&
           mark_issued(context, enqueue_group(context, params, context.issued, total_rows, x, nullptr));
}

bool issue_group_sum(Context &context, GroupParams &params, int total_rows, const float *x, const RowSums &sums) {
    return nothing_pending(context) &&
           mark_issued(context, enqueue_sum(context, params, context.issued, total_rows, x, sums));
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
    float *results;
    COLI_FORWARD(reserve_rows(buffers, x_bytes, y_bytes, &results) &&
                 buffers.workspace.reserve(product_workspace_bytes(S, w.I), "prepared activations"));
    memcpy(buffers.host_x.floats(), x, x_bytes);

    const cudaStream_t stream = context.stream;
    GroupParams params = product_params(w, results, buffers.x.as<float>(), S);
    params.tables = context.tables;
    cudaError_t result = send_rows(buffers, x_bytes, stream);
    if (result == cudaSuccess) result = launch_product(context, params, buffers.workspace.as<void>(), stream);
    if (result == cudaSuccess) result = return_rows(buffers, y_bytes, stream);
    if (!succeeded(result, "multiplying %d rows with a matrix [%d, %d] on device %d", S, w.O, w.I, context.device))
        return context.abandon();
    COLI_FORWARD(succeeded(cudaStreamSynchronize(stream), "multiplying %d rows with a matrix [%d, %d] on device %d", S, w.O,
                           w.I, context.device));
    memcpy(y, buffers.host_y.floats(), y_bytes);
    return true;
}

} // namespace coli
