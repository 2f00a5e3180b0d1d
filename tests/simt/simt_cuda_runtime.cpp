/* simt_cuda_runtime.cpp - the model of devices, memory, streams, events and graphs behind simt_cuda_runtime.h.
 *
 * One lock serialises everything, kernels included. Each operation that is put on a stream gets the next number of one
 * count, so that "all work queued before this" is a comparison, on whichever stream it lies. */
#include "simt_cuda_runtime.h"

#include "simt_execution.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace {

constexpr int MAX_DEVICES = 16;
constexpr size_t SHARED_BYTES = 48 << 10, RESERVED_SHARED_BYTES = 1 << 10;

/* One recording of an event. It stays as it is when the event is recorded again. */
struct Mark {
    cudaStream_t stream; /* valid until done */
    uint64_t number;
    bool done = false;
    std::chrono::steady_clock::time_point time;
    std::shared_ptr<CUgraph_st> captured; /* not null: recorded into this graph, so that it never completes */
};

struct Operation {
    uint64_t number;
    std::function<void()> run;
    std::shared_ptr<Mark> after; /* may be null */
};

} // namespace

struct CUstream_st {
    int device;
    bool legacy, blocking;
    std::deque<Operation> queue;
    std::shared_ptr<CUgraph_st> capture; /* what it is being captured into, or null */
};

struct CUevent_st {
    int device;
    bool timed;
    std::shared_ptr<Mark> mark; /* null until recorded */
};

/* The order in which operations were captured is one of the orders that their dependencies allow. */
struct CUgraph_st {
    int device;
    std::vector<std::function<void()>> operations;
    cudaStream_t origin;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    std::set<cudaStream_t> unjoined;
    bool invalidated = false;
};

struct CUgraphExec_st {
    int device;
    std::vector<std::function<void()>> operations;
};

namespace {

struct Allocation {
    size_t bytes;
    bool pinned;
    int device;
};

/* A __constant__ or __device__ variable. The variable itself holds the value of one device, `image` those of the others. */
struct Symbol {
    size_t bytes;
    int resident;
    std::vector<std::vector<char>> images;
};

struct CallCount {
    size_t calls = 0, fail_at = 0;
    bool for_good = false; /* and all later ones */
};

struct Runtime {
    std::mutex lock;
    uint64_t operations = 0;
    std::map<uintptr_t, Allocation> allocations; /* by address */
    std::map<void *, Symbol> symbols;
    std::map<const void *, int> dynamic_shared_limits; /* by kernel */
    CUstream_st legacy[MAX_DEVICES];
    std::set<cudaStream_t> streams;
    std::set<cudaEvent_t> events;
    std::map<cudaGraph_t, std::shared_ptr<CUgraph_st>> graphs;
    std::set<cudaGraphExec_t> executables;
    std::map<std::string, CallCount> calls;

    Runtime() {
        for (int d = 0; d < MAX_DEVICES; d++) legacy[d] = {d, true, true, {}, nullptr};
        const char *orders = getenv("SIMT_FAIL");
        while (orders && *orders) {
            size_t length = strcspn(orders, ",");
            std::string order(orders, length);
            size_t colon = order.find(':');
            if (colon != std::string::npos)
                calls[order.substr(0, colon)].fail_at = strtoull(&order[colon + 1], nullptr, 10);
            orders += length + (orders[length] == ',');
        }
    }
};

/* Never destroyed: other static objects may free memory after it would be. */
Runtime &runtime() {
    static Runtime *instance = new Runtime;
    return *instance;
}

thread_local int current_device;
thread_local cudaError_t last_error;

size_t from_environment(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}
/* As CUDA writes versions, and as HIP does. */
constexpr int RUNTIME_VERSION = SIMT_WAVE == 64 ? 50221153 : CUDART_VERSION;
int driver_version() {
    return (int)from_environment("SIMT_DRIVER", RUNTIME_VERSION);
}
int device_count() {
    if (from_environment("SIMT_NO_DEVICE", 0)) return 0;
    return (int)std::min<size_t>(from_environment("SIMT_DEVICES", 2), MAX_DEVICES);
}
size_t device_bytes() {
    return from_environment("SIMT_DEVICE_MB", 4096) << 20;
}
int capability() {
    if (SIMT_WAVE == 64) return 0;
    return (int)from_environment("SIMT_CAPABILITY", 90);
}
/* Of a multiprocessor. One block gets all but what is reserved. */
size_t shared_bytes() {
    switch (capability()) {
    case 80:
    case 87:
        return 164 << 10;
    case 86:
    case 89:
    case 120:
    case 121:
        return 100 << 10;
    default:
        return 228 << 10;
    }
}
size_t shared_bytes_optin() {
    if (SIMT_WAVE == 64) return 64 << 10;
    return shared_bytes() - RESERVED_SHARED_BYTES;
}
bool eager() {
    const char *text = getenv("SIMT_STREAMS");
    return text && strcmp(text, "eager") == 0;
}

/* Calls: counted, failed on demand, errors remembered. */

bool count_and_fail(const char *name) {
    bool failed = false;
    for (const char *counted : {name, "*"}) {
        CallCount &count = runtime().calls[counted];
        count.calls++;
        if (!count.fail_at || count.calls < count.fail_at) continue;
        if (!count.for_good) count.fail_at = 0;
        failed = true;
    }
    return failed;
}

cudaError_t injected_error(const char *name) {
    if (strstr(name, "Malloc") || strstr(name, "HostAlloc")) return cudaErrorMemoryAllocation;
    if (strcmp(name, "launch") == 0) return cudaErrorLaunchOutOfResources;
    if (strstr(name, "Synchronize")) return cudaErrorLaunchFailure;
    return cudaErrorUnknown;
}

cudaError_t remember(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

template <class Body> cudaError_t call(const char *name, Body body) {
    std::lock_guard<std::mutex> guard(runtime().lock);
    if (count_and_fail(name)) return remember(injected_error(name));
    if (device_count() == 0) return remember(cudaErrorNoDevice);
    return remember(body());
}

/* Memory. */

/* Lets code touch an allocation while it lives: under AddressSanitizer, device memory is out of bounds at other times. */
void allow_access([[maybe_unused]] uintptr_t address, [[maybe_unused]] const Allocation &allocation,
                  [[maybe_unused]] bool allowed) {
#if defined(__SANITIZE_ADDRESS__)
    if (allocation.pinned) return;
    if (allowed)
        __asan_unpoison_memory_region((void *)address, allocation.bytes);
    else
        __asan_poison_memory_region((void *)address, allocation.bytes);
#endif
}

class DeviceAccess {
  public:
    explicit DeviceAccess(int device) : device_(device) { set(true); }
    ~DeviceAccess() { set(false); }
    DeviceAccess(const DeviceAccess &) = delete;
    DeviceAccess &operator=(const DeviceAccess &) = delete;

  private:
    void set(bool allowed) {
        for (auto &[address, allocation] : runtime().allocations) {
            if (allocation.device == device_) allow_access(address, allocation, allowed);
        }
    }
    int device_;
};

/* The allocation that holds `pointer`, or ends there, as an entry of the table; null if there is none. */
const std::pair<const uintptr_t, Allocation> *find_allocation(const void *pointer) {
    auto &allocations = runtime().allocations;
    auto next = allocations.upper_bound((uintptr_t)pointer);
    if (next == allocations.begin()) return nullptr;
    auto &entry = *std::prev(next);
    return (uintptr_t)pointer - entry.first <= entry.second.bytes ? &entry : nullptr;
}

/* What a copy or a memset sees at one of its ends. */
enum class Place { pageable, pinned, device, wrong };
Place place_of(const void *pointer, size_t bytes, int device) {
    auto entry = find_allocation(pointer);
    if (!entry || (uintptr_t)pointer == entry->first + entry->second.bytes) return Place::pageable;
    if ((uintptr_t)pointer + bytes > entry->first + entry->second.bytes) return Place::wrong;
    if (entry->second.pinned) return Place::pinned;
    return entry->second.device == device ? Place::device : Place::wrong;
}

size_t live_bytes(int device) {
    size_t sum = 0;
    for (auto &[address, allocation] : runtime().allocations) {
        if (!allocation.pinned && allocation.device == device) sum += allocation.bytes;
    }
    return sum;
}

cudaError_t allocate(void **memory, size_t bytes, bool pinned) {
    if (!memory) return cudaErrorInvalidValue;
    *memory = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (!pinned && bytes > device_bytes() - std::min(device_bytes(), live_bytes(current_device))) {
        return cudaErrorMemoryAllocation;
    }
    if (posix_memalign(memory, 256, bytes) != 0) return cudaErrorMemoryAllocation;
    memset(*memory, 0xff, bytes);
    Allocation allocation = {bytes, pinned, current_device};
    runtime().allocations[(uintptr_t)*memory] = allocation;
    allow_access((uintptr_t)*memory, allocation, false);
    return cudaSuccess;
}

/* Streams. */

cudaStream_t find_stream(cudaStream_t handle) {
    if (!handle || handle == cudaStreamLegacy) return &runtime().legacy[current_device];
    return runtime().streams.count(handle) ? handle : nullptr;
}

void run_until(CUstream_st &stream, uint64_t number);

/* Runs what the operation waits for: its event, and - between the legacy stream and blocking ones - all work before it. */
void satisfy(CUstream_st &stream, uint64_t number, const std::shared_ptr<Mark> &after) {
    if (after && !after->done) run_until(*after->stream, after->number);
    if (stream.legacy) {
        for (cudaStream_t other : runtime().streams) {
            if (other->blocking && other->device == stream.device) run_until(*other, number);
        }
    } else if (stream.blocking) {
        run_until(runtime().legacy[stream.device], number);
    }
}

/* Runs the operations of the stream up to `number`, with all that they wait for. Whatever they wait for has a smaller
 * number, so this comes to an end. */
void run_until(CUstream_st &stream, uint64_t number) {
    while (!stream.queue.empty() && stream.queue.front().number <= number) {
        satisfy(stream, stream.queue.front().number, stream.queue.front().after);
        Operation operation = std::move(stream.queue.front());
        stream.queue.pop_front();
        operation.run();
    }
}

void run_all(CUstream_st &stream) {
    run_until(stream, UINT64_MAX);
}

void run_device(int device) {
    run_all(runtime().legacy[device]);
    for (cudaStream_t stream : runtime().streams) {
        if (stream->device == device) run_all(*stream);
    }
}

void invalidate_captures(int device) {
    for (cudaStream_t stream : runtime().streams) {
        if (stream->device == device && stream->capture) stream->capture->invalidated = true;
    }
}

/* Whether a capture forbids the calling thread what would wait for the device or allocate. The capture is lost then. */
bool capture_forbids_waiting() {
    for (cudaStream_t stream : runtime().streams) {
        if (!stream->capture) continue;
        const CUgraph_st &graph = *stream->capture;
        bool same_thread = graph.thread == std::this_thread::get_id();
        if (graph.mode == cudaStreamCaptureModeRelaxed) continue;
        if (graph.mode == cudaStreamCaptureModeThreadLocal && !same_thread) continue;
        invalidate_captures(graph.device);
        return true;
    }
    return false;
}

/* The legacy stream would have to wait for a blocking stream that is being captured. */
bool capture_forbids_legacy(const CUstream_st &stream) {
    if (!stream.legacy) return false;
    for (cudaStream_t other : runtime().streams) {
        if (!other->capture || !other->blocking || other->device != stream.device) continue;
        invalidate_captures(stream.device);
        return true;
    }
    return false;
}

/* Puts an operation on the stream, or into the graph that the stream is captured into. */
cudaError_t enqueue(CUstream_st &stream, std::function<void()> run, std::shared_ptr<Mark> after = nullptr) {
    if (stream.capture) {
        if (stream.capture->invalidated) return cudaErrorStreamCaptureInvalidated;
        stream.capture->operations.push_back(std::move(run));
        if (stream.capture->origin != &stream) stream.capture->unjoined.insert(&stream);
        return cudaSuccess;
    }
    if (capture_forbids_legacy(stream)) return cudaErrorStreamCaptureImplicit;
    stream.queue.push_back({++runtime().operations, std::move(run), std::move(after)});
    if (eager()) run_all(stream);
    return cudaSuccess;
}

/* For a query that found work: runs the first operation of the stream, so that polling makes progress. */
cudaError_t not_ready(CUstream_st &stream) {
    run_until(stream, stream.queue.front().number);
    return cudaErrorNotReady;
}

/* Copies. */

struct Copy {
    char *to;
    size_t to_pitch;
    const char *from;
    size_t from_pitch, width, height;

    size_t to_bytes() const { return to_pitch * (height - 1) + width; }
    size_t from_bytes() const { return from_pitch * (height - 1) + width; }

    void run() const {
        auto access = [](const void *pointer, bool allowed) {
            auto entry = find_allocation(pointer);
            if (entry) allow_access(entry->first, entry->second, allowed);
        };
        access(to, true);
        access(from, true);
        for (size_t row = 0; row < height; row++) memmove(to + row * to_pitch, from + row * from_pitch, width);
        access(to, false);
        access(from, false);
    }
};

cudaError_t enqueue_copy(CUstream_st &stream, const Copy &copy, cudaMemcpyKind kind, bool wait) {
    if (wait && capture_forbids_waiting()) return cudaErrorStreamCaptureUnsupported;
    if (copy.width == 0 || copy.height == 0) return cudaSuccess;
    if (!copy.to || !copy.from) return cudaErrorInvalidValue;
    if (copy.to_pitch < copy.width || copy.from_pitch < copy.width) return cudaErrorInvalidPitchValue;
    Place to = place_of(copy.to, copy.to_bytes(), stream.device),
          from = place_of(copy.from, copy.from_bytes(), stream.device);
    if (to == Place::wrong || from == Place::wrong) return cudaErrorInvalidValue;
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
    if (kind != cudaMemcpyDefault) {
        bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
        bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
        if (to_device != (to == Place::device) || from_device != (from == Place::device)) return cudaErrorInvalidValue;
    }
    Copy queued = copy;
    std::shared_ptr<std::vector<char>> snapshot;
    if (from == Place::pageable && !stream.capture) {
        snapshot = std::make_shared<std::vector<char>>(copy.width * copy.height);
        queued.from = snapshot->data();
        queued.from_pitch = copy.width;
        Copy{snapshot->data(), copy.width, copy.from, copy.from_pitch, copy.width, copy.height}.run();
    }
    cudaError_t error = enqueue(stream, [queued, snapshot] { queued.run(); });
    if (error == cudaSuccess && !stream.capture && (wait || to == Place::pageable)) run_all(stream);
    return error;
}

cudaError_t copy_on_stream(const char *name, const Copy &copy, cudaMemcpyKind kind, cudaStream_t handle, bool wait) {
    return call(name, [&]() -> cudaError_t {
        cudaStream_t stream = find_stream(handle);
        return stream ? enqueue_copy(*stream, copy, kind, wait) : cudaErrorInvalidResourceHandle;
    });
}

cudaError_t set_on_stream(const char *name, void *memory, int value, size_t bytes, cudaStream_t handle) {
    return call(name, [&]() -> cudaError_t {
        cudaStream_t stream = find_stream(handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (bytes == 0) return cudaSuccess;
        Place place = place_of(memory, bytes, stream->device);
        if (place != Place::device && place != Place::pinned) return cudaErrorInvalidValue;
        int device = stream->device;
        return enqueue(*stream, [=] {
            DeviceAccess access(device);
            memset(memory, value, bytes);
        });
    });
}

/* Symbols. */

Symbol &symbol_at(void *address, size_t bytes) {
    auto [entry, added] = runtime().symbols.try_emplace(address);
    if (added) {
        std::vector<char> initial((char *)address, (char *)address + bytes);
        entry->second = {bytes, 0, std::vector<std::vector<char>>(MAX_DEVICES, initial)};
    }
    return entry->second;
}

void make_resident(void *address, Symbol &symbol, int device) {
    if (symbol.resident == device) return;
    memcpy(symbol.images[symbol.resident].data(), address, symbol.bytes);
    memcpy(address, symbol.images[device].data(), symbol.bytes);
    symbol.resident = device;
}

/* Kernels. */

size_t dynamic_shared_limit(const void *function) {
    auto limit = runtime().dynamic_shared_limits.find(function);
    return limit == runtime().dynamic_shared_limits.end() ? SHARED_BYTES : std::max((size_t)limit->second, SHARED_BYTES);
}

cudaError_t check_launch(const simt::LaunchConfig &config, const void *function) {
    dim3 grid = config.grid, block = config.block;
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (threads == 0 || threads > 1024 || block.x > 1024 || block.y > 1024 || block.z > 64) {
        return cudaErrorInvalidConfiguration;
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535) {
        return cudaErrorInvalidConfiguration;
    }
    return config.dynamic_shared_bytes > dynamic_shared_limit(function) ? cudaErrorInvalidValue : cudaSuccess;
}

/* A real device would stop at the first access, with cudaErrorIllegalAddress at some later call. */
void check_pointers(const char *kernel, const std::vector<const void *> &pointers, int device) {
    for (size_t i = 0; i < pointers.size(); i++) {
        if (!pointers[i]) continue;
        auto entry = find_allocation(pointers[i]);
        if (!entry) {
            simt::fail("argument %zu of %s is %p, which is neither device memory nor pinned memory", i + 1, kernel,
                       pointers[i]);
        }
        if (!entry->second.pinned && entry->second.device != device) {
            simt::fail("argument %zu of %s is memory of device %d, but the kernel runs on device %d", i + 1, kernel,
                       entry->second.device, device);
        }
    }
}

} // namespace

cudaError_t simt::submit(const LaunchConfig &config, const BoundKernel &kernel) {
    return call("launch", [&]() -> cudaError_t {
        cudaStream_t stream = find_stream(config.stream);
        if (!stream || stream->device != current_device) return cudaErrorInvalidResourceHandle;
        cudaError_t error = check_launch(config, kernel.function);
        if (error != cudaSuccess) return error;
        std::vector<const void *> pointers(kernel.pointers, kernel.pointers + kernel.arguments);
        return enqueue(*stream, [grid = config.grid, block = config.block, shared = config.dynamic_shared_bytes,
                                 device = stream->device, name = kernel.name, pointers, body = kernel.run_thread] {
            check_pointers(name.c_str(), pointers, device);
            for (auto &[address, symbol] : runtime().symbols) make_resident(address, symbol, device);
            DeviceAccess access(device);
            run_grid({capability(), shared_bytes_optin()}, grid, block, shared, name.c_str(), body);
        });
    });
}

/* Programmatic serialisation lets a kernel begin early; that it begins in its turn is one of the ways this may go. */
cudaError_t simt::check_attributes(const cudaLaunchConfig_t *config) {
    if (!config || (config->numAttrs && !config->attrs)) return remember(cudaErrorInvalidValue);
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const cudaLaunchAttribute &attribute = config->attrs[i];
        bool known = attribute.id == cudaLaunchAttributeIgnore || attribute.id == cudaLaunchAttributePriority;
        if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
            known = !attribute.val.programmaticStreamSerializationAllowed || capability() >= 90;
        }
        if (!known) return remember(cudaErrorNotSupported);
    }
    return cudaSuccess;
}

std::string simt::second_argument(const char *text) {
    int angles = 0, others = 0, comma = 0;
    std::string argument;
    for (; *text; text++) {
        if (strchr("([{", *text)) others++;
        if (strchr(")]}", *text)) others--;
        if (others == 0) angles += (*text == '<') - (*text == '>');
        bool separator = *text == ',' && angles == 0 && others == 0;
        if (separator && ++comma == 2) break;
        if (comma == 1 && !separator && !(argument.empty() && *text == ' ')) argument += *text;
    }
    return argument;
}

cudaError_t simt::copy_to_symbol(const char *name, void *symbol, size_t symbol_bytes, const void *from, size_t bytes,
                                 size_t offset, cudaMemcpyKind kind, cudaStream_t handle, bool wait) {
    return call(name, [&]() -> cudaError_t {
        cudaStream_t stream = find_stream(handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (wait && capture_forbids_waiting()) return cudaErrorStreamCaptureUnsupported;
        if (!from || offset > symbol_bytes || bytes > symbol_bytes - offset) return cudaErrorInvalidValue;
        Place place = place_of(from, bytes, stream->device);
        bool from_device = place == Place::device;
        if (place == Place::wrong) return cudaErrorInvalidValue;
        if (kind != cudaMemcpyDefault && kind != (from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)) {
            return cudaErrorInvalidMemcpyDirection;
        }
        symbol_at(symbol, symbol_bytes);
        std::shared_ptr<std::vector<char>> snapshot;
        if (place == Place::pageable && !stream->capture) {
            snapshot = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
        }
        const char *source = snapshot ? snapshot->data() : (const char *)from;
        int device = stream->device;
        cudaError_t error = enqueue(*stream, [=] {
            make_resident(symbol, symbol_at(symbol, symbol_bytes), device);
            DeviceAccess access(device);
            memcpy((char *)symbol + offset, snapshot ? snapshot->data() : source, bytes);
        });
        if (error == cudaSuccess && wait) run_all(*stream);
        return error;
    });
}

cudaError_t simt::copy_from_symbol(const char *name, void *to, void *symbol, size_t symbol_bytes, size_t bytes,
                                   size_t offset, cudaMemcpyKind kind) {
    return call(name, [&]() -> cudaError_t {
        CUstream_st &stream = *find_stream(nullptr);
        if (capture_forbids_waiting()) return cudaErrorStreamCaptureUnsupported;
        if (!to || offset > symbol_bytes || bytes > symbol_bytes - offset) return cudaErrorInvalidValue;
        Place place = place_of(to, bytes, stream.device);
        if (place == Place::wrong) return cudaErrorInvalidValue;
        if (kind != cudaMemcpyDefault &&
            kind != (place == Place::device ? cudaMemcpyDeviceToDevice : cudaMemcpyDeviceToHost)) {
            return cudaErrorInvalidMemcpyDirection;
        }
        int device = stream.device;
        cudaError_t error = enqueue(stream, [=] {
            make_resident(symbol, symbol_at(symbol, symbol_bytes), device);
            DeviceAccess access(device);
            memcpy(to, (const char *)symbol + offset, bytes);
        });
        if (error == cudaSuccess) run_all(stream);
        return error;
    });
}

extern "C" {

/* Errors and versions. */

cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError() {
    return last_error;
}

struct ErrorText {
    cudaError_t error;
    const char *name, *text;
};
#define ERROR_TEXT(error, text) {error, #error, text}
static const ErrorText error_texts[] = {
    ERROR_TEXT(cudaSuccess, "no error"),
    ERROR_TEXT(cudaErrorInvalidValue, "invalid argument"),
    ERROR_TEXT(cudaErrorMemoryAllocation, "out of memory"),
    ERROR_TEXT(cudaErrorInitializationError, "initialization error"),
    ERROR_TEXT(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    ERROR_TEXT(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    ERROR_TEXT(cudaErrorInvalidSymbol, "invalid device symbol"),
    ERROR_TEXT(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    ERROR_TEXT(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    ERROR_TEXT(cudaErrorInvalidDeviceFunction, "invalid device function"),
    ERROR_TEXT(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR_TEXT(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR_TEXT(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    ERROR_TEXT(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR_TEXT(cudaErrorNotReady, "device not ready"),
    ERROR_TEXT(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR_TEXT(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    ERROR_TEXT(cudaErrorLaunchFailure, "unspecified launch failure"),
    ERROR_TEXT(cudaErrorNotSupported, "operation not supported"),
    ERROR_TEXT(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    ERROR_TEXT(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    ERROR_TEXT(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"),
    ERROR_TEXT(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    ERROR_TEXT(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ERROR_TEXT(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    ERROR_TEXT(cudaErrorStreamCaptureImplicit,
               "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR_TEXT(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"),
    ERROR_TEXT(cudaErrorUnknown, "unknown error"),
};
#undef ERROR_TEXT

static ErrorText error_text(cudaError_t error) {
    for (const ErrorText &known : error_texts) {
        if (known.error == error) return known;
    }
    return {error, "unrecognized error code", "unrecognized error code"};
}

const char *cudaGetErrorName(cudaError_t error) {
    return error_text(error).name;
}

const char *cudaGetErrorString(cudaError_t error) {
    return error_text(error).text;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = driver_version();
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = RUNTIME_VERSION;
    return cudaSuccess;
}

/* Devices. */

cudaError_t cudaGetDeviceCount(int *count) {
    return call(__func__, [&]() -> cudaError_t {
        *count = device_count();
        return driver_version() < RUNTIME_VERSION ? cudaErrorInsufficientDriver : cudaSuccess;
    });
}

cudaError_t cudaSetDevice(int device) {
    return call(__func__, [&]() -> cudaError_t {
        if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
        current_device = device;
        return cudaSuccess;
    });
}

cudaError_t cudaGetDevice(int *device) {
    return call(__func__, [&]() -> cudaError_t {
        *device = current_device;
        return cudaSuccess;
    });
}

static cudaDeviceProp device_properties(int device) {
    cudaDeviceProp p = {};
    strcpy(p.name, "SIMT CPU device");
    p.totalGlobalMem = device_bytes();
    p.sharedMemPerBlock = SHARED_BYTES;
    p.sharedMemPerBlockOptin = shared_bytes_optin();
    p.sharedMemPerMultiprocessor = shared_bytes();
    p.reservedSharedMemPerBlock = RESERVED_SHARED_BYTES;
    p.totalConstMem = 64 << 10;
    p.regsPerBlock = p.regsPerMultiprocessor = 64 << 10;
    p.warpSize = 32;
    p.maxThreadsPerBlock = 1024;
    p.maxThreadsPerMultiProcessor = 2048;
    p.maxBlocksPerMultiProcessor = 32;
    p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
    p.maxThreadsDim[2] = 64;
    p.maxGridSize[0] = INT32_MAX;
    p.maxGridSize[1] = p.maxGridSize[2] = 65535;
    p.major = capability() / 10;
    p.minor = capability() % 10;
    p.multiProcessorCount = (int)from_environment("SIMT_MULTIPROCESSORS", 4);
    p.canMapHostMemory = p.concurrentKernels = p.unifiedAddressing = 1;
    p.pciBusID = device + 1;
    p.asyncEngineCount = 2;
    p.memoryBusWidth = 64;
    p.l2CacheSize = 4 << 20;
    return p;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    return call(__func__, [&]() -> cudaError_t {
        if (!properties) return cudaErrorInvalidValue;
        if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
        *properties = device_properties(device);
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    return call(__func__, [&]() -> cudaError_t {
        if (!value) return cudaErrorInvalidValue;
        if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
        cudaDeviceProp p = device_properties(device);
        const std::map<cudaDeviceAttr, size_t> values = {
            {cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock},
            {cudaDevAttrMaxBlockDimX, p.maxThreadsDim[0]},
            {cudaDevAttrMaxBlockDimY, p.maxThreadsDim[1]},
            {cudaDevAttrMaxBlockDimZ, p.maxThreadsDim[2]},
            {cudaDevAttrMaxGridDimX, p.maxGridSize[0]},
            {cudaDevAttrMaxGridDimY, p.maxGridSize[1]},
            {cudaDevAttrMaxGridDimZ, p.maxGridSize[2]},
            {cudaDevAttrMaxSharedMemoryPerBlock, p.sharedMemPerBlock},
            {cudaDevAttrTotalConstantMemory, p.totalConstMem},
            {cudaDevAttrWarpSize, p.warpSize},
            {cudaDevAttrMaxRegistersPerBlock, p.regsPerBlock},
            {cudaDevAttrMultiProcessorCount, p.multiProcessorCount},
            {cudaDevAttrIntegrated, p.integrated},
            {cudaDevAttrCanMapHostMemory, p.canMapHostMemory},
            {cudaDevAttrConcurrentKernels, p.concurrentKernels},
            {cudaDevAttrL2CacheSize, p.l2CacheSize},
            {cudaDevAttrMaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor},
            {cudaDevAttrUnifiedAddressing, p.unifiedAddressing},
            {cudaDevAttrComputeCapabilityMajor, p.major},
            {cudaDevAttrComputeCapabilityMinor, p.minor},
            {cudaDevAttrMaxSharedMemoryPerMultiprocessor, p.sharedMemPerMultiprocessor},
            {cudaDevAttrMaxRegistersPerMultiprocessor, p.regsPerMultiprocessor},
            {cudaDevAttrMaxSharedMemoryPerBlockOptin, p.sharedMemPerBlockOptin},
            {cudaDevAttrReservedSharedMemoryPerBlock, p.reservedSharedMemPerBlock},
        };
        auto known = values.find(attribute);
        if (known == values.end()) return cudaErrorInvalidValue;
        *value = (int)known->second;
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceSynchronize() {
    return call(__func__, [&]() -> cudaError_t {
        if (capture_forbids_waiting()) return cudaErrorStreamCaptureUnsupported;
        run_device(current_device);
        return cudaSuccess;
    });
}

/* Memory. */

static cudaError_t allocate_outside_capture(void **memory, size_t bytes, bool pinned) {
    if (capture_forbids_waiting()) return cudaErrorStreamCaptureUnsupported;
    return allocate(memory, bytes, pinned);
}

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    return call(__func__, [&] { return allocate_outside_capture(memory, bytes, false); });
}

cudaError_t cudaMallocHost(void **memory, size_t bytes) {
    return call(__func__, [&] { return allocate_outside_capture(memory, bytes, true); });
}

cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned) {
    return call(__func__, [&] { return allocate_outside_capture(memory, bytes, true); });
}

/* Waits for the device first, as the real ones do. */
static cudaError_t deallocate(void *memory, bool pinned) {
    if (capture_forbids_waiting()) return cudaErrorStreamCaptureUnsupported;
    if (!memory) return cudaSuccess;
    auto entry = runtime().allocations.find((uintptr_t)memory);
    if (entry == runtime().allocations.end() || entry->second.pinned != pinned) return cudaErrorInvalidValue;
    run_device(entry->second.device);
    allow_access(entry->first, entry->second, true);
    memset(memory, 0xdd, entry->second.bytes);
    free(memory);
    runtime().allocations.erase(entry);
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory) {
    return call(__func__, [&] { return deallocate(memory, false); });
}

cudaError_t cudaFreeHost(void *memory) {
    return call(__func__, [&] { return deallocate(memory, true); });
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    return call(__func__, [&]() -> cudaError_t {
        if (!free_bytes || !total_bytes) return cudaErrorInvalidValue;
        *total_bytes = device_bytes();
        *free_bytes = *total_bytes - std::min(*total_bytes, live_bytes(current_device));
        return cudaSuccess;
    });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    return call(__func__, [&]() -> cudaError_t {
        if (!attributes) return cudaErrorInvalidValue;
        void *address = (void *)pointer;
        auto entry = find_allocation(pointer);
        if (!entry || (uintptr_t)pointer == entry->first + entry->second.bytes) {
            *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, address};
        } else if (entry->second.pinned) {
            *attributes = {cudaMemoryTypeHost, entry->second.device, address, address};
        } else {
            *attributes = {cudaMemoryTypeDevice, entry->second.device, address, nullptr};
        }
        return cudaSuccess;
    });
}

/* A copy of one row has no pitch to speak of: its width stands for both. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return copy_on_stream(__func__, {(char *)to, bytes, (const char *)from, bytes, bytes, 1}, kind, nullptr, true);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return copy_on_stream(__func__, {(char *)to, bytes, (const char *)from, bytes, bytes, 1}, kind, stream, false);
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind) {
    return copy_on_stream(__func__, {(char *)to, to_pitch, (const char *)from, from_pitch, width, height}, kind, nullptr,
                          true);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
    return copy_on_stream(__func__, {(char *)to, to_pitch, (const char *)from, from_pitch, width, height}, kind, stream,
                          false);
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes) {
    return set_on_stream(__func__, memory, value, bytes, nullptr);
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
    return set_on_stream(__func__, memory, value, bytes, stream);
}

/* Streams. */

static cudaError_t create_stream(cudaStream_t *stream, unsigned flags) {
    if (!stream || flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
    *stream = new CUstream_st{current_device, false, flags == cudaStreamDefault, {}, nullptr};
    runtime().streams.insert(*stream);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return call(__func__, [&] { return create_stream(stream, cudaStreamDefault); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return call(__func__, [&] { return create_stream(stream, flags); });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    return call(__func__, [&]() -> cudaError_t {
        if (!runtime().streams.count(stream)) return cudaErrorInvalidResourceHandle;
        run_all(*stream);
        runtime().streams.erase(stream);
        delete stream;
        return cudaSuccess;
    });
}

/* Waiting for a stream that is being captured would never end; CUDA gives the capture up. */
static bool capture_lost(CUstream_st &stream) {
    if (!stream.capture) return capture_forbids_legacy(stream);
    stream.capture->invalidated = true;
    return true;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    return call(__func__, [&]() -> cudaError_t {
        cudaStream_t stream = find_stream(handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (capture_lost(*stream)) return cudaErrorStreamCaptureUnsupported;
        run_all(*stream);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    return call(__func__, [&]() -> cudaError_t {
        cudaStream_t stream = find_stream(handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (capture_lost(*stream)) return cudaErrorStreamCaptureUnsupported;
        return stream->queue.empty() ? cudaSuccess : not_ready(*stream);
    });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    return call(__func__, [&]() -> cudaError_t {
        cudaStream_t stream = find_stream(handle);
        if (!stream || !runtime().events.count(event)) return cudaErrorInvalidResourceHandle;
        std::shared_ptr<Mark> mark = event->mark;
        if (mark && mark->captured) { /* fork into, or join of, the capture that recorded it */
            if (stream->legacy) return cudaErrorStreamCaptureImplicit;
            if (stream->capture && stream->capture != mark->captured) return cudaErrorStreamCaptureMerge;
            stream->capture = mark->captured;
            if (stream != mark->stream) stream->capture->unjoined.erase(mark->stream);
            if (stream != stream->capture->origin) stream->capture->unjoined.insert(stream);
            return cudaSuccess;
        }
        if (stream->capture && mark) {
            stream->capture->invalidated = true;
            return cudaErrorStreamCaptureIsolation;
        }
        return mark && !mark->done ? enqueue(*stream, [] {}, mark) : cudaSuccess;
    });
}

/* Events. */

static cudaError_t create_event(cudaEvent_t *event, unsigned flags) {
    if (!event) return cudaErrorInvalidValue;
    *event = new CUevent_st{current_device, !(flags & cudaEventDisableTiming), nullptr};
    runtime().events.insert(*event);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return call(__func__, [&] { return create_event(event, cudaEventDefault); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return call(__func__, [&] { return create_event(event, flags); });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return call(__func__, [&]() -> cudaError_t {
        if (!runtime().events.erase(event)) return cudaErrorInvalidResourceHandle;
        delete event;
        return cudaSuccess;
    });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    return call(__func__, [&]() -> cudaError_t {
        cudaStream_t stream = find_stream(handle);
        if (!stream || !runtime().events.count(event) || stream->device != event->device) {
            return cudaErrorInvalidResourceHandle;
        }
        auto mark = std::make_shared<Mark>();
        mark->stream = stream;
        if (stream->capture) {
            mark->captured = stream->capture;
            event->mark = mark;
            return cudaSuccess;
        }
        mark->number = runtime().operations + 1;
        cudaError_t error = enqueue(*stream, [mark] {
            mark->done = true;
            mark->time = std::chrono::steady_clock::now();
        });
        if (error == cudaSuccess) event->mark = mark;
        return error;
    });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return call(__func__, [&]() -> cudaError_t {
        if (!runtime().events.count(event)) return cudaErrorInvalidResourceHandle;
        if (!event->mark || event->mark->done) return cudaSuccess;
        if (event->mark->captured) return cudaErrorCapturedEvent;
        run_until(*event->mark->stream, event->mark->number);
        return cudaSuccess;
    });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return call(__func__, [&]() -> cudaError_t {
        if (!runtime().events.count(event)) return cudaErrorInvalidResourceHandle;
        if (!event->mark || event->mark->done) return cudaSuccess;
        if (event->mark->captured) return cudaErrorCapturedEvent;
        return not_ready(*event->mark->stream);
    });
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return call(__func__, [&]() -> cudaError_t {
        for (cudaEvent_t event : {start, end}) {
            if (!runtime().events.count(event) || !event->timed || !event->mark) return cudaErrorInvalidResourceHandle;
        }
        if (!start->mark->done || !end->mark->done) return cudaErrorNotReady;
        *milliseconds = std::chrono::duration<float, std::milli>(end->mark->time - start->mark->time).count();
        return cudaSuccess;
    });
}

/* Graphs. */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    return call(__func__, [&]() -> cudaError_t {
        if (!runtime().streams.count(stream)) return cudaErrorStreamCaptureUnsupported; /* the legacy stream, for one */
        if (stream->capture) return cudaErrorInvalidValue;
        stream->capture = std::make_shared<CUgraph_st>();
        stream->capture->device = stream->device;
        stream->capture->origin = stream;
        stream->capture->mode = mode;
        stream->capture->thread = std::this_thread::get_id();
        return cudaSuccess;
    });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    return call(__func__, [&]() -> cudaError_t {
        if (!graph) return cudaErrorInvalidValue;
        *graph = nullptr;
        if (!runtime().streams.count(stream) || !stream->capture) return cudaErrorInvalidValue;
        std::shared_ptr<CUgraph_st> captured = stream->capture;
        if (captured->origin != stream) return cudaErrorStreamCaptureUnmatched;
        for (cudaStream_t other : runtime().streams) {
            if (other->capture == captured) other->capture = nullptr;
        }
        if (captured->invalidated) return cudaErrorStreamCaptureInvalidated;
        if (!captured->unjoined.empty()) return cudaErrorStreamCaptureUnjoined;
        *graph = captured.get();
        runtime().graphs[*graph] = captured;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
    return call(__func__, [&]() -> cudaError_t {
        cudaStream_t stream = find_stream(handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        *status = !stream->capture               ? cudaStreamCaptureStatusNone
                  : stream->capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                                 : cudaStreamCaptureStatusActive;
        return cudaSuccess;
    });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
    return call(__func__, [&]() -> cudaError_t {
        if (!executable || !runtime().graphs.count(graph)) return cudaErrorInvalidValue;
        *executable = new CUgraphExec_st{graph->device, graph->operations};
        runtime().executables.insert(*executable);
        return cudaSuccess;
    });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
    return call(__func__, [&]() -> cudaError_t {
        cudaStream_t stream = find_stream(handle);
        if (!runtime().executables.count(executable)) return cudaErrorInvalidValue;
        if (!stream || stream->device != executable->device) return cudaErrorInvalidResourceHandle;
        return enqueue(*stream, [operations = executable->operations] {
            for (const auto &operation : operations) operation();
        });
    });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    return call(__func__, [&] { return runtime().graphs.erase(graph) ? cudaSuccess : cudaErrorInvalidValue; });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    return call(__func__, [&]() -> cudaError_t {
        if (!runtime().executables.erase(executable)) return cudaErrorInvalidValue;
        delete executable;
        return cudaSuccess;
    });
}

cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute attribute, int value) {
    return call(__func__, [&]() -> cudaError_t {
        if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
        if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
        if (value < 0 || (size_t)value > shared_bytes_optin()) return cudaErrorInvalidValue;
        runtime().dynamic_shared_limits[function] = value;
        return cudaSuccess;
    });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *function) {
    return call(__func__, [&]() -> cudaError_t {
        if (!attributes || !function) return cudaErrorInvalidValue;
        *attributes = {};
        attributes->maxThreadsPerBlock = 1024;
        attributes->ptxVersion = attributes->binaryVersion = capability();
        attributes->maxDynamicSharedSizeBytes = (int)dynamic_shared_limit(function);
        return cudaSuccess;
    });
}

/* For tests. */

void simt_fail_call(const char *name, int nth) {
    std::lock_guard<std::mutex> guard(runtime().lock);
    CallCount &count = runtime().calls[name];
    if (nth == 0 && strcmp(name, "*") == 0) {
        for (auto &[other, counted] : runtime().calls) counted.fail_at = 0;
    }
    count.fail_at = nth ? count.calls + (size_t)std::abs(nth) : 0;
    count.for_good = nth < 0;
}

size_t simt_call_count(const char *name) {
    std::lock_guard<std::mutex> guard(runtime().lock);
    return runtime().calls[name].calls;
}

size_t simt_live_allocations(void) {
    std::lock_guard<std::mutex> guard(runtime().lock);
    return runtime().allocations.size();
}

size_t simt_live_bytes(int device) {
    std::lock_guard<std::mutex> guard(runtime().lock);
    return live_bytes(device);
}

size_t simt_live_handles(void) {
    std::lock_guard<std::mutex> guard(runtime().lock);
    Runtime &r = runtime();
    return r.streams.size() + r.events.size() + r.graphs.size() + r.executables.size();
}
}
