/* fault.h - COLI_GPU_FAIL_AFTER=N: compute calls fail after N of them, so that hosts can test their fallbacks. */
#ifndef COLI_CUDA_FAULT_H
#define COLI_CUDA_FAULT_H

namespace coli {

/* True, with an error set, when this call is to fail. Counts from the moment the variable takes its value. */
bool fault_injected(const char *call);

} // namespace coli

#endif
