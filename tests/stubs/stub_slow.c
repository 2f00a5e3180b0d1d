/* stub_slow.c - a GPU library whose experts give back their rows after a while: y = x after STUB_DELAY_US microseconds,
 * slept, so that the processor is free meanwhile. For measurements of what a host does around its calls. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "coli/coli_cuda.h"

struct ColiCudaTensor {
    int device, rows, columns;
    size_t bytes;
};

static struct timespec ready_at;
static float *issued;
static size_t issued_floats, capacity;

static long delay_ns(void) {
    const char *text = getenv("STUB_DELAY_US");
    return text ? 1000 * atol(text) : 0;
}

static struct timespec after_delay(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_nsec += delay_ns();
    at.tv_sec += at.tv_nsec / 1000000000;
    at.tv_nsec %= 1000000000;
    return at;
}

static void sleep_until(struct timespec at) {
    if (delay_ns()) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
}

int coli_cuda_abi_version(void) {
    return COLI_CUDA_ABI_MAJOR * 1000 + COLI_CUDA_ABI_MINOR;
}
const char *coli_cuda_last_error(void) {
    return "";
}
coli_status coli_cuda_last_status(void) {
    return COLI_OK;
}
int coli_cuda_init(const int *devices, int count) {
    return devices != NULL && count == 1;
}
void coli_cuda_shutdown(void) {}
int coli_cuda_available_device_count(void) {
    return 1;
}
int coli_cuda_device_count(void) {
    return 1;
}
int coli_cuda_device_at(int index) {
    return index ? -1 : 0;
}
int coli_cuda_mem_info(int device, size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = *total_bytes = (size_t)1 << 40;
    return device == 0;
}
void coli_cuda_stats(int device, size_t *count, size_t *bytes) {
    (void)device;
    *count = *bytes = 0;
}
int coli_cuda_e8_set_grid(const void *grid) {
    return grid != NULL;
}
int coli_cuda_tensor_set_rotated(ColiCudaTensor *tensor, int rotated) {
    return tensor != NULL && rotated >= 0;
}
int coli_cuda_tensor_upload(ColiCudaTensor **tensor, const void *weights, const float *scales, int fmt, int I, int O,
                            int device) {
    (void)scales, (void)fmt;
    *tensor = malloc(sizeof **tensor);
    if (*tensor) **tensor = (ColiCudaTensor){device, O, I, (size_t)O * (size_t)I};
    return *tensor != NULL && weights != NULL;
}
int coli_cuda_tensor_upload_g(ColiCudaTensor **tensor, const void *weights, const float *scales, int fmt, int I, int O,
                              int device, int gs) {
    return gs > 0 && coli_cuda_tensor_upload(tensor, weights, scales, fmt, I, O, device);
}
int coli_cuda_tensor_update(ColiCudaTensor *tensor, const void *weights, const float *scales) {
    (void)scales;
    return tensor && weights;
}
void coli_cuda_tensor_free(ColiCudaTensor *tensor) {
    free(tensor);
}
int coli_cuda_matmul(ColiCudaTensor **tensor, float *y, const float *x, const void *weights, const float *scales, int fmt,
                     int S, int I, int O, int device, int gs) {
    (void)tensor, (void)y, (void)x, (void)weights, (void)scales, (void)fmt, (void)S, (void)I, (void)O, (void)device,
        (void)gs;
    return 0;
}

static size_t floats_of(ColiCudaTensor *const *gates, const int *rows, int count) {
    size_t sum = 0;
    for (int i = 0; i < count; i++) sum += (size_t)rows[i];
    return sum * (size_t)gates[0]->columns;
}

int coli_cuda_expert_group(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                           const int *rows, int count, float *y, const float *x) {
    (void)ups, (void)downs;
    struct timespec at = after_delay();
    memcpy(y, x, floats_of(gates, rows, count) * sizeof *y);
    sleep_until(at);
    return 1;
}
int coli_cuda_expert_mlp(ColiCudaTensor *gate, ColiCudaTensor *up, ColiCudaTensor *down, float *y, const float *x, int S) {
    ColiCudaTensor *const gates[] = {gate}, *const ups[] = {up}, *const downs[] = {down};
    return coli_cuda_expert_group(gates, ups, downs, &S, 1, y, x);
}
static int give_after_delay(size_t floats) {
    if (floats > capacity) issued = realloc(issued, (capacity = floats) * sizeof *issued);
    issued_floats = floats;
    return issued != NULL;
}

int coli_cuda_expert_group_issue(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                                 const int *rows, int count, const float *x) {
    (void)ups, (void)downs;
    ready_at = after_delay();
    if (!give_after_delay(floats_of(gates, rows, count))) return 0;
    memcpy(issued, x, issued_floats * sizeof *issued);
    return 1;
}
int coli_cuda_expert_group_issue_sum(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                                     const int *rows, int count, const float *x, int x_rows, const int *x_index, int tokens,
                                     const int *row_tokens, const float *row_weights) {
    (void)ups, (void)downs, (void)x_rows;
    size_t D = (size_t)gates[0]->columns, total = floats_of(gates, rows, count) / D;
    ready_at = after_delay();
    if (!give_after_delay((size_t)tokens * D)) return 0;
    memset(issued, 0, issued_floats * sizeof *issued);
    for (size_t r = 0; r < total; r++) {
        for (size_t i = 0; i < D; i++)
            issued[(size_t)row_tokens[r] * D + i] += row_weights[r] * x[(size_t)x_index[r] * D + i];
    }
    return 1;
}
const float *coli_cuda_expert_group_take(int device) {
    sleep_until(ready_at);
    return device == 0 ? issued : NULL;
}
