/* status.c - texts of errors, names of statuses, the log. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "status.h"

#define MESSAGE_BYTES 2048 /* longer messages are cut; fixed, so that running out of memory can be reported too */

static _Thread_local char last_error[MESSAGE_BYTES];

static coli_log_fn log_callback;
static void *log_user;

coli_status coli_fail(coli_status status, const char *format, ...) {
    char message[MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    memcpy(last_error, message, sizeof message);
    return status;
}

const char *coli_last_error(void) {
    return last_error;
}

const char *coli_status_string(coli_status status) {
    switch (status) {
    case COLI_OK:
        return "COLI_OK";
    case COLI_E_ARGUMENT:
        return "COLI_E_ARGUMENT";
    case COLI_E_SHAPE:
        return "COLI_E_SHAPE";
    case COLI_E_FORMAT:
        return "COLI_E_FORMAT";
    case COLI_E_NOT_FINITE:
        return "COLI_E_NOT_FINITE";
    case COLI_E_STATE:
        return "COLI_E_STATE";
    case COLI_E_MEMORY:
        return "COLI_E_MEMORY";
    case COLI_E_NO_DEVICE:
        return "COLI_E_NO_DEVICE";
    case COLI_E_DEVICE:
        return "COLI_E_DEVICE";
    case COLI_E_INJECTED:
        return "COLI_E_INJECTED";
    case COLI_E_NOT_PROVIDED:
        return "COLI_E_NOT_PROVIDED";
    case COLI_E_NO_LIBRARY:
        return "COLI_E_NO_LIBRARY";
    case COLI_E_ABI:
        return "COLI_E_ABI";
    }
    return "unknown status";
}

void coli_set_log(coli_log_fn log, void *user) {
    log_callback = log;
    log_user = user;
}

static int log_to_stderr(void) {
    const char *wanted = getenv("COLI_LOG");
    return wanted && strcmp(wanted, "1") == 0;
}

void coli_log(int level, const char *format, ...) {
    static const char *const names[] = {"error", "warning", "info"};
    if (!log_callback && !log_to_stderr()) return;
    char line[MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (log_callback) {
        log_callback(level, line, log_user);
    } else {
        fprintf(stderr, "libcoli: %s: %s\n", names[level], line);
    }
}
