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
    const long long now = value && value[0] ? atoll(value) : kNever;
    std::lock_guard<std::mutex> lock(mutex);
    if (limit != now) calls = 0;
    limit = now;
    if (limit == kNever || calls++ < limit) return false;
    fail(COLI_E_INJECTED, "%s fails on purpose: COLI_GPU_FAIL_AFTER=%lld", call, limit);
    return true;
}

} // namespace coli
