/* placed.h - what the MoE layer asks of placed matrices. */
#ifndef COLI_CORE_PLACED_H
#define COLI_CORE_PLACED_H

#include "backend.h"

/* NULL on the CPU. */
ColiCudaTensor *coli_placed_tensor(const coli_placed *placed);

/* Why no GPU of this library takes such a matrix: its format, or a codebook of its own. NULL where it is worth a try. */
const char *coli_placed_why_never(const coli_backend *backend, const coli_matrix *matrix);

#endif
