/* kernels/wgmma_unit.cuh - Hopper's matrix unit as multiply_tile (tile_product.cuh) takes it. */
#ifndef COLI_CUDA_KERNELS_WGMMA_UNIT_CUH
#define COLI_CUDA_KERNELS_WGMMA_UNIT_CUH

#include "../ptx/wgmma.cuh"

namespace coli {

/* N columns in blocks of 64 values each, a block N rows of ptx/wgmma.cuh; of GROUP_STEPS steps the products are under way
 * together. */
template <int N, int GROUP_STEPS = 4, int BUFFERS = 2> class WgmmaUnit {
  public:
    static constexpr int kMaxGroupSteps = GROUP_STEPS, kBuffers = BUFFERS;
    __device__ __forceinline__ WgmmaUnit(const uint8_t *columns, int) : columns_(wgmma_operand(columns)) {}
    __device__ __forceinline__ void begin() const { wgmma_fence(); }
    /* chunk += or = a times columns 16 step ... of each of the N columns. */
    __device__ __forceinline__ void multiply(float (&chunk)[N / 8][4], const uint32_t (&a)[4], int step, bool add) const {
        wgmma(chunk, a, columns_ + (step / 4 * N * kWgmmaRowBytes + step % 4 * 32) / 16, add);
    }
    __device__ __forceinline__ void next() const {}
    __device__ __forceinline__ void end() const { wgmma_commit(); }
    template <int GROUPS> __device__ __forceinline__ void wait() const { wgmma_wait<GROUPS>(); }
    __device__ __forceinline__ void settle(float (&chunk)[N / 8][4]) const { wgmma_settle(chunk); }

  private:
    uint64_t columns_;
};

} // namespace coli

#endif
