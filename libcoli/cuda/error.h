/* error.h - why a call failed: thread-local text and status, one line per check, and the log callback. */
#ifndef COLI_CUDA_ERROR_H
#define COLI_CUDA_ERROR_H

#include "coli/coli_cuda.h"
#include "gpu.h"

/* Has GCC and Clang check a printf format. */
#if defined(__GNUC__)
#define COLI_PRINTF(format_number, first_argument) __attribute__((format(printf, format_number, first_argument)))
#else
#define COLI_PRINTF(format_number, first_argument)
#endif

namespace coli {

/* Keeps the text for coli_cuda_last_error(), logs it, and returns false. */
COLI_PRINTF(2, 3) bool fail(coli_status status, const char *format, ...);

/* True for cudaSuccess. Otherwise consumes the runtime's sticky error, so that it cannot taint the next check, and fails
 * with `what`, the runtime's name and text of the error, and what to do where that is known. */
COLI_PRINTF(2, 3) bool succeeded(cudaError_t result, const char *what, ...);

/* For calls whose failure changes nothing, such as those that clean up: keeps it from tainting the next check. */
inline void ignore(cudaError_t result) {
    if (result != cudaSuccess) (void)cudaGetLastError();
}

/* Visible devices; false with the reason (no driver, driver too old, no GPU) when there are none. */
bool count_visible_devices(int *count);
/* Whether `device` is one of them; if not, fails with the reason. */
bool device_visible(int device);

coli_status last_status();
const char *last_error();
void set_log(coli_log_fn log, void *user);
void log_line(int level, const char *line);

} // namespace coli

/* For functions that return false (or 0) on failure. */
#define COLI_REFUSE_IF(condition, status, ...)                                                                             \
    do {                                                                                                                   \
        if (condition) return ::coli::fail(status, __VA_ARGS__);                                                           \
    } while (0)

#define COLI_FORWARD(call)                                                                                                 \
    do {                                                                                                                   \
        if (!(call)) return false;                                                                                         \
    } while (0)

#endif
