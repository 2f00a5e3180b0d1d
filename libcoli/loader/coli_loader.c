/* coli_loader.c - finds and loads the GPU library while the program runs; coli_loader.h is its manual.
 *
 * Three parts: what the operating system does, one file and the search for it, the GPU library of this process with all its
 * functions. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr */
#endif

#include "coli_loader.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef COLI_LOADER_NAME
#define COLI_LOADER_NAME "coli_cuda"
#endif

#define ABI_MAJOR 1 /* of the functions below; coli_cuda_abi_version() / 1000 of a library that fits */

/* ABI_MAJOR as text, for the file's name. */
#define DIGITS_OF(number) #number
#define DIGITS(number) DIGITS_OF(number)

/* Has the compiler check a format; gcc for Windows would check plain "printf" against Microsoft's old one. */
#if defined(__MINGW32__) && !defined(__clang__)
#define PRINTF_FORMAT(format_number, first_argument) __attribute__((format(gnu_printf, format_number, first_argument)))
#else
#define PRINTF_FORMAT(format_number, first_argument) __attribute__((format(printf, format_number, first_argument)))
#endif

/* A text in the caller's memory that grows; what does not fit is cut. */
typedef struct text {
    char *start;
    size_t size, length;
} text;

static text empty_text(char *start, size_t size) {
    if (size) start[0] = '\0';
    return (text){start, size, 0};
}

PRINTF_FORMAT(2, 3) static void append(text *t, const char *format, ...) {
    if (t->length + 1 >= t->size) return;
    va_list arguments;
    va_start(arguments, format);
    size_t room = t->size - t->length;
    int written = vsnprintf(t->start + t->length, room, format, arguments);
    va_end(arguments);
    if (written > 0) t->length += (size_t)written < room ? (size_t)written : room - 1;
}

/*------   What the operating system does   ------*/

/* library_open, library_symbol   NULL, and the system's reason
 * library_close
 * library_path                   the file that an address was loaded from, or with NULL the program; "" when unknown
 * file_is_there                  0 only where no file has this path
 * environment                    1; 0 when the variable is not set or is empty, -1 when it does not fit */

#ifdef _WIN32
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <windows.h>

static const char *const file_names[] = {COLI_LOADER_NAME ".dll", "lib" COLI_LOADER_NAME ".dll"};
#define SEPARATORS "/\\:" /* "C:name" is a path too, and no name for the system to look for */

/* 0 where the text is not UTF-8 or too long. */
static int to_wide(const char *utf8, WCHAR wide[COLI_LOADER_PATH_BYTES]) {
    return MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, utf8, -1, wide, COLI_LOADER_PATH_BYTES);
}

static int to_utf8(const WCHAR *wide, char *utf8, size_t size) {
    return WideCharToMultiByte(CP_UTF8, 0, wide, -1, utf8, (int)size, NULL, NULL);
}

/* "SUBJECT: words of Windows (error N)" */
static void append_error(text *why, const char *subject, DWORD error) {
    WCHAR wide[512];
    char words[1024] = "";
    DWORD flags = FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS;
    DWORD length = FormatMessageW(flags, NULL, error, 0, wide, sizeof wide / sizeof *wide, NULL);
    while (length && strchr("\r\n .", (int)wide[length - 1])) wide[--length] = 0;
    if (length) to_utf8(wide, words, sizeof words);
    append(why, "%s: %s (error %lu)", subject, words, (unsigned long)error);
}

static int file_is_there(const char *path) {
    WCHAR wide[COLI_LOADER_PATH_BYTES];
    if (!to_wide(path, wide) || GetFileAttributesW(wide) != INVALID_FILE_ATTRIBUTES) return 1;
    DWORD error = GetLastError();
    return error != ERROR_FILE_NOT_FOUND && error != ERROR_PATH_NOT_FOUND && error != ERROR_INVALID_NAME;
}

/* The flags leave the current folder and PATH out, for the libraries that this one needs too. */
static void *library_open(const char *path, text *why) {
    WCHAR name[COLI_LOADER_PATH_BYTES], full[COLI_LOADER_PATH_BYTES];
    const WCHAR *wide = name;
    DWORD flags = LOAD_LIBRARY_SEARCH_DEFAULT_DIRS;
    if (!to_wide(path, name)) {
        append(why, "%s: not a path in UTF-8, or too long", path);
        return NULL;
    }
    if (strpbrk(path, SEPARATORS)) { /* the folder of a library is searched for relatives of absolute paths alone */
        DWORD length = GetFullPathNameW(name, COLI_LOADER_PATH_BYTES, full, NULL);
        if (length && length < COLI_LOADER_PATH_BYTES) wide = full;
        flags |= LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR;
    }
    void *library = (void *)LoadLibraryExW(wide, NULL, flags);
    if (library) return library;
    DWORD error = GetLastError();
    append_error(why, path, error);
    if (wide == full && error == ERROR_MOD_NOT_FOUND && file_is_there(path))
        append(why, "; the file is there, a library that it needs is not");
    return NULL;
}

static void module_path(HMODULE module, char path[COLI_LOADER_PATH_BYTES]) {
    WCHAR wide[COLI_LOADER_PATH_BYTES];
    DWORD length = GetModuleFileNameW(module, wide, COLI_LOADER_PATH_BYTES);
    if (!length || length >= COLI_LOADER_PATH_BYTES || !to_utf8(wide, path, COLI_LOADER_PATH_BYTES)) path[0] = '\0';
}

static void library_path(const void *address, char path[COLI_LOADER_PATH_BYTES]) {
    HMODULE module = NULL;
    DWORD flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    path[0] = '\0';
    if (!address || GetModuleHandleExW(flags, (LPCWSTR)address, &module)) module_path(module, path);
}

static coli_loader_function library_symbol(void *library, const char *name, text *why) {
    FARPROC function = GetProcAddress((HMODULE)library, name);
    if (!function) {
        DWORD error = GetLastError();
        char path[COLI_LOADER_PATH_BYTES];
        module_path((HMODULE)library, path);
        append(why, "%s: ", path);
        append_error(why, name, error);
    }
    return (coli_loader_function)function;
}

static void library_close(void *library) {
    FreeLibrary((HMODULE)library);
}

static int environment(const char *variable, char value[COLI_LOADER_PATH_BYTES]) {
    WCHAR name[COLI_LOADER_PATH_BYTES], wide[COLI_LOADER_PATH_BYTES];
    if (!to_wide(variable, name)) return 0;
    DWORD length = GetEnvironmentVariableW(name, wide, COLI_LOADER_PATH_BYTES);
    if (!length) return 0;
    return length < COLI_LOADER_PATH_BYTES && to_utf8(wide, value, COLI_LOADER_PATH_BYTES) ? 1 : -1;
}

#else
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <link.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const file_names[] = {"lib" COLI_LOADER_NAME ".so." DIGITS(ABI_MAJOR), "lib" COLI_LOADER_NAME ".so"};
#define SEPARATORS "/"

static int file_is_there(const char *path) {
    return access(path, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

/* A library that was copied or downloaded in part, by the section headers at its end. dlopen would map it, and die of
 * SIGBUS in the part that is missing. */
static int is_cut_short(const char *path, text *why) {
    ElfW(Ehdr) header;
    FILE *file = fopen(path, "rbe");
    if (!file) return 0;
    int elf = fread(&header, sizeof header, 1, file) == 1 && !memcmp(header.e_ident, ELFMAG, SELFMAG) &&
              header.e_ehsize == sizeof header;
    long size = elf && fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    fclose(file);
    if (size < 0) return 0;
    uint64_t needed = header.e_shoff + (uint64_t)header.e_shnum * header.e_shentsize;
    if ((uint64_t)size >= needed) return 0;
    append(why, "%s: cut short, it has %ld bytes of at least %" PRIu64, path, size, needed);
    return 1;
}

/* Opening one waits until somebody writes to it. */
static int is_pipe(const char *path, text *why) {
    struct stat status;
    if (stat(path, &status) != 0 || !S_ISFIFO(status.st_mode)) return 0;
    append(why, "%s: a pipe and not a file", path);
    return 1;
}

/* RTLD_NODELETE: a GPU runtime has threads and exit handlers of its own, whose code must not be unmapped while the process
 * lives; and what it allocates once would be lost anew with every time that it is loaded. */
static void *library_open(const char *path, text *why) {
    if (strchr(path, '/') && (is_pipe(path, why) || is_cut_short(path, why))) return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library) append(why, "%s", dlerror());
    return library;
}

static coli_loader_function library_symbol(void *library, const char *name, text *why) {
    union { /* ISO C has no cast from one to the other */
        void *object;
        coli_loader_function function;
    } symbol;
    symbol.object = dlsym(library, name);
    if (!symbol.object) {
        const char *words = dlerror();
        append(why, "%s", words ? words : name);
    }
    return symbol.function;
}

static void library_close(void *library) {
    dlclose(library);
}

/* The path of the mapping that holds an address, as the kernel knows it. */
static void mapped_path(const void *address, char path[COLI_LOADER_PATH_BYTES]) {
    char line[COLI_LOADER_PATH_BYTES + 128];
    FILE *maps = fopen("/proc/self/maps", "re");
    path[0] = '\0';
    while (maps && !path[0] && fgets(line, sizeof line, maps)) {
        uintptr_t start, end;
        int column = 0;
        sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %*s %*s %*s %n", &start, &end, &column);
        if (column && start <= (uintptr_t)address && (uintptr_t)address < end && line[column] == '/')
            snprintf(path, COLI_LOADER_PATH_BYTES, "%.*s", (int)strcspn(line + column, "\n"), line + column);
    }
    if (maps) fclose(maps);
}

/* dladdr may answer with a path that is relative to where the program started, or with its argv[0]; neither leads anywhere
 * now. */
static void library_path(const void *address, char path[COLI_LOADER_PATH_BYTES]) {
    Dl_info info;
    if (!address) {
        ssize_t length = readlink("/proc/self/exe", path, COLI_LOADER_PATH_BYTES - 1);
        path[length > 0 ? length : 0] = '\0';
    } else if (dladdr(address, &info) && info.dli_fname && info.dli_fname[0] == '/' &&
               strlen(info.dli_fname) < COLI_LOADER_PATH_BYTES) {
        strcpy(path, info.dli_fname);
    } else {
        mapped_path(address, path);
    }
}

static int environment(const char *variable, char value[COLI_LOADER_PATH_BYTES]) {
    const char *set = getenv(variable);
    if (!set || !*set) return 0;
    if (strlen(set) >= COLI_LOADER_PATH_BYTES) return -1;
    strcpy(value, set);
    return 1;
}
#endif

/*------   One file, and the search for it   ------*/

coli_loader_function coli_loader_symbol(const coli_loader_library *library, const char *name, char *why, size_t size) {
    text reason = empty_text(why, why ? size : 0);
    return library_symbol(library->handle, name, &reason);
}

void coli_loader_close(coli_loader_library *library) {
    if (library->handle) library_close(library->handle);
    library->handle = NULL;
}

/* A library without a version is older than versions, and has the functions of this ABI major. */
static int speaks_other_abi(void *library, const char *path, text *why) {
    text unsaid = empty_text(NULL, 0);
    int (*abi_version)(void) = (int (*)(void))library_symbol(library, "coli_cuda_abi_version", &unsaid);
    int version = abi_version ? abi_version() : ABI_MAJOR * 1000;
    if (version / 1000 == ABI_MAJOR) return 0;
    append(why, "%s speaks the GPU ABI %d.%d, and %d.x is needed", path, version / 1000, version % 1000, ABI_MAJOR);
    return 1;
}

/* Looks for every name, so that the reason has all that are missing. */
static int lacks_one(void *library, const char *const *names, text *why) {
    int lacks = 0;
    for (; *names; names++) {
        const char *separator = lacks ? "; " : "";
        char words[COLI_LOADER_PATH_BYTES];
        text reason = empty_text(words, sizeof words);
        if (library_symbol(library, *names, &reason)) continue;
        append(why, "%s%s", separator, words);
        lacks = 1;
    }
    return lacks;
}

/* A file that the system's search did not find goes by its bare name in the system's words; any other by its path, or by
 * the name of a library that it needs. */
static int is_about_name(const char *words, const char *name) {
    for (const char *found = words; (found = strstr(found, name)); found++) {
        if (found == words || !strchr(SEPARATORS, found[-1])) return 1;
    }
    return 0;
}

static coli_loader_result open_file(const char *path, const char *const *mandatory, coli_loader_library *library,
                                    text *why) {
    int has_folder = strpbrk(path, SEPARATORS) != NULL;
    if (has_folder && !file_is_there(path)) {
        append(why, "%s: no such file", path);
        return COLI_LOADER_NOT_FOUND;
    }
    char words[COLI_LOADER_PATH_BYTES];
    text said = empty_text(words, sizeof words);
    coli_loader_library loaded = {.handle = library_open(path, &said)};
    if (!loaded.handle) {
        if (!strstr(words, path)) append(why, "%s: ", path); /* the system names a library that it needs, and no more */
        append(why, "%s", words);
        return !has_folder && is_about_name(words, path) ? COLI_LOADER_NOT_FOUND : COLI_LOADER_REFUSED;
    }
    coli_loader_result result = COLI_LOADER_OK;
    if (speaks_other_abi(loaded.handle, path, why))
        result = COLI_LOADER_OTHER_ABI;
    else if (lacks_one(loaded.handle, mandatory, why))
        result = COLI_LOADER_REFUSED;
    if (result != COLI_LOADER_OK) {
        coli_loader_close(&loaded);
        return result;
    }
    text unsaid = empty_text(NULL, 0);
    coli_loader_function first = mandatory[0] ? library_symbol(loaded.handle, mandatory[0], &unsaid) : NULL;
    if (first) library_path((const void *)(uintptr_t)first, loaded.path);
    if (!loaded.path[0]) snprintf(loaded.path, sizeof loaded.path, "%s", path);
    *library = loaded;
    return COLI_LOADER_OK;
}

/* Tries the usual names in `folder`, which ends with a separator; "" is the system's search. */
static coli_loader_result search_folder(const char *folder, const char *const *mandatory, coli_loader_library *library,
                                        text *why) {
    for (size_t i = 0; i < sizeof file_names / sizeof *file_names; i++) {
        char path[COLI_LOADER_PATH_BYTES + sizeof COLI_LOADER_NAME + 16];
        snprintf(path, sizeof path, "%s%s", folder, file_names[i]);
        if (why->length) append(why, "; ");
        coli_loader_result result = open_file(path, mandatory, library, why);
        if (result != COLI_LOADER_NOT_FOUND) return result;
    }
    return COLI_LOADER_NOT_FOUND;
}

/* The folder of library_path(), with its last separator. */
static void folder_of(const void *address, char folder[COLI_LOADER_PATH_BYTES]) {
    library_path(address, folder);
    size_t length = strlen(folder);
    while (length && !strchr(SEPARATORS, folder[length - 1])) length--;
    folder[length] = '\0';
}

static coli_loader_result search(const char *const *mandatory, coli_loader_library *library, text *why) {
    static const char own_address;
    char own[COLI_LOADER_PATH_BYTES], program[COLI_LOADER_PATH_BYTES];
    folder_of(&own_address, own);
    folder_of(NULL, program);
    coli_loader_result result = COLI_LOADER_NOT_FOUND;
    if (own[0]) result = search_folder(own, mandatory, library, why);
    if (result == COLI_LOADER_NOT_FOUND && program[0] && strcmp(own, program) != 0)
        result = search_folder(program, mandatory, library, why);
    if (result == COLI_LOADER_NOT_FOUND) result = search_folder("", mandatory, library, why);
    return result;
}

coli_loader_result coli_loader_open(const char *path, const char *const *mandatory, coli_loader_library *library, char *why,
                                    size_t size) {
    text reason = empty_text(why, size);
    char named[COLI_LOADER_PATH_BYTES];
    if (path) return open_file(path, mandatory, library, &reason);
    int is_named = environment("COLI_CUDA_LIB", named);
    if (is_named) append(&reason, "COLI_CUDA_LIB: ");
    if (is_named > 0) return open_file(named, mandatory, library, &reason);
    if (is_named < 0) {
        append(&reason, "longer than the %d bytes of a path", COLI_LOADER_PATH_BYTES - 1);
        return COLI_LOADER_NOT_FOUND;
    }
    coli_loader_result result = search(mandatory, library, &reason);
    if (result != COLI_LOADER_OK) append(&reason, "; COLI_CUDA_LIB can name another file");
    return result;
}

#ifndef COLI_LOADER_FILES_ONLY
/*------   The functions of the GPU ABI   ------*/

/* What coli_cuda.h declares, for a host that does not have it. */
typedef struct ColiCudaTensor ColiCudaTensor;
typedef struct ColiCudaDn ColiCudaDn;
typedef struct ColiCudaChainOps ColiCudaChainOps;
#ifndef COLI_COMMON_H
typedef int coli_status;
typedef void (*coli_log_fn)(int level, const char *line, void *user);
#endif
#define NO_LIBRARY 41 /* COLI_E_NO_LIBRARY */

/* FUNCTION(MUST or MAY be there, type, name, parameters, arguments, result where the library lacks it)
 * PROCEDURE(MUST or MAY be there, name, parameters, arguments, what is done where the library lacks it) */
/* clang-format off */
#define CALLS(FUNCTION, PROCEDURE) \
    FUNCTION(MUST, int, init, (const int *devices, int count), (devices, count), 0) \
    PROCEDURE(MUST, shutdown, (void), (), (void)0) \
    FUNCTION(MAY, int, available_device_count, (void), (), coli_cuda_device_count()) \
    FUNCTION(MUST, int, device_count, (void), (), 0) \
    FUNCTION(MUST, int, device_at, (int index), (index), -1) \
    FUNCTION(MUST, int, mem_info, (int device, size_t *free_bytes, size_t *total_bytes), \
        (device, free_bytes, total_bytes), 0) \
    FUNCTION(MAY, int, device_integrated, (int device), (device), 0) \
    FUNCTION(MAY, int, e8_set_grid, (const void *grid), (grid), 0) \
    FUNCTION(MAY, int, fp8_set_lut, (const float *lut), (lut), 0) \
    FUNCTION(MUST, int, tensor_upload, (ColiCudaTensor **tensor, const void *weights, const float *scales, int fmt, \
        int I, int O, int device), \
        (tensor, weights, scales, fmt, I, O, device), 0) \
    FUNCTION(MAY, int, tensor_upload_g, (ColiCudaTensor **tensor, const void *weights, const float *scales, int fmt, \
        int I, int O, int device, int gs), \
        (tensor, weights, scales, fmt, I, O, device, gs), 0) \
    FUNCTION(MAY, int, tensor_update, (ColiCudaTensor *tensor, const void *weights, const float *scales), \
        (tensor, weights, scales), 0) \
    FUNCTION(MAY, int, tensor_overwrite, (ColiCudaTensor *tensor, const void *weights, const float *scales), \
        (tensor, weights, scales), 0) \
    PROCEDURE(MUST, tensor_free, (ColiCudaTensor *tensor), (tensor), (void)0) \
    FUNCTION(MUST, size_t, tensor_bytes, (const ColiCudaTensor *tensor), (tensor), 0) \
    FUNCTION(MAY, size_t, tensor_vram, (const ColiCudaTensor *tensor), (tensor), coli_cuda_tensor_bytes(tensor)) \
    FUNCTION(MAY, size_t, alloc_footprint, (size_t bytes), (bytes), bytes) \
    FUNCTION(MUST, int, tensor_device, (const ColiCudaTensor *tensor), (tensor), -1) \
    PROCEDURE(MAY, stats, (int device, size_t *tensor_count, size_t *tensor_bytes), \
        (device, tensor_count, tensor_bytes), no_tensors(tensor_count, tensor_bytes)) \
    PROCEDURE(MAY, group_stats, (uint64_t *calls, uint64_t *experts, uint64_t *rows, double *h2d_ms, \
        double *kernel_ms, double *d2h_ms), \
        (calls, experts, rows, h2d_ms, kernel_ms, d2h_ms), \
        no_groups(calls, experts, rows, h2d_ms, kernel_ms, d2h_ms)) \
    PROCEDURE(MAY, group_stats_device, (int device, uint64_t *calls, uint64_t *experts, uint64_t *rows, \
        double *h2d_ms, double *kernel_ms, double *d2h_ms), \
        (device, calls, experts, rows, h2d_ms, kernel_ms, d2h_ms), \
        no_groups(calls, experts, rows, h2d_ms, kernel_ms, d2h_ms)) \
    FUNCTION(MUST, int, matmul, (ColiCudaTensor **tensor, float *y, const float *x, const void *weights, \
        const float *scales, int fmt, int S, int I, int O, int device, int gs), \
        (tensor, y, x, weights, scales, fmt, S, I, O, device, gs), 0) \
    FUNCTION(MAY, int, expert_mlp, (ColiCudaTensor *gate, ColiCudaTensor *up, ColiCudaTensor *down, float *y, \
        const float *x, int S), \
        (gate, up, down, y, x, S), 0) \
    FUNCTION(MAY, int, shared_mlp_w4a16, (ColiCudaTensor *gate, ColiCudaTensor *up, ColiCudaTensor *down, float *y, \
        const float *x, int S), \
        (gate, up, down, y, x, S), 0) \
    FUNCTION(MAY, int, expert_group, (ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, \
        ColiCudaTensor *const *downs, const int *rows, int count, float *y, const float *x), \
        (gates, ups, downs, rows, count, y, x), 0) \
    FUNCTION(MAY, int, expert_group_pinned, (ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, \
        ColiCudaTensor *const *downs, const int *rows, int count, float *y, const float *x, int pin_small_batch), \
        (gates, ups, downs, rows, count, y, x, pin_small_batch), \
        pin_small_batch ? 0 : coli_cuda_expert_group(gates, ups, downs, rows, count, y, x)) \
    FUNCTION(MAY, int, expert_group_issue, (ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, \
        ColiCudaTensor *const *downs, const int *rows, int count, const float *x), \
        (gates, ups, downs, rows, count, x), 0) \
    FUNCTION(MAY, const float *, expert_group_take, (int device), (device), NULL) \
    FUNCTION(MAY, int, matmul_mxfp4, (float *y, const float *x, const unsigned char *q4, const unsigned char *e8s, \
        int S, int I, int O), \
        (y, x, q4, e8s, S, I, O), 0) \
    FUNCTION(MAY, int, expert_mxfp4, (float *y, const float *x, const unsigned char *gate_w, \
        const unsigned char *gate_s, const unsigned char *up_w, const unsigned char *up_s, const unsigned char *down_w, \
        const unsigned char *down_s, int S, int D, int I, float b1, float b2), \
        (y, x, gate_w, gate_s, up_w, up_s, down_w, down_s, S, D, I, b1, b2), 0) \
    FUNCTION(MAY, int, abi_version, (void), (), 0) \
    FUNCTION(MAY, const char *, version_string, (void), (), NULL) \
    FUNCTION(MAY, const char *, build_info, (void), (), NULL) \
    FUNCTION(MAY, int, device_name, (int device, char *name, size_t size), (device, name, size), 0) \
    FUNCTION(MAY, const char *, last_error, (void), (), unexplained()) \
    FUNCTION(MAY, coli_status, last_status, (void), (), process.loaded ? 0 : NO_LIBRARY) \
    PROCEDURE(MAY, set_log, (coli_log_fn log, void *user), (log, user), (void)0) \
    FUNCTION(MAY, int, tensor_download, (const ColiCudaTensor *tensor, void *weights, void *scales), \
        (tensor, weights, scales), 0) \
    FUNCTION(MAY, int, tensor_set_rotated, (ColiCudaTensor *tensor, int rotated), (tensor, rotated), 0) \
    FUNCTION(MAY, size_t, expert_group_workspace, (ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, \
        ColiCudaTensor *const *downs, const int *rows, int count), \
        (gates, ups, downs, rows, count), 0) \
    FUNCTION(MAY, int, matmul_dev, (const ColiCudaTensor *tensor, float *y_dev, const float *x_dev, int S, \
        void *stream), \
        (tensor, y_dev, x_dev, S, stream), 0) \
    FUNCTION(MAY, int, expert_group_dev, (ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, \
        ColiCudaTensor *const *downs, const int *rows, int count, float *y_dev, const float *x_dev, void *workspace_dev, \
        size_t workspace_bytes, void *stream), \
        (gates, ups, downs, rows, count, y_dev, x_dev, workspace_dev, workspace_bytes, stream), 0) \
    FUNCTION(MAY, int, rotate_rows_dev, (int device, float *y_dev, const float *x_dev, int rows, int dim, \
        int inverse, void *stream), \
        (device, y_dev, x_dev, rows, dim, inverse, stream), 0) \
    FUNCTION(MAY, size_t, expert_group_combine_workspace, (ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, \
        ColiCudaTensor *const *downs, const int *rows, int count), \
        (gates, ups, downs, rows, count), 0) \
    FUNCTION(MAY, int, expert_group_combine_dev, (ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, \
        ColiCudaTensor *const *downs, const int *rows, int count, float *y_dev, int tokens, const float *x_dev, \
        const int *row_tokens_dev, const float *row_weights_dev, void *workspace_dev, size_t workspace_bytes, \
        void *stream), \
        (gates, ups, downs, rows, count, y_dev, tokens, x_dev, row_tokens_dev, row_weights_dev, workspace_dev, \
        workspace_bytes, stream), 0) \
    FUNCTION(MAY, int, expert_group_issue_sum, (ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, \
        ColiCudaTensor *const *downs, const int *rows, int count, const float *x, int x_rows, const int *x_index, \
        int tokens, const int *row_tokens, const float *row_weights), \
        (gates, ups, downs, rows, count, x, x_rows, x_index, tokens, row_tokens, row_weights), 0) \
    FUNCTION(MAY, int, encode_e8, (int device, int quality, int rotate, const float *importance, const float *w, \
        int rows, int columns, void *blocks), (device, quality, rotate, importance, w, rows, columns, blocks), 0) \
    FUNCTION(MAY, size_t, plan_text, (int device, int capability, const int *formats, int D, int H, int experts, \
        int rows, char *text, size_t capacity), \
        (device, capability, formats, D, H, experts, rows, text, capacity), 0) \
    FUNCTION(MAY, int, limit_path, (const char *path), (path), 0) \
    PROCEDURE(MAY, require_exact, (int exact), (exact), (void)0) \
    FUNCTION(MAY, int, probe_dev, (int device, int kind, const void *a_dev, void *b_dev, size_t bytes, \
        void *stream), \
        (device, kind, a_dev, b_dev, bytes, stream), 0) \
    FUNCTION(MAY, int, attention_absorb, (ColiCudaTensor *kv_b, float *ctx, const float *q, const float *latent, \
        const float *rope, int H, int Q, int R, int V, int K, int T, float scale), \
        (kv_b, ctx, q, latent, rope, H, Q, R, V, K, T, scale), 0) \
    FUNCTION(MAY, int, attention_absorb_batch, (ColiCudaTensor *kv_b, float *ctx, const float *q, \
        const float *latent, const float *rope, int S, int H, int Q, int R, int V, int K, int T, float scale), \
        (kv_b, ctx, q, latent, rope, S, H, Q, R, V, K, T, scale), 0) \
    FUNCTION(MAY, int, attention_absorb_batch_dev, (ColiCudaTensor *shard, float *ctx_dev, const float *q_dev, \
        const float *latent_dev, const float *rope_dev, int S, int H, int Q, int R, int V, int K, int T, float scale), \
        (shard, ctx_dev, q_dev, latent_dev, rope_dev, S, H, Q, R, V, K, T, scale), 0) \
    FUNCTION(MAY, int, attention_absorb_kvdev, (ColiCudaTensor *kv_b, float *ctx, const float *q, \
        const float *latent_dev, const float *rope_dev, int H, int Q, int R, int V, int K, int T, float scale), \
        (kv_b, ctx, q, latent_dev, rope_dev, H, Q, R, V, K, T, scale), 0) \
    FUNCTION(MAY, int, attention_project_batch, (ColiCudaTensor *kv_b, ColiCudaTensor *o_proj, float *out, \
        const float *q, const float *latent, const float *rope, int S, int H, int Q, int R, int V, int K, int T, \
        float scale), \
        (kv_b, o_proj, out, q, latent, rope, S, H, Q, R, V, K, T, scale), 0) \
    FUNCTION(MAY, int, attention_project_ragged, (ColiCudaTensor *kv_b, ColiCudaTensor *o_proj, float *out, \
        const float *q, const void *const *keys, const float *const *latent, const float *const *rope, \
        const int *lengths, int S, int H, int Q, int R, int V, int K, int max_t, float scale), \
        (kv_b, o_proj, out, q, keys, latent, rope, lengths, S, H, Q, R, V, K, max_t, scale), 0) \
    FUNCTION(MAY, int, attention_project_batch_dev, (ColiCudaTensor *kv_b, ColiCudaTensor *o_proj, float *out, \
        const float *q_dev, const float *latent_dev, const float *rope_dev, int S, int H, int Q, int R, int V, int K, \
        int T, float scale), \
        (kv_b, o_proj, out, q_dev, latent_dev, rope_dev, S, H, Q, R, V, K, T, scale), 0) \
    FUNCTION(MAY, int, attention_project_batch_dev_out, (ColiCudaTensor *kv_b, ColiCudaTensor *o_proj, \
        float *out_dev, const float *q_dev, const float *latent_dev, const float *rope_dev, int S, int H, int Q, int R, \
        int V, int K, int T, float scale), \
        (kv_b, o_proj, out_dev, q_dev, latent_dev, rope_dev, S, H, Q, R, V, K, T, scale), 0) \
    FUNCTION(MAY, int, expert_group_resident_issue, (ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, \
        ColiCudaTensor *const *downs, const float *weights, int count, int home_device, const float *x_src_dev, \
        float *partial_slot_dev), \
        (gates, ups, downs, weights, count, home_device, x_src_dev, partial_slot_dev), 0) \
    FUNCTION(MAY, int, expert_group_resident_take, (int home_device, const int *devices, int n_issued, \
        float *slots_dev, float *acc_dev, int D), \
        (home_device, devices, n_issued, slots_dev, acc_dev, D), 0) \
    FUNCTION(MAY, float *, pipe_scratch, (int device, int slot, size_t bytes), (device, slot, bytes), NULL) \
    FUNCTION(MAY, void *, pipe_alloc, (int device, size_t bytes), (device, bytes), NULL) \
    PROCEDURE(MAY, pipe_free, (int device, void *p), (device, p), (void)0) \
    FUNCTION(MAY, int, pipe_upload, (int device, void *dst, const void *src, size_t bytes), \
        (device, dst, src, bytes), 0) \
    FUNCTION(MAY, int, pipe_download, (int device, const void *src, void *dst, size_t bytes), \
        (device, src, dst, bytes), 0) \
    FUNCTION(MAY, int, pipe_sync, (int device), (device), 0) \
    FUNCTION(MAY, int, pipe_rmsnorm, (int device, float *y_dev, const float *x_dev, const float *w_dev, int S, \
        int D, float eps), \
        (device, y_dev, x_dev, w_dev, S, D, eps), 0) \
    FUNCTION(MAY, int, pipe_rmsnorm_s, (int device, float *y_dev, const float *x_dev, const float *w_dev, int S, \
        int D, float eps, int xstride, int ystride), \
        (device, y_dev, x_dev, w_dev, S, D, eps, xstride, ystride), 0) \
    FUNCTION(MAY, int, pipe_rope, (int device, float *v_dev, const int *pos_dev, int rows, int stride, int offset, \
        int R, int heads, float theta), \
        (device, v_dev, pos_dev, rows, stride, offset, R, heads, theta), 0) \
    FUNCTION(MAY, int, pipe_rope_base, (int device, float *v_dev, int pos_base, int rows, int stride, int offset, \
        int R, int heads, float theta), \
        (device, v_dev, pos_base, rows, stride, offset, R, heads, theta), 0) \
    FUNCTION(MAY, int, pipe_silu_mul, (int device, float *gate_dev, const float *up_dev, size_t n), \
        (device, gate_dev, up_dev, n), 0) \
    FUNCTION(MAY, int, pipe_add, (int device, float *x_dev, const float *t_dev, size_t n), \
        (device, x_dev, t_dev, n), 0) \
    FUNCTION(MAY, int, pipe_rows_add, (int device, float *x_dev, const float *partial_dev, const int *rows_dev, \
        int nrows, int D), \
        (device, x_dev, partial_dev, rows_dev, nrows, D), 0) \
    FUNCTION(MAY, int, pipe_gemm, (ColiCudaTensor *w, float *y_dev, const float *x_dev, int S), \
        (w, y_dev, x_dev, S), 0) \
    FUNCTION(MAY, int, pipe_copy2d, (int device, void *dst, size_t dpitch, const void *src, size_t spitch, \
        size_t width, size_t height), \
        (device, dst, dpitch, src, spitch, width, height), 0) \
    FUNCTION(MAY, int, pipe_peer_copy, (int dst_device, void *dst, int src_device, const void *src, size_t bytes), \
        (dst_device, dst, src_device, src, bytes), 0) \
    FUNCTION(MAY, int, pipe_router, (int device, const float *x_dev, const void *rw, const void *rb, int D, int E, \
        int Ksel, float topp, int norm_topk, float routed_scale, int *idx_host, float *w_host, int *keff_host), \
        (device, x_dev, rw, rb, D, E, Ksel, topp, norm_topk, routed_scale, idx_host, w_host, keff_host), 0) \
    FUNCTION(MAY, ColiCudaDn *, dn_create, (int device, int hidden, int vk, int vh, int kdim, int vdim, int convk, \
        float eps, const float *conv_w, const float *norm_w), \
        (device, hidden, vk, vh, kdim, vdim, convk, eps, conv_w, norm_w), NULL) \
    PROCEDURE(MAY, dn_free, (ColiCudaDn *dn), (dn), (void)0) \
    FUNCTION(MAY, int, dn_set_state, (ColiCudaDn *dn, const float *ring, const float *rec), (dn, ring, rec), 0) \
    FUNCTION(MAY, int, dn_get_state, (ColiCudaDn *dn, float *ring, float *rec), (dn, ring, rec), 0) \
    FUNCTION(MAY, int, dn_step, (ColiCudaDn *dn, ColiCudaTensor *proj, ColiCudaTensor *projz, ColiCudaTensor *outp, \
        const float *x, float *out, const float *egh, const float *beta), \
        (dn, proj, projz, outp, x, out, egh, beta), 0) \
    FUNCTION(MAY, const ColiCudaChainOps *, chain_ops, (void), (), NULL)
/* clang-format on */

/*------   The GPU library of this process   ------*/

enum {
#define ENTRY_OF_FUNCTION(level, type, name, parameters, arguments, absent) ENTRY_##name,
#define ENTRY_OF_PROCEDURE(level, name, parameters, arguments, absent) ENTRY_##name,
    CALLS(ENTRY_OF_FUNCTION, ENTRY_OF_PROCEDURE) ENTRIES
};

enum { MAY, MUST };

static const struct entry {
    const char *name;
    int level;
} entries[ENTRIES] = {
#define NAME_OF_FUNCTION(level, type, name, parameters, arguments, absent) {"coli_cuda_" #name, level},
#define NAME_OF_PROCEDURE(level, name, parameters, arguments, absent) {"coli_cuda_" #name, level},
    CALLS(NAME_OF_FUNCTION, NAME_OF_PROCEDURE)};

/* Written by the one attempt, and read only from then on. */
static struct {
    int loaded;
    coli_loader_library library;
    coli_loader_function functions[ENTRIES];
    const char *misses[ENTRIES]; /* reasons; NULL where the library has the function */
    char why[COLI_LOADER_PATH_BYTES];
} process;

static const char *kept(const char *reason) {
    size_t size = strlen(reason) + 1;
    char *copy = malloc(size);
    return copy ? memcpy(copy, reason, size) : "missing, and no memory to say why";
}

static void resolve_all(void) {
    for (int i = 0; i < ENTRIES; i++) {
        char reason[COLI_LOADER_PATH_BYTES];
        process.functions[i] = coli_loader_symbol(&process.library, entries[i].name, reason, sizeof reason);
        if (!process.functions[i]) process.misses[i] = kept(reason);
    }
}

static void attempt(void) {
    const char *mandatory[ENTRIES + 1];
    size_t count = 0;
    for (int i = 0; i < ENTRIES; i++) {
        if (entries[i].level == MUST) mandatory[count++] = entries[i].name;
    }
    mandatory[count] = NULL;
    coli_loader_result result = coli_loader_open(NULL, mandatory, &process.library, process.why, sizeof process.why);
    process.loaded = result == COLI_LOADER_OK;
    if (process.loaded) resolve_all();
}

#ifdef _WIN32
static BOOL CALLBACK call_attempt(PINIT_ONCE once, PVOID unused, PVOID *context) {
    (void)once, (void)unused, (void)context;
    attempt();
    return TRUE;
}
static void attempt_once(void) {
    static INIT_ONCE once = INIT_ONCE_STATIC_INIT;
    InitOnceExecuteOnce(&once, call_attempt, NULL, NULL);
}
#else
static void attempt_once(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, attempt);
}
#endif

const char *coli_loader_path(void) {
    attempt_once();
    return process.loaded ? process.library.path : NULL;
}

const char *coli_loader_why(void) {
    attempt_once();
    return process.loaded ? NULL : process.why;
}

const char *coli_loader_miss(int index) {
    attempt_once();
    for (int i = 0; i < ENTRIES && index >= 0; i++) {
        if (process.misses[i] && index-- == 0) return process.misses[i];
    }
    return NULL;
}

const char *coli_loader_why_not(const char *name) {
    attempt_once();
    if (!process.loaded) return process.why;
    for (int i = 0; i < ENTRIES; i++) {
        if (name && !strcmp(entries[i].name, name)) return process.misses[i];
    }
    return "the GPU ABI has no such name";
}

/*------   What hosts call   ------*/

static coli_loader_function resolved(int entry) {
    attempt_once();
    return process.functions[entry];
}

static const char *unexplained(void) {
    return process.loaded ? "the GPU library does not say why" : process.why;
}

static void no_tensors(size_t *tensor_count, size_t *tensor_bytes) {
    if (tensor_count) *tensor_count = 0;
    if (tensor_bytes) *tensor_bytes = 0;
}

static void no_groups(uint64_t *calls, uint64_t *experts, uint64_t *rows, double *h2d_ms, double *kernel_ms,
                      double *d2h_ms) {
    uint64_t *const counts[] = {calls, experts, rows};
    double *const times[] = {h2d_ms, kernel_ms, d2h_ms};
    for (int i = 0; i < 3; i++) {
        if (counts[i]) *counts[i] = 0;
        if (times[i]) *times[i] = 0;
    }
}

/* Declarations first: some functions stand in for others. */
#define DECLARE_FUNCTION(level, type, name, parameters, arguments, absent) type coli_cuda_##name parameters;
#define DECLARE_PROCEDURE(level, name, parameters, arguments, absent) void coli_cuda_##name parameters;
CALLS(DECLARE_FUNCTION, DECLARE_PROCEDURE)

#define DEFINE_FUNCTION(level, type, name, parameters, arguments, absent)                                                  \
    type coli_cuda_##name parameters {                                                                                     \
        type(*function) parameters = (type(*) parameters)resolved(ENTRY_##name);                                           \
        return function ? function arguments : (absent);                                                                   \
    }
#define DEFINE_PROCEDURE(level, name, parameters, arguments, absent)                                                       \
    void coli_cuda_##name parameters {                                                                                     \
        void(*function) parameters = (void(*) parameters)resolved(ENTRY_##name);                                           \
        if (function)                                                                                                      \
            function arguments;                                                                                            \
        else                                                                                                               \
            absent;                                                                                                        \
    }
CALLS(DEFINE_FUNCTION, DEFINE_PROCEDURE)
#endif
