/* api/products.cpp - matmul, experts, groups: entry points of coli_cuda.h. Each checks, finds the device, runs. */
#include <algorithm>
#include <numeric>

#include "../dispatch.h"
#include "../fault.h"
#include "../host_calls.h"
#include "../kernels/combine.h"
#include "../kernels/rotate.h"
#include "upload.h"

using namespace coli;

namespace {

bool pointers_given(const void *y, const void *x) {
    COLI_REFUSE_IF(!y || !x, COLI_E_ARGUMENT, "%s is NULL", y ? "x" : "y");
    return true;
}

/* A misaligned load on the device would end its context. */
bool device_pointers_given(const void *y_dev, const void *x_dev) {
    COLI_FORWARD(pointers_given(y_dev, x_dev));
    for (const void *pointer : {y_dev, x_dev}) {
        COLI_REFUSE_IF(reinterpret_cast<uintptr_t>(pointer) % alignof(float), COLI_E_ARGUMENT, "%s is %p, expected floats",
                       pointer == x_dev ? "x_dev" : "y_dev", pointer);
    }
    return true;
}

/* One expert, which coli_cuda_group_stats does not count. The caller holds the device. */
bool run_expert(Context &context, const GroupCall &call, const Activation &activation, float *y, const float *x) {
    int total_rows;
    COLI_FORWARD(check_group(call, 1, &total_rows));
    GroupParams params = group_params(call, 0, 0);
    params.activation = activation;
    return run_group(context, params, total_rows, y, x);
}

bool counted(Context &context, int experts, int total_rows) {
    context.counters->calls++;
    context.counters->experts += experts;
    context.counters->rows += total_rows;
    return true;
}

bool fits_one_launch(const GroupCall &call) {
    COLI_REFUSE_IF(call.count > COLI_CUDA_MAX_EXPERTS, COLI_E_ARGUMENT, "a group of %d experts, expected 1 to %d",
                   call.count, COLI_CUDA_MAX_EXPERTS);
    return true;
}

/* Matrices in host memory for the length of one call, on a device that the caller holds. */
class TemporaryTensors {
  public:
    ~TemporaryTensors() {
        for (ColiCudaTensor *tensor : tensors_) {
            if (tensor) tensor_release(tensor);
        }
    }
    ColiCudaTensor *upload_mxfp4(Context &context, const void *weights, const void *scales, int I, int O) {
        ColiCudaTensor *&tensor = tensors_[count_++];
        upload(context, &tensor, weights, scales, COLI_MXFP4, I, O, 0);
        return tensor;
    }

  private:
    ColiCudaTensor *tensors_[3] = {};
    int count_ = 0;
};

bool workspace_given(const void *workspace_dev, size_t size, size_t needed, int total_rows) {
    COLI_REFUSE_IF(!workspace_dev || reinterpret_cast<uintptr_t>(workspace_dev) % kPlaneAlignment || size < needed,
                   COLI_E_ARGUMENT, "a workspace of %zu bytes at %p, expected %zu aligned to %zu for %d rows", size,
                   workspace_dev, needed, kPlaneAlignment, total_rows);
    return true;
}

/* A group on the caller's stream, as many experts a time as kernel parameters hold. The caller checked everything. */
bool launch_on_stream(Context &context, const GroupCall &group, int total_rows, float *y_dev, const float *x_dev,
                      void *workspace_dev, void *stream) {
    context.caller_streams = true;
    for (int begin = 0, first_row = 0; begin < group.count; begin += COLI_CUDA_MAX_EXPERTS) {
        GroupParams params = group_params(group, begin, first_row);
        params.x = x_dev;
        params.y = y_dev;
        params.tables = context.tables;
        place_workspace(&params, total_rows, workspace_dev);
        if (params.max_rows > 0) {
            COLI_FORWARD(succeeded(launch_group(context, params, static_cast<cudaStream_t>(stream)),
                                   "launching %d expert(s) with %d rows on device %d", group.count, total_rows,
                                   context.device));
        }
        const ExpertEntry &last = params.experts[params.count - 1];
        first_row = last.first_row + last.rows;
    }
    return true;
}

bool all_below(const int *values, int count, int limit, const char *name) {
    for (int i = 0; i < count; i++) {
        COLI_REFUSE_IF(values[i] < 0 || values[i] >= limit, COLI_E_ARGUMENT, "%s[%d] is %d, expected 0 ... %d", name, i,
                       values[i], limit - 1);
    }
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
    COLI_REFUSE_IF(!tensor, COLI_E_ARGUMENT, "the pointer to the tensor is NULL");
    COLI_REFUSE_IF(fmt == COLI_INT4_GROUPED && gs < 1, COLI_E_SHAPE, "grouped int4 with group size %d, expected 1 or more",
                   gs);
    COLI_REFUSE_IF(S < 1, COLI_E_SHAPE, "%d activation rows, expected 1 or more", S);
    Context *context = find_context(device);
    if (!context) return 0;
    DeviceCall call(*context);
    return call.ok() && upload(*context, tensor, weights, scales, fmt, I, O, gs) && tensor_usable(*tensor, "the matrix") &&
           run_matmul(**tensor, y, x, S);
}

int coli_cuda_expert_mlp(ColiCudaTensor *gate, ColiCudaTensor *up, ColiCudaTensor *down, float *y, const float *x, int S) {
    COLI_FORWARD(!fault_injected("coli_cuda_expert_mlp") && pointers_given(y, x));
    const GroupCall expert{&gate, &up, &down, &S, 1};
    Context *context = context_of(expert);
    if (!context) return 0;
    DeviceCall call(*context);
    return call.ok() && run_expert(*context, expert, {}, y, x);
}

int coli_cuda_shared_mlp_w4a16(ColiCudaTensor *gate, ColiCudaTensor *up, ColiCudaTensor *down, float *y, const float *x,
                               int S) {
    for (const ColiCudaTensor *tensor : {gate, up, down}) {
        COLI_REFUSE_IF(tensor && tensor->format != COLI_INT4, COLI_E_FORMAT, "a matrix has format %d, expected int4 (%d)",
                       tensor->format, COLI_INT4);
    }
    return coli_cuda_expert_mlp(gate, up, down, y, x, S);
}

int coli_cuda_expert_group(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                           const int *rows, int count, float *y, const float *x) {
    return coli_cuda_expert_group_pinned(gates, ups, downs, rows, count, y, x, 0);
}

int coli_cuda_expert_group_pinned(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                                  const int *rows, int count, float *y, const float *x, int pin_small_batch) {
    COLI_FORWARD(!fault_injected("coli_cuda_expert_group") && pointers_given(y, x));
    const GroupCall group{gates, ups, downs, rows, count};
    Context *context = context_of(group);
    if (!context) return 0;
    DeviceCall call(*context);
    int total_rows;
    COLI_FORWARD(call.ok() && fits_one_launch(group) && check_group(group, 1, &total_rows));
    GroupParams params = group_params(group, 0, 0);
    params.pinned = pin_small_batch != 0;
    return run_group(*context, params, total_rows, y, x) && counted(*context, count, total_rows);
}

int coli_cuda_expert_group_issue(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                                 const int *rows, int count, const float *x) {
    COLI_FORWARD(!fault_injected("coli_cuda_expert_group_issue"));
    COLI_REFUSE_IF(!x, COLI_E_ARGUMENT, "x is NULL");
    const GroupCall group{gates, ups, downs, rows, count};
    Context *context = context_of(group);
    if (!context) return 0;
    DeviceCall call(*context);
    int total_rows;
    COLI_FORWARD(call.ok() && fits_one_launch(group) && check_group(group, 1, &total_rows));
    COLI_REFUSE_IF(total_rows > COLI_CUDA_MAX_ISSUE_ROWS, COLI_E_ARGUMENT, "an issue of %d rows, expected at most %d",
                   total_rows, COLI_CUDA_MAX_ISSUE_ROWS);
    GroupParams params = group_params(group, 0, 0);
    return issue_group(*context, params, total_rows, x) && counted(*context, count, total_rows);
}

int coli_cuda_expert_group_issue_sum(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                                     const int *rows, int count, const float *x, int x_rows, const int *x_index, int tokens,
                                     const int *row_tokens, const float *row_weights) {
    COLI_FORWARD(!fault_injected("coli_cuda_expert_group_issue_sum"));
    COLI_REFUSE_IF(!x || !x_index || !row_tokens || !row_weights, COLI_E_ARGUMENT,
                   "x, x_index, row_tokens and row_weights must not be NULL");
    COLI_REFUSE_IF(tokens < 1, COLI_E_SHAPE, "%d tokens, expected 1 or more", tokens);
    const GroupCall group{gates, ups, downs, rows, count};
    Context *context = context_of(group);
    if (!context) return 0;
    DeviceCall call(*context);
    int total_rows;
    COLI_FORWARD(call.ok() && fits_one_launch(group) && check_group(group, 1, &total_rows));
    COLI_FORWARD(all_below(x_index, total_rows, x_rows, "x_index") &&
                 all_below(row_tokens, total_rows, tokens, "row_tokens"));
    GroupParams params = group_params(group, 0, 0);
    return issue_group_sum(*context, params, total_rows, x, {x_index, row_tokens, row_weights, tokens}) &&
           counted(*context, count, total_rows);
}

const float *coli_cuda_expert_group_take(int device) {
    Context *context = find_context(device);
    if (!context) return nullptr;
    DeviceCall call(*context);
    const bool injected = fault_injected("coli_cuda_expert_group_take");
    const bool taken = take_group(*context); /* whatever fails, nothing is pending any more */
    return call.ok() && taken && !injected ? context->issued.host_y.floats() : nullptr;
}

int coli_cuda_matmul_mxfp4(float *y, const float *x, const unsigned char *q4, const unsigned char *e8s, int S, int I,
                           int O) {
    COLI_FORWARD(!fault_injected("coli_cuda_matmul_mxfp4") && pointers_given(y, x));
    COLI_REFUSE_IF(S < 1, COLI_E_SHAPE, "%d activation rows, expected 1 or more", S);
    Context *context = first_context();
    if (!context) return 0;
    DeviceCall call(*context);
    COLI_FORWARD(call.ok());
    TemporaryTensors temporary;
    const ColiCudaTensor *w = temporary.upload_mxfp4(*context, q4, e8s, I, O);
    return w && run_matmul(*w, y, x, S);
}

int coli_cuda_expert_mxfp4(float *y, const float *x, const unsigned char *gate_w, const unsigned char *gate_s,
                           const unsigned char *up_w, const unsigned char *up_s, const unsigned char *down_w,
                           const unsigned char *down_s, int S, int D, int I, float b1, float b2) {
    COLI_FORWARD(!fault_injected("coli_cuda_expert_mxfp4") && pointers_given(y, x));
    Context *context = first_context();
    if (!context) return 0;
    DeviceCall call(*context);
    COLI_FORWARD(call.ok());
    TemporaryTensors temporary;
    ColiCudaTensor *gate = temporary.upload_mxfp4(*context, gate_w, gate_s, D, I);
    ColiCudaTensor *up = gate ? temporary.upload_mxfp4(*context, up_w, up_s, D, I) : nullptr;
    ColiCudaTensor *down = up ? temporary.upload_mxfp4(*context, down_w, down_s, I, D) : nullptr;
    return down && run_expert(*context, {&gate, &up, &down, &S, 1}, {Activation::kSitu, b1, b2}, y, x);
}

/*------   Device pointers, the caller's stream   ------*/

size_t coli_cuda_expert_group_workspace(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups,
                                        ColiCudaTensor *const *downs, const int *rows, int count) {
    const GroupCall group{gates, ups, downs, rows, count};
    Context *context = context_of(group);
    if (!context) return 0;
    DeviceCall call(*context);
    int total_rows;
    COLI_FORWARD(call.ok() && check_group(group, 0, &total_rows));
    return workspace_bytes(std::max(total_rows, 1), gates[0]->I, gates[0]->O, count);
}

int coli_cuda_matmul_dev(const ColiCudaTensor *tensor, float *y_dev, const float *x_dev, int S, void *stream) {
    COLI_FORWARD(!fault_injected("coli_cuda_matmul_dev") && tensor_alive(tensor, "the matrix"));
    COLI_REFUSE_IF(S < 0, COLI_E_SHAPE, "%d activation rows, expected 0 or more", S);
    Context &context = *tensor->context;
    DeviceCall call(context);
    COLI_FORWARD(call.ok() && tensor_usable(tensor, "the matrix"));
    if (S == 0) return 1;
    COLI_FORWARD(device_pointers_given(y_dev, x_dev));
    context.caller_streams = true;
    GroupParams params = product_params(*tensor, y_dev, x_dev, S);
    params.tables = context.tables;
    return succeeded(launch_product(context, params, nullptr, static_cast<cudaStream_t>(stream)),
                     "launching a product of %d rows with a matrix [%d, %d] on device %d", S, tensor->O, tensor->I,
                     context.device);
}

int coli_cuda_expert_group_dev(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                               const int *rows, int count, float *y_dev, const float *x_dev, void *workspace_dev,
                               size_t workspace_size, void *stream) {
    COLI_FORWARD(!fault_injected("coli_cuda_expert_group_dev"));
    const GroupCall group{gates, ups, downs, rows, count};
    Context *context = context_of(group);
    if (!context) return 0;
    DeviceCall call(*context);
    int total_rows;
    COLI_FORWARD(call.ok() && check_group(group, 0, &total_rows));
    if (total_rows == 0) return 1;
    COLI_FORWARD(device_pointers_given(y_dev, x_dev) &&
                 workspace_given(workspace_dev, workspace_size,
                                 workspace_bytes(total_rows, gates[0]->I, gates[0]->O, count), total_rows) &&
                 launch_on_stream(*context, group, total_rows, y_dev, x_dev, workspace_dev, stream));
    return counted(*context, count, total_rows);
}

size_t coli_cuda_expert_group_combine_workspace(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups,
                                                ColiCudaTensor *const *downs, const int *rows, int count) {
    const size_t of_group = coli_cuda_expert_group_workspace(gates, ups, downs, rows, count);
    if (of_group == 0) return 0;
    const int total_rows = std::accumulate(rows, rows + count, 0);
    return of_group + rows_bytes(std::max(total_rows, 1), gates[0]->I);
}

int coli_cuda_expert_group_combine_dev(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups,
                                       ColiCudaTensor *const *downs, const int *rows, int count, float *y_dev, int tokens,
                                       const float *x_dev, const int *row_tokens_dev, const float *row_weights_dev,
                                       void *workspace_dev, size_t workspace_size, void *stream) {
    COLI_FORWARD(!fault_injected("coli_cuda_expert_group_combine_dev"));
    COLI_REFUSE_IF(tokens < 0, COLI_E_ARGUMENT, "%d tokens, expected 0 or more", tokens);
    if (tokens == 0) return 1;
    const GroupCall group{gates, ups, downs, rows, count};
    Context *context = context_of(group);
    if (!context) return 0;
    DeviceCall call(*context);
    int total_rows;
    COLI_FORWARD(call.ok() && check_group(group, 0, &total_rows) && device_pointers_given(y_dev, x_dev) &&
                 device_pointers_given(row_tokens_dev, row_weights_dev));
    const int D = gates[0]->I;
    const size_t of_group = workspace_bytes(std::max(total_rows, 1), D, gates[0]->O, count);
    COLI_FORWARD(
        workspace_given(workspace_dev, workspace_size, of_group + rows_bytes(std::max(total_rows, 1), D), total_rows));
    float *expert_rows = reinterpret_cast<float *>(static_cast<uint8_t *>(workspace_dev) + of_group);
    COLI_FORWARD(total_rows == 0 ||
                 launch_on_stream(*context, group, total_rows, expert_rows, x_dev, workspace_dev, stream));
    const CombineParams params{expert_rows, row_tokens_dev, row_weights_dev, y_dev, total_rows, tokens, D};
    COLI_FORWARD(
        succeeded(launch_combine(params, path_of(context->gpu) == Path::kHopper, static_cast<cudaStream_t>(stream)),
                  "launching the sums of %d rows for %d token(s) on device %d", total_rows, tokens, context->device));
    return counted(*context, count, total_rows);
}

int coli_cuda_rotate_rows_dev(int device, float *y_dev, const float *x_dev, int rows, int dim, int inverse, void *stream) {
    Context *context = find_context(device);
    if (!context) return 0;
    COLI_REFUSE_IF(rows < 0 || dim < 1, COLI_E_SHAPE, "%d rows of %d, expected 0 or more rows of 1 or more", rows, dim);
    if (rows == 0) return 1;
    COLI_FORWARD(device_pointers_given(y_dev, x_dev));
    COLI_REFUSE_IF(y_dev == x_dev, COLI_E_ARGUMENT, "y_dev and x_dev are the same memory, expected two places");
    DeviceCall call(*context);
    COLI_FORWARD(call.ok());
    context->caller_streams = true;
    return succeeded(launch_rotate({x_dev, y_dev, rows, dim, inverse != 0, context->tables}, plan_rotation(dim, rows),
                                   static_cast<cudaStream_t>(stream)),
                     "launching the rotation of %d rows of %d on device %d", rows, dim, device);
}
