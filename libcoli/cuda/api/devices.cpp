/* api/devices.cpp - devices, tables, statistics: entry points of coli_cuda.h. */
#include <cstdio>

#include "../context.h"
#include "../tensor.h"

using namespace coli;

namespace {

bool device_list_valid(const int *devices, int count) {
    COLI_REFUSE_IF(!devices, COLI_E_ARGUMENT, "the device list is NULL");
    COLI_REFUSE_IF(count < 1 || count > COLI_CUDA_MAX_DEVICES, COLI_E_ARGUMENT, "a list of %d devices, expected 1 to %d",
                   count, COLI_CUDA_MAX_DEVICES);
    for (int i = 0; i < count; i++) {
        COLI_FORWARD(device_visible(devices[i]));
        for (int j = 0; j < i; j++)
            COLI_REFUSE_IF(devices[j] == devices[i], COLI_E_ARGUMENT, "device %d is listed twice", devices[i]);
    }
    return true;
}

bool already_open_as(const int *devices, int count) {
    const auto &open = contexts();
    if (open.size() != static_cast<size_t>(count)) return false;
    for (int i = 0; i < count; i++) {
        if (open[i]->device != devices[i]) return false;
    }
    return true;
}

/* What the statistics calls report, before NULL pointers are left out. */
struct GroupTotals {
    uint64_t calls = 0, experts = 0, rows = 0;
    double h2d_ms = 0, kernel_ms = 0, d2h_ms = 0;

    void add(const GroupCounters &counters) {
        calls += counters.calls;
        experts += counters.experts;
        rows += counters.rows;
        std::lock_guard<std::mutex> lock(counters.times_mutex);
        h2d_ms += counters.h2d_ms;
        kernel_ms += counters.kernel_ms;
        d2h_ms += counters.d2h_ms;
    }
};

template <class T> void store(T *target, T value) {
    if (target) *target = value;
}

void store_totals(const GroupTotals &totals, uint64_t *calls, uint64_t *experts, uint64_t *rows, double *h2d_ms,
                  double *kernel_ms, double *d2h_ms) {
    store(calls, totals.calls);
    store(experts, totals.experts);
    store(rows, totals.rows);
    store(h2d_ms, totals.h2d_ms);
    store(kernel_ms, totals.kernel_ms);
    store(d2h_ms, totals.d2h_ms);
}

} // namespace

int coli_cuda_init(const int *devices, int count) {
    COLI_FORWARD(device_list_valid(devices, count));
    if (already_open_as(devices, count)) return 1;
    COLI_REFUSE_IF(!contexts().empty(), COLI_E_STATE,
                   "another list of %zu device(s) is configured; call coli_cuda_shutdown before changing it",
                   contexts().size());
    return open_contexts(devices, count);
}

void coli_cuda_shutdown(void) {
    close_contexts();
}

int coli_cuda_available_device_count(void) {
    int count;
    count_visible_devices(&count);
    return count;
}

int coli_cuda_device_count(void) {
    return static_cast<int>(contexts().size());
}

int coli_cuda_device_at(int index) {
    const auto &open = contexts();
    return index >= 0 && static_cast<size_t>(index) < open.size() ? open[index]->device : -1;
}

int coli_cuda_mem_info(int device, size_t *free_bytes, size_t *total_bytes) {
    Context *context = find_context(device);
    if (!context) return 0;
    COLI_REFUSE_IF(!free_bytes || !total_bytes, COLI_E_ARGUMENT, "free_bytes and total_bytes must not be NULL");
    DeviceCall call(*context);
    size_t free_now, total;
    COLI_FORWARD(call.ok() && succeeded(cudaMemGetInfo(&free_now, &total), "asking device %d for its memory", device));
    *free_bytes = free_now;
    *total_bytes = total;
    return 1;
}

int coli_cuda_device_integrated(int device) {
    COLI_FORWARD(device_visible(device));
    int integrated = 0;
    COLI_FORWARD(succeeded(cudaDeviceGetAttribute(&integrated, cudaDevAttrIntegrated, device), "asking device %d", device));
    return integrated;
}

int coli_cuda_device_name(int device, char *name, size_t size) {
    COLI_FORWARD(device_visible(device));
    COLI_REFUSE_IF(!name || size == 0, COLI_E_ARGUMENT, "room for the name is %zu bytes at %p", size,
                   static_cast<void *>(name));
    cudaDeviceProp properties;
    COLI_FORWARD(succeeded(cudaGetDeviceProperties(&properties, device), "asking device %d for its name", device));
    snprintf(name, size, "%s", properties.name);
    return 1;
}

int coli_cuda_e8_set_grid(const void *grid) {
    COLI_REFUSE_IF(!grid, COLI_E_ARGUMENT, "the E8 codebook is NULL, expected %d bytes", COLI_E8_CODEBOOK_BYTES);
    COLI_REFUSE_IF(contexts().empty(), COLI_E_STATE,
                   "no device is configured: call coli_cuda_init before coli_cuda_e8_set_grid");
    return publish_codebook(grid);
}

int coli_cuda_fp8_set_lut(const float *lut) {
    COLI_REFUSE_IF(!lut, COLI_E_ARGUMENT, "the fp8 table is NULL, expected 256 floats");
    COLI_REFUSE_IF(contexts().empty(), COLI_E_STATE,
                   "no device is configured: call coli_cuda_init before coli_cuda_fp8_set_lut");
    return publish_fp8_table(lut);
}

void coli_cuda_stats(int device, size_t *tensor_count, size_t *tensor_bytes) {
    size_t count = 0, bytes = 0;
    for (const auto &context : contexts()) {
        if (device >= 0 && context->device != device) continue;
        count += context->tensor_count;
        bytes += context->tensor_bytes;
    }
    store(tensor_count, count);
    store(tensor_bytes, bytes);
}

void coli_cuda_group_stats(uint64_t *calls, uint64_t *experts, uint64_t *rows, double *h2d_ms, double *kernel_ms,
                           double *d2h_ms) {
    GroupTotals totals;
    for (const auto &[device, counters] : group_counters()) totals.add(counters);
    store_totals(totals, calls, experts, rows, h2d_ms, kernel_ms, d2h_ms);
}

void coli_cuda_group_stats_device(int device, uint64_t *calls, uint64_t *experts, uint64_t *rows, double *h2d_ms,
                                  double *kernel_ms, double *d2h_ms) {
    GroupTotals totals;
    const auto found = group_counters().find(device);
    if (found != group_counters().end()) totals.add(found->second);
    store_totals(totals, calls, experts, rows, h2d_ms, kernel_ms, d2h_ms);
}
