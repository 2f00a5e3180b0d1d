/* placed.h - what the MoE layer asks of placed matrices. */
#ifndef COLI_CORE_PLACED_H
#define COLI_CORE_PLACED_H

#include "backend.h"

/* NULL on the CPU. */
ColiCudaTensor *coli_placed_tensor(const coli_placed *placed);

#endif
