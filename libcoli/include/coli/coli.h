/* coli.h - low-bit expert weights on the CPU, and the loader of the GPU backend.
 *
 * Introduction
 *   libcoli keeps the expert weights of mixture-of-experts models in low-bit formats, above all E8 (3.0625 bits a
 *   weight), and computes y = down(silu(gate x) * (up x)) with them. Four ways to use it, simplest first:
 *
 *     1. Encode, decode and multiply on the CPU:        coli_encode, coli_decode, coli_matmul, coli_expert_mlp
 *     2. Let the GPU do what it can, the CPU the rest:  coli_backend_open, coli_place, coli_placed_matmul, ...
 *     3. Run whole MoE layers on GPUs and CPU at once:  coli_moe.h
 *     4. Call the GPU backend itself:                   coli_cuda.h
 *
 * Conventions
 *   - Matrices are row-major float32 unless a format says otherwise; activations x are [S, I], results y are [S, O].
 *   - Functions return a coli_status; anything but COLI_OK leaves outputs untouched and coli_last_error() says what was
 *     expected and what came. No function prints, exits or keeps a pointer unless its comment says so.
 *   - All functions may be called from any thread at once, except where a comment says otherwise.
 *   - E8 weights are stored rotated: a row w is kept as rotate(w), so the activations that meet it must be rotated too
 *     (coli_rotate_rows). coli_matmul never rotates. coli_expert_mlp takes x already rotated where gate and up are
 *     rotated, and rotates the hidden rows itself where down is. That is the GPU backend's rule as well.
 */
#ifndef COLI_H
#define COLI_H

#include "coli_common.h"

#ifdef __cplusplus
extern "C" {
#endif

/*------   Version, errors, log   ------*/

/* COLI_VERSION_NUMBER of the library that runs. */
COLI_API int coli_version_number(void);
/* "0.1.0". Static. */
COLI_API const char *coli_version_string(void);
/* COLI_ABI_MAJOR * 1000 + COLI_ABI_MINOR of the library that runs. */
COLI_API int coli_abi_version(void);
/* One line: version, compiler, instruction sets built in, OpenMP. Static. */
COLI_API const char *coli_build_info(void);
/* Name of a status, such as "COLI_E_SHAPE"; "unknown status" for other numbers. Static. */
COLI_API const char *coli_status_string(coli_status status);
/* What the last failing call of this thread expected and what it got; "" when none failed yet. The text belongs to the
 * library and lives until the thread's next failing call. */
COLI_API const char *coli_last_error(void);
/* Sends log lines to `log` (NULL: back to the default, which is silence, or stderr where COLI_LOG=1). Not to be called
 * while other threads use the library. */
COLI_API void coli_set_log(coli_log_fn log, void *user);

/*------   Instruction set and threads   ------*/

/* The kernels in use: "avx512", "avx2" or "scalar". The best that the processor runs, unless COLI_ISA names another. */
COLI_API const char *coli_isa(void);
/* Forces one of the names above, for tests and measurements; NULL returns to the default. COLI_E_NOT_PROVIDED where the
 * processor or the build lacks it. Not to be called while other threads compute. */
COLI_API coli_status coli_set_isa(const char *name);
/* CPU threads a call may use; 0 returns to the default (OMP_NUM_THREADS, or the cores available). Results do not depend
 * on it. A forked child computes with one. */
COLI_API coli_status coli_set_threads(int threads);
COLI_API int coli_threads(void);

/*------   Formats   ------*/

typedef struct coli_format_info {
    coli_format format;
    const char *name;        /* "e8"; "int4-g64" for the grouped format, whose group size is free */
    const char *scale_dtype; /* "none", "float32" or "uint8" */
    double bits_per_weight;  /* of a large matrix, scales included; the grouped format at a group size of 64 */
    int scale_columns;       /* columns of a row that share a scale, where the format fixes their number; 0 where the whole
                              * row does, where group_size says it, and where there are no scales */
    int can_encode;          /* coli_encode takes it */
    int on_gpu;              /* the GPU ABI takes it */
    const char *summary;     /* one line for a person */
} coli_format_info;

/* The formats in order of their numbers: index 0 ... coli_format_count() - 1. NULL past the end. Static. */
COLI_API int coli_format_count(void);
COLI_API const coli_format_info *coli_format_get(int format);
/* "e8" -> COLI_E8, 0; "int4-g32" -> COLI_INT4_GROUPED, 32. Either result pointer may be NULL. COLI_E_FORMAT for a name
 * that does not exist; the error lists those that do. */
COLI_API coli_status coli_format_parse(const char *name, int *format, int *group_size);

/* Bytes of the weights of one row, of the whole matrix, and number and bytes of its scales. `group_size` matters to
 * COLI_INT4_GROUPED alone. 0 for an unknown format, rows or columns below 1, or a missing group size. */
COLI_API size_t coli_row_bytes(int format, int columns);
COLI_API size_t coli_weight_bytes(int format, int rows, int columns);
COLI_API size_t coli_scale_count(int format, int rows, int columns, int group_size);
COLI_API size_t coli_scale_bytes(int format, int rows, int columns, int group_size);

/* The published E8 codebook: 256 entries of 4 doubled magnitudes. Static, 1024 bytes. */
COLI_API const uint8_t *coli_e8_codebook(void);
/* The 256 values of e4m3, NaN at 0x7f and 0xff: what coli_cuda_fp8_set_lut takes. Static. */
COLI_API const float *coli_e4m3_table(void);

/*------   Matrices   ------*/

#define COLI_UNROTATED 1 /* E8 weights that were encoded without rotation, such as imports from GGUF */

/* A view of an encoded matrix in host memory; it owns nothing. No alignment is needed. */
typedef struct coli_matrix {
    int format;           /* a coli_format */
    int rows;             /* O, outputs */
    int columns;          /* I, inputs */
    int group_size;       /* COLI_INT4_GROUPED: columns that share a scale; 0 otherwise */
    int flags;            /* 0 or COLI_UNROTATED */
    const void *weights;  /* coli_weight_bytes() */
    const void *scales;   /* coli_scale_bytes(); NULL where the format has none */
    const void *codebook; /* COLI_E8: 1024 bytes, or NULL for the published table; NULL otherwise */
} coli_matrix;

/* COLI_OK when the fields fit each other. Every call below that takes a matrix makes this check first. */
COLI_API coli_status coli_matrix_check(const coli_matrix *matrix);

/* Encodes w [rows, columns] as it is (rotate E8 rows first, if wanted) into caller memory of coli_weight_bytes() and
 * coli_scale_bytes(); `scales` may be NULL where the format has none. E8 is encoded by COLI_E8_SEARCH; a row's last
 * super-block is padded with zeros. COLI_E_NOT_FINITE names the row and column of the first NaN or infinity. Nothing is
 * written unless the result is COLI_OK. The bytes do not depend on instruction set or threads. */
COLI_API coli_status coli_encode(int format, const float *w, int rows, int columns, int group_size, void *weights,
                                 void *scales);

/* Zero it, then set `size` and what is wanted. */
typedef struct coli_e8_options {
    size_t size;   /* sizeof(coli_e8_options) */
    int quality;   /* a coli_e8_quality */
    float damping; /* COLI_E8_CALIBRATED: part of the Hessian's mean diagonal that is added to its diagonal, at most
                    * 1; 0 stands for 0.02 */
    const float *importance; /* COLI_E8_SEARCH: weight of each column's squared error [columns], 0 or more; or NULL */
    const float *hessian; /* COLI_E8_CALIBRATED: sum of x x^T over activations x as the encoded matrix meets them (rotated
                           * where w is) [columns, columns]; its upper triangle is read */
} coli_e8_options;

/* As coli_encode(COLI_E8, ...) with a choice of quality; NULL options are the default.
 *
 * No super-block has a larger squared error than by COLI_E8_REFERENCE, weighted by the importance where there is one; with
 * COLI_E8_CALIBRATED, no row has a larger e (hessian + damping) e^T, e being its error, than by COLI_E8_SEARCH. There a
 * row's columns are encoded in lanes of 8 from the first to the last, then improved lane by lane. It takes 8 columns^2
 * bytes of memory besides, columns^3 / 3 operations once, and about 8 columns^2 for each row.
 *
 * Errors: those of coli_encode(); COLI_E_ARGUMENT for a size, quality, damping or importance that does not exist and for a
 * Hessian that is not positive semidefinite, COLI_E_NOT_FINITE, COLI_E_MEMORY. */
COLI_API coli_status coli_encode_e8(const coli_e8_options *options, const float *w, int rows, int columns, void *weights);
/* Decodes to w [rows, columns], E8 as stored (still rotated). Exact: the product of code and scale in float32. */
COLI_API coli_status coli_decode(const coli_matrix *matrix, float *w);

/*------   Rotation (E8)   ------*/

/* Rotates `rows` rows of `dim` floats: per power-of-two block, random signs, fast Walsh-Hadamard transform, 1/sqrt(n).
 * Blocks are the powers of two of dim, smallest first, at most 32768. y is x or
 * does not overlap it. */
COLI_API coli_status coli_rotate_rows(const float *x, float *y, size_t rows, int dim);
/* The inverse: y = x for y = unrotate(rotate(x)), up to rounding. */
COLI_API coli_status coli_unrotate_rows(const float *x, float *y, size_t rows, int dim);

/*------   Products on the CPU   ------*/

/* y [S, O] = x [S, I] w^T. Weights are decoded once for all S rows. Sums are float32; the result is the same for every
 * number of threads, and a row's result does not depend on the other rows. y must not overlap x. */
COLI_API coli_status coli_matmul(const coli_matrix *w, const float *x, size_t S, float *y);
/* y [S, D] = down(silu(gate x) * (up x)); gate and up [H, D], down [D, H], in any formats. Gate and up meet the same x, so
 * both are rotated or neither is (else COLI_E_ARGUMENT). */
COLI_API coli_status coli_expert_mlp(const coli_matrix *gate, const coli_matrix *up, const coli_matrix *down,
                                     const float *x, size_t S, float *y);

/*------   GPU backend, loaded at run time   ------*/

/* A loaded libcoli_cuda (or any library with the same names, older ones too). */
typedef struct coli_backend coli_backend;

/* Loads `path` (UTF-8); with NULL, COLI_CUDA_LIB, or else libcoli_cuda beside libcoli, beside the program, or by the
 * system's search. The first file that is there is the one, whether it loads or not. Each entry point is resolved on its
 * own: what is missing disables the features that need it and nothing else. COLI_E_NO_LIBRARY and COLI_E_ABI say in words
 * what was tried and what the system's loader said. *backend belongs to the caller. */
COLI_API coli_status coli_backend_open(const char *path, coli_backend **backend);
/* Releases the backend; the library itself may stay loaded until the process ends. Tensors and devices in use must be
 * released first. NULL is allowed. */
COLI_API void coli_backend_close(coli_backend *backend);
/* The file that was loaded. Lives as long as the backend. */
COLI_API const char *coli_backend_path(const coli_backend *backend);
/* Address of an entry point such as "coli_cuda_matmul", or NULL. */
COLI_API void *coli_backend_symbol(const coli_backend *backend, const char *name);

/* Configures the GPUs of the ordinals in `devices`, or with NULL all that are visible. Does nothing where that very list is
 * configured already. Waits for calls of coli_place() and its like that are in progress. A failure has the status and the
 * reason that the library gives; COLI_E_NO_DEVICE where it gives no status. */
COLI_API coli_status coli_backend_init(coli_backend *backend, const int *devices, int count);

/* Features, by index 0 ... coli_backend_feature_count() - 1: a format's name ("e8", "int8", ...), or "devices",
 * "matmul", "expert_mlp", "expert_group", "issue_take", "update", "download". NULL past the end. */
COLI_API int coli_backend_feature_count(void);
COLI_API const char *coli_backend_feature_name(int index);
/* Why this backend cannot offer a feature: NULL when it can; else a sentence that names the missing entry points, or the
 * format's own limit. `backend` may be NULL: then the reason is that no GPU library is loaded. Lives as long as the
 * backend. */
COLI_API const char *coli_backend_why_not(const coli_backend *backend, const char *feature);
/* Why this backend cannot compute an expert of these matrices by the feature "expert_mlp", "expert_group" or "issue_take":
 * NULL when it can; else what coli_backend_why_not() says of the feature, that gate and up need different inputs, or what
 * the library would get wrong. A library
 * without coli_cuda_abi_version does not refuse such calls, it computes something else, so hosts should ask here first.
 * Only format, columns and flags of the matrices are read. Lives as long as the backend. */
COLI_API const char *coli_backend_why_not_expert(const coli_backend *backend, const char *feature, const coli_matrix *gate,
                                                 const coli_matrix *up, const coli_matrix *down);

/*------   Weights placed on a device, or on the CPU where it cannot be   ------*/

/* A matrix that computes on a GPU where it can. It keeps the caller's host pointers as the way back to the CPU: weights,
 * scales and codebook must outlive it. */
typedef struct coli_placed coli_placed;

/* Uploads `matrix` to GPU `device` (a CUDA ordinal that coli_backend_init or coli_cuda_init configured), or leaves it on
 * the CPU: for device = -1, a NULL backend, a feature the backend lacks, or a failed upload. The result is COLI_OK in all
 * these cases; coli_placed_why_cpu() tells. Errors are those of coli_matrix_check() and COLI_E_MEMORY.
 *
 * E8 matrices on the GPU are decoded with the one codebook that the library holds, which must be the published one: a host
 * that gives coli_cuda_e8_set_grid another table owns the consequence. The fp8 table is published here where it is missing;
 * a library without coli_cuda_abi_version also gets the published codebook with each E8 matrix. */
COLI_API coli_status coli_place(coli_backend *backend, int device, const coli_matrix *matrix, coli_placed **placed);
COLI_API void coli_placed_free(coli_placed *placed);
/* Replaces the contents in place by a matrix of the same format, shape, group size and flags, after work that still reads
 * them. Where the GPU fails, the matrix goes on from the CPU, and coli_placed_why_cpu() tells. The host memory of `matrix`
 * is the way back to the CPU from now on. */
COLI_API coli_status coli_placed_update(coli_placed *placed, const coli_matrix *matrix);
/* GPU ordinal, or -1 for the CPU. */
COLI_API int coli_placed_device(const coli_placed *placed);
/* Why it is on the CPU, or why its last call was computed there; NULL while the GPU does the work. The text belongs to the
 * matrix and lives until the next product with it, or coli_placed_free(). */
COLI_API const char *coli_placed_why_cpu(const coli_placed *placed);
/* As coli_matmul and coli_expert_mlp. A GPU call that fails is computed on the CPU and logged. The expert runs on the GPU
 * when its three matrices are on one device. Calls on one placed matrix must not overlap. */
COLI_API coli_status coli_placed_matmul(coli_placed *w, const float *x, size_t S, float *y);
COLI_API coli_status coli_placed_expert_mlp(coli_placed *gate, coli_placed *up, coli_placed *down, const float *x, size_t S,
                                            float *y);

#ifdef __cplusplus
}
#endif
#endif
