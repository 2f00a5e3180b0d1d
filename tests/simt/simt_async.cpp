/* simt_async.cpp - groups of copies, barriers that count arrivals and bytes, and what is under way. */
#include "simt_async.h"

#include <cstdlib>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void __tsan_read8(void *address);
void __tsan_write8(void *address);
void __tsan_read_range(void *address, unsigned long bytes);
void __tsan_write_range(void *address, unsigned long bytes);
void __tsan_func_entry(void *return_address);
void __tsan_func_exit();
}
#endif

namespace simt {

namespace {

constexpr unsigned MAX_THREADS = 1024, MAX_BARRIERS = 256, GROUPS_TOLD_APART = 8;
constexpr uint32_t MAX_TRANSACTION = (1u << 20) - 1;

struct Copy {
    Copy *next;
    char *to;
    const char *from;
    size_t bytes;
    unsigned group;
    Location where;
};

/* Copies under way, oldest first. */
struct CopyList {
    Copy *first, *last;
};
Copy *free_copies;

/* What a thread has started with copy_async. */
struct ThreadCopies {
    CopyList list;
    unsigned groups; /* committed */
    char arrived[GROUPS_TOLD_APART];
};
ThreadCopies thread_copies[MAX_THREADS];

/* The barrier in shared memory holds its place in this table. */
struct TransactionBarrier {
    uint64_t *address;
    unsigned expected, pending; /* arrivals: of a phase; that the current one still lacks */
    int64_t bytes;              /* that the current phase still lacks */
    unsigned phase;
    unsigned owner; /* the thread that initialised it */
    bool published;
    CopyList copies;
    Waiting waiting;
    char passed[2]; /* stand for the order of memory: by parity */
};
TransactionBarrier barriers[MAX_BARRIERS];
unsigned barrier_count;
constexpr uint64_t BARRIER_WORD = 0x6261727269657200;

/* ---- For the sanitizers. */

SIMT_UNTRACED void acquire([[maybe_unused]] void *what) {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(what);
#endif
}

SIMT_UNTRACED void release([[maybe_unused]] void *what) {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(what);
#endif
}

/* The copy as accesses of a thread of its own, whose work up to here `arrived` stands for. */
SIMT_UNTRACED void trace_copy([[maybe_unused]] const Copy &copy, [[maybe_unused]] void *arrived,
                              [[maybe_unused]] void *return_address) {
#if defined(__SANITIZE_THREAD__)
    static void *engines[MAX_THREADS];
    void *&engine = engines[current->number], *self = __tsan_get_current_fiber();
    if (!engine) {
        engine = __tsan_create_fiber(0);
        __tsan_set_fiber_name(engine, "copies of a GPU thread");
    }
    __tsan_release(&engine);
    __tsan_switch_to_fiber(engine, __tsan_switch_to_fiber_no_sync);
    __tsan_acquire(&engine);
    __tsan_func_entry(return_address);
    __tsan_read_range((void *)copy.from, copy.bytes);
    __tsan_write_range(copy.to, copy.bytes);
    __tsan_func_exit();
    __tsan_release(arrived);
    __tsan_switch_to_fiber(self, __tsan_switch_to_fiber_no_sync);
#endif
}

/* AddressSanitizer reports it here if the bytes are not all addressable. */
SIMT_UNTRACED void check_addressable([[maybe_unused]] const void *memory, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    void *bad = __asan_region_is_poisoned((void *)memory, bytes);
    if (bad) (void)*(volatile char *)bad;
#endif
}

/* Not by memcpy: ThreadSanitizer would take that for accesses of the thread. */
SIMT_UNTRACED void copy_bytes(char *to, const char *from, size_t bytes) {
#if defined(__x86_64__)
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
#else
    for (volatile char *p = to; bytes; bytes--) *p++ = *from++;
#endif
}

/* ---- Copies. */

SIMT_UNTRACED void check_copy(const void *shared, const void *global, size_t bytes, const char *operation, Location where) {
    if (((uintptr_t)shared | (uintptr_t)global | bytes) % 16) {
        fail("%s at %s:%d: to %p, from %p, %zu bytes, which are not all multiples of 16", operation, where.file, where.line,
             shared, global, bytes);
    }
    check_addressable(shared, bytes);
    check_addressable(global, bytes);
    if (!is_shared(shared, bytes)) {
        fail("%s at %s:%d: the %zu bytes at %p are not in the block's shared memory", operation, where.file, where.line,
             bytes, shared);
    }
    if (is_shared(global, bytes)) {
        fail("%s at %s:%d: the source %p is in shared memory", operation, where.file, where.line, global);
    }
}

SIMT_UNTRACED Copy &start(CopyList &list, void *shared, const void *global, size_t bytes, Location where) {
    if (!free_copies) {
        constexpr unsigned more = 1024;
        Copy *copies = (Copy *)calloc(more, sizeof(Copy));
        for (unsigned i = 0; i < more; i++) {
            copies[i].next = free_copies;
            free_copies = &copies[i];
        }
    }
    Copy &copy = *free_copies;
    free_copies = copy.next;
    copy.next = nullptr;
    copy.to = (char *)shared;
    copy.from = (const char *)global;
    copy.bytes = bytes;
    copy.where = where;
    (list.first ? list.last->next : list.first) = &copy;
    list.last = &copy;
    poison(shared, bytes);
    return copy;
}

SIMT_UNTRACED void drop_first(CopyList &list) {
    Copy *copy = list.first;
    list.first = copy->next;
    copy->next = free_copies;
    free_copies = copy;
}

SIMT_UNTRACED void let_first_arrive(CopyList &list) {
    copy_bytes(list.first->to, list.first->from, list.first->bytes);
    drop_first(list);
}

/* ---- Barriers. */

SIMT_UNTRACED void check_barrier_address(const uint64_t *address, const char *operation, Location where) {
    require_capability(90, operation, where);
    check_addressable(address, sizeof *address);
    if ((uintptr_t)address % 8 || !is_shared(address, sizeof *address)) {
        fail("%s at %s:%d: %p is not 8 aligned bytes of the block's shared memory", operation, where.file, where.line,
             (const void *)address);
    }
}

SIMT_UNTRACED TransactionBarrier *find_barrier(const uint64_t *address) {
    uint64_t number = *address - BARRIER_WORD;
    return number < barrier_count && barriers[number].address == address ? &barriers[number] : nullptr;
}

SIMT_UNTRACED TransactionBarrier &use_barrier(uint64_t *address, const char *operation, Location where) {
    check_barrier_address(address, operation, where);
#if defined(__SANITIZE_THREAD__)
    __tsan_func_entry(__builtin_return_address(0));
    __tsan_read8(address);
    __tsan_func_exit();
#endif
    TransactionBarrier *barrier = find_barrier(address);
    if (!barrier) fail("%s at %s:%d: the barrier is not initialised", operation, where.file, where.line);
    return *barrier;
}

/* Begins the next phase if the current one lacks nothing. */
SIMT_UNTRACED void end_phase(TransactionBarrier &barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.phase++;
    barrier.pending = barrier.expected;
    wake(barrier.waiting);
}

SIMT_UNTRACED void arrive(TransactionBarrier &barrier, const char *operation, Location where) {
    release(&barrier.passed[barrier.phase & 1]);
    if (barrier.pending == 0) {
        fail("%s at %s:%d: all %u arrivals of the phase have come", operation, where.file, where.line, barrier.expected);
    }
    barrier.pending--;
    end_phase(barrier);
    if (barrier.pending == 0) wake(barrier.waiting); /* to let the copies arrive */
}

} // namespace

SIMT_UNTRACED void copy_async_16(void *shared, const void *global, Location where) {
    require_capability(80, "copy_async_16", where);
    check_copy(shared, global, 16, "copy_async_16", where);
    ThreadCopies &mine = thread_copies[current->number];
    Copy &copy = start(mine.list, shared, global, 16, where);
    copy.group = mine.groups;
    trace_copy(copy, &mine.arrived[copy.group % GROUPS_TOLD_APART], __builtin_return_address(0));
}

SIMT_UNTRACED void copy_async_commit() {
    thread_copies[current->number].groups++;
}

SIMT_UNTRACED void wait_for_groups(unsigned under_way) {
    ThreadCopies &mine = thread_copies[current->number];
    dawdle();
    while (mine.list.first && mine.list.first->group + under_way < mine.groups) {
        acquire(&mine.arrived[mine.list.first->group % GROUPS_TOLD_APART]);
        let_first_arrive(mine.list);
    }
}

SIMT_UNTRACED void barrier_init(uint64_t *address, unsigned arrivals, Location where) {
    check_barrier_address(address, "barrier_init", where);
    if (find_barrier(address)) fail("barrier_init at %s:%d: the barrier is initialised already", where.file, where.line);
    if (arrivals == 0 || arrivals > MAX_TRANSACTION)
        fail("barrier_init at %s:%d: %u arrivals", where.file, where.line, arrivals);
    if (barrier_count == MAX_BARRIERS) fail("barrier_init at %s:%d: too many barriers", where.file, where.line);
#if defined(__SANITIZE_THREAD__)
    __tsan_func_entry(__builtin_return_address(0));
    __tsan_write8(address);
    __tsan_func_exit();
#endif
    *address = BARRIER_WORD + barrier_count;
    TransactionBarrier &barrier = barriers[barrier_count++];
    barrier.address = address;
    barrier.expected = barrier.pending = arrivals;
    barrier.bytes = 0;
    barrier.phase = 0;
    barrier.owner = current->number;
    barrier.published = false;
}

SIMT_UNTRACED void barrier_init_fence(Location where) {
    require_capability(90, "barrier_init_fence", where);
    for (unsigned i = 0; i < barrier_count; i++) {
        if (barriers[i].owner == current->number) barriers[i].published = true;
    }
}

SIMT_UNTRACED void barrier_expect(uint64_t *address, uint32_t bytes, Location where) {
    TransactionBarrier &barrier = use_barrier(address, "barrier_expect", where);
    barrier.bytes += bytes;
    if (barrier.bytes > (int64_t)MAX_TRANSACTION) {
        fail("barrier_expect at %s:%d: more than %u bytes in a phase", where.file, where.line, MAX_TRANSACTION);
    }
    arrive(barrier, "barrier_expect", where);
}

SIMT_UNTRACED void barrier_arrive(uint64_t *address, Location where) {
    arrive(use_barrier(address, "barrier_arrive", where), "barrier_arrive", where);
}

/* Lets the barrier's copies arrive, and the phase end, if it is that phase and nobody else is to come. */
SIMT_UNTRACED static bool ended(TransactionBarrier &barrier, unsigned parity, const char *operation, Location where) {
    if ((barrier.phase & 1) != parity) return true;
    if (barrier.pending) return false;
    for (; barrier.copies.first; let_first_arrive(barrier.copies)) barrier.bytes -= barrier.copies.first->bytes;
    if (barrier.bytes < 0) {
        fail("%s at %s:%d: %lld bytes more than the phase expects have arrived", operation, where.file, where.line,
             -(long long)barrier.bytes);
    }
    end_phase(barrier);
    return (barrier.phase & 1) != parity;
}

SIMT_UNTRACED static TransactionBarrier &barrier_to_ask(uint64_t *address, unsigned parity, const char *operation,
                                                        Location where) {
    TransactionBarrier &barrier = use_barrier(address, operation, where);
    if (parity > 1) fail("%s at %s:%d: the parity is %u", operation, where.file, where.line, parity);
    dawdle();
    return barrier;
}

SIMT_UNTRACED void barrier_wait(uint64_t *address, unsigned parity, Location where) {
    TransactionBarrier &barrier = barrier_to_ask(address, parity, "barrier_wait", where);
    while (!ended(barrier, parity, "barrier_wait", where)) wait_among(barrier.waiting, "barrier_wait", where);
    acquire(&barrier.passed[parity]);
}

SIMT_UNTRACED bool barrier_done(uint64_t *address, unsigned parity, Location where) {
    TransactionBarrier &barrier = barrier_to_ask(address, parity, "barrier_done", where);
    if (!ended(barrier, parity, "barrier_done", where)) {
        yield(); /* who asks again is to be answered otherwise some day */
        return false;
    }
    acquire(&barrier.passed[parity]);
    return true;
}

SIMT_UNTRACED void copy_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *address, Location where) {
    TransactionBarrier &barrier = use_barrier(address, "copy_bulk", where);
    if (bytes == 0) fail("copy_bulk at %s:%d: no bytes", where.file, where.line);
    if (!barrier.published) {
        fail("copy_bulk at %s:%d: no barrier_init_fence of the initialising thread has made the barrier visible to copies",
             where.file, where.line);
    }
    check_copy(shared, global, bytes, "copy_bulk", where);
    Copy &copy = start(barrier.copies, shared, global, bytes, where);
    trace_copy(copy, &barrier.passed[barrier.phase & 1], __builtin_return_address(0));
    if (barrier.pending == 0) wake(barrier.waiting);
}

void proxy_fence(Location where) {
    require_capability(90, "proxy_fence", where);
}

SIMT_UNTRACED void forget_copies() {
    ThreadCopies &mine = thread_copies[current->number];
    while (mine.list.first) drop_first(mine.list);
    mine.groups = 0;
}

SIMT_UNTRACED void forget_barriers() {
    barrier_count = 0;
}

SIMT_UNTRACED void check_copies_arrived() {
    for (unsigned i = 0; i < barrier_count; i++) {
        const Copy *copy = barriers[i].copies.first;
        if (copy) fail("the block ends while the copy of %s:%d is under way", copy->where.file, copy->where.line);
    }
}

} // namespace simt
