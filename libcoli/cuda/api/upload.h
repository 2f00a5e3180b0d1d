/* api/upload.h - the upload that several entry points begin with. */
#ifndef COLI_CUDA_API_UPLOAD_H
#define COLI_CUDA_API_UPLOAD_H

#include "../tensor.h"

namespace coli {

/* coli_cuda_tensor_upload_g with scales of any type, on a device that the caller holds. */
bool upload(Context &context, ColiCudaTensor **tensor, const void *weights, const void *scales, int format, int I, int O,
            int group_size);

} // namespace coli

#endif
