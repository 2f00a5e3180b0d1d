#include "error.h"

#include <cstdarg>
#include <cstdio>

#include "environment.h"
#include "vendor.h"

namespace coli {

namespace {

constexpr size_t kErrorBytes = 768;

/* A fixed buffer: reporting that memory ran out must not need memory. */
thread_local char error_text[kErrorBytes];
thread_local coli_status error_status = COLI_OK;

coli_log_fn log_callback = nullptr;
void *log_user = nullptr;

bool is_missing_device(cudaError_t result) {
    return result == cudaErrorNoDevice || result == cudaErrorInsufficientDriver || result == cudaErrorInvalidDevice;
}

coli_status status_of(cudaError_t result) {
    if (result == cudaErrorMemoryAllocation) return COLI_E_MEMORY;
    return is_missing_device(result) ? COLI_E_NO_DEVICE : COLI_E_DEVICE;
}

/* What a person can do about it, or "". */
const char *advice_for(cudaError_t result) {
    switch (result) {
    case cudaErrorMemoryAllocation:
        return "; free tensors or place fewer experts on this device";
    case cudaErrorNoKernelImageForDevice:
        return "; this build has no code for the GPU, see coli_cuda_build_info()";
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
        return "; the device context is lost, the process must restart to use the GPU";
    default:
        return "";
    }
}

} // namespace

bool fail(coli_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text, kErrorBytes, format, arguments);
    va_end(arguments);
    error_status = status;
    log_line(1, error_text);
    return false;
}

bool succeeded(cudaError_t result, const char *what, ...) {
    if (result == cudaSuccess) return true;
    (void)cudaGetLastError();
    char tried[kErrorBytes / 2];
    va_list arguments;
    va_start(arguments, what);
    vsnprintf(tried, sizeof tried, what, arguments);
    va_end(arguments);
    return fail(status_of(result), "%s: %s (%s)%s", tried, cudaGetErrorName(result), cudaGetErrorString(result),
                advice_for(result));
}

bool count_visible_devices(int *count) {
    *count = 0;
    cudaError_t result = cudaGetDeviceCount(count);
    if (result == cudaSuccess && *count > 0) return true;
    (void)cudaGetLastError();
    *count = 0;
    int driver = 0, runtime = 0;
    ignore(cudaDriverGetVersion(&driver));
    ignore(cudaRuntimeGetVersion(&runtime));
    if (result == cudaErrorInsufficientDriver && driver == 0)
        return fail(COLI_E_NO_DEVICE, "no device: no " COLI_GPU_VENDOR " driver is installed");
    if (result == cudaErrorInsufficientDriver) {
        return fail(COLI_E_NO_DEVICE,
                    "no device: the " COLI_GPU_VENDOR " driver offers " COLI_GPU_RUNTIME
                    " %d.%d, this library needs %d.%d; update the driver",
                    gpu_version_major(driver), gpu_version_minor(driver), gpu_version_major(runtime),
                    gpu_version_minor(runtime));
    }
    if (result == cudaSuccess || result == cudaErrorNoDevice)
        return fail(COLI_E_NO_DEVICE, "no device: " COLI_GPU_NONE_SEEN);
    return fail(COLI_E_NO_DEVICE, "no device: %s (%s)", cudaGetErrorName(result), cudaGetErrorString(result));
}

bool device_visible(int device) {
    int visible = 0;
    COLI_FORWARD(count_visible_devices(&visible));
    COLI_REFUSE_IF(device < 0 || device >= visible, COLI_E_NO_DEVICE, "device %d is not there, expected 0 to %d", device,
                   visible - 1);
    return true;
}

coli_status last_status() {
    return error_status;
}

const char *last_error() {
    return error_text;
}

void set_log(coli_log_fn log, void *user) {
    log_callback = log;
    log_user = user;
}

void log_line(int level, const char *line) {
    static const char *const names[] = {"error", "warning", "information"};
    if (log_callback) {
        log_callback(level, line, log_user);
        return;
    }
    if (switched_on("COLI_LOG")) fprintf(stderr, COLI_GPU_LIBRARY ": %s: %s\n", names[level], line);
}

} // namespace coli
