#include "copy_threads.h"

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <unistd.h>

namespace coli {

namespace {

constexpr unsigned kMostThreads = 7;              /* beside the caller's */
constexpr size_t kSliceBytes = size_t{128} << 10; /* a few microseconds */

} // namespace

/* A few threads and the queue of jobs with slices that nobody has taken yet. */
class CopyThreads {
  public:
    CopyThreads() {
        /* signals of the process are the host's: its own threads take them */
        sigset_t all, previous;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &previous);
        const unsigned wanted = std::clamp(std::thread::hardware_concurrency(), 1u, kMostThreads + 1) - 1;
        try {
            for (; count_ < wanted; count_++) threads_[count_] = std::thread([this] { work(); });
        } catch (const std::system_error &) { /* fewer are enough; the caller copies too */
        }
        pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    }

    ~CopyThreads() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ending_ = true;
        }
        job_came_.notify_all();
        for (unsigned i = 0; i < count_; i++) threads_[i].join();
    }

    void queue(CopyJob &job) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job.taken_ = job.copied_ = 0;
            job.next_ = nullptr;
            CopyJob **end = &first_;
            while (*end) end = &(*end)->next_;
            *end = &job;
        }
        job_came_.notify_all();
    }

    void finish(CopyJob &job) {
        std::unique_lock<std::mutex> lock(mutex_);
        while (job.taken_ < job.slices_) copy_next_slice(job, lock);
        job_done_.wait(lock, [&] { return job.copied_ == job.slices_; });
    }

  private:
    /* The lock is open while the slice is copied. */
    void copy_next_slice(CopyJob &job, std::unique_lock<std::mutex> &lock) {
        const size_t slice = job.taken_++;
        if (job.taken_ == job.slices_) remove(job);
        lock.unlock();
        job.copy_slice(slice);
        lock.lock();
        if (++job.copied_ == job.slices_) job_done_.notify_all();
    }

    void remove(CopyJob &job) {
        CopyJob **link = &first_;
        while (*link != &job) link = &(*link)->next_;
        *link = job.next_;
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            job_came_.wait(lock, [&] { return first_ || ending_; });
            if (!first_) return;
            copy_next_slice(*first_, lock);
        }
    }

    std::mutex mutex_;
    std::condition_variable job_came_, job_done_;
    CopyJob *first_ = nullptr;
    bool ending_ = false;
    std::thread threads_[kMostThreads];
    unsigned count_ = 0;
};

namespace {

/* Never destroyed by itself: at the end of a process the threads are gone before this library's statics. */
std::mutex &threads_mutex = *new std::mutex;
CopyThreads *threads = nullptr;
pid_t threads_process = 0;

/* NULL when memory ran out. */
CopyThreads *copy_threads() {
    std::lock_guard<std::mutex> lock(threads_mutex);
    /* a fork has none of its parent's threads */
    if (threads && threads_process != getpid()) threads = nullptr;
    if (!threads) {
        threads = new (std::nothrow) CopyThreads;
        threads_process = getpid();
    }
    return threads;
}

} // namespace

void stop_copy_threads() {
    std::lock_guard<std::mutex> lock(threads_mutex);
    if (threads && threads_process == getpid()) delete threads;
    threads = nullptr;
}

void CopyJob::add(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height) {
    if (width == 0 || height == 0) return;
    Block &block = blocks_[block_count_++];
    block.to = static_cast<uint8_t *>(to);
    block.from = static_cast<const uint8_t *>(from);
    block.bytes = width * height;
    const bool dense = height == 1 || (to_pitch == width && from_pitch == width);
    block.slice_bytes = dense ? kSliceBytes : width;
    block.to_step = dense ? kSliceBytes : to_pitch;
    block.from_step = dense ? kSliceBytes : from_pitch;
    block.slices = (block.bytes + block.slice_bytes - 1) / block.slice_bytes;
    slices_ += block.slices;
}

void CopyJob::clear() {
    block_count_ = 0;
    slices_ = 0;
}

void CopyJob::copy_slice(size_t index) const {
    const Block &block = index < blocks_[0].slices ? blocks_[0] : blocks_[1];
    if (&block == &blocks_[1]) index -= blocks_[0].slices;
    const size_t bytes = std::min(block.slice_bytes, block.bytes - index * block.slice_bytes);
    memcpy(block.to + index * block.to_step, block.from + index * block.from_step, bytes);
}

void CopyJob::begin(bool threaded) {
    helpers_ = threaded && slices_ > 1 ? copy_threads() : nullptr;
    if (helpers_) return helpers_->queue(*this);
    for (size_t slice = 0; slice < slices_; slice++) copy_slice(slice);
}

void CopyJob::finish() {
    if (helpers_) helpers_->finish(*this);
    helpers_ = nullptr;
}

} // namespace coli
