/* tensor.h - matrices resident on devices. */
#ifndef COLI_CUDA_TENSOR_H
#define COLI_CUDA_TENSOR_H

#include "context.h"
#include "layout.h"

struct ColiCudaTensor {
    coli::Context *context = nullptr; /* NULL after coli_cuda_shutdown */
    ColiCudaTensor *previous = nullptr, *next = nullptr;

    int format = 0, I = 0, O = 0;
    int group_size = 0;  /* of COLI_INT4_GROUPED; 0 elsewhere, and where that format came without one */
    bool rotated = true; /* E8: stored rotated */
    bool valid = false;  /* false after an update that failed half-way */

    uint8_t *memory = nullptr; /* the tiles, then the plane of scales where there is one */
    size_t tiles_bytes = 0, plane_bytes = 0, device_bytes = 0;
    size_t scale_bytes = 0, logical_bytes = 0; /* as uploaded: the scales; weights and scales */

    uint8_t *plane() const { return plane_bytes ? memory + tiles_bytes : nullptr; }
    coli::MatrixView view() const;
};

namespace coli {

/* All of these but tensor_alive and those after it: the caller holds the device.
 *
 * A fresh tensor with its contents; NULL, nothing kept and an error set when that fails. The caller checked format, shape
 * and pointers. */
ColiCudaTensor *tensor_create(Context &context, const void *weights, const void *scales, int format, int I, int O,
                              int group_size);
/* Waits for work that uses the tensor, then releases it, handle included. */
void tensor_release(ColiCudaTensor *tensor);
/* Releases device memory and detaches the handle from its context; the handle itself stays the caller's. */
void tensor_orphan(ColiCudaTensor &tensor);

bool tensor_write(ColiCudaTensor &tensor, const void *weights, const void *scales);
bool tensor_read(const ColiCudaTensor &tensor, void *weights, void *scales);

/* False, with an error naming `role` ("gate", "the matrix", ...), unless the tensor is there and its device configured; has
 * its contents too; can take part in a product too. */
bool tensor_alive(const ColiCudaTensor *tensor, const char *role);
bool tensor_readable(const ColiCudaTensor *tensor, const char *role);
bool tensor_usable(const ColiCudaTensor *tensor, const char *role);

/* False, with an error set, for a matrix whose size in bytes a size_t cannot hold. */
bool tensor_size_countable(int format, int I, int O, int group_size);

/* Device memory that the CUDA allocator takes for an allocation: slices of 512 bytes out of blocks of 2 MiB, whole blocks
 * above 1 MiB. */
size_t allocation_footprint(size_t bytes);

} // namespace coli

#endif
