/* selftest.cu - shows that simt.h runs correct programs correctly, and that it exposes the mistakes it is there for.
 *
 *   selftest NAME       runs a case, or a check of the runtime, as it should be: exit status 0
 *   selftest NAME bug   runs the case with its mistake put in: a report, or "wrong: ..." and exit status 1
 *
 * tests/test_simt_selftest.py knows which sanitizer or order of threads must notice which mistake. */
#include "ptx/barrier.cuh"
#include "ptx/bits.cuh"
#include "ptx/copy.cuh"
#include "ptx/dependent.cuh"
#include "ptx/mma.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

using namespace coli;

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

/* ---- Mistakes with the twins of PTX instructions. */

enum CopyBug {
    copies_right,
    async_missing_wait,
    async_missing_barrier,
    async_early_refill,
    async_misaligned,
    async_out_of_bounds,
    async_not_shared,
    bulk_missing_wait,
    bulk_early_release,
    bulk_overrun,
    bulk_too_few_bytes,
    bulk_too_many_bytes,
    bulk_misaligned,
    bulk_out_of_bounds,
    bulk_unpublished,
    bulk_left_behind,
    barrier_not_initialised,
    barrier_initialised_twice,
    named_barrier_missing,
    named_barrier_too_few,
    named_barrier_split_warp,
    named_barrier_counts,
};

constexpr int kTiles = 7, kTileFloats = 256, kStages = 3, kConsumers = kTileFloats / 4;

/* Each thread adds up the four floats behind its own of every tile; tiles come through two buffers. */
__global__ void add_async(const float *x, float *sums, CopyBug bug) {
    __shared__ __align__(16) float stages[2][kTileFloats];
    const int own = 4 * threadIdx.x, other = (own + 4) % kTileFloats;
    auto start = [&](int tile) {
        const float *from = x + tile * kTileFloats + own + (bug == async_misaligned) +
                            (bug == async_out_of_bounds && tile == kTiles - 1 ? kTileFloats : 0);
        if (tile < kTiles) copy_async_16(bug == async_not_shared ? sums : &stages[tile % 2][own], from);
        copy_async_commit();
    };
    start(0);
    float sum = 0.0f;
    for (int tile = 0; tile < kTiles; tile++) {
        start(tile + 1);
        if (bug == async_missing_wait)
            copy_async_wait<2>();
        else
            copy_async_wait<1>();
        if (bug != async_missing_barrier) __syncthreads();
        for (int i = 0; i < 4; i++) sum += stages[tile % 2][other + i];
        if (bug != async_early_refill) __syncthreads();
    }
    sums[threadIdx.x] = sum;
}

void async_copies(CopyBug bug) {
    std::vector<float> x = ramp(kTiles * kTileFloats);
    Device<float> device_x(x), sums(kConsumers);
    add_async<<<1, kConsumers>>>(device_x.data, sums.data, bug);
    OK(cudaGetLastError());
    std::vector<float> got = sums.download();
    for (int thread = 0; thread < kConsumers; thread++) {
        float sum = 0.0f;
        for (int tile = 0; tile < kTiles; tile++) {
            for (int i = 0; i < 4; i++) sum += x[tile * kTileFloats + (4 * thread + 4 + i) % kTileFloats];
        }
        EXPECT(got[thread] == sum);
    }
}

/* A warp fetches tiles into a ring; two others wait for each, add it up and hand its place back. The ring is larger than
 * the shared memory that a block has without asking. */
struct Ring {
    float stages[kStages][kTileFloats];
    uint64_t full[kStages], empty[kStages];
    float sums[kConsumers];
    float rest[12 << 10];
};

__device__ void produce(const float *x, Ring &ring, CopyBug bug) {
    for (int tile = 0; tile < kTiles; tile++) {
        const int stage = tile % kStages;
        const unsigned bytes = sizeof ring.stages[0];
        const bool last = tile == kTiles - 1;
        if (tile >= kStages && bug != bulk_overrun) barrier_wait(&ring.empty[stage], (tile / kStages - 1) % 2);
        barrier_expect(&ring.full[stage], bytes + (bug == bulk_too_few_bytes) * 16 - (bug == bulk_too_many_bytes) * 16);
        copy_bulk(ring.stages[stage],
                  x + tile * kTileFloats + (bug == bulk_misaligned) + (bug == bulk_out_of_bounds && last) * 4, bytes,
                  &ring.full[stage]);
    }
    if (bug == bulk_left_behind) copy_bulk(ring.rest, x, 16, &ring.empty[0]);
}

__device__ void consume(float *sum_of_all, Ring &ring, CopyBug bug) {
    const int me = threadIdx.x - 32;
    float sum = 0.0f;
    for (int tile = 0; tile < kTiles; tile++) {
        const int stage = tile % kStages;
        if (bug != bulk_missing_wait || me < 32 || tile < kTiles - 1) barrier_wait(&ring.full[stage], tile / kStages % 2);
        if (bug == bulk_early_release) barrier_arrive(&ring.empty[stage]);
        for (int i = 0; i < 4; i++) sum += ring.stages[stage][me + kConsumers * i];
        if (bug != bulk_early_release) barrier_arrive(&ring.empty[stage]);
    }
    ring.sums[me] = sum;
    if (bug == named_barrier_split_warp) {
        if (me < 16 || me >= 48) named_barrier_sync(2, 32);
    }
    if (bug == named_barrier_counts)
        named_barrier_sync(1, me < 32 ? 64 : 96);
    else if (bug != named_barrier_missing && !(bug == named_barrier_too_few && me == 40))
        named_barrier_sync(1, kConsumers);
    if (me != 0) return;
    for (int i = 1; i < kConsumers; i++) sum += ring.sums[i];
    *sum_of_all = sum;
}

__global__ void add_bulk(const float *x, float *sum, CopyBug bug) {
    dependency_wait();
    Ring &ring = *(Ring *)dynamic_shared();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; stage++) {
            barrier_init(&ring.full[stage], 1);
            barrier_init(&ring.empty[stage], kConsumers);
        }
        if (bug == barrier_initialised_twice) barrier_init(&ring.full[0], 1);
        if (bug != bulk_unpublished) barrier_init_fence();
    }
    if (bug != barrier_not_initialised) __syncthreads();
    if (threadIdx.x >= 32)
        consume(sum, ring, bug);
    else if (threadIdx.x == 0)
        produce(x, ring, bug);
    dependency_trigger();
}

cudaError_t launch_add_bulk(const float *x, float *sum, CopyBug bug) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = 1;
    config.blockDim = 32 + kConsumers;
    config.dynamicSmemBytes = sizeof(Ring);
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, add_bulk, x, sum, bug);
}

void bulk_copies(CopyBug bug) {
    std::vector<float> x = ramp(kTiles * kTileFloats);
    Device<float> device_x(x), sum(1);
    OK(cudaFuncSetAttribute(add_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Ring)));
    OK(launch_add_bulk(device_x.data, sum.data, bug));
    EXPECT(sum.download()[0] == std::accumulate(x.begin(), x.end(), 0.0f));
}

/* Products of small matrices on tensor cores, with the fragments as PTX lays them out. All sums are exact. */
struct Products {
    float c16[16][8], c8[16][8];
    int s8[16][8], u8s8[16][8];
};
struct Factors {
    float a[16][16], b[16][8];
    int8_t sa[16][32], sb[32][8];
    uint8_t ua[16][16];
};

__device__ uint32_t half_pair(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return __half_as_ushort(pair.x) | (uint32_t)__half_as_ushort(pair.y) << 16;
}
template <class Byte> __device__ uint32_t four_bytes(const Byte *first, int step) {
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) word |= (uint32_t)(uint8_t)first[i * step] << 8 * i;
    return word;
}

__global__ void multiply(const Factors *factors, Products *products, bool bug) {
    const Factors &f = *factors;
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    auto store = [&](auto(&c)[16][8], const auto(&values)[4]) {
        c[g][2 * t] = values[0];
        c[g][2 * t + 1] = values[1];
        c[g + 8][2 * t] = values[2];
        c[g + 8][2 * t + 1] = values[3];
    };
    uint32_t a[4] = {half_pair(f.a[g][2 * t], f.a[g][2 * t + 1]), half_pair(f.a[g + 8][2 * t], f.a[g + 8][2 * t + 1]),
                     half_pair(f.a[g][2 * t + 8], f.a[g][2 * t + 9]),
                     half_pair(f.a[g + 8][2 * t + 8], f.a[g + 8][2 * t + 9])};
    uint32_t b[2] = {half_pair(f.b[2 * t][g], f.b[2 * t + 1][g]), half_pair(f.b[2 * t + 8][g], f.b[2 * t + 9][g])};
    if (bug) a[1] = a[2]; /* rows and columns mistaken for each other */
    float c16[4] = {0.5f, 0.5f, 0.5f, 0.5f}, c8[4] = {};
    mma_m16n8k16(c16, a, b[0], b[1]);
    mma_m16n8k8(c8, a[0], a[1], b[0]);
    store(products->c16, c16);
    store(products->c8, c8);

    const uint32_t sa[4] = {four_bytes(&f.sa[g][4 * t], 1), four_bytes(&f.sa[g + 8][4 * t], 1),
                            four_bytes(&f.sa[g][4 * t + 16], 1), four_bytes(&f.sa[g + 8][4 * t + 16], 1)};
    const uint32_t sb[2] = {four_bytes(&f.sb[4 * t][g], 8), four_bytes(&f.sb[4 * t + 16][g], 8)};
    int s8[4] = {-7, -7, -7, -7}, u8s8[4] = {};
    mma_m16n8k32_s8(s8, sa, sb[0], sb[1]);
    mma_m16n8k16_u8s8(u8s8, four_bytes(&f.ua[g][4 * t], 1), four_bytes(&f.ua[g + 8][4 * t], 1), sb[0]);
    store(products->s8, s8);
    store(products->u8s8, u8s8);
}

void mma_fragments(bool bug) {
    std::vector<Factors> host(1);
    Factors &f = host[0];
    int next = 1;
    auto random = [&] { return (next = next * 5 % 8191) % 256; };
    for (auto &row : f.a)
        for (float &value : row) value = (float)(random() - 128) / 16;
    for (auto &row : f.b)
        for (float &value : row) value = (float)(random() - 128) / 4;
    for (auto &row : f.sa)
        for (int8_t &value : row) value = (int8_t)random();
    for (auto &row : f.sb)
        for (int8_t &value : row) value = (int8_t)random();
    for (auto &row : f.ua)
        for (uint8_t &value : row) value = (uint8_t)random();
    Device<Factors> factors(host);
    Device<Products> products(1);
    multiply<<<1, 32>>>(factors.data, products.data, bug);
    std::vector<Products> got = products.download();
    for (int row = 0; row < 16; row++) {
        for (int column = 0; column < 8; column++) {
            float c16 = 0.5f, c8 = 0.0f;
            int s8 = -7, u8s8 = 0;
            for (int k = 0; k < 16; k++) c16 += f.a[row][k] * f.b[k][column];
            for (int k = 0; k < 8; k++) c8 += f.a[row][k] * f.b[k][column];
            for (int k = 0; k < 32; k++) s8 += f.sa[row][k] * f.sb[k][column];
            for (int k = 0; k < 16; k++) u8s8 += f.ua[row][k] * f.sb[k][column];
            EXPECT(got[0].c16[row][column] == c16 && got[0].c8[row][column] == c8);
            EXPECT(got[0].s8[row][column] == s8 && got[0].u8s8[row][column] == u8s8);
        }
    }
}

/* All lanes take part in an mma, but it orders no memory. */
__global__ void multiply_and_exchange(float *out, bool divergent, bool unordered) {
    __shared__ float buffer[32];
    float c[4] = {};
    buffer[threadIdx.x] = 1.0f;
    if (!divergent || threadIdx.x < 16) mma_m16n8k8(c, 0, 0, 0);
    if (!unordered) __syncwarp();
    out[threadIdx.x] = buffer[31 - threadIdx.x] + c[0];
}

void mma_exchange(bool divergent, bool unordered) {
    Device<float> out(32);
    multiply_and_exchange<<<1, 32>>>(out.data, divergent, unordered);
    for (float value : out.download()) EXPECT(value == 1.0f);
}
void mma_divergent(bool bug) {
    mma_exchange(bug, false);
}
void mma_unordered(bool bug) {
    mma_exchange(false, bug);
}

__global__ void much_shared(float *out) {
    __shared__ float some[64 * 128];
    float *more = (float *)dynamic_shared();
    some[threadIdx.x] = more[threadIdx.x] = 1.0f;
    out[threadIdx.x] = some[threadIdx.x] + more[threadIdx.x];
}

void too_much_shared(bool bug) {
    Device<float> out(32);
    const size_t bytes = (227 << 10) - 64 * 128 * sizeof(float) + bug * 16;
    OK(cudaFuncSetAttribute(much_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    much_shared<<<1, 32, bytes>>>(out.data);
    EXPECT(out.download()[31] == 2.0f);
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

/* Threads 128 ... 255 meet as a warpgroup does, while others do not. */
SIMT_UNTRACED int from_group(int mine, unsigned other) {
    simt::Gathering<int> group(128, 128, mine, "from_group", simt::Location::here());
    return group[other];
}
__global__ void gather_group(int *out) {
    out[threadIdx.x] = threadIdx.x < 128 ? -1 : from_group((int)threadIdx.x, (threadIdx.x + 40) % 128);
}

void check_gathering() {
    Device<int> out(256);
    gather_group<<<1, 256>>>(out.data);
    std::vector<int> got = out.download();
    for (int i = 0; i < 256; i++) EXPECT(got[i] == (i < 128 ? -1 : 128 + (i + 40) % 128));
}

__device__ unsigned short bits_of(__half h) {
    return __half_as_ushort(h);
}
__global__ void round_halves(unsigned short *out) {
    auto half_of = [](unsigned short bits) { return __ushort_as_half(bits); };
    const __half one = half_of(0x3c00), above_one = half_of(0x3c01), below_one = half_of(0x3bff);
    const __half2 pair = __halves2half2(one, above_one);
    int n = 0;
    auto put = [&](__half2 value) {
        out[n++] = bits_of(__low2half(value));
        out[n++] = bits_of(__high2half(value));
    };
    put(__hadd2(pair, __half2half2(half_of(0x1000)))); /* half a unit in the last place: to even */
    put(__hsub2(pair, __half2half2(half_of(0x0c00)))); /* below one the unit is half as large */
    put(__hmul2(__halves2half2(above_one, half_of(0x7bff)), __halves2half2(above_one, above_one)));
    /* 1 + 2^-11 + 2^-24, which through float would become 1; the exact middle, which is even below */
    put(__hfma2(__half2half2(above_one), __half2half2(below_one), __halves2half2(half_of(0x0009), half_of(0x0008))));
    put(__floats2half2_rn(65519.9f, 0x1.8p-25f));
    put(__hneg2(pair));
    out[n++] = (unsigned short)__half22float2(pair).x;
    out[n++] = (unsigned short)(prmt(0x00008000u, 0, 0x9910u) >> 16);
    out[n++] = (unsigned short)rotl(0x80000001u, 4);
}

void check_halves() {
    const std::vector<unsigned short> expected = {0x3c00, 0x3c02, 0x3c00, 0x3c01, 0x3c02, 0x7c00, 0x3c01, 0x3c00,
                                                  0x7bff, 0x0001, 0xbc00, 0xbc01, 1,      0xffff, 0x0018};
    Device<unsigned short> out(expected.size());
    round_halves<<<1, 1>>>(out.data);
    std::vector<unsigned short> got = out.download();
    for (size_t i = 0; i < expected.size(); i++) EXPECT(got[i] == expected[i]);
}

template <int A, int B> __global__ void trap_at(int thread) {
    if ((int)threadIdx.x == thread) __trap();
}

/* cudaLaunchKernelEx: its errors, and a name for reports though the kernel is an argument like others. */
void launch_ex(bool bug) {
    Device<float> x(ramp(32));
    cudaLaunchConfig_t config = {};
    config.gridDim = 1;
    config.blockDim = 32;
    OK(cudaLaunchKernelEx(&config, scale, x.data, 2.0f, 32));
    EXPECT(x.download()[31] == 64.0f);
    void (*kernel)(float *, float, int) = scale;
    OK(cudaLaunchKernelEx(&config, kernel, x.data, 2, 32)); /* arguments convert */
    EXPECT(x.download()[31] == 128.0f);

    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    config.attrs = &attribute;
    config.numAttrs = 1;
    EXPECT(cudaLaunchKernelEx(&config, kernel, x.data, 2, 32) == cudaErrorNotSupported);
    config.numAttrs = 0;
    config.dynamicSmemBytes = 100 << 10;
    EXPECT(cudaLaunchKernelEx(&config, much_shared, x.data) == cudaErrorInvalidValue);
    cudaFuncAttributes attributes;
    OK(cudaFuncGetAttributes(&attributes, much_shared));
    EXPECT(attributes.maxDynamicSharedSizeBytes == 48 << 10);
    EXPECT(cudaFuncSetAttribute(much_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, (227 << 10) + 1) ==
           cudaErrorInvalidValue);
    cudaGetLastError();
    config.dynamicSmemBytes = 0;
    simt_fail_call("launch", 1);
    EXPECT(cudaLaunchKernelEx(&config, kernel, x.data, 2, 32) == cudaErrorLaunchOutOfResources);
    EXPECT(cudaGetLastError() == cudaErrorLaunchOutOfResources);
    OK(cudaLaunchKernelEx(&config, trap_at<1, (2 > 1)>, bug ? 3 : -1));
    OK(cudaDeviceSynchronize());
}

/* With SIMT_CAPABILITY=80. */
void check_capability(bool bug) {
    int major, minor, shared;
    OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 1));
    OK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 1));
    OK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 1));
    EXPECT(major == 8 && minor == 0 && shared == 163 << 10);
    EXPECT(cudaFuncSetAttribute(add_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, (163 << 10) + 1) ==
           cudaErrorInvalidValue);
    cudaGetLastError();
    OK(cudaFuncSetAttribute(add_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, 163 << 10));
    async_copies(copies_right);
    mma_fragments(false);
    Device<float> x(kTiles * kTileFloats), sum(1);
    EXPECT(launch_add_bulk(x.data, sum.data, copies_right) == cudaErrorNotSupported);
    if (bug) add_bulk<<<1, 96, sizeof(Ring)>>>(x.data, sum.data, copies_right);
    OK(cudaDeviceSynchronize());
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
#define ASYNC(bug_) {#bug_, [](bool bug) { async_copies(bug ? bug_ : copies_right); }}
#define BULK(bug_) {#bug_, [](bool bug) { bulk_copies(bug ? bug_ : copies_right); }}
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
    ASYNC(async_missing_wait),
    ASYNC(async_missing_barrier),
    ASYNC(async_early_refill),
    ASYNC(async_misaligned),
    ASYNC(async_out_of_bounds),
    ASYNC(async_not_shared),
    BULK(bulk_missing_wait),
    BULK(bulk_early_release),
    BULK(bulk_overrun),
    BULK(bulk_too_few_bytes),
    BULK(bulk_too_many_bytes),
    BULK(bulk_misaligned),
    BULK(bulk_out_of_bounds),
    BULK(bulk_unpublished),
    BULK(bulk_left_behind),
    BULK(barrier_not_initialised),
    BULK(barrier_initialised_twice),
    BULK(named_barrier_missing),
    BULK(named_barrier_too_few),
    BULK(named_barrier_split_warp),
    BULK(named_barrier_counts),
    CASE(mma_fragments),
    CASE(mma_divergent),
    CASE(mma_unordered),
    CASE(too_much_shared),
    CASE(launch_ex),
    CASE(other_device),
    CASE(other_device_hidden),
    CASE(host_pointer),
    CASE(host_access),
    CASE(use_after_free),
    CASE(wrong_stream),
    CASE(legacy_stream),
    CASE(early_reuse),
    CASE(missing_wait),
    CASE(check_capability),
    CHECK(check_collectives),
    CHECK(check_gathering),
    CHECK(check_halves),
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
