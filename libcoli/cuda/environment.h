/* environment.h - switches in the environment, read anew at every call. */
#ifndef COLI_CUDA_ENVIRONMENT_H
#define COLI_CUDA_ENVIRONMENT_H

#include <cstdlib>
#include <cstring>

namespace coli {

inline bool switched_on(const char *variable) {
    const char *value = getenv(variable);
    return value && strcmp(value, "1") == 0;
}

} // namespace coli

#endif
