/* api/tensors.h - the upload that several entry points begin with. */
#ifndef COLI_CUDA_API_TENSORS_H
#define COLI_CUDA_API_TENSORS_H

#include "coli/coli_cuda.h"

namespace coli {

/* coli_cuda_tensor_upload_g with scales of any type. */
bool upload(ColiCudaTensor **tensor, const void *weights, const void *scales, int format, int I, int O, int device,
            int group_size);

} // namespace coli

#endif
