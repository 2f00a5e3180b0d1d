/* backend.c - finds and loads the GPU library, and tells what it can do and what it cannot.
 *
 * Every entry point is looked up by itself, so that a library which lacks some still serves with the others. */
#define _GNU_SOURCE /* dladdr, pthread_rwlock_t */

#include "backend.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../formats/signs.h"
#include "status.h"

/*------   What the operating system does   ------*/

#define PATH_BYTES 4096

#ifdef _WIN32
#include <windows.h>

static const char *const library_names[] = {"coli_cuda.dll", "libcoli_cuda.dll"};
#define DIRECTORY_ENDS "/\\"

static void *library_open(const char *path, char *reason, size_t reason_size) {
    DWORD flags = strpbrk(path, DIRECTORY_ENDS) ? LOAD_WITH_ALTERED_SEARCH_PATH : 0;
    void *library = (void *)LoadLibraryExA(path, NULL, flags);
    if (!library) snprintf(reason, reason_size, "%s: error %lu of LoadLibrary", path, (unsigned long)GetLastError());
    return library;
}

static void *library_symbol(void *library, const char *name) {
    return (void *)(uintptr_t)GetProcAddress((HMODULE)library, name);
}

static void library_close(void *library) {
    FreeLibrary((HMODULE)library);
}

/* Path of the file that an address was loaded from; "" when unknown. */
static void library_path_of(const void *address, char path[PATH_BYTES]) {
    HMODULE library = NULL;
    DWORD flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    path[0] = '\0';
    if (!GetModuleHandleExA(flags, (LPCSTR)address, &library)) return;
    if (GetModuleFileNameA(library, path, PATH_BYTES) >= PATH_BYTES) path[0] = '\0';
}

static SRWLOCK calls = SRWLOCK_INIT;

void coli_backend_lock(coli_access access) {
    if (access == COLI_SHARED)
        AcquireSRWLockShared(&calls);
    else
        AcquireSRWLockExclusive(&calls);
}

void coli_backend_unlock(coli_access access) {
    if (access == COLI_SHARED)
        ReleaseSRWLockShared(&calls);
    else
        ReleaseSRWLockExclusive(&calls);
}

#else
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

static const char *const library_names[] = {"libcoli_cuda.so." COLI_VERSION_DIGITS(COLI_CUDA_ABI_MAJOR), "libcoli_cuda.so"};
#define DIRECTORY_ENDS "/"

/* RTLD_NODELETE: a GPU runtime has threads and exit handlers of its own, whose code must not be unmapped while the process
 * lives; and what it allocates once would be lost anew with every time that it is loaded. */
static void *library_open(const char *path, char *reason, size_t reason_size) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library) return library;
    if (strchr(path, '/') && access(path, F_OK) != 0)
        snprintf(reason, reason_size, "%s: no such file", path);
    else
        snprintf(reason, reason_size, "%s", dlerror());
    return NULL;
}

static void *library_symbol(void *library, const char *name) {
    return dlsym(library, name);
}

static void library_close(void *library) {
    dlclose(library);
}

/* Path of the file that an address was loaded from; "" when unknown. */
static void library_path_of(const void *address, char path[PATH_BYTES]) {
    Dl_info info;
    int known = dladdr(address, &info) && info.dli_fname && strlen(info.dli_fname) < PATH_BYTES;
    strcpy(path, known ? info.dli_fname : "");
}

static pthread_rwlock_t calls = PTHREAD_RWLOCK_INITIALIZER;

void coli_backend_lock(coli_access access) {
    if (access == COLI_SHARED)
        pthread_rwlock_rdlock(&calls);
    else
        pthread_rwlock_wrlock(&calls);
}

void coli_backend_unlock(coli_access access) {
    (void)access;
    pthread_rwlock_unlock(&calls);
}
#endif

/*------   Messages that grow   ------*/

typedef struct message {
    char text[2048];
    size_t length;
} message;

COLI_PRINTF(2, 3) static void append(message *m, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    size_t room = sizeof m->text - m->length;
    int written = vsnprintf(m->text + m->length, room, format, arguments);
    va_end(arguments);
    if (written > 0) m->length += (size_t)written < room ? (size_t)written : room - 1;
}

static char *copy_string(const char *string) {
    size_t size = strlen(string) + 1;
    char *copy = malloc(size);
    return copy ? memcpy(copy, string, size) : NULL;
}

/*------   Features   ------*/

#define TENSOR_CALLS "coli_cuda_tensor_upload", "coli_cuda_tensor_free"

/* What a library must export for every format. */
static const char *const format_calls[] = {TENSOR_CALLS, "coli_cuda_matmul"};

/* And for one of them besides; NULL for nothing. Where no call is for the format alone, one that came with it. */
static const char *format_call(int format) {
    switch (format) {
    case COLI_INT4_GROUPED:
        return "coli_cuda_tensor_upload_g";
    case COLI_E8:
        return "coli_cuda_e8_set_grid";
    case COLI_MXFP4:
        return "coli_cuda_matmul_mxfp4";
    case COLI_FP8_B128:
        return "coli_cuda_fp8_set_lut";
    default:
        return NULL;
    }
}

/* The features that are no formats, and what a library must export for each. */
static const struct call_feature {
    const char *name;
    const char *calls[5];
} call_features[COLI_BACKEND_CALL_FEATURES] = {
    {"devices", {"coli_cuda_init", "coli_cuda_shutdown", "coli_cuda_device_count", "coli_cuda_device_at"}},
    {"matmul", {TENSOR_CALLS, "coli_cuda_matmul"}},
    {"expert_mlp", {TENSOR_CALLS, "coli_cuda_expert_mlp"}},
    {"expert_group", {TENSOR_CALLS, "coli_cuda_expert_group"}},
    {"issue_take", {TENSOR_CALLS, "coli_cuda_expert_group_issue", "coli_cuda_expert_group_take"}},
    {"update", {TENSOR_CALLS, "coli_cuda_tensor_update"}},
    {"download", {TENSOR_CALLS, "coli_cuda_tensor_download"}},
};

static int feature_index(const char *name) {
    for (int i = 0; i < COLI_BACKEND_CALL_FEATURES; i++) {
        if (!strcmp(call_features[i].name, name)) return COLI_FORMAT_COUNT + i;
    }
    int format; /* "int4-g32" and its like share a feature with "int4-g64" */
    return coli_format_parse(name, &format, NULL) == COLI_OK ? format : -1;
}

int coli_backend_feature_count(void) {
    return COLI_BACKEND_FEATURES;
}

const char *coli_backend_feature_name(int index) {
    if (index < 0 || index >= COLI_BACKEND_FEATURES) return NULL;
    return index < COLI_FORMAT_COUNT ? coli_format_get(index)->name : call_features[index - COLI_FORMAT_COUNT].name;
}

const char *coli_backend_why_not(const coli_backend *backend, const char *feature) {
    int index = feature ? feature_index(feature) : -1;
    if (index < 0) return "there is no such feature; coli_backend_feature_name() lists them";
    if (!backend) return "no GPU library is loaded";
    return backend->why_not[index];
}

/* Adds an entry point that the library lacks to the reason against a feature. */
static void check_call(const coli_backend *backend, int feature, const char *call, message *why) {
    if (!call || library_symbol(backend->library, call)) return;
    if (why->length)
        append(why, ", %s", call);
    else
        append(why, "%s lacks what %s needs: %s", backend->path, coli_backend_feature_name(feature), call);
}

/* Writes down why the library cannot offer a feature; "" when it can. */
static void explain_feature(const coli_backend *backend, int feature, message *why) {
    if (feature >= COLI_FORMAT_COUNT) {
        const char *const *call = call_features[feature - COLI_FORMAT_COUNT].calls;
        for (; *call; call++) check_call(backend, feature, *call, why);
    } else if (!coli_format_get(feature)->on_gpu) {
        append(why, "the GPU ABI has no %s", coli_format_get(feature)->name);
    } else {
        for (size_t i = 0; i < sizeof format_calls / sizeof *format_calls; i++)
            check_call(backend, feature, format_calls[i], why);
        check_call(backend, feature, format_call(feature), why);
    }
}

/*------   Experts   ------*/

int coli_backend_is_old(const coli_backend *backend) {
    return !backend->call.abi_version;
}

static int largest_rotation_block(int columns) {
    int largest = 0;
    for (int rest = columns, block; rest > 0; rest -= block) {
        block = coli_rotation_block(rest);
        if (block > largest) largest = block;
    }
    return largest;
}

/* How the hidden rows of an expert would reach its down matrix: the library rotates them where that is E8. */
static const char *why_not_down(const coli_backend *backend, const coli_matrix *down) {
    if (down->format != COLI_E8) return NULL;
    if (down->flags & COLI_UNROTATED) {
        return backend->call.tensor_set_rotated
                   ? NULL
                   : "its down matrix is unrotated e8, and the GPU library rotates what meets it";
    }
    if (coli_backend_is_old(backend) && largest_rotation_block(down->columns) > 4096) {
        return "its down matrix needs rotation blocks above 4096, and the GPU library is too old for them";
    }
    return NULL;
}

const char *coli_backend_why_not_expert(const coli_backend *backend, const char *feature, const coli_matrix *gate,
                                        const coli_matrix *up, const coli_matrix *down) {
    const char *lacks = coli_backend_why_not(backend, feature);
    if (lacks) return lacks;
    int grouped = strcmp(feature, "expert_mlp") != 0;
    if (grouped && coli_backend_is_old(backend)) {
        const coli_matrix *const matrices[] = {gate, up, down};
        for (int i = 0; i < 3; i++) {
            if (matrices[i]->format > COLI_INT4_GROUPED)
                return "a GPU library without coli_cuda_abi_version may misread e8, mxfp4 and fp8 matrices in a group";
        }
    }
    return why_not_down(backend, down);
}

void coli_backend_explain(const coli_backend *backend, const char *name, char *why, size_t size) {
    if (backend->call.last_error)
        snprintf(why, size, "%s: %s", name, backend->call.last_error());
    else
        snprintf(why, size, "%s returned 0 (this library does not say why)", name);
}

/*------   Opening   ------*/

static void resolve_calls(coli_backend *backend) {
#define RESOLVE(name)                                                                                                      \
    backend->call.name = (__typeof__(backend->call.name))library_symbol(backend->library, "coli_cuda_" #name);
    COLI_BACKEND_CALLS(RESOLVE)
#undef RESOLVE
}

static coli_status fill_in(coli_backend *backend, const char *path) {
    backend->path = copy_string(path);
    RETURN_ERROR_IF(!backend->path, COLI_E_MEMORY, "no memory for the description of %s", path);
    for (int i = 0; i < COLI_BACKEND_FEATURES; i++) {
        message why = {.length = 0};
        explain_feature(backend, i, &why);
        if (!why.length) continue;
        backend->why_not[i] = copy_string(why.text);
        RETURN_ERROR_IF(!backend->why_not[i], COLI_E_MEMORY, "no memory for the description of %s", path);
    }
    return COLI_OK;
}

/* Loads one file. When it will not do, its reason is appended to `tried`. COLI_E_MEMORY sets the error itself. */
static coli_status try_file(const char *path, coli_backend **result, message *tried) {
    char reason[1024], loaded_path[PATH_BYTES];
    const char *separator = tried->length ? "; " : "";
    coli_backend *backend = calloc(1, sizeof *backend);
    RETURN_ERROR_IF(!backend, COLI_E_MEMORY, "no memory to load %s", path);

    coli_status status = COLI_E_NO_LIBRARY;
    backend->library = library_open(path, reason, sizeof reason);
    if (!backend->library) {
        append(tried, "%s%s", separator, reason);
        goto refuse;
    }
    const void *init = library_symbol(backend->library, "coli_cuda_init");
    if (!init) {
        append(tried, "%s%s is not a libcoli_cuda: it lacks coli_cuda_init", separator, path);
        goto refuse;
    }
    resolve_calls(backend);
    /* A library without a version is older than versions, and has the calls of this ABI major. */
    int abi = backend->call.abi_version ? backend->call.abi_version() : COLI_CUDA_ABI_MAJOR * 1000;
    if (abi / 1000 != COLI_CUDA_ABI_MAJOR) {
        append(tried, "%s%s speaks libcoli_cuda ABI %d.%d, this libcoli speaks %d.x", separator, path, abi / 1000,
               abi % 1000, COLI_CUDA_ABI_MAJOR);
        status = COLI_E_ABI;
        goto refuse;
    }
    library_path_of(init, loaded_path);
    status = fill_in(backend, loaded_path[0] ? loaded_path : path);
    if (status != COLI_OK) goto refuse;
    *result = backend;
    return COLI_OK;

refuse:
    coli_backend_close(backend);
    return status;
}

/* Tries the usual names in `directory`; with NULL, wherever the system looks. */
static coli_status try_directory(const char *directory, coli_backend **result, message *tried) {
    coli_status status = COLI_E_NO_LIBRARY;
    for (size_t i = 0; i < sizeof library_names / sizeof *library_names; i++) {
        char path[PATH_BYTES + 32];
        snprintf(path, sizeof path, "%s%s", directory ? directory : "", library_names[i]);
        coli_status one = try_file(path, result, tried);
        if (one == COLI_OK || one == COLI_E_MEMORY) return one;
        if (one == COLI_E_ABI) status = one;
    }
    return status;
}

/* The folder that this code was loaded from, with its final separator; "" when unknown. */
static void own_directory(char directory[PATH_BYTES]) {
    library_path_of(call_features, directory);
    size_t length = strlen(directory);
    while (length && !strchr(DIRECTORY_ENDS, directory[length - 1])) length--;
    directory[length] = '\0';
}

static coli_status try_usual_places(coli_backend **result, message *tried) {
    char directory[PATH_BYTES];
    own_directory(directory);
    coli_status beside = directory[0] ? try_directory(directory, result, tried) : COLI_E_NO_LIBRARY;
    if (beside == COLI_OK || beside == COLI_E_MEMORY) return beside;
    coli_status anywhere = try_directory(NULL, result, tried);
    return anywhere == COLI_E_NO_LIBRARY ? beside : anywhere;
}

coli_status coli_backend_open(const char *path, coli_backend **backend) {
    RETURN_ERROR_IF(!backend, COLI_E_ARGUMENT, "coli_backend_open needs a place for its result, got backend = NULL");
    RETURN_ERROR_IF(path && !path[0], COLI_E_ARGUMENT, "coli_backend_open needs a path or NULL, got an empty path");
    message tried = {.length = 0};
    const char *from_environment = path ? NULL : getenv("COLI_CUDA_LIB");
    if (from_environment && !from_environment[0]) from_environment = NULL;
    if (from_environment) path = from_environment;

    coli_status status = path ? try_file(path, backend, &tried) : try_usual_places(backend, &tried);
    if (status == COLI_OK || status == COLI_E_MEMORY) return status;
    RETURN_ERROR(status, "no usable GPU library%s: %s%s", from_environment ? " at COLI_CUDA_LIB" : "", tried.text,
                 path ? "" : "; COLI_CUDA_LIB can name one");
}

void coli_backend_close(coli_backend *backend) {
    if (!backend) return;
    for (int i = 0; i < COLI_BACKEND_FEATURES; i++) free(backend->why_not[i]);
    free(backend->path);
    if (backend->library) library_close(backend->library);
    free(backend);
}

const char *coli_backend_path(const coli_backend *backend) {
    return backend ? backend->path : NULL;
}

void *coli_backend_symbol(const coli_backend *backend, const char *name) {
    return backend && name ? library_symbol(backend->library, name) : NULL;
}

/*------   Devices   ------*/

/* Ordinals 0 ... count - 1 of the visible devices; device 0, to be tried, when the library cannot count them. */
static int visible_devices(const coli_backend *backend, int devices[COLI_CUDA_MAX_DEVICES]) {
    int count = backend->call.available_device_count ? backend->call.available_device_count() : 1;
    if (count > COLI_CUDA_MAX_DEVICES) count = COLI_CUDA_MAX_DEVICES;
    for (int i = 0; i < count; i++) devices[i] = i;
    return count;
}

/* Name of the call that failed, or NULL. */
static const char *configure(const coli_backend *backend, const int *devices, int count) {
    int visible[COLI_CUDA_MAX_DEVICES];
    if (!devices) {
        devices = visible;
        count = visible_devices(backend, visible);
        if (count < 1) return "coli_cuda_available_device_count";
    }
    return backend->call.init(devices, count) ? NULL : "coli_cuda_init";
}

coli_status coli_backend_init(coli_backend *backend, const int *devices, int count) {
    RETURN_ERROR_IF(!backend, COLI_E_ARGUMENT, "coli_backend_init needs a backend, got NULL");
    const char *lacks = coli_backend_why_not(backend, "devices");
    RETURN_ERROR_IF(lacks, COLI_E_NOT_PROVIDED, "%s", lacks);
    char why[sizeof backend->init_error] = "";
    coli_backend_lock(COLI_EXCLUSIVE);
    const char *failed = configure(backend, devices, count);
    if (failed) coli_backend_explain(backend, failed, why, sizeof why);
    memcpy(backend->init_error, why, sizeof why);
    coli_backend_unlock(COLI_EXCLUSIVE);
    if (!failed) return COLI_OK;
    coli_status status = backend->call.last_status ? backend->call.last_status() : COLI_OK;
    RETURN_ERROR(status == COLI_OK ? COLI_E_NO_DEVICE : status, "%s: %s", backend->path, why);
}
