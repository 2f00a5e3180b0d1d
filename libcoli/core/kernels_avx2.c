/* kernels_avx2.c - the kernels for AVX2 and FMA (-mavx2 -mfma). */
#define COLI_KERNELS_NAME avx2
#include "kernels_impl.h"
