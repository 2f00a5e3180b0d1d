/* kernels/ring.cuh - a warp's own queue of weight tiles on their way from device memory to shared memory.
 *
 * A slot holds one tile of each of two strips. Warps share nothing, so none waits for another's tiles. Three ways to fill a
 * slot: the copy engine (Hopper and later), asynchronous copies by the threads (Ampere and later), plain loads. */
#ifndef COLI_CUDA_KERNELS_RING_CUH
#define COLI_CUDA_KERNELS_RING_CUH

#include "../ptx/copy.cuh"
#include "tiles.cuh"

namespace coli {

/* Tiles to copy: `bytes` from each of two places. */
struct TilePair {
    const uint8_t *first, *second;
    int bytes;
};

/* Where a warp's slots lie; `barriers` has one for each slot, and only the copy engine uses it. */
struct RingMemory {
    uint8_t *slots;
    uint64_t *barriers;
    int slot_bytes, stages;
};

class BulkRing {
  public:
    static constexpr bool kOneLane = true; /* push is lane 0's alone */

    __device__ BulkRing(const RingMemory &memory, int lane) : memory_(memory) {
        if (lane == 0) {
            for (int i = 0; i < memory.stages; i++) barrier_init(memory.barriers + i, 1);
            barrier_init_fence();
        } /* a barrier of the block follows before others wait on them */
    }
    /* Fills the next slot; at most `stages` are filled and not released. */
    __device__ __forceinline__ void push(const TilePair &tiles) {
        uint8_t *slot = memory_.slots + head_ * memory_.slot_bytes;
        uint64_t *barrier = memory_.barriers + head_;
        barrier_expect(barrier, 2 * tiles.bytes);
        copy_bulk(slot, tiles.first, tiles.bytes, barrier);
        copy_bulk(slot + tiles.bytes, tiles.second, tiles.bytes, barrier);
        head_ = head_ + 1 == memory_.stages ? 0 : head_ + 1;
    }
    /* The oldest slot, filled. */
    __device__ __forceinline__ const uint8_t *front() {
        barrier_wait(memory_.barriers + tail_, phase_);
        return memory_.slots + tail_ * memory_.slot_bytes;
    }
    /* The oldest slot was read and may be filled again. */
    __device__ __forceinline__ void pop() {
        __syncwarp();
        if (++tail_ == memory_.stages) tail_ = 0, phase_ ^= 1;
    }

  private:
    RingMemory memory_;
    int head_ = 0, tail_ = 0;
    unsigned phase_ = 0;
};

class AsyncRing {
  public:
    static constexpr bool kOneLane = false;

    __device__ AsyncRing(const RingMemory &memory, int lane) : memory_(memory), lane_(lane) {}
    __device__ __forceinline__ void push(const TilePair &tiles) {
        uint8_t *slot = memory_.slots + head_ * memory_.slot_bytes;
        for (int i = 16 * lane_; i < tiles.bytes; i += 16 * kWarp) {
            copy_async_16(slot + i, tiles.first + i);
            copy_async_16(slot + tiles.bytes + i, tiles.second + i);
        }
        copy_async_commit();
        head_ = head_ + 1 == memory_.stages ? 0 : head_ + 1;
        pending_++;
    }
    __device__ __forceinline__ const uint8_t *front() {
        if (pending_ > 2)
            copy_async_wait<2>();
        else if (pending_ == 2)
            copy_async_wait<1>();
        else
            copy_async_wait<0>();
        __syncwarp();
        return memory_.slots + tail_ * memory_.slot_bytes;
    }
    __device__ __forceinline__ void pop() {
        tail_ = tail_ + 1 == memory_.stages ? 0 : tail_ + 1;
        pending_--;
    }

  private:
    RingMemory memory_;
    int lane_, head_ = 0, tail_ = 0, pending_ = 0;
};

class PlainRing {
  public:
    static constexpr bool kOneLane = false;

    __device__ PlainRing(const RingMemory &memory, int lane) : memory_(memory), lane_(lane) {}
    __device__ __forceinline__ void push(const TilePair &tiles) {
        uint8_t *slot = memory_.slots + head_ * memory_.slot_bytes;
        for (int i = 16 * lane_; i < tiles.bytes; i += 16 * kWarp) {
            *reinterpret_cast<uint4 *>(slot + i) = *reinterpret_cast<const uint4 *>(tiles.first + i);
            *reinterpret_cast<uint4 *>(slot + tiles.bytes + i) = *reinterpret_cast<const uint4 *>(tiles.second + i);
        }
        head_ = head_ + 1 == memory_.stages ? 0 : head_ + 1;
    }
    __device__ __forceinline__ const uint8_t *front() { return memory_.slots + tail_ * memory_.slot_bytes; }
    __device__ __forceinline__ void pop() { tail_ = tail_ + 1 == memory_.stages ? 0 : tail_ + 1; }

  private:
    RingMemory memory_;
    int lane_, head_ = 0, tail_ = 0;
};

} // namespace coli

#endif
