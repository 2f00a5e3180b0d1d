#include "copy_threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(_WIN32)
#include <process.h>
#else
#include <csignal>
#include <unistd.h>
#endif

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace coli {

namespace {

constexpr unsigned kMostThreads = 7;             /* beside the caller's */
constexpr size_t kLanes = 16;                    /* jobs at a time */
constexpr size_t kSliceBytes = size_t{32} << 10; /* a few microseconds; all threads together have a first chunk soon */
/* To wake a thread up takes longer than to copy a matrix, so it stays awake for a while for the next one. */
constexpr std::chrono::microseconds kAwake{200};

#if defined(_WIN32)
int this_process() {
    return _getpid();
}

class SignalsBlocked {}; /* there are none */
#else
pid_t this_process() {
    return getpid();
}

/* Threads that begin meanwhile take no signals of the process: those are the host's, for its own threads. */
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &previous_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }

  private:
    sigset_t previous_;
};
#endif

/* Between looks at what another thread will change soon; the other may be waiting for this very core. */
class Pause {
  public:
    void operator()() {
        if (++looks_ % 64 == 0) std::this_thread::yield();
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
    }

  private:
    unsigned looks_ = 0;
};

/* A matrix is read by the device, or later: streaming stores fetch no line of the target and leave the caches alone. */
void copy_streaming(uint8_t *to, const uint8_t *from, size_t bytes) {
#if defined(__SSE2__)
    constexpr size_t kLine = 64, kAhead = 2048; /* which crosses pages, as the prefetchers of processors do not */
    const size_t head = std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
    memcpy(to, from, head);
    size_t i = head;
    for (; i + kLine <= bytes; i += kLine) {
        _mm_prefetch(reinterpret_cast<const char *>(from + i + kAhead), _MM_HINT_T0);
        const __m128i *line = reinterpret_cast<const __m128i *>(from + i);
        __m128i *target = reinterpret_cast<__m128i *>(to + i);
        const __m128i quarters[4] = {_mm_loadu_si128(line), _mm_loadu_si128(line + 1), _mm_loadu_si128(line + 2),
                                     _mm_loadu_si128(line + 3)};
        for (int k = 0; k < 4; k++) _mm_stream_si128(target + k, quarters[k]);
    }
    memcpy(to + i, from + i, bytes - i);
    _mm_sfence(); /* before anybody is told that the slice is there */
#else
    memcpy(to, from, bytes);
#endif
}

} // namespace

/* Where threads find a job, and which of its slices are to be taken, the last one first. */
struct alignas(64) CopyLane {
    std::atomic<CopyJob *> job{nullptr}; /* NULL: the lane is free */
    std::atomic<uint64_t> ticket{0};     /* slices left, and above bit 32 the number of jobs before */

    void open(size_t slices) { ticket = ((ticket >> 32) + 1) << 32 | slices; }
    uint32_t left() const { return static_cast<uint32_t>(ticket.load()); }
    /* From 0 on; false when none is left. */
    bool take(size_t *slice) {
        uint64_t seen = ticket;
        do {
            if (static_cast<uint32_t>(seen) == 0) return false;
        } while (!ticket.compare_exchange_weak(seen, seen - 1));
        *slice = static_cast<uint32_t>(seen) - 1;
        return true;
    }
};

/* A few threads, and the lanes where they find jobs. */
class CopyThreads {
  public:
    CopyThreads() {
        [[maybe_unused]] SignalsBlocked blocked;
        const unsigned wanted = std::clamp(std::thread::hardware_concurrency(), 1u, kMostThreads + 1) - 1;
        try {
            for (; count_ < wanted; count_++) threads_[count_] = std::thread([this] { work(); });
        } catch (const std::system_error &) { /* fewer are enough; the caller copies too */
        }
    }

    ~CopyThreads() {
        {
            std::lock_guard<std::mutex> lock(sleep_mutex_);
            ending_ = true;
        }
        job_came_.notify_all();
        for (unsigned i = 0; i < count_; i++) threads_[i].join();
    }

    /* False when all lanes are in use. */
    bool queue(CopyJob &job) {
        for (size_t tries = 0; tries < kLanes; tries++) {
            CopyLane &lane = lanes_[next_lane_++ % kLanes];
            CopyJob *none = nullptr;
            if (!lane.job.compare_exchange_strong(none, &job)) continue;
            job.copied_ = 0;
            job.lane_ = &lane;
            lane.open(job.slices_);
            wake_one();
            return true;
        }
        return false;
    }

    void finish(CopyJob &job) {
        CopyLane &lane = *job.lane_;
        while (copy_slice_of(lane)) continue;
        for (Pause pause; job.copied_.load(std::memory_order_acquire) < job.slices_;) pause();
        lane.job = nullptr;
    }

  private:
    bool copy_slice_of(CopyLane &lane) {
        size_t slice;
        if (!lane.take(&slice)) return false;
        CopyJob &job = *lane.job; /* stays, as it is not finished without this slice */
        job.copy_slice(slice);
        job.copied_.fetch_add(1, std::memory_order_release); /* its owner may forget the job from here on */
        return true;
    }

    /* Jobs come to the lanes in turn, so the oldest is found first by who goes on where it was; kLanes when there is none.
     */
    size_t find_work(size_t from) const {
        for (size_t i = from; i < from + kLanes; i++) {
            if (lanes_[i % kLanes].left() > 0) return i % kLanes;
        }
        return kLanes;
    }

    void work() {
        for (size_t at = 0; !ending_;) {
            size_t lane = find_work(at);
            const auto end = std::chrono::steady_clock::now() + kAwake;
            for (Pause pause; lane == kLanes && !ending_ && std::chrono::steady_clock::now() < end; lane = find_work(at))
                pause();
            if (lane == kLanes) {
                sleep();
                continue;
            }
            at = lane;
            while (copy_slice_of(lanes_[at])) continue;
        }
    }

    void sleep() {
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        sleepers_++; /* before the look for work, as wake_one looks for sleepers after the job came */
        job_came_.wait(lock, [&] { return find_work(0) < kLanes || ending_; });
        sleepers_--;
        lock.unlock();
        wake_one(); /* each wakes the next, so that the caller need not wake all of them */
    }

    void wake_one() {
        if (sleepers_ == 0) return;
        {
            std::lock_guard<std::mutex> lock(sleep_mutex_);
        } /* who saw no job waits by now */
        job_came_.notify_one();
    }

    CopyLane lanes_[kLanes];
    std::atomic<size_t> next_lane_{0};

    std::mutex sleep_mutex_;
    std::condition_variable job_came_;
    std::atomic<int> sleepers_{0};
    std::atomic<bool> ending_{false};

    std::thread threads_[kMostThreads];
    unsigned count_ = 0;
};

namespace {

/* Never destroyed by itself: at the end of a process the threads are gone before this library's statics. */
std::mutex &threads_mutex = *new std::mutex;
CopyThreads *threads = nullptr;
decltype(this_process()) threads_process = 0;

/* NULL when memory ran out. */
CopyThreads *copy_threads() {
    std::lock_guard<std::mutex> lock(threads_mutex);
    /* a fork has none of its parent's threads */
    if (threads && threads_process != this_process()) threads = nullptr;
    if (!threads) {
        threads = new (std::nothrow) CopyThreads;
        threads_process = this_process();
    }
    return threads;
}

} // namespace

void stop_copy_threads() {
    std::lock_guard<std::mutex> lock(threads_mutex);
    if (threads && threads_process == this_process()) delete threads;
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
    copy_streaming(block.to + index * block.to_step, block.from + index * block.from_step, bytes);
}

void CopyJob::begin(bool threaded) {
    helpers_ = threaded && slices_ > 1 ? copy_threads() : nullptr;
    if (helpers_ && helpers_->queue(*this)) return;
    helpers_ = nullptr;
    for (size_t slice = 0; slice < slices_; slice++) copy_slice(slice);
}

void CopyJob::finish() {
    if (helpers_) helpers_->finish(*this);
    helpers_ = nullptr;
}

} // namespace coli
