/* kernels/ring.cuh - a warp's own queue of weight tiles on their way from device memory to shared memory.
 *
 * A slot holds tiles of two strips. Warps share nothing, so none waits for another's tiles. Three ways to fill a slot: the
 * copy engine (Hopper and later), which another warp tells what to copy; asynchronous copies by the threads (Ampere and
 * later); plain loads. */
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

/* Where the slots of a ring lie. Only the copy engine uses the barriers: of each slot one for being filled, then of each
 * one for being emptied. */
struct RingMemory {
    uint8_t *slots;
    uint64_t *barriers;
    int slot_bytes, stages;
};

/* A slot of a ring that the copy engine fills, and how often the ring went round. */
class RingPosition {
  public:
    __device__ explicit RingPosition(const RingMemory &memory) : memory_(memory) {}
    __device__ __forceinline__ uint8_t *slot() const { return memory_.slots + index_ * memory_.slot_bytes; }
    __device__ __forceinline__ uint64_t *filled() const { return memory_.barriers + index_; }
    __device__ __forceinline__ uint64_t *emptied() const { return memory_.barriers + memory_.stages + index_; }
    __device__ __forceinline__ unsigned phase() const { return phase_; }
    __device__ __forceinline__ void advance() {
        if (++index_ == memory_.stages) index_ = 0, phase_ ^= 1;
    }

  private:
    RingMemory memory_;
    int index_ = 0;
    unsigned phase_ = 0;
};

/* The sum of all lanes' bytes. */
__device__ __forceinline__ int sum_of_warp(int bytes) {
    for (int distance = kWarp / 2; distance; distance /= 2) bytes += __shfl_xor_sync(kFullWarp, bytes, distance);
    return bytes;
}

/* By one thread, before anybody uses the ring; a barrier of those that do must follow. `readers` warps hand a slot back,
 * `fillers` announce what they copy to it. */
__device__ inline void init_ring(const RingMemory &memory, int readers, int fillers = 1) {
    for (int i = 0; i < memory.stages; i++) {
        barrier_init(memory.barriers + i, fillers);
        barrier_init(memory.barriers + memory.stages + i, readers);
    }
    barrier_init_fence();
}

/* The end of a ring that one lane of another warp fills. */
class RingFeeder {
  public:
    __device__ explicit RingFeeder(const RingMemory &memory) : position_(memory) {}
    /* Whether the next slot is free. */
    __device__ __forceinline__ bool ready() const { return barrier_done(position_.emptied(), position_.phase() ^ 1); }
    __device__ __forceinline__ void push(const TilePair &tiles) {
        barrier_expect(position_.filled(), 2 * tiles.bytes);
        copy_bulk(position_.slot(), tiles.first, tiles.bytes, position_.filled());
        copy_bulk(position_.slot() + tiles.bytes, tiles.second, tiles.bytes, position_.filled());
        position_.advance();
    }

  private:
    RingPosition position_;
};

/* A reading warp's end of a ring that others fill. */
class FedRing {
  public:
    __device__ FedRing(const RingMemory &memory, int lane) : position_(memory), lane_(lane) {}
    /* The oldest slot, filled. */
    __device__ __forceinline__ const uint8_t *front() const {
        barrier_wait(position_.filled(), position_.phase());
        return position_.slot();
    }
    /* The oldest slot was read and may be filled again. */
    __device__ __forceinline__ void pop() {
        __syncwarp();
        if (lane_ == 0) barrier_arrive(position_.emptied());
        position_.advance();
    }

  private:
    RingPosition position_;
    int lane_;
};

/* Rings that their own warp fills have the same front and pop, and
 *
 *     push(tiles)     fills the next slot; at most `stages` are filled and not released */

class AsyncRing {
  public:
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
