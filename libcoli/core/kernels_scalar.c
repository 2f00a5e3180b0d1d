/* kernels_scalar.c - the kernels for any processor. */
#define COLI_KERNELS_NAME scalar
#include "kernels_impl.h"
