/* kernels_avx512.c - the kernels for AVX-512 (-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma). */
#define COLI_KERNELS_NAME avx512
#include "kernels_impl.h"
