/* status.h - how the core fails: each check is one line, each failure a text that says what was expected and what came. */
#ifndef COLI_CORE_STATUS_H
#define COLI_CORE_STATUS_H

#include "../include/coli/coli.h"

/* Has the compiler check a printf format, the parameter of that number, against its arguments. Plain "printf" means the old
 * Microsoft one to gcc on Windows, which does not know %zu. */
#if defined(__MINGW32__) && !defined(__clang__)
#define COLI_PRINTF(format_number, first_argument) __attribute__((format(gnu_printf, format_number, first_argument)))
#else
#define COLI_PRINTF(format_number, first_argument) __attribute__((format(printf, format_number, first_argument)))
#endif

/* Keeps the text for coli_last_error() of this thread and returns `status`. The arguments may point into the text of the
 * last error, so that a caller can put its own words before it. */
coli_status coli_fail(coli_status status, const char *format, ...) COLI_PRINTF(2, 3);

/* Sends one line to the log: level 0 error, 1 warning, 2 information. */
void coli_log(int level, const char *format, ...) COLI_PRINTF(2, 3);

#define RETURN_ERROR(status, ...) return coli_fail(status, __VA_ARGS__)

#define RETURN_ERROR_IF(condition, status, ...)                                                                            \
    do {                                                                                                                   \
        if (condition) RETURN_ERROR(status, __VA_ARGS__);                                                                  \
    } while (0)

#define FORWARD_ERROR(call)                                                                                                \
    do {                                                                                                                   \
        coli_status forwarded = (call);                                                                                    \
        if (forwarded != COLI_OK) return forwarded;                                                                        \
    } while (0)

#endif
