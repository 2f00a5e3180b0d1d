/* copy_threads.h - host memory to host memory with several threads: one core cannot keep a GPU's link busy. */
#ifndef COLI_CUDA_COPY_THREADS_H
#define COLI_CUDA_COPY_THREADS_H

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace coli {

class CopyThreads;
struct CopyLane;

/* One copy of up to two blocks, cut into slices that any thread may take. */
class CopyJob {
  public:
    /* `height` rows of `width` bytes from one pitch to another. Call it before the job begins; empty blocks are left out.
     */
    void add(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height);
    /* Forgets the blocks of a finished job. */
    void clear();

    /* With `threaded`, lets the threads copy and returns; else copies. */
    void begin(bool threaded);
    /* Copies what nobody has taken yet and waits for the rest. Nothing to do for a job that did not begin. */
    void finish();

  private:
    friend class CopyThreads;
    struct Block {
        uint8_t *to;
        const uint8_t *from;
        size_t to_step, from_step; /* from one slice to the next */
        size_t slice_bytes, bytes; /* of a slice, but what remains of the block for the last */
        size_t slices;
    };
    void copy_slice(size_t index) const;

    Block blocks_[2];
    int block_count_ = 0;
    size_t slices_ = 0;
    CopyThreads *helpers_ = nullptr; /* while they may still copy */
    CopyLane *lane_ = nullptr;       /* where they find it */
    std::atomic<size_t> copied_{0};  /* slices */
};

/* Ends the threads; the next job that wants them starts new ones. No job may be under way. */
void stop_copy_threads();

} // namespace coli

#endif
