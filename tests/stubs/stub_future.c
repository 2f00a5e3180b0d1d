/* stub_future.c - a GPU library of a later ABI: loaders must refuse it before they call anything else. */
#include <stdlib.h>

int coli_cuda_abi_version(void) {
    return 99003;
}

int coli_cuda_init(const int *devices, int count) {
    (void)devices, (void)count;
    abort();
}
