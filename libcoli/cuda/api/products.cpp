/* api/products.cpp - matmul, experts, groups: entry points of coli_cuda.h. Each checks, finds the device, runs. */
#include <cstdlib>

#include "../expert_group.h"
#include "../fault.h"
#include "../kernels/matmul.h"
#include "../kernels/rotate.h"
#include "tensors.h"

using namespace coli;

namespace {

/* A tensor for the length of a call. */
class TemporaryTensor {
  public:
    ~TemporaryTensor() { tensor_destroy(tensor); }
    ColiCudaTensor *tensor = nullptr;
};

bool pointers_given(const void *y, const void *x) {
    COLI_REFUSE_IF(!y || !x, COLI_E_ARGUMENT, "%s is NULL", y ? "x" : "y");
    return true;
}

bool matmul(const ColiCudaTensor *w, float *y, const float *x, int S) {
    COLI_FORWARD(tensor_usable(w, "the matrix"));
    DeviceCall call(*w->context);
    return run_matmul(*w, y, x, S);
}

/* One expert, which coli_cuda_group_stats does not count. */
bool expert(ColiCudaTensor *gate, ColiCudaTensor *up, ColiCudaTensor *down, const Activation &activation, float *y,
            const float *x, int S) {
    Context *context;
    GroupParams params{};
    int total_rows;
    COLI_FORWARD(pointers_given(y, x) && prepare_group({&gate, &up, &down, &S, 1}, 1, &context, &params, &total_rows));
    params.activation = activation;
    DeviceCall device(*context);
    return run_group(*context, params, total_rows, y, x);
}

bool counted(Context &context, const GroupParams &params, int total_rows) {
    context.counters->calls++;
    context.counters->experts += params.count;
    context.counters->rows += total_rows;
    return true;
}

Context *first_context() {
    if (!contexts().empty()) return contexts().front().get();
    fail(COLI_E_STATE, "no device is configured: call coli_cuda_init first");
    return nullptr;
}

} // namespace

int coli_cuda_matmul(ColiCudaTensor **tensor, float *y, const float *x, const void *weights, const float *scales, int fmt,
                     int S, int I, int O, int device, int gs) {
    COLI_FORWARD(!fault_injected("coli_cuda_matmul") && pointers_given(y, x));
    COLI_REFUSE_IF(fmt == COLI_INT4_GROUPED && gs < 1, COLI_E_SHAPE, "grouped int4 with group size %d, expected 1 or more",
                   gs);
    COLI_REFUSE_IF(S < 1, COLI_E_SHAPE, "%d activation rows, expected 1 or more", S);
    COLI_FORWARD(upload(tensor, weights, scales, fmt, I, O, device, gs));
    return matmul(*tensor, y, x, S);
}

int coli_cuda_expert_mlp(ColiCudaTensor *gate, ColiCudaTensor *up, ColiCudaTensor *down, float *y, const float *x, int S) {
    COLI_FORWARD(!fault_injected("coli_cuda_expert_mlp"));
    return expert(gate, up, down, {}, y, x, S);
}

int coli_cuda_shared_mlp_w4a16(ColiCudaTensor *gate, ColiCudaTensor *up, ColiCudaTensor *down, float *y, const float *x,
                               int S) {
    COLI_FORWARD(!fault_injected("coli_cuda_shared_mlp_w4a16"));
    for (const ColiCudaTensor *tensor : {gate, up, down}) {
        COLI_REFUSE_IF(tensor && tensor->format != COLI_INT4, COLI_E_FORMAT, "a matrix has format %d, expected int4 (%d)",
                       tensor->format, COLI_INT4);
    }
    return expert(gate, up, down, {}, y, x, S);
}

int coli_cuda_expert_group(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                           const int *rows, int count, float *y, const float *x) {
    return coli_cuda_expert_group_pinned(gates, ups, downs, rows, count, y, x, 0);
}

int coli_cuda_expert_group_pinned(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                                  const int *rows, int count, float *y, const float *x, int pin_small_batch) {
    (void)pin_small_batch; /* results never depend on the number of rows here */
    Context *context;
    GroupParams params{};
    int total_rows;
    COLI_FORWARD(!fault_injected("coli_cuda_expert_group") && pointers_given(y, x));
    COLI_FORWARD(prepare_group({gates, ups, downs, rows, count}, 1, &context, &params, &total_rows));
    DeviceCall device(*context);
    return run_group(*context, params, total_rows, y, x) && counted(*context, params, total_rows);
}

int coli_cuda_expert_group_issue(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                                 const int *rows, int count, const float *x) {
    Context *context;
    GroupParams params{};
    int total_rows;
    COLI_FORWARD(!fault_injected("coli_cuda_expert_group_issue"));
    COLI_REFUSE_IF(!x, COLI_E_ARGUMENT, "x is NULL");
    COLI_FORWARD(prepare_group({gates, ups, downs, rows, count}, 1, &context, &params, &total_rows));
    COLI_REFUSE_IF(total_rows > COLI_CUDA_MAX_ISSUE_ROWS, COLI_E_ARGUMENT, "an issue of %d rows, expected at most %d",
                   total_rows, COLI_CUDA_MAX_ISSUE_ROWS);
    DeviceCall device(*context);
    return issue_group(*context, params, total_rows, x) && counted(*context, params, total_rows);
}

const float *coli_cuda_expert_group_take(int device) {
    Context *context = find_context(device);
    if (!context) return nullptr;
    DeviceCall call(*context);
    const bool injected = fault_injected("coli_cuda_expert_group_take");
    return take_group(*context) && !injected ? context->issued.host_y.floats() : nullptr;
}

int coli_cuda_matmul_mxfp4(float *y, const float *x, const unsigned char *q4, const unsigned char *e8s, int S, int I,
                           int O) {
    COLI_FORWARD(!fault_injected("coli_cuda_matmul_mxfp4") && pointers_given(y, x));
    COLI_REFUSE_IF(S < 1, COLI_E_SHAPE, "%d activation rows, expected 1 or more", S);
    Context *context = first_context();
    if (!context) return 0;
    TemporaryTensor w;
    COLI_FORWARD(upload(&w.tensor, q4, e8s, COLI_MXFP4, I, O, context->device, 0));
    return matmul(w.tensor, y, x, S);
}

int coli_cuda_expert_mxfp4(float *y, const float *x, const unsigned char *gate_w, const unsigned char *gate_s,
                           const unsigned char *up_w, const unsigned char *up_s, const unsigned char *down_w,
                           const unsigned char *down_s, int S, int D, int I, float b1, float b2) {
    COLI_FORWARD(!fault_injected("coli_cuda_expert_mxfp4"));
    Context *context = first_context();
    if (!context) return 0;
    TemporaryTensor gate, up, down;
    COLI_FORWARD(upload(&gate.tensor, gate_w, gate_s, COLI_MXFP4, D, I, context->device, 0) &&
                 upload(&up.tensor, up_w, up_s, COLI_MXFP4, D, I, context->device, 0) &&
                 upload(&down.tensor, down_w, down_s, COLI_MXFP4, I, D, context->device, 0));
    return expert(gate.tensor, up.tensor, down.tensor, {Activation::kSitu, b1, b2}, y, x, S);
}

/*------   Device pointers, the caller's stream   ------*/

size_t coli_cuda_workspace_bytes(int total_rows, int H) {
    return total_rows < 0 || H < 1 ? 0 : workspace_bytes(total_rows, H);
}

int coli_cuda_matmul_dev(const ColiCudaTensor *tensor, float *y_dev, const float *x_dev, int S, void *stream) {
    COLI_FORWARD(!fault_injected("coli_cuda_matmul_dev") && tensor_usable(tensor, "the matrix"));
    COLI_REFUSE_IF(S < 0, COLI_E_SHAPE, "%d activation rows, expected 0 or more", S);
    if (S == 0) return 1;
    COLI_FORWARD(pointers_given(y_dev, x_dev));
    Context &context = *tensor->context;
    DeviceCall call(context);
    context.caller_streams = true;
    const MatmulParams params{tensor->view(), tensor->O, tensor->I, S, x_dev, y_dev, context.tables};
    return succeeded(launch_matmul(params, static_cast<cudaStream_t>(stream)),
                     "launching a product of %d rows with a matrix [%d, %d] on device %d", S, tensor->O, tensor->I,
                     context.device);
}

int coli_cuda_expert_group_dev(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                               const int *rows, int count, float *y_dev, const float *x_dev, void *workspace_dev,
                               size_t workspace_size, void *stream) {
    Context *context;
    GroupParams params{};
    int total_rows;
    COLI_FORWARD(!fault_injected("coli_cuda_expert_group_dev"));
    COLI_FORWARD(prepare_group({gates, ups, downs, rows, count}, 0, &context, &params, &total_rows));
    if (total_rows == 0) return 1;
    COLI_FORWARD(pointers_given(y_dev, x_dev));
    COLI_REFUSE_IF(!workspace_dev || workspace_size < workspace_bytes(total_rows, params.H), COLI_E_ARGUMENT,
                   "a workspace of %zu bytes at %p, expected %zu for %d rows of %d", workspace_size, workspace_dev,
                   workspace_bytes(total_rows, params.H), total_rows, params.H);
    params.x = x_dev;
    params.y = y_dev;
    params.tables = context->tables;
    place_workspace(&params, total_rows, workspace_dev);
    DeviceCall call(*context);
    context->caller_streams = true;
    if (!succeeded(launch_expert_group(params, static_cast<cudaStream_t>(stream)),
                   "launching %d expert(s) with %d rows on device %d", count, total_rows, context->device))
        return 0;
    return counted(*context, params, total_rows);
}

int coli_cuda_rotate_rows_dev(int device, float *y_dev, const float *x_dev, int rows, int dim, int inverse, void *stream) {
    Context *context = find_context(device);
    if (!context) return 0;
    COLI_REFUSE_IF(rows < 0 || dim < 1, COLI_E_SHAPE, "%d rows of %d, expected 0 or more rows of 1 or more", rows, dim);
    if (rows == 0) return 1;
    COLI_FORWARD(pointers_given(y_dev, x_dev));
    COLI_REFUSE_IF(y_dev == x_dev, COLI_E_ARGUMENT, "y_dev and x_dev are the same memory, expected two places");
    DeviceCall call(*context);
    context->caller_streams = true;
    return succeeded(
        launch_rotate({x_dev, y_dev, rows, dim, inverse != 0, context->tables}, static_cast<cudaStream_t>(stream)),
        "launching the rotation of %d rows of %d on device %d", rows, dim, device);
}
