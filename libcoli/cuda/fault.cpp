#include "fault.h"

#include <cstdlib>
#include <mutex>

#include "error.h"

namespace coli {

bool fault_injected(const char *call) {
    constexpr long long kNever = -1;
    static std::mutex mutex;
    static long long limit = kNever, calls = 0;

    const char *value = getenv("COLI_GPU_FAIL_AFTER");
    char *end = nullptr;
    const long long parsed = value ? strtoll(value, &end, 10) : kNever;
    const long long now = end != value && *end == '\0' && parsed >= 0 ? parsed : kNever; /* junk is no limit */
    std::lock_guard<std::mutex> lock(mutex);
    if (limit != now) calls = 0;
    limit = now;
    if (limit == kNever || calls++ < limit) return false;
    fail(COLI_E_INJECTED, "%s fails on purpose: COLI_GPU_FAIL_AFTER=%lld", call, limit);
    return true;
}

} // namespace coli
