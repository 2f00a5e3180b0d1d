/* coli_common.h - what both public headers share: visibility, weight formats, status codes, the log callback.
 *
 * Include coli.h (CPU core) or coli_cuda.h (GPU backend); either brings this file in. */
#ifndef COLI_COMMON_H
#define COLI_COMMON_H

#include <stddef.h>
#include <stdint.h>

#include "coli_version.h"

/* COLI_STATIC is for programs that hold the functions themselves, as with coli_loader.c: Windows then expects no DLL. */
#if defined(COLI_STATIC)
#define COLI_API
#elif defined(_WIN32)
#if defined(COLI_BUILD)
#define COLI_API __declspec(dllexport)
#else
#define COLI_API __declspec(dllimport)
#endif
#else
#define COLI_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Weight formats. Every matrix is [O, I] row-major: O rows (outputs) of I columns (inputs); y[s,o] = sum_i x[s,i] w[o,i].
 * The numbers are those of the C ABI and never change; outside it, formats go by the names in the comments.
 * Byte layouts: docs/formats.md in the source. */
typedef enum coli_format {
    COLI_F32 = 0,          /* "f32"            4 bytes a weight, no scales                                      */
    COLI_INT8 = 1,         /* "int8"           1 byte, one f32 scale a row                                      */
    COLI_INT4 = 2,         /* "int4"           2 a byte, one f32 scale a row                                    */
    COLI_INT2 = 3,         /* "int2"           4 a byte, one f32 scale a row                                    */
    COLI_INT4_GROUPED = 4, /* "int4-g64", ...  2 a byte, one f32 scale for each group of columns in a row       */
    COLI_INT3_G64 = 5,     /* "int3-g64"       24 bytes and one f32 scale for 64 columns; CPU only              */
    COLI_E8 = 6,           /* "e8"             98-byte super-blocks of 256 weights, scales inside               */
    COLI_MXFP4 = 7,        /* "mxfp4"          2 a byte, one ue8m0 byte for 32 columns                          */
    COLI_FP8_B128 = 8      /* "fp8-e4m3-b128"  1 byte, one f32 scale for each 128 x 128 block                   */
} coli_format;

/* How E8 chooses scales, entries and signs. All give the same bytes on disk, which any decoder reads. */
typedef enum coli_e8_quality {
    COLI_E8_SEARCH = 0, /* super-scale, codes, entries and flipped signs chosen together, for the smallest squared error */
    COLI_E8_REFERENCE = 1, /* the reference rule of docs/formats.md, to the bit */
    COLI_E8_CALIBRATED = 2 /* for the smallest error of the outputs: each column's error is made up for by those after it */
} coli_e8_quality;

/* Status of a call. Values are pinned; each group of ten has room to grow. */
typedef enum coli_status {
    COLI_OK = 0,
    /* the caller's arguments */
    COLI_E_ARGUMENT = 10,   /* NULL, a count out of range, a flag that does not exist */
    COLI_E_SHAPE = 11,      /* rows, columns or group size do not fit each other */
    COLI_E_FORMAT = 12,     /* unknown format, or one this call cannot take */
    COLI_E_NOT_FINITE = 13, /* NaN or infinity where a finite number is needed */
    COLI_E_STATE = 14,      /* called at the wrong time: not initialised, nothing issued, tensor no longer valid */
    /* resources */
    COLI_E_MEMORY = 20, /* host or device memory ran out */
    /* devices */
    COLI_E_NO_DEVICE = 30, /* no driver, no GPU, or an ordinal that is not there */
    COLI_E_DEVICE = 31,    /* the GPU runtime reported an error */
    COLI_E_INJECTED = 32,  /* COLI_GPU_FAIL_AFTER made this call fail */
    /* libraries and features */
    COLI_E_NOT_PROVIDED = 40, /* this build or this library does not offer it */
    COLI_E_NO_LIBRARY = 41,   /* the GPU library was not found or did not load */
    COLI_E_ABI = 42           /* the GPU library speaks another ABI major */
} coli_status;

/* Receives one line of text, without a newline. `level`: 0 error, 1 warning, 2 information. May be called from any
 * thread that calls the library; must not call the library. The libraries themselves never print. */
typedef void (*coli_log_fn)(int level, const char *line, void *user);

#ifdef __cplusplus
}
#endif
#endif
