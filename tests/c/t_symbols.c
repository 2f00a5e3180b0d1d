/* t_symbols.c - every function of both headers is there to be linked. A function that is declared and not exported fails
 * the link; one that resolves to nothing fails the run. */
#include "coli/coli.h"
#include "coli/coli_moe.h"

#include "check.h"

typedef void (*any_function)(void);

static const struct symbol {
    const char *name;
    any_function address;
} symbols[] = {
#define SYMBOL(name) {#name, (any_function)name},
#include "declared_symbols.h"
#undef SYMBOL
};

int main(void) {
    int count = (int)(sizeof symbols / sizeof *symbols), core = 0, cuda = 0;
    for (int i = 0; i < count; i++) {
        CHECK(symbols[i].address != NULL, "%s", symbols[i].name);
        if (strncmp(symbols[i].name, "coli_cuda_", 10))
            core++;
        else
            cuda++;
    }
    CHECK(core > 0 && cuda > 0, "found %d functions of libcoli and %d of libcoli_cuda", core, cuda);
    return finish("t_symbols");
}
