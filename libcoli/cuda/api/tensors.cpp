/* api/tensors.cpp - upload, update, download, free: entry points of coli_cuda.h. */
#include "upload.h"

using namespace coli;

namespace {

bool pointers_valid(int format, const void *weights, const void *scales) {
    COLI_REFUSE_IF(!weights, COLI_E_ARGUMENT, "weights are NULL");
    COLI_REFUSE_IF(!scales && coli_geometry_scale_columns(format, 1, 1) > 0, COLI_E_ARGUMENT,
                   "scales are NULL, format %d needs them", format);
    return true;
}

bool upload_valid(int format, int I, int O, int group_size) {
    COLI_REFUSE_IF(format == COLI_INT3_G64, COLI_E_FORMAT, "int3-g64 has no GPU kernels; it stays on the CPU");
    COLI_REFUSE_IF(coli_geometry_row_bytes(format, 1) == 0, COLI_E_FORMAT, "format %d is unknown, expected 0 to %d", format,
                   COLI_FORMAT_COUNT - 1);
    COLI_REFUSE_IF(I < 1 || O < 1, COLI_E_SHAPE, "matrix [%d, %d], expected at least [1, 1]", O, I);
    COLI_REFUSE_IF(group_size < 0, COLI_E_SHAPE, "group size %d, expected 1 or more columns", group_size);
    COLI_REFUSE_IF(format == COLI_FP8_B128 && !fp8_table_published(), COLI_E_STATE,
                   "fp8 has no decode table yet: call coli_cuda_fp8_set_lut first");
    return tensor_size_countable(format, I, O, group_size);
}

/* *tensor is there already: it must be what the caller describes. */
bool same_tensor(const ColiCudaTensor &tensor, int format, int I, int O, int device, int group_size) {
    COLI_FORWARD(tensor_alive(&tensor, "the tensor"));
    const int present = tensor.context->device;
    COLI_REFUSE_IF(
        tensor.format != format || tensor.I != I || tensor.O != O || present != device || tensor.group_size != group_size,
        COLI_E_SHAPE,
        "the tensor holds format %d [%d, %d], group size %d on device %d; asked for format %d [%d, %d], group size %d "
        "on device %d",
        tensor.format, tensor.O, tensor.I, tensor.group_size, present, format, O, I, group_size, device);
    return true;
}

} // namespace

bool coli::upload(Context &context, ColiCudaTensor **tensor, const void *weights, const void *scales, int format, int I,
                  int O, int group_size) {
    if (format != COLI_INT4_GROUPED) group_size = 0;
    if (*tensor) return same_tensor(**tensor, format, I, O, context.device, group_size);
    COLI_FORWARD(upload_valid(format, I, O, group_size) && pointers_valid(format, weights, scales));
    ColiCudaTensor *created = tensor_create(context, weights, scales, format, I, O, group_size);
    if (created) *tensor = created;
    return created;
}

int coli_cuda_tensor_upload(ColiCudaTensor **tensor, const void *weights, const float *scales, int fmt, int I, int O,
                            int device) {
    return coli_cuda_tensor_upload_g(tensor, weights, scales, fmt, I, O, device, 0);
}

int coli_cuda_tensor_upload_g(ColiCudaTensor **tensor, const void *weights, const float *scales, int fmt, int I, int O,
                              int device, int gs) {
    COLI_REFUSE_IF(!tensor, COLI_E_ARGUMENT, "the pointer to the tensor is NULL");
    Context *context = find_context(device);
    if (!context) return 0;
    DeviceCall call(*context);
    return call.ok() && upload(*context, tensor, weights, scales, fmt, I, O, gs);
}

int coli_cuda_tensor_update(ColiCudaTensor *tensor, const void *weights, const float *scales) {
    COLI_FORWARD(tensor_alive(tensor, "the tensor") && pointers_valid(tensor->format, weights, scales));
    DeviceCall call(*tensor->context);
    return call.ok() && tensor_write(*tensor, weights, scales);
}

int coli_cuda_tensor_overwrite(ColiCudaTensor *tensor, const void *weights, const float *scales) {
    return coli_cuda_tensor_update(tensor, weights, scales);
}

int coli_cuda_tensor_download(const ColiCudaTensor *tensor, void *weights, void *scales) {
    COLI_FORWARD(tensor_alive(tensor, "the tensor"));
    COLI_REFUSE_IF(!weights, COLI_E_ARGUMENT, "weights are NULL, expected room for the bytes");
    DeviceCall call(*tensor->context);
    return call.ok() && tensor_readable(tensor, "the tensor") && tensor_read(*tensor, weights, scales);
}

int coli_cuda_tensor_set_rotated(ColiCudaTensor *tensor, int rotated) {
    COLI_FORWARD(tensor_alive(tensor, "the tensor"));
    COLI_REFUSE_IF(tensor->format != COLI_E8, COLI_E_FORMAT, "only E8 matrices are rotated, the tensor has format %d",
                   tensor->format);
    std::lock_guard<std::mutex> lock(tensor->context->mutex);
    tensor->rotated = rotated != 0;
    return 1;
}

void coli_cuda_tensor_free(ColiCudaTensor *tensor) {
    if (!tensor) return;
    if (!tensor->context) {
        delete tensor;
        return;
    }
    DeviceCall call(*tensor->context);
    tensor_release(tensor);
}

size_t coli_cuda_tensor_bytes(const ColiCudaTensor *tensor) {
    return tensor ? tensor->logical_bytes : 0;
}

size_t coli_cuda_tensor_vram(const ColiCudaTensor *tensor) {
    return tensor && tensor->context ? allocation_footprint(tensor->device_bytes) : 0;
}

size_t coli_cuda_alloc_footprint(size_t bytes) {
    return allocation_footprint(bytes);
}

int coli_cuda_tensor_device(const ColiCudaTensor *tensor) {
    return tensor && tensor->context ? tensor->context->device : -1;
}
