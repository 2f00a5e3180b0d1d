/* The products of experts in any formats. */
#include "expert_kernels.cuh"
#include "expert_variants.h"

namespace coli {

ProductKernel any_kernel(const ProductPlan &plan) {
    const int rows = plan.pass_rows;
    switch (plan.path) {
    case Path::kHopper:
        if (rows == 16) return expert_product<HopperPath, 16, false>;
        return rows == 8 ? expert_product<HopperPath, 8, false> : expert_product<HopperPath, 4, false>;
    case Path::kAmpere:
        return rows == 8 ? expert_product<AmperePath, 8, false> : expert_product<AmperePath, 4, false>;
    default:
        return expert_product<PlainPath, 4, false>;
    }
}

} // namespace coli
