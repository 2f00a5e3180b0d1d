"""The C ABI of a GPU library as numpy functions, for tests.

`Gpu` opens one library file and calls it directly. A call that returns 0 or NULL raises `Refused` with the library's
own status and text, after checking that it wrote nothing into the result.
"""

import math

import numpy as np
import oracle
from pycoli._bindings import ffi

NULL = ffi.NULL
UNTOUCHED = np.float32(-12345.5)  # what results hold before a call

STATUS = {
    "OK": 0,
    "ARGUMENT": 10,
    "SHAPE": 11,
    "FORMAT": 12,
    "NOT_FINITE": 13,
    "STATE": 14,
    "MEMORY": 20,
    "NO_DEVICE": 30,
    "DEVICE": 31,
    "INJECTED": 32,
    "NOT_PROVIDED": 40,
}
NAMES = {number: name for name, number in STATUS.items()}


class Refused(Exception):
    """A call that was not done. `status` is one of the keys of STATUS."""

    def __init__(self, status, text):
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


def pointer(array, ctype):
    """A C pointer to the data of a contiguous array; NULL for None."""
    if array is None:
        return NULL
    assert array.flags.c_contiguous
    return ffi.cast(ctype, array.ctypes.data)


def floats(array):
    return pointer(array, "float *")


def tensor_array(tensors):
    return ffi.new("ColiCudaTensor *[]", [NULL if tensor is None else tensor for tensor in tensors])


class Gpu:
    """One GPU library. Remembers the tensors that it uploads, so that a test need not free them."""

    def __init__(self, path):
        self.path = str(path)
        self.lib = ffi.dlopen(self.path)
        self.tensors = []

    def refusal(self):
        """The error that the last failing call of this thread left."""
        text = ffi.string(self.lib.coli_cuda_last_error()).decode()
        status = NAMES[int(self.lib.coli_cuda_last_status())]
        assert text, "a call returned 0 and does not say why"
        assert status != "OK"
        return Refused(status, text)

    def check(self, done):
        assert done in (0, 1)
        if not done:
            raise self.refusal()

    # ---- devices and tables

    def init(self, *devices):
        self.check(self.lib.coli_cuda_init(list(devices), len(devices)))

    def shutdown(self):
        self.lib.coli_cuda_shutdown()

    def publish_tables(self):
        """The fp8 table; the E8 codebook is built in."""
        with np.errstate(invalid="ignore"):
            table = oracle.E4M3.astype(np.float32)
        self.check(self.lib.coli_cuda_fp8_set_lut(floats(table)))

    def set_codebook(self, codebook):
        self.check(self.lib.coli_cuda_e8_set_grid(pointer(np.ascontiguousarray(codebook), "void *")))

    def memory(self, device=0):
        """(free, total) bytes."""
        free, total = ffi.new("size_t *"), ffi.new("size_t *")
        self.check(self.lib.coli_cuda_mem_info(device, free, total))
        return free[0], total[0]

    # ---- plans

    def limit_path(self, path):
        self.check(self.lib.coli_cuda_limit_path(path.encode()))

    def require_exact(self, exact):
        self.lib.coli_cuda_require_exact(int(exact))

    # ---- statistics

    def stats(self, device=-1):
        """(tensors, bytes)."""
        count, size = ffi.new("size_t *", 77), ffi.new("size_t *", 77)
        self.lib.coli_cuda_stats(device, count, size)
        return count[0], size[0]

    def group_stats(self, device=None):
        """((calls, experts, rows), (h2d, kernel, d2h) in ms)."""
        counts = [ffi.new("uint64_t *") for _ in range(3)]
        times = [ffi.new("double *") for _ in range(3)]
        if device is None:
            self.lib.coli_cuda_group_stats(*counts, *times)
        else:
            self.lib.coli_cuda_group_stats_device(device, *counts, *times)
        return tuple(c[0] for c in counts), tuple(t[0] for t in times)

    # ---- tensors

    def upload(self, matrix, device=0):
        rows, columns = matrix.shape
        slot = ffi.new("ColiCudaTensor **")
        done = self.lib.coli_cuda_tensor_upload_g(
            slot,
            pointer(matrix.data, "void *"),
            floats(matrix.scales),
            oracle.abi_number(matrix.fmt),
            columns,
            rows,
            device,
            matrix.group_size or 0,
        )
        if not done:
            assert slot[0] == NULL, "a failed upload left a tensor"
        self.check(done)
        if not matrix.rotated:
            self.check(self.lib.coli_cuda_tensor_set_rotated(slot[0], 0))
        self.tensors.append(slot[0])
        return slot[0]

    def upload_expert(self, expert, device=0):
        return tuple(self.upload(matrix, device) for matrix in expert)

    def update(self, tensor, matrix):
        self.check(self.lib.coli_cuda_tensor_update(tensor, pointer(matrix.data, "void *"), floats(matrix.scales)))

    def download(self, tensor, like):
        """(data, scales) of a tensor that was uploaded from a matrix such as `like`."""
        data = np.full_like(like.data, 0xA5)
        scales = None if like.scales is None else np.full_like(like.scales, 99)
        self.check(self.lib.coli_cuda_tensor_download(tensor, pointer(data, "void *"), pointer(scales, "void *")))
        return data, scales

    def free(self, tensor):
        self.tensors.remove(tensor)
        self.lib.coli_cuda_tensor_free(tensor)

    def free_all(self):
        while self.tensors:
            self.lib.coli_cuda_tensor_free(self.tensors.pop())

    # ---- products

    def _compute(self, shape, call):
        y = np.full(shape, UNTOUCHED, np.float32)
        done = call(floats(y))
        if not done:
            assert (y == UNTOUCHED).all(), "a failed call wrote results"
        self.check(done)
        return y

    def matmul(self, tensor, x, matrix):
        """x [S, I] times the tensor that was uploaded from `matrix`."""
        rows, columns = matrix.shape
        slot = ffi.new("ColiCudaTensor **", tensor)
        number, group_size = oracle.abi_number(matrix.fmt), matrix.group_size or 0
        device = self.lib.coli_cuda_tensor_device(tensor)
        return self._compute(
            (len(x), rows),
            lambda y: self.lib.coli_cuda_matmul(
                slot, y, floats(x), NULL, NULL, number, len(x), columns, rows, device, group_size
            ),
        )

    def expert_mlp(self, tensors, x):
        return self._compute(x.shape, lambda y: self.lib.coli_cuda_expert_mlp(*tensors, y, floats(x), len(x)))

    def group(self, experts, rows, x, pinned=None):
        """Experts are (gate, up, down) tensors; x [sum(rows), D]. `pinned` None calls the plain entry point."""
        columns = [tensor_array(column) for column in zip(*experts, strict=True)]
        if pinned is None:
            return self._compute(
                x.shape,
                lambda y: self.lib.coli_cuda_expert_group(*columns, list(rows), len(experts), y, floats(x)),
            )
        return self._compute(
            x.shape,
            lambda y: self.lib.coli_cuda_expert_group_pinned(
                *columns, list(rows), len(experts), y, floats(x), int(pinned)
            ),
        )

    def issue(self, experts, rows, x):
        columns = [tensor_array(column) for column in zip(*experts, strict=True)]
        self.check(self.lib.coli_cuda_expert_group_issue(*columns, list(rows), len(experts), floats(x)))

    def issue_sum(self, experts, rows, x, x_index, tokens, row_tokens, weights):
        columns = [tensor_array(column) for column in zip(*experts, strict=True)]
        group = (*columns, list(rows), len(experts))
        weights = np.asarray(weights, np.float32)
        self.check(
            self.lib.coli_cuda_expert_group_issue_sum(
                *group, floats(x), len(x), list(x_index), tokens, list(row_tokens), floats(weights)
            )
        )

    def take_view(self, shape, device=0):
        """The taken rows where the library keeps them."""
        taken = self.lib.coli_cuda_expert_group_take(device)
        if taken == NULL:
            raise self.refusal()
        return np.frombuffer(ffi.buffer(taken, 4 * math.prod(shape)), np.float32).reshape(shape)

    def take(self, shape, device=0):
        return self.take_view(shape, device).copy()

    # ---- encoding

    def encode(self, w, quality, rotate=False, importance=None, device=0):
        """The E8 blocks of float32 w, uint8 [rows, bytes of a row]."""
        rows, columns = w.shape
        blocks = np.full((rows, -(-columns // 256) * 98), 0xA5, np.uint8)
        number = getattr(self.lib, f"COLI_E8_{quality.upper()}")
        how = (device, number, int(rotate), floats(importance))
        self.check(self.lib.coli_cuda_encode_e8(*how, floats(w), rows, columns, pointer(blocks, "void *")))
        return blocks
