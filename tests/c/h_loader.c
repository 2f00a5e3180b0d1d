/* h_loader.c - every function that coli_loader.c defines has the prototype of coli_cuda.h: the compiler sees both. */
#define _GNU_SOURCE
#define COLI_STATIC
#include "coli/coli_cuda.h"

#include "../../libcoli/loader/coli_loader.c"

int main(void) {
    return 0;
}
