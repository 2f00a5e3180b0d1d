/* simt_execution.cpp - runs a grid: schedules the threads of a block on fibers and lets them meet at barriers. */
#include "simt_execution.h"

#include "simt_async.h"
#include "simt_fibers.h"

#include <cstdarg>
#include <cstring>
#include <numeric>

namespace simt {

Thread *current;
Block block;
DeviceModel device;
const void *offers[1024];

/* Lanes of one warp that meet under one mask. What they bring is kept twice: lanes that are ahead bring values to the next
 * meeting while others still read those of the last. */
struct Collective {
    Lanes mask, arrived, reading;
    unsigned generation;
    const char *operation;
    Location where;
    uint64_t values[2][SIMT_WAVE];
    Lanes lanes[2];
};

struct Warp {
    Lanes live, unstarted, ready, at_barrier;
    Collective collectives[8];
};

namespace {

constexpr unsigned WARP = SIMT_WAVE, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / WARP, NAMED_BARRIERS = 16;

#if defined(__SANITIZE_THREAD__)
/* Two threads that use one stack in turn would race on it in ThreadSanitizer's eyes. */
constexpr bool SHARE_STACKS = false;
#else
constexpr bool SHARE_STACKS = true;
#endif

enum class Order { forward, reverse, random };

Order order;
uint64_t random_state = 1;
bool lax;

const char *kernel;
const std::function<void()> *body;

Thread threads[MAX_THREADS];
Warp warps[MAX_WARPS];
Warp *current_warp;
unsigned warp_count, runnable_warps; /* the latter: one bit a warp */

Fiber launcher, fibers[MAX_THREADS];
Fiber *idle_fibers[MAX_THREADS];
unsigned fiber_count, idle_count;

unsigned live, returned;

unsigned barrier_generation, barrier_arrived;
unsigned barrier_true[2];
Location barrier_where;

/* A number of threads, whole warps, that meet. */
struct Rendezvous {
    unsigned arrived, threads, generation;
    const char *operation;
    Location where; /* of who came last */
    Waiting waiting;
    char passed[2]; /* stands for the order of memory, where the meeting makes one */
};
Rendezvous named_barriers[NAMED_BARRIERS];
Rendezvous convergences[MAX_WARPS]; /* by first warp */

/* Shared memory that the block has declared so far. */
struct SharedRange {
    char *begin, *end;
};
SharedRange shared_ranges[256];
unsigned shared_range_count;
size_t shared_bytes;

/* Addresses that stand for an order which CUDA guarantees, for ThreadSanitizer. */
char block_start, block_finish, barrier_passed[2];

SIMT_UNTRACED inline void acquire([[maybe_unused]] void *what) {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(what);
#endif
}
SIMT_UNTRACED inline void release([[maybe_unused]] void *what) {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(what);
#endif
}

SIMT_UNTRACED uint64_t random_number() {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545f4914f6cdd1dull;
}

SIMT_UNTRACED bool same_place(Location a, Location b) {
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

SIMT_UNTRACED void print_waiting_threads() {
    unsigned printed = 0;
    for (unsigned i = 0; i < warp_count * WARP; i++) {
        const Thread &t = threads[i];
        if (!t.fiber || !t.waiting_for) continue;
        if (++printed > 8) break;
        fprintf(stderr, "simt:   thread %u waits for %s at %s:%d\n", t.number, t.waiting_for, t.where.file, t.where.line);
    }
    if (printed > 8) fprintf(stderr, "simt:   and more\n");
}

/* One of a set of bits, which is not empty, as SIMT_ORDER says. */
SIMT_UNTRACED unsigned choose_bit(uint64_t set) {
    if (order == Order::forward) return __builtin_ctzll(set);
    if (order == Order::reverse) return 63 - __builtin_clzll(set);
    for (unsigned skip = random_number() % __builtin_popcountll(set); skip; skip--) set &= set - 1;
    return __builtin_ctzll(set);
}

SIMT_UNTRACED void make_ready(Warp &warp, Lanes lanes) {
    warp.ready |= lanes;
    runnable_warps |= 1u << (&warp - warps);
}

/* The thread to run next. A warp goes on as long as one of its lanes can, except in random order. */
SIMT_UNTRACED Thread &take_next_thread() {
    if (!runnable_warps) {
        fprintf(stderr, "simt: %s, block (%u, %u, %u): deadlock, no thread can go on\n", kernel, block.index.x,
                block.index.y, block.index.z);
        print_waiting_threads();
        abort();
    }
    Warp *warp = current_warp;
    if (order == Order::random || !(warp->ready | warp->unstarted)) warp = &warps[choose_bit(runnable_warps)];
    unsigned lane = choose_bit(warp->ready | warp->unstarted);
    Lanes others = ~(Lanes{1} << lane);
    warp->ready &= others;
    warp->unstarted &= others;
    if (!(warp->ready | warp->unstarted)) runnable_warps &= ~(1u << (warp - warps));
    current_warp = warp;
    return threads[(warp - warps) * WARP + lane];
}

void run_threads();

SIMT_UNTRACED Fiber *fiber_for(const Thread &thread) {
    if (!SHARE_STACKS) return &fibers[thread.number];
    if (idle_count) return idle_fibers[--idle_count];
    create_fiber(fibers[fiber_count], run_threads);
    return &fibers[fiber_count++];
}

SIMT_UNTRACED void switch_to_thread(Thread &next) {
    current = &next;
    if (!next.fiber) next.fiber = fiber_for(next);
    switch_to(*next.fiber);
}

/* Lets others run until somebody has made the current thread ready. */
SIMT_UNTRACED void suspend(const char *waiting_for, Location where) {
    Thread &self = *current;
    self.waiting_for = waiting_for;
    self.where = where;
    Thread &next = take_next_thread();
    if (&next != &self) switch_to_thread(next);
    self.waiting_for = nullptr;
}

SIMT_UNTRACED void complete_barrier() {
    barrier_arrived = 0;
    barrier_generation++;
    barrier_true[barrier_generation & 1] = 0;
    for (unsigned w = 0; w < warp_count; w++) {
        if (warps[w].at_barrier) make_ready(warps[w], warps[w].at_barrier);
        warps[w].at_barrier = 0;
    }
    current_warp = &warps[choose_bit(runnable_warps)];
}

/* The caller has come; returns when all have. */
SIMT_UNTRACED void meet_at(Rendezvous &r, unsigned count, const char *operation, Location where) {
    if (r.arrived && r.threads != count) {
        fail("threads wait at one barrier for %u and for %u threads, at %s:%d and %s:%d", r.threads, count, r.where.file,
             r.where.line, where.file, where.line);
    }
    r.threads = count;
    r.operation = operation;
    r.where = where;
    if (++r.arrived < count) return wait_among(r.waiting, operation, where);
    Thread &self = *current;
    r.waiting.lanes[self.warp - warps] |= Lanes{1} << self.lane;
    for (unsigned w = 0; w < warp_count; w++) {
        Lanes lanes = r.waiting.lanes[w];
        if (!lanes || lanes == warps[w].live) continue;
        fail("%u threads meet in %s at %s:%d, but of warp %u only the lanes 0x%08llx", count, operation, where.file,
             where.line, w, (unsigned long long)lanes);
    }
    r.arrived = 0;
    r.generation++;
    wake(r.waiting);
    current_warp = &warps[choose_bit(runnable_warps)];
    suspend(operation, where);
}

SIMT_UNTRACED void complete_collective(Warp &warp, Collective &c) {
    c.lanes[c.generation & 1] = c.reading = c.arrived;
    c.arrived = 0;
    c.generation++;
    make_ready(warp, c.reading);
}

/* The meeting under `mask` that is under way, or a place for a new one. */
SIMT_UNTRACED Collective &collective_for(Warp &warp, Lanes mask) {
    for (Collective &c : warp.collectives) {
        if (c.mask == mask) return c;
    }
    for (Collective &c : warp.collectives) {
        if (c.arrived | c.reading) continue;
        c.mask = mask;
        return c;
    }
    fail("more than 8 different masks at once in one warp");
}

SIMT_UNTRACED void run_body() {
    acquire(&block_start);
    (*body)();
    release(&block_finish);
}

SIMT_UNTRACED void thread_returns() {
    Thread &self = *current;
    Warp &warp = *self.warp;
    forget_copies();
    if (barrier_arrived && !lax) {
        fail("the thread returns while %u others wait at the barrier at %s:%d", barrier_arrived, barrier_where.file,
             barrier_where.line);
    }
    self.fiber = nullptr;
    warp.live &= ~(Lanes{1} << self.lane);
    live--;
    returned++;
    if (barrier_arrived && barrier_arrived == live) complete_barrier();
    for (Collective &c : warp.collectives) {
        if (c.arrived && c.arrived == (c.mask & warp.live)) complete_collective(warp, c);
    }
}

/* What a fiber does: runs threads that have not started, as long as they are next in turn, then idles. */
SIMT_UNTRACED void run_threads() {
    finish_switch();
    for (;;) {
        Fiber *self = running;
        run_body();
        thread_returns();
        if (!live) {
            if (SHARE_STACKS) idle_fibers[idle_count++] = self;
            switch_to(launcher);
            continue;
        }
        Thread &next = take_next_thread();
        if (SHARE_STACKS && !next.fiber) {
            next.fiber = self;
            current = &next;
            continue;
        }
        if (SHARE_STACKS) idle_fibers[idle_count++] = self;
        switch_to_thread(next);
    }
}

SIMT_UNTRACED void run_block() {
    live = block.size.x * block.size.y * block.size.z;
    returned = 0;
    barrier_arrived = barrier_true[barrier_generation & 1] = 0;
    runnable_warps = 0;
    forget_barriers();
    for (unsigned w = 0; w < warp_count; w++) {
        Lanes lanes = live - w * WARP < WARP ? (Lanes{1} << (live - w * WARP)) - 1 : ALL_LANES;
        warps[w].live = warps[w].unstarted = lanes;
        runnable_warps |= 1u << w;
    }
    current_warp = &warps[choose_bit(runnable_warps)];
    release(&block_start);
    switch_to_thread(take_next_thread());
    acquire(&block_finish);
    check_copies_arrived();
    current = nullptr;
}

SIMT_UNTRACED void prepare_threads() {
    unsigned count = block.size.x * block.size.y * block.size.z;
    warp_count = (count + WARP - 1) / WARP;
    uint3 index = {0, 0, 0};
    for (unsigned i = 0; i < count; i++) {
        threads[i] = {index, i, i % WARP, &warps[i / WARP], nullptr, nullptr, {nullptr, 0}};
        if (++index.x < block.size.x) continue;
        index.x = 0;
        if (++index.y < block.size.y) continue;
        index.y = 0;
        index.z++;
    }
    memset(warps, 0, warp_count * sizeof warps[0]);
    if (SHARE_STACKS) return;
    for (; fiber_count < count; fiber_count++) create_fiber(fibers[fiber_count], run_threads);
}

void read_environment() {
    const char *text = getenv("SIMT_ORDER");
    order = Order::forward;
    if (text && strcmp(text, "rev") == 0) order = Order::reverse;
    if (text && strncmp(text, "rand", 4) == 0) {
        order = Order::random;
        random_state = 0x9e3779b97f4a7c15ull * (1 + (text[4] == ':' ? strtoull(text + 5, nullptr, 10) : 0)) | 1;
    }
    text = getenv("SIMT_LAX");
    lax = text && strcmp(text, "1") == 0;
}

/* Visits every block once: in order, in reverse, or - start and stride being random, the latter coprime - shuffled. */
struct BlockOrder {
    uint64_t count, start = 0, stride = 1;
    explicit BlockOrder(uint64_t count_) : count(count_) {
        if (order == Order::reverse) start = stride = count - 1;
        if (order != Order::random) return;
        start = random_number() % count;
        do stride = random_number() % count + 1;
        while (std::gcd(stride, count) != 1);
    }
    uint64_t operator[](uint64_t i) const { return (start + i * stride) % count; }
};

} // namespace

void fail(const char *format, ...) {
    fprintf(stderr, "simt: ");
    if (current) {
        fprintf(stderr, "%s, block (%u, %u, %u), thread (%u, %u, %u): ", kernel, block.index.x, block.index.y,
                block.index.z, current->index.x, current->index.y, current->index.z);
    }
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    abort();
}

SIMT_UNTRACED unsigned barrier(bool predicate, Location where) {
    Thread &self = *current;
    if (!lax && returned) {
        fail("the thread waits at the barrier at %s:%d, but %u threads of its block have returned", where.file, where.line,
             returned);
    }
    if (!lax && barrier_arrived && !same_place(where, barrier_where)) {
        fail("threads of one block wait at different barriers, at %s:%d and %s:%d", barrier_where.file, barrier_where.line,
             where.file, where.line);
    }
    unsigned parity = barrier_generation & 1;
    release(&barrier_passed[parity]);
    barrier_where = where;
    barrier_true[parity] += predicate;
    self.warp->at_barrier |= Lanes{1} << self.lane;
    if (++barrier_arrived == live) complete_barrier();
    suspend("all threads of the block", where);
    acquire(&barrier_passed[parity]);
    return barrier_true[parity];
}

SIMT_UNTRACED Meeting meet(Lanes mask, uint64_t value, const char *operation, bool orders_memory, Location where) {
    Thread &self = *current;
    Warp &warp = *self.warp;
    Lanes bit = Lanes{1} << self.lane;
    if (!(mask & bit)) {
        fail("lane %u calls %s at %s:%d with the mask 0x%08llx, which leaves it out", self.lane, operation, where.file,
             where.line, (unsigned long long)mask);
    }
    Collective &c = collective_for(warp, mask);
    if (!lax && c.arrived && !(strcmp(c.operation, operation) == 0 && same_place(c.where, where))) {
        fail("lanes of one warp meet in different operations, %s at %s:%d and %s at %s:%d", c.operation, c.where.file,
             c.where.line, operation, where.file, where.line);
    }
    unsigned parity = c.generation & 1;
    if (orders_memory) release(&c.values[parity]);
    c.operation = operation;
    c.where = where;
    c.values[parity][self.lane] = value;
    c.arrived |= bit;
    if (c.arrived == (mask & warp.live)) complete_collective(warp, c);
    suspend(operation, where);
    c.reading &= ~bit;
    if (orders_memory) acquire(&c.values[parity]);
    return {c.values[parity], c.lanes[parity]};
}

SIMT_UNTRACED void named_barrier_sync(int id, int threads, Location where) {
    if (id < 1 || id >= (int)NAMED_BARRIERS || threads <= 0 || threads % (int)WARP || threads > (int)MAX_THREADS) {
        fail("named_barrier_sync(%d, %d) at %s:%d: the barriers are 1 to 15, of whole warps", id, threads, where.file,
             where.line);
    }
    Rendezvous &r = named_barriers[id];
    char *passed = &r.passed[r.generation & 1];
    release(passed);
    meet_at(r, (unsigned)threads, "named_barrier_sync", where);
    acquire(passed);
}

SIMT_UNTRACED void converge(unsigned first, unsigned count, const void *mine, const char *operation, Location where) {
    if (first % WARP || count % WARP || current->number - first >= count) {
        fail("%s at %s:%d: threads %u to %u are not whole warps, the caller's among them", operation, where.file,
             where.line, first, first + count - 1);
    }
    Rendezvous &r = convergences[first / WARP];
    if (!lax && r.arrived && !(strcmp(r.operation, operation) == 0 && same_place(r.where, where))) {
        fail("lanes of one warp meet in different operations, %s at %s:%d and %s at %s:%d", r.operation, r.where.file,
             r.where.line, operation, where.file, where.line);
    }
    offers[current->number] = mine;
    meet_at(r, count, operation, where);
}

SIMT_UNTRACED void wait_among(Waiting &waiting, const char *operation, Location where) {
    waiting.lanes[current->warp - warps] |= Lanes{1} << current->lane;
    suspend(operation, where);
}

SIMT_UNTRACED void wake(Waiting &waiting) {
    for (unsigned w = 0; w < warp_count; w++) {
        if (waiting.lanes[w]) make_ready(warps[w], waiting.lanes[w]);
        waiting.lanes[w] = 0;
    }
}

SIMT_UNTRACED void yield() {
    Thread &self = *current;
    if (!runnable_warps) return;
    Order usual = order;
    order = Order::random; /* any other would let two threads that yield starve the rest */
    Thread &next = take_next_thread();
    order = usual;
    make_ready(*self.warp, Lanes{1} << self.lane);
    switch_to_thread(next);
}

SIMT_UNTRACED void dawdle() {
    if (order == Order::random && random_number() & 1) yield();
}

SIMT_UNTRACED Lanes live_lanes() {
    return current->warp->live;
}

void require_capability(int capability, const char *operation, Location where) {
    if (device.capability >= capability) return;
    fail("%s at %s:%d needs compute capability %d.%d, this device has %d.%d", operation, where.file, where.line,
         capability / 10, capability % 10, device.capability / 10, device.capability % 10);
}

SIMT_UNTRACED void add_shared(void *memory, size_t bytes) {
    if (shared_range_count == sizeof shared_ranges / sizeof shared_ranges[0]) fail("too many __shared__ variables");
    shared_ranges[shared_range_count++] = {(char *)memory, (char *)memory + bytes};
    shared_bytes += bytes;
    if (shared_bytes > device.shared_bytes) {
        fail("%zu bytes of shared memory, static and dynamic, where a block has at most %zu", shared_bytes,
             device.shared_bytes);
    }
    poison(memory, bytes);
}

SIMT_UNTRACED bool is_shared(const void *memory, size_t bytes) {
    for (unsigned i = 0; i < shared_range_count; i++) {
        const SharedRange &range = shared_ranges[i];
        if (memory >= range.begin && (const char *)memory + bytes <= range.end) return true;
    }
    return false;
}

/* Not by memset: ThreadSanitizer would take that for an access of the thread. */
SIMT_UNTRACED void poison(void *memory, size_t bytes) {
#if defined(__x86_64__)
    asm volatile("rep stosb" : "+D"(memory), "+c"(bytes) : "a"(0xff) : "memory");
#else
    for (volatile unsigned char *p = (unsigned char *)memory; bytes; bytes--) *p++ = 0xff;
#endif
}

SIMT_UNTRACED void run_grid(const DeviceModel &device_model, dim3 grid, dim3 block_size, size_t dynamic_shared_bytes,
                            const char *kernel_name, const std::function<void()> &kernel_body) {
    read_environment();
    device = device_model;
    kernel = kernel_name;
    body = &kernel_body;
    block.size = block_size;
    block.grid = grid;
    prepare_threads();
    adopt_this_stack(launcher);
    BlockOrder blocks((uint64_t)grid.x * grid.y * grid.z);
    for (uint64_t i = 0; i < blocks.count; i++) {
        uint64_t linear = blocks[i];
        block.index = {(unsigned)(linear % grid.x), (unsigned)(linear / grid.x % grid.y),
                       (unsigned)(linear / grid.x / grid.y)};
        block.number++;
        block.dynamic_shared = nullptr;
        shared_bytes = shared_range_count = 0;
        if (dynamic_shared_bytes && posix_memalign(&block.dynamic_shared, 1024, dynamic_shared_bytes) == 0) {
            add_shared(block.dynamic_shared, dynamic_shared_bytes);
        }
        run_block();
        free(block.dynamic_shared);
    }
    kernel = nullptr;
}

} // namespace simt
