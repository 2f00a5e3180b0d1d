/* kernels/expert_variants.h - the compiled variants of the products, in files of their own: each takes its time. */
#ifndef COLI_CUDA_KERNELS_EXPERT_VARIANTS_H
#define COLI_CUDA_KERNELS_EXPERT_VARIANTS_H

#include "expert.h"

namespace coli {

using ProductKernel = void (*)(GroupParams, ProductPlan);

/* The kernel of a plan, for plans that are limbs_only and for all others. */
ProductKernel limbs_kernel(const ProductPlan &plan);
ProductKernel any_kernel(const ProductPlan &plan);

} // namespace coli

#endif
