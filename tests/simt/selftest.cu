/* selftest.cu - shows that simt.h runs correct programs correctly, and that it exposes the mistakes it is there for.
 *
 *   selftest NAME       runs a case, or a check of the runtime, as it should be: exit status 0
 *   selftest NAME bug   runs the case with its mistake put in: a report, or "wrong: ..." and exit status 1
 *
 * tests/test_simt_selftest.py knows which sanitizer or order of threads must notice which mistake. */
#include "simt.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

namespace {

#define EXPECT(condition)                                                                                                  \
    do {                                                                                                                   \
        if (!(condition)) {                                                                                                \
            printf("wrong: %s, line %d\n", #condition, __LINE__);                                                          \
            exit(1);                                                                                                       \
        }                                                                                                                  \
    } while (0)

#define OK(call) EXPECT((call) == cudaSuccess)

/* Device memory, freed at the end of its scope. */
template <class T> struct Device {
    T *data = nullptr;
    size_t count;
    explicit Device(size_t count_) : count(count_) { OK(cudaMalloc(&data, count * sizeof(T))); }
    explicit Device(const std::vector<T> &host) : Device(host.size()) {
        OK(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~Device() { cudaFree(data); }
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;
    std::vector<T> download() const {
        std::vector<T> host(count);
        OK(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
};

std::vector<float> ramp(size_t count) {
    std::vector<float> values(count);
    std::iota(values.begin(), values.end(), 1.0f);
    return values;
}

/* ---- Mistakes in a kernel. All are put into one reduction of rows: static and dynamic shared memory, barriers, shuffles.
 */

enum Bug {
    none,
    missing_barrier,
    divergent_barrier,
    divergent_shuffle,
    shared_out_of_bounds,
    dynamic_shared_out_of_bounds,
    global_out_of_bounds,
    misaligned_load,
    bad_shift,
    unwritten_shared,
    trap,
};

constexpr int kThreads = 128, kWarps = kThreads / 32, kRows = 6, kColumns = 320;

__global__ void __launch_bounds__(kThreads) sum_rows(const float *x, float *sums, int columns, Bug bug) {
    __shared__ float parts[kWarps];
    extern __shared__ float stage[];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += x[(size_t)blockIdx.x * columns + i];
    stage[threadIdx.x] = sum;
    __syncthreads();
    sum = stage[threadIdx.x ^ 1];
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0 && !(bug == unwritten_shared && warp == 2)) parts[warp] = sum;
    if (bug != missing_barrier) __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int i = 0; i < kWarps; i++) total += parts[i];
        sums[blockIdx.x] = total;
    }

    if (bug == divergent_barrier && threadIdx.x < 40) __syncthreads();
    if (bug == divergent_shuffle && lane < 20) sum += __shfl_xor_sync(lane < 10 ? 0x000fffffu : 0x000ffffeu, sum, 1);
    if (bug == shared_out_of_bounds) parts[kWarps + (threadIdx.x == 7)] = 0.0f;
    if (bug == dynamic_shared_out_of_bounds && threadIdx.x == 9) stage[kThreads] = 0.0f;
    if (bug == global_out_of_bounds && threadIdx.x == 3) sums[gridDim.x] = 0.0f;
    if (bug == misaligned_load) sums[blockIdx.x] += ((const float4 *)(x + 1))->x;
    if (bug == bad_shift) sums[blockIdx.x] += (float)(1 << (threadIdx.x + (unsigned)columns));
    if (bug == trap && threadIdx.x == 5) __trap();
}

void reduction(Bug bug) {
    std::vector<float> x = ramp(kRows * kColumns);
    Device<float> device_x(x), sums(kRows);
    sum_rows<<<kRows, kThreads, kThreads * sizeof(float)>>>(device_x.data, sums.data, kColumns, bug);
    OK(cudaGetLastError());
    std::vector<float> got = sums.download();
    for (int row = 0; row < kRows; row++) {
        auto first = x.begin() + row * kColumns;
        EXPECT(got[row] == std::accumulate(first, first + kColumns, 0.0f));
    }
}

/* Lanes exchange values through shared memory: a shuffle between does not order the accesses, __syncwarp does. */
__global__ void rotate_lanes(const int *x, int *y, bool bug) {
    __shared__ int buffer[32];
    buffer[threadIdx.x] = x[threadIdx.x];
    if (bug)
        y[threadIdx.x] = __shfl_sync(0xffffffffu, 0, 0);
    else
        __syncwarp();
    y[threadIdx.x] = buffer[(threadIdx.x + 1) % 32];
}

void warp_order(bool bug) {
    std::vector<int> x(32);
    std::iota(x.begin(), x.end(), 0);
    Device<int> device_x(x), y(32);
    rotate_lanes<<<1, 32>>>(device_x.data, y.data, bug);
    std::vector<int> got = y.download();
    for (int i = 0; i < 32; i++) EXPECT(got[i] == (i + 1) % 32);
}

/* ---- Mistakes on the host. */

__global__ void scale(float *x, float factor, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] *= factor;
}

struct Hidden {
    float *x; /* in a structure, where no check of the arguments finds it */
};
__global__ void write_hidden(Hidden hidden) {
    hidden.x[threadIdx.x] = 1.0f;
}

void other_device(bool bug) {
    Device<float> x(ramp(32));
    if (bug) OK(cudaSetDevice(1));
    scale<<<1, 32>>>(x.data, 2.0f, 32);
    OK(cudaDeviceSynchronize());
    OK(cudaSetDevice(0));
    EXPECT(x.download()[31] == 64.0f);
}

void other_device_hidden(bool bug) {
    Device<float> x(32);
    if (bug) OK(cudaSetDevice(1));
    write_hidden<<<1, 32>>>({x.data});
    OK(cudaDeviceSynchronize());
    OK(cudaSetDevice(0));
    EXPECT(x.download()[31] == 1.0f);
}

void host_pointer(bool bug) {
    Device<float> x(32);
    std::vector<float> host(32);
    scale<<<1, 32>>>(bug ? host.data() : x.data, 2.0f, 32);
    OK(cudaDeviceSynchronize());
}

void host_access(bool bug) {
    Device<float> x(ramp(32));
    EXPECT((bug ? x.data[0] : x.download()[0]) == 1.0f);
}

void use_after_free(bool bug) {
    float *x;
    OK(cudaMalloc(&x, 128));
    if (bug) OK(cudaFree(x));
    write_hidden<<<1, 32>>>({x});
    OK(cudaDeviceSynchronize());
    if (!bug) OK(cudaFree(x));
}

/* A second stream reads what the first wrote: it has to wait for an event. */
void wrong_stream(bool bug) {
    cudaStream_t first, second;
    cudaEvent_t written;
    OK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&written, cudaEventDisableTiming));
    Device<float> x(ramp(32)), y(32);
    scale<<<1, 32, 0, first>>>(x.data, 2.0f, 32);
    OK(cudaEventRecord(written, first));
    if (!bug) OK(cudaStreamWaitEvent(second, written));
    OK(cudaMemcpyAsync(y.data, x.data, 128, cudaMemcpyDeviceToDevice, second));
    OK(cudaStreamSynchronize(second));
    EXPECT(y.download()[31] == 64.0f);
    OK(cudaEventDestroy(written));
    OK(cudaStreamDestroy(first));
    OK(cudaStreamDestroy(second));
}

/* A non-blocking stream does not wait for the legacy one, where cudaMemset works. */
void legacy_stream(bool bug) {
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, bug ? cudaStreamNonBlocking : cudaStreamDefault));
    Device<float> x(32), y(32);
    OK(cudaMemset(x.data, 0, 128));
    OK(cudaMemcpyAsync(y.data, x.data, 128, cudaMemcpyDeviceToDevice, stream));
    OK(cudaStreamSynchronize(stream));
    EXPECT(y.download()[31] == 0.0f);
    OK(cudaStreamDestroy(stream));
}

void early_reuse(bool bug) {
    cudaStream_t stream;
    float *pinned;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaMallocHost(&pinned, 128));
    Device<float> x(32);
    for (int i = 0; i < 32; i++) pinned[i] = 1.0f;
    OK(cudaMemcpyAsync(x.data, pinned, 128, cudaMemcpyHostToDevice, stream));
    if (!bug) OK(cudaStreamSynchronize(stream));
    for (int i = 0; i < 32; i++) pinned[i] = 2.0f;
    OK(cudaStreamSynchronize(stream));
    EXPECT(x.download()[0] == 1.0f);
    OK(cudaFreeHost(pinned));
    OK(cudaStreamDestroy(stream));
}

void missing_wait(bool bug) {
    cudaStream_t stream;
    float *pinned;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaMallocHost(&pinned, 128));
    Device<float> x(ramp(32));
    OK(cudaMemcpyAsync(pinned, x.data, 128, cudaMemcpyDeviceToHost, stream));
    if (!bug) OK(cudaStreamSynchronize(stream));
    EXPECT(pinned[31] == 32.0f);
    OK(cudaFreeHost(pinned));
    OK(cudaStreamDestroy(stream));
}

/* ---- Checks that have no wrong version. */

struct Results {
    unsigned ballot, permuted, any, all, total;
    float up, down, within16, value_of_3, gathered;
    int dot, odd_threads;
};

__global__ void collectives(Results *results) {
    const unsigned full = 0xffffffffu, lane = threadIdx.x % 32, half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    const float mine = (float)lane;
    float all[32];
    simt::gather_warp(full, mine, all);
    Results r;
    r.ballot = __ballot_sync(full, lane % 3 == 0);
    r.permuted = __byte_perm(0x33221180u, 0x77665544u, 0x8047u);
    r.any = (unsigned)__any_sync(half, lane == 20);
    r.all = (unsigned)__all_sync(half, lane < 16);
    r.total = __reduce_add_sync(full, lane);
    r.up = __shfl_up_sync(full, mine, 3);
    r.down = __shfl_down_sync(full, mine, 3, 16);
    r.within16 = __shfl_xor_sync(half, mine, 5, 16);
    r.value_of_3 = __shfl_sync(full, mine, 3, 8);
    r.gathered = all[31 - lane];
    r.dot = __dp4a((int)0xff02fe04u, 0x01020304, 100);
    r.odd_threads = __syncthreads_count(threadIdx.x % 2);
    results[threadIdx.x] = r;
}

void check_collectives() {
    Device<Results> results(64);
    collectives<<<1, 64>>>(results.data);
    std::vector<Results> got = results.download();
    for (unsigned i = 0; i < 64; i++) {
        unsigned lane = i % 32;
        const Results &r = got[i];
        EXPECT(r.ballot == 0x49249249u);
        EXPECT(r.permuted == 0xff804477u); /* bytes 7, 4, 0, and the sign of byte 0 */
        EXPECT(r.any == (lane >= 16) && r.all == (lane < 16));
        EXPECT(r.total == 496);
        EXPECT(r.up == (float)(lane < 3 ? lane : lane - 3));
        EXPECT(r.down == (float)(lane % 16 < 13 ? lane + 3 : lane));
        EXPECT(r.within16 == (float)(lane ^ 5));
        EXPECT(r.value_of_3 == (float)(lane / 8 * 8 + 3));
        EXPECT(r.gathered == (float)(31 - lane));
        EXPECT(r.dot == 100 - 1 + 2 * 2 - 2 * 3 + 4 * 4);
        EXPECT(r.odd_threads == 32);
    }
}

struct Shape {
    unsigned padding[500]; /* parameters may be large */
    int *counts;
};
template <int STEP, typename T> __global__ void count_threads(const __grid_constant__ Shape shape, T *places) {
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    unsigned size = blockDim.x * blockDim.y * blockDim.z;
    if (thread % 7 == 6) return; /* a thread may return where no barrier follows */
    atomicAdd(shape.counts, STEP);
    atomicMax(&shape.counts[1], (int)(block * size + thread));
    places[block * size + thread] = atomicCAS(&shape.counts[2], 5, 6) == 5 ? 1 : 0;
}

void check_grids() {
    Shape shape = {};
    Device<int> counts(std::vector<int>{0, 0, 5});
    Device<float> places(3 * 2 * 2 * 70);
    shape.counts = counts.data;
    count_threads<2, float><<<dim3(3, 2, 2), dim3(7, 5, 2)>>>(shape, places.data);
    std::vector<int> got = counts.download();
    EXPECT(got[0] == 2 * 12 * 60 && got[1] == 12 * 70 - 2 && got[2] == 6);
    float winners = 0.0f;
    for (float place : places.download()) winners += place == 1.0f; /* NaN where the thread returned */
    EXPECT(winners == 1.0f);
}

__constant__ int table[4] = {1, 2, 3, 4};
__global__ void read_table(int *out) {
    out[threadIdx.x] = table[threadIdx.x];
}

/* Each device has its own value of a variable. */
void check_symbols() {
    const int other[2] = {30, 40};
    OK(cudaSetDevice(1));
    OK(cudaMemcpyToSymbol(table, other, sizeof other, 2 * sizeof(int)));
    for (int device = 0; device < 2; device++) {
        OK(cudaSetDevice(device));
        Device<int> out(4);
        read_table<<<1, 4>>>(out.data);
        int symbol[4];
        OK(cudaMemcpyFromSymbol(symbol, table, sizeof symbol));
        std::vector<int> got = out.download();
        EXPECT(got[1] == 2 && got[3] == (device ? 40 : 4) && symbol[2] == (device ? 30 : 3));
    }
}

void check_errors() {
    Device<float> x(32);
    EXPECT(cudaMemcpy(x.data + 1, ramp(32).data(), 128, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    EXPECT(cudaPeekAtLastError() == cudaErrorInvalidValue);
    OK(cudaDeviceSynchronize());
    EXPECT(cudaGetLastError() == cudaErrorInvalidValue);
    OK(cudaGetLastError());
    EXPECT(cudaMemcpy(x.data, x.data, 128, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    EXPECT(cudaSetDevice(2) == cudaErrorInvalidDevice);
    EXPECT(cudaFree(x.data + 1) == cudaErrorInvalidValue);
    EXPECT(strcmp(cudaGetErrorName(cudaErrorInvalidDevice), "cudaErrorInvalidDevice") == 0);
    cudaGetLastError();

    const dim3 wrong[][2] = {{dim3(1), dim3(1025)}, {dim3(1, 65536), dim3(1)}, {dim3(1, 1, 65536), dim3(1)},
                             {dim3(0), dim3(1)},    {dim3(1), dim3(1, 0)},     {dim3(1), dim3(1, 1, 65)}};
    for (const auto &shape : wrong) {
        scale<<<shape[0], shape[1]>>>(x.data, 1.0f, 32);
        EXPECT(cudaGetLastError() == cudaErrorInvalidConfiguration);
    }
    scale<<<1, 1, 100 << 10>>>(x.data, 1.0f, 32);
    EXPECT(cudaGetLastError() == cudaErrorInvalidValue);
    OK(cudaFuncSetAttribute(scale, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10));
    scale<<<1, 1, 100 << 10>>>(x.data, 1.0f, 32);
    OK(cudaGetLastError());

    cudaStream_t stream;
    OK(cudaStreamCreate(&stream));
    OK(cudaSetDevice(1));
    scale<<<1, 1, 0, stream>>>(x.data, 1.0f, 32);
    EXPECT(cudaGetLastError() == cudaErrorInvalidResourceHandle);
    EXPECT(cudaMemcpy(x.data, ramp(32).data(), 128, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    OK(cudaSetDevice(0));
    OK(cudaStreamDestroy(stream));
    EXPECT(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle);
}

void check_memory() {
    size_t free_bytes, total, allocations = simt_live_allocations();
    OK(cudaMemGetInfo(&free_bytes, &total));
    EXPECT(total == (size_t)4096 << 20 && free_bytes == total);
    {
        Device<char> x(1000);
        void *pinned, *too_much = &pinned;
        OK(cudaHostAlloc(&pinned, 10, cudaHostAllocDefault));
        EXPECT(simt_live_allocations() == allocations + 2);
        EXPECT(simt_live_bytes(0) == 1000 && simt_live_bytes(1) == 0);
        EXPECT(cudaMalloc(&too_much, total - 999) == cudaErrorMemoryAllocation && !too_much);
        EXPECT((unsigned char)x.download()[999] == 0xff);
        cudaPointerAttributes attributes;
        OK(cudaPointerGetAttributes(&attributes, x.data + 999));
        EXPECT(attributes.type == cudaMemoryTypeDevice && attributes.device == 0 && !attributes.hostPointer);
        OK(cudaPointerGetAttributes(&attributes, pinned));
        EXPECT(attributes.type == cudaMemoryTypeHost && attributes.devicePointer == pinned);
        OK(cudaPointerGetAttributes(&attributes, &total));
        EXPECT(attributes.type == cudaMemoryTypeUnregistered);
        OK(cudaFreeHost(pinned));
    }
    EXPECT(simt_live_allocations() == allocations && simt_live_bytes(0) == 0);

    std::vector<float> x = ramp(12); /* [3, 4], of which the columns 1 and 2 */
    Device<float> columns(6);
    OK(cudaMemcpy2D(columns.data, 8, x.data() + 1, 16, 8, 3, cudaMemcpyHostToDevice));
    EXPECT((columns.download() == std::vector<float>{2, 3, 6, 7, 10, 11}));
    EXPECT(cudaMemcpy2D(columns.data, 4, x.data(), 16, 8, 3, cudaMemcpyHostToDevice) == cudaErrorInvalidPitchValue);
}

void check_streams() {
    cudaStream_t stream;
    cudaEvent_t start, end;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaEventCreate(&start));
    OK(cudaEventCreate(&end));
    EXPECT(simt_live_handles() == 3);

    std::vector<float> host = ramp(32), back(32);
    Device<float> x(32);
    OK(cudaEventRecord(start, stream));
    OK(cudaMemcpyAsync(x.data, host.data(), 128, cudaMemcpyHostToDevice, stream));
    host.assign(32, 0.0f); /* pageable memory was read by the call */
    scale<<<1, 32, 0, stream>>>(x.data, 3.0f, 32);
    OK(cudaEventRecord(end, stream));
    float milliseconds;
    EXPECT(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorNotReady);
    int polls = 0;
    while (cudaEventQuery(end) == cudaErrorNotReady) polls++;
    EXPECT(polls == 4);
    OK(cudaStreamQuery(stream));
    OK(cudaEventElapsedTime(&milliseconds, start, end));
    EXPECT(milliseconds >= 0.0f);
    OK(cudaMemcpyAsync(back.data(), x.data, 128, cudaMemcpyDeviceToHost, stream)); /* pageable: returns when copied */
    EXPECT(back[31] == 96.0f);
    OK(cudaEventDestroy(start));
    OK(cudaEventDestroy(end));
    OK(cudaStreamDestroy(stream));
    EXPECT(simt_live_handles() == 0);
}

/* Two streams captured into one graph, which runs as often as it is launched, with the values that memory has then. */
void check_graphs() {
    cudaStream_t stream, side;
    cudaEvent_t fork, join;
    float *pinned;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    OK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    OK(cudaMallocHost(&pinned, 128));
    Device<float> x(32);

    auto capture = [&](bool joined) {
        cudaGraph_t graph;
        OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        OK(cudaMemcpyAsync(x.data, pinned, 128, cudaMemcpyHostToDevice, stream));
        OK(cudaEventRecord(fork, stream));
        OK(cudaStreamWaitEvent(side, fork));
        scale<<<1, 32, 0, side>>>(x.data, 2.0f, 32);
        OK(cudaEventRecord(join, side));
        if (joined) OK(cudaStreamWaitEvent(stream, join));
        cudaError_t error = cudaStreamEndCapture(stream, &graph);
        EXPECT(error == (joined ? cudaSuccess : cudaErrorStreamCaptureUnjoined));
        return graph;
    };
    capture(false);
    cudaGetLastError();
    cudaGraph_t graph = capture(true);
    cudaGraphExec_t executable;
    OK(cudaGraphInstantiate(&executable, graph));
    OK(cudaGraphDestroy(graph));
    for (float value : {1.0f, 5.0f}) {
        std::fill(pinned, pinned + 32, value);
        OK(cudaGraphLaunch(executable, stream));
        OK(cudaStreamSynchronize(stream));
        EXPECT(x.download()[31] == 2.0f * value);
    }
    OK(cudaGraphExecDestroy(executable));

    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    EXPECT(cudaStreamSynchronize(stream) == cudaErrorStreamCaptureUnsupported);
    EXPECT(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated && !graph);

    OK(cudaFreeHost(pinned));
    OK(cudaEventDestroy(fork));
    OK(cudaEventDestroy(join));
    OK(cudaStreamDestroy(stream));
    OK(cudaStreamDestroy(side));
}

void check_fault_injection() {
    Device<float> x(32);
    void *p;
    size_t mallocs = simt_call_count("cudaMalloc"), any = simt_call_count("*");
    simt_fail_call("cudaMalloc", 2);
    OK(cudaMalloc(&p, 8));
    OK(cudaFree(p));
    EXPECT(cudaMalloc(&p, 8) == cudaErrorMemoryAllocation);
    OK(cudaMalloc(&p, 8));
    OK(cudaFree(p));
    EXPECT(simt_call_count("cudaMalloc") == mallocs + 3 && simt_call_count("*") == any + 5);

    cudaGetLastError();
    simt_fail_call("launch", 1);
    scale<<<1, 32>>>(x.data, 2.0f, 32);
    EXPECT(cudaGetLastError() == cudaErrorLaunchOutOfResources);
    simt_fail_call("*", 2);
    OK(cudaDeviceSynchronize());
    EXPECT(cudaSetDevice(0) == cudaErrorUnknown);
    simt_fail_call("cudaSetDevice", 1);
    simt_fail_call("*", 0);
    OK(cudaSetDevice(0));
}

/* Host threads that use different devices at once. */
void check_threads() {
    auto work = [](int device) {
        OK(cudaSetDevice(device));
        for (int i = 0; i < 8; i++) reduction(none);
    };
    std::thread other(work, 1);
    work(0);
    other.join();
}

/* With SIMT_NO_DEVICE=1. */
void check_no_device() {
    int count = -7;
    EXPECT(cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == -7);
    void *p;
    EXPECT(cudaMalloc(&p, 8) == cudaErrorNoDevice);
}

/* With SIMT_FAIL=cudaMalloc:2,cudaFree:1, SIMT_DEVICES=3 and SIMT_DEVICE_MB=1. */
void check_environment() {
    int count;
    void *p;
    OK(cudaGetDeviceCount(&count));
    EXPECT(count == 3);
    EXPECT(cudaMalloc(&p, (1 << 20) + 1) == cudaErrorMemoryAllocation);
    EXPECT(cudaMalloc(&p, 8) == cudaErrorMemoryAllocation);
    OK(cudaMalloc(&p, 1 << 20));
    EXPECT(cudaFree(p) == cudaErrorUnknown);
    OK(cudaFree(p));
}

/* For timing: many switches between threads. */
void speed() {
    std::vector<float> x = ramp(kColumns);
    Device<float> device_x((size_t)2000 * kColumns), sums(2000);
    OK(cudaMemset(device_x.data, 0, device_x.count * sizeof(float)));
    sum_rows<<<2000, kThreads, kThreads * sizeof(float)>>>(device_x.data, sums.data, kColumns, none);
    OK(cudaDeviceSynchronize());
}

struct Case {
    const char *name;
    void (*run)(bool bug);
};
#define REDUCTION(bug_) {#bug_, [](bool bug) { reduction(bug ? bug_ : none); }}
#define CASE(name) {#name, name}
#define CHECK(name) {#name, [](bool) { name(); }}
const Case cases[] = {
    REDUCTION(missing_barrier),
    REDUCTION(divergent_barrier),
    REDUCTION(divergent_shuffle),
    REDUCTION(shared_out_of_bounds),
    REDUCTION(dynamic_shared_out_of_bounds),
    REDUCTION(global_out_of_bounds),
    REDUCTION(misaligned_load),
    REDUCTION(bad_shift),
    REDUCTION(unwritten_shared),
    REDUCTION(trap),
    CASE(warp_order),
    CASE(other_device),
    CASE(other_device_hidden),
    CASE(host_pointer),
    CASE(host_access),
    CASE(use_after_free),
    CASE(wrong_stream),
    CASE(legacy_stream),
    CASE(early_reuse),
    CASE(missing_wait),
    CHECK(check_collectives),
    CHECK(check_grids),
    CHECK(check_symbols),
    CHECK(check_errors),
    CHECK(check_memory),
    CHECK(check_streams),
    CHECK(check_graphs),
    CHECK(check_fault_injection),
    CHECK(check_threads),
    CHECK(check_no_device),
    CHECK(check_environment),
    CHECK(speed),
};

} // namespace

int main(int count, char **arguments) {
    for (const Case &c : cases) {
        if (count < 2 || strcmp(c.name, arguments[1]) != 0) continue;
        c.run(count > 2 && strcmp(arguments[2], "bug") == 0);
        return 0;
    }
    printf("wrong: no case of that name\n");
    return 2;
}
