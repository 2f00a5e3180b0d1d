/* simt_async.h - twins of ptx/copy.cuh: copies that threads start and wait for.
 *
 * A copy arrives as late as it may: copy_async_16 when its thread waits for the group, copy_bulk when somebody waits for
 * the barrier. From the start of the copy until then its target is full of 0xff bytes, so that both reading too early and
 * overwriting too early show. To ThreadSanitizer each thread's copies are accesses of one more thread, which runs behind
 * what the starting thread did and in front of what waiting threads do. */
#ifndef SIMT_ASYNC_H
#define SIMT_ASYNC_H

#include "simt_execution.h"

namespace simt {

void copy_async_16(void *shared, const void *global, Location where = Location::here());
void copy_async_commit();
void wait_for_groups(unsigned under_way);
template <int N> void copy_async_wait() {
    static_assert(N >= 0, "the number of groups that may be under way");
    wait_for_groups(N);
}

void barrier_init(uint64_t *barrier, unsigned arrivals, Location where = Location::here());
void barrier_init_fence(Location where = Location::here());
void barrier_expect(uint64_t *barrier, uint32_t bytes, Location where = Location::here());
void barrier_arrive(uint64_t *barrier, Location where = Location::here());
void barrier_wait(uint64_t *barrier, unsigned parity, Location where = Location::here());
bool barrier_done(uint64_t *barrier, unsigned parity, Location where = Location::here());
void copy_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *barrier, Location where = Location::here());
void proxy_fence(Location where = Location::here());

/* For run_grid: a thread returns; a block begins; a block has ended. */
void forget_copies();
void forget_barriers();
void check_copies_arrived();

} // namespace simt

#endif
