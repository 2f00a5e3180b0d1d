/* kernels/layout.h - E8 blocks to planes and back; see ../layout.h. */
#ifndef COLI_CUDA_KERNELS_LAYOUT_H
#define COLI_CUDA_KERNELS_LAYOUT_H

#include "../gpu.h"
#include "../layout.h"

namespace coli {

/* Rows first ... first + rows - 1 of a matrix [O, I]: `blocks` holds those rows alone, `planes` the whole matrix. */
cudaError_t launch_pack_e8(const uint8_t *blocks, uint8_t *planes, int O, int I, int first, int rows, cudaStream_t stream);
cudaError_t launch_unpack_e8(const uint8_t *planes, uint8_t *blocks, int O, int I, int first, int rows,
                             cudaStream_t stream);

} // namespace coli

#endif
