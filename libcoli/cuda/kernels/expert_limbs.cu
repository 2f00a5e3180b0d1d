/* The products of experts whose matrices are all multiplied as bytes. */
#include "expert_kernels.cuh"
#include "expert_variants.h"

namespace coli {

namespace {

template <class Path> ProductKernel kernel_of(int pass_rows) {
    switch (pass_rows) {
    case 1:
        return expert_product<Path, 1, true>;
    case 2:
        return expert_product<Path, 2, true>;
    case 4:
        return expert_product<Path, 4, true>;
    case 8:
        return expert_product<Path, 8, true>;
    default:
        return expert_product<Path, 16, true>;
    }
}

} // namespace

ProductKernel limbs_kernel(const ProductPlan &plan) {
    return plan.path == Path::kHopper ? kernel_of<HopperPath>(plan.pass_rows) : kernel_of<AmperePath>(plan.pass_rows);
}

} // namespace coli
