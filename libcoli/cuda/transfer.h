/* transfer.h - matrices between host memory and their tiles: copies in chunks, packed or unpacked on the device. */
#ifndef COLI_CUDA_TRANSFER_H
#define COLI_CUDA_TRANSFER_H

#include "tensor.h"

namespace coli {

/* Both need the context's staging reserved, and leave work of the device behind, also on failure: the caller waits for the
 * context's stream, or abandons. The caller's memory is free for reuse then. A plane of scales behind the tiles is not
 * theirs; without one, a download may do without `scales`. The caller holds the device. */
bool upload_tiles(const ColiCudaTensor &tensor, const void *weights, const void *scales);
bool download_tiles(const ColiCudaTensor &tensor, void *weights, void *scales);

} // namespace coli

#endif
