#include "tensor.h"

#include <algorithm>
#include <new>

#include "kernels/layout.h"
#include "plan.h"

namespace coli {

namespace {

void link_into_context(ColiCudaTensor &tensor) {
    Context &context = *tensor.context;
    tensor.next = context.tensors;
    if (tensor.next) tensor.next->previous = &tensor;
    context.tensors = &tensor;
    context.tensor_count++;
    context.tensor_bytes += tensor.logical_bytes;
}

void unlink_from_context(ColiCudaTensor &tensor) {
    Context &context = *tensor.context;
    if (tensor.next) tensor.next->previous = tensor.previous;
    (tensor.previous ? tensor.previous->next : context.tensors) = tensor.next;
    context.tensor_count--;
    context.tensor_bytes -= tensor.logical_bytes;
}

/* Bytes behind the scales pointer; grouped int4 without a group size has one scale a row. */
size_t scale_bytes(int format, int I, int O, int group_size) {
    if (format == COLI_INT4_GROUPED && group_size == 0) group_size = I;
    return coli_geometry_scale_count(format, O, I, group_size) * coli_geometry_scale_bytes_each(format);
}

/* Calls step(first row, rows) for pieces of the matrix that fit the staging buffer, at least one row each. */
template <class Step> bool for_staged_rows(const ColiCudaTensor &tensor, Step step) {
    const size_t row_bytes = coli_geometry_row_bytes(tensor.format, tensor.I);
    const int most = static_cast<int>(std::clamp<size_t>(kStagingBytes / row_bytes, 1, static_cast<size_t>(tensor.O)));
    COLI_FORWARD(tensor.context->staging.reserve(most * row_bytes, "staging of E8 blocks"));
    for (int row = 0; row < tensor.O; row += most) COLI_FORWARD(step(row, std::min(most, tensor.O - row)));
    return true;
}

bool write_e8(const ColiCudaTensor &tensor, const uint8_t *blocks) {
    const size_t row_bytes = coli_geometry_row_bytes(tensor.format, tensor.I);
    const cudaStream_t stream = tensor.context->stream;
    return for_staged_rows(tensor, [&](int row, int rows) {
        uint8_t *staging = tensor.context->staging.as<uint8_t>();
        cudaError_t result =
            cudaMemcpyAsync(staging, blocks + row * row_bytes, rows * row_bytes, cudaMemcpyHostToDevice, stream);
        if (result == cudaSuccess) result = launch_pack_e8(staging, tensor.memory, tensor.O, tensor.I, row, rows, stream);
        return succeeded(result, "uploading rows %d to %d of an E8 matrix [%d, %d]", row, row + rows - 1, tensor.O,
                         tensor.I);
    });
}

bool read_e8(const ColiCudaTensor &tensor, uint8_t *blocks) {
    const size_t row_bytes = coli_geometry_row_bytes(tensor.format, tensor.I);
    const cudaStream_t stream = tensor.context->stream;
    return for_staged_rows(tensor, [&](int row, int rows) {
        uint8_t *staging = tensor.context->staging.as<uint8_t>();
        cudaError_t result = launch_unpack_e8(tensor.memory, staging, tensor.O, tensor.I, row, rows, stream);
        if (result == cudaSuccess)
            result = cudaMemcpyAsync(blocks + row * row_bytes, staging, rows * row_bytes, cudaMemcpyDeviceToHost, stream);
        if (result == cudaSuccess) result = cudaStreamSynchronize(stream);
        return succeeded(result, "downloading rows %d to %d of an E8 matrix [%d, %d]", row, row + rows - 1, tensor.O,
                         tensor.I);
    });
}

/* Kernels read whole lanes and mask what lies past the end of a row: give that memory a value once. */
bool clear_padding(const ColiCudaTensor &tensor) {
    const size_t row_bytes = coli_geometry_row_bytes(tensor.format, tensor.I);
    if (tensor.format == COLI_E8 || row_bytes == row_pitch(tensor.format, tensor.I)) return true;
    return succeeded(cudaMemsetAsync(tensor.memory, 0, tensor.scales_offset, tensor.context->stream),
                     "clearing the padding of a matrix [%d, %d]", tensor.O, tensor.I);
}

bool write_rows(const ColiCudaTensor &tensor, const void *weights) {
    const size_t row_bytes = coli_geometry_row_bytes(tensor.format, tensor.I);
    return succeeded(cudaMemcpy2DAsync(tensor.memory, row_pitch(tensor.format, tensor.I), weights, row_bytes, row_bytes,
                                       tensor.O, cudaMemcpyHostToDevice, tensor.context->stream),
                     "uploading the weights of a matrix [%d, %d]", tensor.O, tensor.I);
}

bool read_rows(const ColiCudaTensor &tensor, void *weights) {
    const size_t row_bytes = coli_geometry_row_bytes(tensor.format, tensor.I);
    return succeeded(cudaMemcpy2DAsync(weights, row_bytes, tensor.memory, row_pitch(tensor.format, tensor.I), row_bytes,
                                       tensor.O, cudaMemcpyDeviceToHost, tensor.context->stream),
                     "downloading the weights of a matrix [%d, %d]", tensor.O, tensor.I);
}

bool write_weights(const ColiCudaTensor &tensor, const void *weights) {
    return tensor.format == COLI_E8 ? write_e8(tensor, static_cast<const uint8_t *>(weights)) : write_rows(tensor, weights);
}

bool read_weights(const ColiCudaTensor &tensor, void *weights) {
    return tensor.format == COLI_E8 ? read_e8(tensor, static_cast<uint8_t *>(weights)) : read_rows(tensor, weights);
}

} // namespace

size_t allocation_footprint(size_t bytes) {
    constexpr size_t slice = 512, block = size_t{2} << 20;
    const size_t unit = bytes <= block / 2 ? slice : block;
    return bytes > SIZE_MAX - unit ? SIZE_MAX : align_up(bytes, unit);
}

bool tensor_size_countable(int format, int I, int O, int group_size) {
    /* in double, which cannot wrap: a row has at most 8 GiB, and no more scales than columns */
    const double row =
        static_cast<double>(row_pitch(format, I)) + static_cast<double>(scale_bytes(format, I, 1, group_size));
    COLI_REFUSE_IF(row * O > 0x1p62, COLI_E_MEMORY, "a matrix [%d, %d] of format %d needs more than 2^62 bytes", O, I,
                   format);
    return true;
}

ColiCudaTensor *tensor_create(Context &context, const void *weights, const void *scales, int format, int I, int O,
                              int group_size) {
    ColiCudaTensor *tensor = new (std::nothrow) ColiCudaTensor;
    if (!tensor) {
        fail(COLI_E_MEMORY, "allocating a tensor handle: host memory ran out");
        return nullptr;
    }
    tensor->context = &context;
    tensor->format = format;
    tensor->I = I;
    tensor->O = O;
    tensor->group_size = group_size;
    tensor->scales_offset = weights_extent(format, O, I);
    tensor->scale_bytes = scale_bytes(format, I, O, group_size);
    tensor->device_bytes = tensor->scales_offset + tensor->scale_bytes;
    tensor->logical_bytes = static_cast<size_t>(O) * coli_geometry_row_bytes(format, I) + tensor->scale_bytes;

    const bool done =
        succeeded(cudaMalloc(reinterpret_cast<void **>(&tensor->memory), tensor->device_bytes),
                  "allocating %zu bytes on device %d for a matrix [%d, %d]", tensor->device_bytes, context.device, O, I) &&
        clear_padding(*tensor) && tensor_write(*tensor, weights, scales);
    if (done) {
        link_into_context(*tensor);
        return tensor;
    }
    if (tensor->memory) ignore(cudaFree(tensor->memory));
    delete tensor;
    return nullptr;
}

void tensor_orphan(ColiCudaTensor &tensor) {
    unlink_from_context(tensor);
    ignore(cudaFree(tensor.memory));
    tensor.memory = nullptr;
    tensor.context = nullptr;
}

void tensor_release(ColiCudaTensor *tensor) {
    (void)tensor->context->wait_for_readers();
    tensor_orphan(*tensor);
    delete tensor;
}

bool tensor_write(ColiCudaTensor &tensor, const void *weights, const void *scales) {
    Context &context = *tensor.context;
    if (context.caller_streams) COLI_FORWARD(context.wait_for_readers());
    tensor.valid = false;
    if (!write_weights(tensor, weights)) return context.abandon();
    cudaError_t result = cudaSuccess;
    if (tensor.scale_bytes) {
        result = cudaMemcpyAsync(tensor.memory + tensor.scales_offset, scales, tensor.scale_bytes, cudaMemcpyHostToDevice,
                                 context.stream);
    }
    /* the caller may reuse its memory on return */
    if (result == cudaSuccess) result = cudaStreamSynchronize(context.stream);
    if (!succeeded(result, "uploading a matrix [%d, %d]", tensor.O, tensor.I)) return context.abandon();
    tensor.valid = true;
    return true;
}

bool tensor_read(const ColiCudaTensor &tensor, void *weights, void *scales) {
    Context &context = *tensor.context;
    if (!read_weights(tensor, weights)) return context.abandon();
    cudaError_t result = cudaSuccess;
    if (tensor.scale_bytes && scales) {
        result = cudaMemcpyAsync(scales, tensor.memory + tensor.scales_offset, tensor.scale_bytes, cudaMemcpyDeviceToHost,
                                 context.stream);
    }
    if (result == cudaSuccess) result = cudaStreamSynchronize(context.stream);
    return succeeded(result, "downloading a matrix [%d, %d]", tensor.O, tensor.I) || context.abandon();
}

bool tensor_alive(const ColiCudaTensor *tensor, const char *role) {
    COLI_REFUSE_IF(!tensor, COLI_E_ARGUMENT, "%s is NULL, expected a tensor", role);
    COLI_REFUSE_IF(!tensor->context, COLI_E_STATE, "%s belongs to a device that coli_cuda_shutdown released", role);
    return true;
}

bool tensor_readable(const ColiCudaTensor *tensor, const char *role) {
    COLI_FORWARD(tensor_alive(tensor, role));
    COLI_REFUSE_IF(!tensor->valid, COLI_E_STATE, "%s lost its contents in an update that failed; update it again", role);
    return true;
}

bool tensor_usable(const ColiCudaTensor *tensor, const char *role) {
    COLI_FORWARD(tensor_readable(tensor, role));
    COLI_REFUSE_IF(tensor->format == COLI_INT4_GROUPED && tensor->group_size < 1, COLI_E_SHAPE,
                   "%s is grouped int4 uploaded without a group size; upload it with coli_cuda_tensor_upload_g", role);
    return true;
}

} // namespace coli
