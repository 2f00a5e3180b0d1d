/* stub_needy.c - a GPU library that needs another library, stub_needed. */
int answer(void);

int coli_cuda_init(const int *devices, int count) {
    return devices && count > 0 && answer() == 42;
}
