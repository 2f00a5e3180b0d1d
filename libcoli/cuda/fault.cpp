#include "fault.h"

#include <cstdlib>
#include <mutex>
#include <string>

#include "error.h"

namespace coli {

bool fault_injected(const char *call) {
    static std::mutex mutex;
    static std::string value; /* the variable when the count began */
    static long long calls = 0;

    const char *now = getenv("COLI_GPU_FAIL_AFTER");
    std::lock_guard<std::mutex> lock(mutex);
    if (value != (now ? now : "")) {
        value = now ? now : "";
        calls = 0;
    }
    if (value.empty() || calls++ < atoll(value.c_str())) return false;
    fail(COLI_E_INJECTED, "%s fails on purpose: COLI_GPU_FAIL_AFTER=%s", call, value.c_str());
    return true;
}

} // namespace coli
