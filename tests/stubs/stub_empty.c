/* stub_empty.c - a shared library that has nothing to do with coli. */
int answer(void) {
    return 42;
}
