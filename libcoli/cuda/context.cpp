#include "context.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <new>

#include "../formats/e8_codebook.h"
#include "../formats/floats.h"
#include "copy_threads.h"
#include "encode.h"
#include "kernels/batch.h"
#include "kernels/expert.h"
#include "kernels/prefill.h"
#include "tensor.h"

namespace coli {

namespace {

/* Never destroyed: at the end of a process the CUDA runtime may be gone before this library's statics. */
std::vector<std::unique_ptr<Context>> &open_list = *new std::vector<std::unique_ptr<Context>>;
std::map<int, GroupCounters> &all_counters = *new std::map<int, GroupCounters>;

/* What every configured device holds, and new ones receive. */
DeviceTables current_tables;
bool fp8_published = false, fp8_e4m3 = false, small_codebook = true;

void reset_tables() {
    uint8_t codebook[COLI_E8_CODEBOOK_BYTES];
    coli_e8_codebook_expand(codebook);
    memcpy(current_tables.codebook, codebook, sizeof codebook);
    small_codebook = true;
    memset(current_tables.fp8, 0, sizeof current_tables.fp8);
    coli_sign_table_fill(current_tables.signs);
    fill_encoder_codebook(&current_tables.encoder);
    fp8_published = false;
}

/* Bytes times 2 code + 1, at most 31, are to be exact in fp16, and none may be 0 where bytes are negated. */
bool is_small(const void *codebook) {
    constexpr uint8_t kMost = 2048 / 31;
    const uint8_t *bytes = static_cast<const uint8_t *>(codebook);
    return std::all_of(bytes, bytes + COLI_E8_CODEBOOK_BYTES, [](uint8_t byte) { return byte >= 1 && byte <= kMost; });
}

bool is_e4m3(const float table[256]) {
    for (uint32_t code = 0; code < 256; code++) {
        const float expected = coli_e4m3_to_f32(code);
        const bool same = coli_f32_to_bits(expected) == coli_f32_to_bits(table[code]);
        if (!same && !(std::isnan(expected) && std::isnan(table[code]))) return false;
    }
    return true;
}

/* Copies `bytes` at `offset` of a device's tables, after the work that still reads them. */
bool write_table(Context &context, size_t offset, const void *source, size_t bytes, const char *name) {
    DeviceCall call(context);
    COLI_FORWARD(call.ok() && context.wait_for_readers());
    uint8_t *target = reinterpret_cast<uint8_t *>(context.tables) + offset;
    cudaError_t result = cudaMemcpyAsync(target, source, bytes, cudaMemcpyHostToDevice, context.stream);
    if (result == cudaSuccess) result = cudaStreamSynchronize(context.stream);
    return succeeded(result, "copying the %s to device %d", name, context.device) || context.abandon();
}

/* Replaces part of the tables on all devices, or on none: when one refuses, the others get the old contents back. */
bool publish(size_t offset, const void *source, size_t bytes, const char *name) {
    uint8_t *current = reinterpret_cast<uint8_t *>(&current_tables) + offset;
    for (size_t i = 0; i < open_list.size(); i++) {
        if (write_table(*open_list[i], offset, source, bytes, name)) continue;
        char reason[512];
        snprintf(reason, sizeof reason, "%s", last_error());
        const coli_status status = last_status();
        for (size_t done = 0; done <= i; done++) write_table(*open_list[done], offset, current, bytes, name);
        return fail(status, "%s", reason);
    }
    memcpy(current, source, bytes);
    return true;
}

} // namespace

/*------   Buffers   ------*/

bool DeviceBuffer::reserve(size_t bytes, const char *purpose) {
    if (bytes <= bytes_) return true;
    release();
    COLI_FORWARD(succeeded(cudaMalloc(&memory_, bytes), "allocating %zu bytes of device memory for %s", bytes, purpose));
    bytes_ = bytes;
    return true;
}

void DeviceBuffer::release() {
    if (memory_) ignore(cudaFree(memory_));
    memory_ = nullptr;
    bytes_ = 0;
}

bool PinnedBuffer::reserve(size_t bytes, const char *purpose) {
    if (bytes <= bytes_) return true;
    release();
    COLI_FORWARD(
        succeeded(cudaMallocHost(&memory_, bytes), "allocating %zu bytes of pinned memory for %s", bytes, purpose));
    bytes_ = bytes;
    return true;
}

void PinnedBuffer::release() {
    if (memory_) ignore(cudaFreeHost(memory_));
    memory_ = nullptr;
    bytes_ = 0;
}

void CallBuffers::release() {
    host_x.release();
    host_y.release();
    x.release();
    y.release();
    workspace.release();
}

bool Staging::reserve() {
    COLI_FORWARD(host.reserve(kSlots * kSlotBytes, "matrices on their way to or from a device") &&
                 device.reserve(kSlots * kSlotBytes, "matrices on their way to or from their tiles"));
    cudaError_t result = stream ? cudaSuccess : cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (result == cudaSuccess && !crossed) result = cudaEventCreateWithFlags(&crossed, cudaEventDisableTiming);
    for (cudaEvent_t &event : passed) {
        if (result == cudaSuccess && !event) result = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    }
    return succeeded(result, "preparing for matrices on their way to or from a device");
}

void Staging::release() {
    host.release();
    device.release();
    for (cudaEvent_t event : passed) {
        if (event) ignore(cudaEventDestroy(event));
    }
    if (crossed) ignore(cudaEventDestroy(crossed));
    if (stream) ignore(cudaStreamDestroy(stream));
}

cudaError_t Staging::cross(cudaStream_t from, cudaStream_t to) const {
    const cudaError_t result = cudaEventRecord(crossed, from);
    return result == cudaSuccess ? cudaStreamWaitEvent(to, crossed, 0) : result;
}

/*------   One device   ------*/

cudaError_t read_traits(int device, GpuTraits *gpu) {
    int major = 0, minor = 0;
    cudaError_t result = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (result == cudaSuccess) result = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (result == cudaSuccess)
        result = cudaDeviceGetAttribute(&gpu->multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (result == cudaSuccess)
        result = cudaDeviceGetAttribute(&gpu->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    gpu->capability = 10 * major + minor;
    return result;
}

CurrentDevice::CurrentDevice(int device) : device_(device) {
    ignore(cudaGetDevice(&previous_));
    if (previous_ != device_) result_ = cudaSetDevice(device_);
    ignore(result_);
}

CurrentDevice::~CurrentDevice() {
    if (previous_ >= 0 && previous_ != device_) ignore(cudaSetDevice(previous_));
}

bool CurrentDevice::ok() const {
    return succeeded(result_, "making device %d current", device_);
}

bool Context::open(int ordinal) {
    device = ordinal;
    counters = &all_counters[ordinal];
    CurrentDevice current(ordinal);
    COLI_FORWARD(current.ok());
    cudaError_t result = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (result == cudaSuccess) result = cudaEventCreateWithFlags(&issued_done, cudaEventDisableTiming);
    if (result == cudaSuccess) result = read_traits(ordinal, &gpu);
    if (result == cudaSuccess) result = prepare_expert_kernels(gpu);
    if (result == cudaSuccess && gpu.capability >= 80) result = prepare_prefill_kernels(gpu);
    if (result == cudaSuccess && gpu.capability == 90) result = prepare_batch_kernels(gpu);
    if (result == cudaSuccess) result = cudaMalloc(reinterpret_cast<void **>(&tables), sizeof(DeviceTables));
    if (result == cudaSuccess)
        result = cudaMemcpyAsync(tables, &current_tables, sizeof(DeviceTables), cudaMemcpyHostToDevice, stream);
    if (result == cudaSuccess) result = cudaStreamSynchronize(stream);
    return succeeded(result, "preparing device %d", ordinal);
}

Context::~Context() {
    if (device < 0) return;
    CurrentDevice current(device);
    ignore(cudaDeviceSynchronize());
    while (tensors) tensor_orphan(*tensors);
    synchronous.release();
    issued.release();
    staging.release();
    encode.release();
    if (tables) ignore(cudaFree(tables));
    if (issued_done) ignore(cudaEventDestroy(issued_done));
    if (stream) ignore(cudaStreamDestroy(stream));
}

bool Context::wait_for_readers() {
    cudaError_t result = caller_streams ? cudaDeviceSynchronize() : cudaStreamSynchronize(stream);
    if (result == cudaSuccess) caller_streams = false;
    return succeeded(result, "waiting for work on device %d", device);
}

bool Context::abandon() {
    ignore(cudaStreamSynchronize(stream));
    if (staging.stream) ignore(cudaStreamSynchronize(staging.stream));
    return false;
}

/*------   All devices   ------*/

const std::vector<std::unique_ptr<Context>> &contexts() {
    return open_list;
}

Context *find_context(int device) {
    for (const auto &context : open_list) {
        if (context->device == device) return context.get();
    }
    if (open_list.empty())
        fail(COLI_E_STATE, "device %d is not configured: call coli_cuda_init first", device);
    else
        fail(COLI_E_NO_DEVICE, "device %d is not configured: coli_cuda_init named %zu other device(s)", device,
             open_list.size());
    return nullptr;
}

bool open_contexts(const int *devices, int count) try {
    reset_tables();
    std::vector<std::unique_ptr<Context>> opened;
    for (int i = 0; i < count; i++) {
        opened.push_back(std::make_unique<Context>());
        COLI_FORWARD(opened.back()->open(devices[i]));
    }
    open_list = std::move(opened);
    return true;
} catch (const std::bad_alloc &) { /* exceptions end here: the callers are C */
    return fail(COLI_E_MEMORY, "preparing %d device(s): host memory ran out", count);
}

void close_contexts() {
    open_list.clear();
    stop_copy_threads();
    fp8_published = false;
}

bool publish_codebook(const void *codebook) {
    COLI_FORWARD(publish(offsetof(DeviceTables, codebook), codebook, sizeof(DeviceTables::codebook), "E8 codebook"));
    small_codebook = is_small(codebook);
    return true;
}

bool publish_fp8_table(const float *table) {
    COLI_FORWARD(publish(offsetof(DeviceTables, fp8), table, sizeof(DeviceTables::fp8), "fp8 table"));
    fp8_published = true;
    fp8_e4m3 = is_e4m3(table);
    return true;
}

bool fp8_table_published() {
    return fp8_published;
}

bool codebook_is_small() {
    return small_codebook;
}

bool fp8_table_is_e4m3() {
    return fp8_e4m3;
}

const std::map<int, GroupCounters> &group_counters() {
    return all_counters;
}

} // namespace coli
