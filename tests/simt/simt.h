/* simt.h - compiles CUDA sources for the CPU, so that kernels can be tested with no GPU.
 *
 * A source that includes this header in place of <cuda_runtime.h>, and has gone through cu2cpp.py, is plain C++17. Each GPU
 * thread then runs on a stack of its own (a fiber), the blocks of a grid run one after another, and streams, events, graphs
 * and memory of several devices are modelled closely enough to expose the mistakes that real ones punish:
 *
 * - AddressSanitizer and UndefinedBehaviorSanitizer see accesses out of bounds or misaligned, bad shifts, and device memory
 *   touched by the host;
 * - ThreadSanitizer sees missing barriers, every GPU thread being one of its fibers; SIMT_ORDER often shows them too;
 * - divergent barriers and warp collectives are reported with their source lines, then the process aborts;
 * - every block starts with shared memory full of 0xff bytes (NaN), so that reading what was not written shows;
 * - copies that go on behind a thread (cp.async) arrive when they are waited for, and their target is full of 0xff bytes
 *   until then;
 * - work on a stream is put off until somebody waits for it, so that missing synchronisation shows.
 *
 * What it cannot show: races between blocks, memory ordering, register limits, coalescing, speed, inline PTX (what the
 * backend has of it has twins here), kernels that overlap on one stream, and the rounding of approximate intrinsics and
 * tensor cores (they are the host's exact functions).
 *
 * Build: g++ -std=c++17 -ffp-contract=off -fno-strict-aliasing, together with the simt_*.cpp.
 *
 * Environment, read when a kernel starts or a call is made:
 * - SIMT_ORDER=fwd, rev or rand:SEED: the order in which threads run between barriers, and blocks in a grid (fwd);
 * - SIMT_LAX=1: threads may return while others still use barriers, and barriers of different lines may meet;
 * - SIMT_STREAMS=lazy or eager: eager runs work on a stream at once (lazy);
 * - SIMT_DEVICES=N: number of devices, up to 16 (2);
 * - SIMT_DEVICE_MB=N: memory of each device in MiB (4096);
 * - SIMT_MULTIPROCESSORS=N: multiprocessors of each device (4);
 * - SIMT_CAPABILITY=N: compute capability of each device, ten times: 80, 86, 89, 90, 100, 120 (90); with SIMT_WAVE=64 it
 *   is always 0, and blocks have 64 KB of shared memory, as AMD's GPUs;
 * - SIMT_NO_DEVICE=1: as on a machine with a driver and no GPU;
 * - SIMT_DRIVER=N: the newest runtime that the driver serves, as CUDA (HIP with SIMT_WAVE=64) writes it, and 0 without a
 *   driver (that of the runtime);
 * - SIMT_FAIL=NAME:N,NAME:N,...: as simt_fail_call (simt_cuda_runtime.h), from the start of the process. */
#ifndef SIMT_H
#define SIMT_H

#include "simt_async.h"
#include "simt_cuda_runtime.h"
#include "simt_execution.h"
#include "simt_half.h"
#include "simt_intrinsics.h"
#if SIMT_WAVE == 32
#include "simt_mma.h"
#endif
#include "simt_types.h"

#endif
