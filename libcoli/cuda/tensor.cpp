#include "tensor.h"

#include <new>

#include "transfer.h"

coli::MatrixView ColiCudaTensor::view() const {
    using namespace coli;
    const bool row_scales = format == COLI_INT8 || format == COLI_INT4 || format == COLI_INT2;
    return {memory,
            plane(),
            tile_kind(format, group_size, fp8_table_is_e4m3(), codebook_is_small()),
            group_size,
            static_cast<int>(tile_bytes(format, group_size)),
            row_scales};
}

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

} // namespace

size_t allocation_footprint(size_t bytes) {
    constexpr size_t slice = 512, block = size_t{2} << 20;
    const size_t unit = bytes <= block / 2 ? slice : block;
    return bytes > SIZE_MAX - unit ? SIZE_MAX : align_up(bytes, unit);
}

bool tensor_size_countable(int format, int I, int O, int group_size) {
    /* in double, which cannot wrap: a strip has at most 256 GiB, and a row no more scales than columns */
    const double strip = static_cast<double>(weights_extent(format, group_size, kStripRows, I)) +
                         kStripRows * static_cast<double>(scale_bytes(format, I, 1, group_size));
    COLI_REFUSE_IF(strip * tile_strips(O) > 0x1p62, COLI_E_MEMORY,
                   "a matrix [%d, %d] of format %d needs more than 2^62 bytes", O, I, format);
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
    tensor->tiles_bytes = weights_extent(format, group_size, O, I);
    tensor->scale_bytes = scale_bytes(format, I, O, group_size);
    tensor->plane_bytes = scales_in_tiles(format, group_size) ? 0 : tensor->scale_bytes;
    tensor->device_bytes = tensor->tiles_bytes + tensor->plane_bytes;
    tensor->logical_bytes = static_cast<size_t>(O) * coli_geometry_row_bytes(format, I) + tensor->scale_bytes;

    const bool done =
        succeeded(cudaMalloc(reinterpret_cast<void **>(&tensor->memory), tensor->device_bytes),
                  "allocating %zu bytes on device %d for a matrix [%d, %d]", tensor->device_bytes, context.device, O, I) &&
        tensor_write(*tensor, weights, scales);
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
    COLI_FORWARD(context.staging.reserve());
    tensor.valid = false;
    cudaError_t result = cudaSuccess;
    if (tensor.plane_bytes)
        result = cudaMemcpyAsync(tensor.plane(), scales, tensor.plane_bytes, cudaMemcpyHostToDevice, context.stream);
    if (!succeeded(result, "uploading the scales of a matrix [%d, %d]", tensor.O, tensor.I) ||
        !upload_tiles(tensor, weights, scales))
        return context.abandon();
    /* the caller may reuse its memory on return */
    result = cudaStreamSynchronize(context.stream);
    if (!succeeded(result, "uploading a matrix [%d, %d]", tensor.O, tensor.I)) return context.abandon();
    tensor.valid = true;
    return true;
}

bool tensor_read(const ColiCudaTensor &tensor, void *weights, void *scales) {
    Context &context = *tensor.context;
    COLI_FORWARD(context.staging.reserve());
    if (!download_tiles(tensor, weights, scales)) return context.abandon();
    cudaError_t result = cudaSuccess;
    if (tensor.plane_bytes && scales)
        result = cudaMemcpyAsync(scales, tensor.plane(), tensor.plane_bytes, cudaMemcpyDeviceToHost, context.stream);
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
