#include "expert.h"

#include "../ptx/dependent.cuh"
#include "expert_variants.h"
#include "launch.h"
#include "rotate.cuh"

namespace coli {

namespace {

__global__ void __launch_bounds__(kRotationThreads) expert_rotate(const __grid_constant__ GroupParams p) {
    __shared__ float buffer[kRotationPiece];
    dependency_trigger();
    const ExpertEntry &expert = p.experts[blockIdx.z];
    if (!expert.rotate_hidden) return;
    const RotationPiece piece = rotation_piece(p.H, blockIdx.x);
    dependency_wait();
    for (int r = blockIdx.y; r < expert.rows; r += gridDim.y) {
        const size_t start = (static_cast<size_t>(expert.first_row) + r) * p.H;
        rotate_piece(p.hidden + start, p.rotated + start, piece, false, p.tables->signs, buffer);
        __syncthreads(); /* the buffer was read */
    }
}

ProductKernel kernel_of(const ProductPlan &plan) {
    return plan.limbs_only ? limbs_kernel(plan) : any_kernel(plan);
}

} // namespace

cudaError_t launch_expert_product(const GroupParams &params, const ProductPlan &plan, cudaStream_t stream) {
    if (plan.warps == 0) return cudaErrorNotSupported;
    return launch(kernel_of(plan), dim3(plan.blocks, params.count), plan.threads, plan.shared_bytes,
                  plan.path == Path::kHopper, stream, params, plan);
}

cudaError_t launch_expert_group(const GroupParams &params, const GroupPlan &plan, cudaStream_t stream) {
    cudaError_t result = launch_expert_product(params, plan.hidden, stream);
    if (result == cudaSuccess && plan.rotation.rows > 0)
        result = launch(expert_rotate, dim3(plan.rotation.pieces, plan.rotation.rows, params.count), kRotationThreads, 0,
                        plan.down.path == Path::kHopper, stream, params);
    if (result == cudaSuccess) result = launch_expert_product(params, plan.down, stream);
    return result;
}

cudaError_t prepare_expert_kernels(const GpuTraits &gpu) {
    for (const ProductPlan &plan : all_variants(gpu)) {
        const void *kernel = reinterpret_cast<const void *>(kernel_of(plan));
        const cudaError_t result =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, gpu.shared_bytes);
        if (result != cudaSuccess) return result;
    }
    return cudaSuccess;
}

} // namespace coli
