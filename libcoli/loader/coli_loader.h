/* coli_loader.h - finds and loads the GPU library while the program runs, on Linux and on Windows.
 *
 * Introduction
 *   coli_loader.h and coli_loader.c go into the tree of a C host and need nothing else of libcoli. A host that calls the
 *   functions of the GPU ABI compiles coli_loader.c in the place of linking the library: it defines all of them, and the
 *   first call of any looks for the library. Without it the program runs just the same, with no GPU:
 *
 *       int devices[] = {0};
 *       int on_gpu = coli_cuda_init(devices, 1);
 *       if (!coli_loader_path()) fprintf(stderr, "no GPU: %s\n", coli_loader_why());
 *       for (int i = 0; coli_loader_path() && coli_loader_miss(i); i++) fprintf(stderr, "GPU: %s\n", coli_loader_miss(i));
 *
 *   The prototypes are those of coli_cuda.h; a host's own header of them does as well. With coli_cuda.h, define
 *   COLI_STATIC, so that Windows does not expect the functions in a DLL.
 *
 * What is looked for, and where
 *   libcoli_cuda.so.1 and libcoli_cuda.so; on Windows coli_cuda.dll and libcoli_cuda.dll. COLI_LOADER_NAME, defined when
 *   coli_loader.c is compiled, names another library, such as "coli_hip".
 *     1. The file that the environment variable COLI_CUDA_LIB names, and no other then.
 *     2. By absolute path, in the folder of the program or library that coli_loader.c was compiled into.
 *     3. By absolute path, in the folder of the program.
 *     4. By name, where the system looks: on Linux as dlopen does, on Windows in the folder of the program, System32 and
 *        what AddDllDirectory added. Never in the current folder, which is no place for code, nor in PATH.
 *   The first file that is there is the one: if it does not load, the program gets its reason and not some other library.
 *
 * Conventions
 *   - Paths and texts are UTF-8, on Windows too.
 *   - Reasons are the words of the system's own loader, with the path or the name they are about.
 *   - All functions may be called from any thread at once. None prints.
 *   - C11 with GCC, Clang or MinGW. Linux: -ldl and -pthread where the C library keeps them apart. */
#ifndef COLI_LOADER_H
#define COLI_LOADER_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/*------   The GPU library of this process   ------*/

/* One attempt a process: the first call of any function below, or of any coli_cuda_ function, makes it, and what came of it
 * stays until the process ends. Texts live as long.
 *
 * Without the mandatory names - init, shutdown, device_count, device_at, mem_info, tensor_upload, tensor_free,
 * tensor_bytes, tensor_device and matmul, each after coli_cuda_ - there is no GPU. Every other name is optional: while the
 * library lacks it, its function is off and nothing else. A function that is off returns 0 or NULL, which hosts take as
 * "not done", except
 *   - device_at, tensor_device: -1
 *   - available_device_count: what device_count says
 *   - tensor_vram: what tensor_bytes says
 *   - alloc_footprint: the number of bytes it is given
 *   - expert_group_pinned: what expert_group does, where nothing is to be pinned
 *   - stats, group_stats, group_stats_device: write zeros
 *   - last_error, last_status: without a library coli_loader_why() and COLI_E_NO_LIBRARY (41) */

/* The file that was loaded; NULL when there is no GPU library. */
const char *coli_loader_path(void);
/* Why there is no GPU library: every file that was tried with the reason against it. NULL when there is one. */
const char *coli_loader_why(void);
/* Reasons against the names of the GPU ABI that the library lacks, index 0 and up; NULL past the last. Without a library
 * there are none: coli_loader_why() says it once. */
const char *coli_loader_miss(int index);
/* The reason against one name such as "coli_cuda_e8_set_grid"; NULL when the library has it. */
const char *coli_loader_why_not(const char *name);

/*------   One file   ------*/

/* What the above is made of, for hosts that keep a table of functions of their own. coli_loader.c compiled with
 * COLI_LOADER_FILES_ONLY holds this part alone. */

#define COLI_LOADER_PATH_BYTES 4096

typedef struct coli_loader_library {
    void *handle; /* what the system calls the loaded file */
    char path[COLI_LOADER_PATH_BYTES];
} coli_loader_library;

typedef enum coli_loader_result {
    COLI_LOADER_OK,
    COLI_LOADER_NOT_FOUND, /* no such file */
    COLI_LOADER_REFUSED,   /* it does not load, or lacks a mandatory name */
    COLI_LOADER_OTHER_ABI  /* it loads, and speaks another major version of the GPU ABI */
} coli_loader_result;

/* Loads the GPU library at `path`, or with NULL the one that the search above finds. `mandatory` is a list of names that
 * ends with NULL. Unless the result is COLI_LOADER_OK, `why` (of `size` bytes) gets the reason, and *library is not
 * written. A name without a folder is left to the system's search. The library is the caller's until coli_loader_close().
 */
coli_loader_result coli_loader_open(const char *path, const char *const *mandatory, coli_loader_library *library, char *why,
                                    size_t size);
/* On Linux the code stays mapped until the process ends: GPU runtimes have threads and exit handlers. */
void coli_loader_close(coli_loader_library *library);

/* Any function; cast to its own type before it is called. */
typedef void (*coli_loader_function)(void);

/* The function of that name, or NULL and the reason in `why` (of `size` bytes; may be NULL). */
coli_loader_function coli_loader_symbol(const coli_loader_library *library, const char *name, char *why, size_t size);

#ifdef __cplusplus
}
#endif
#endif
