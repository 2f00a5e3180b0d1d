/* context.h - what the library holds for each configured device, and the list of them. */
#ifndef COLI_CUDA_CONTEXT_H
#define COLI_CUDA_CONTEXT_H

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "error.h"
#include "plan.h"
#include "tables.h"

struct ColiCudaTensor;

namespace coli {

/* Memory that grows on demand and is kept for the next call. */
class DeviceBuffer {
  public:
    bool reserve(size_t bytes, const char *purpose);
    void release();
    template <class T> T *as() const { return static_cast<T *>(memory_); }

  private:
    void *memory_ = nullptr;
    size_t bytes_ = 0;
};

class PinnedBuffer {
  public:
    bool reserve(size_t bytes, const char *purpose);
    void release();
    float *floats() const { return static_cast<float *>(memory_); }
    uint8_t *bytes() const { return static_cast<uint8_t *>(memory_); }

  private:
    void *memory_ = nullptr;
    size_t bytes_ = 0;
};

/* Buffers of one host-pointer call in flight. Synchronous and issued calls have their own, so that neither disturbs the
 * other's rows. */
struct CallBuffers {
    PinnedBuffer host_x, host_y;
    DeviceBuffer x, y, workspace;
    void release();
};

/* What matrices travel through, a slot at a time, between host memory and their tiles. Each slot has a part on the host and
 * a part on the device. Copies run on a stream of their own, beside the kernels that pack and unpack. */
struct Staging {
    static constexpr int kSlots = 4;
    static constexpr size_t kSlotBytes = size_t{2} << 20;

    PinnedBuffer host;
    DeviceBuffer device;
    cudaStream_t stream = nullptr;
    cudaEvent_t crossed = nullptr;   /* the other stream may go on */
    cudaEvent_t passed[kSlots] = {}; /* what was in the slot has left it */

    /* Once: all of it is kept until the context closes. */
    bool reserve();
    void release();
    /* Lets one stream wait for what is on another. */
    cudaError_t cross(cudaStream_t from, cudaStream_t to) const;
    uint8_t *host_slot(int slot) const { return host.bytes() + slot * kSlotBytes; }
    uint8_t *device_slot(int slot) const { return device.as<uint8_t>() + slot * kSlotBytes; }
};

/* What E8 matrices pass through when the device encodes them, beside the staging; see encode.cpp. */
struct EncodeBuffers {
    PinnedBuffer host_blocks;
    DeviceBuffer blocks, rotated, importance;

    bool reserve(size_t block_bytes, size_t importance_bytes);
    void release();
};

struct GroupCounters {
    std::atomic<uint64_t> calls{0}, experts{0}, rows{0};
    mutable std::mutex times_mutex;
    double h2d_ms = 0, kernel_ms = 0, d2h_ms = 0;
};

struct Context {
    int device = -1;
    GpuTraits gpu{};
    std::mutex mutex; /* held by every call that uses the device */
    cudaStream_t stream = nullptr;
    DeviceTables *tables = nullptr; /* device memory */

    PlanCache plans;
    CallBuffers synchronous;
    CallBuffers issued;
    bool pending = false; /* a group was issued and not yet taken */
    cudaEvent_t issued_done = nullptr;
    Staging staging;
    EncodeBuffers encode;
    bool caller_streams = false; /* device-pointer calls ran on streams that the library cannot order */

    ColiCudaTensor *tensors = nullptr; /* all live ones, a doubly linked list */
    std::atomic<size_t> tensor_count{0}, tensor_bytes{0};
    GroupCounters *counters = nullptr; /* outlives the context: counters survive coli_cuda_shutdown */

    Context() = default;
    Context(const Context &) = delete;
    ~Context();
    bool open(int ordinal);
    /* Waits for all work that may still read a tensor of this device. */
    bool wait_for_readers();
    /* After a failure half-way: nothing of the call may still run when its memory is used again. Returns false. */
    bool abandon();
};

/* What the plans want to know of a visible device. */
cudaError_t read_traits(int device, GpuTraits *gpu);

/* Makes a device current for a scope and gives the caller's device back afterwards. */
class CurrentDevice {
  public:
    explicit CurrentDevice(int device);
    ~CurrentDevice();
    bool ok() const;

  private:
    int device_, previous_ = -1;
    cudaError_t result_ = cudaSuccess;
};

/* A call on one device: holds its lock and makes it current. Nothing of a tensor but its context is read before. */
class DeviceCall {
  public:
    explicit DeviceCall(Context &context) : lock_(context.mutex), current_(context.device) {}
    /* False, with an error set, when the device could not be made current. */
    bool ok() const { return current_.ok(); }

  private:
    std::lock_guard<std::mutex> lock_;
    CurrentDevice current_;
};

/* Configured devices in the order given to coli_cuda_init. */
const std::vector<std::unique_ptr<Context>> &contexts();
/* NULL, with an error set, when the device is not configured. */
Context *find_context(int device);

bool open_contexts(const int *devices, int count);
void close_contexts();

bool publish_codebook(const void *codebook);
bool publish_fp8_table(const float *table);
bool fp8_table_published();
/* Whether it is the published e4m3, which kernels decode without a table. */
bool fp8_table_is_e4m3();
/* Whether all bytes of the E8 codebook are 1 ... 66, which the fast kernels need. */
bool codebook_is_small();

/* By ordinal, of every device that was ever configured. */
const std::map<int, GroupCounters> &group_counters();

} // namespace coli

#endif
