"""Every kernel once, on small odd shapes, results checked: what compute-sanitizer runs.

python tests/gpu/workload.py LIBRARY
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np
import oracle
from abi import Gpu, ffi
from device_memory import DeviceMemory
from samples import EXACT, gaussian, random_expert

FORMATS = ["f32", "int8", "int4", "int2", "int4-g16", "int4-g5", "e8", "mxfp4", "fp8-e4m3-b128"]


def check(name, actual, expected):
    error = oracle.relative_rms(actual, expected)
    assert error <= EXACT, f"{name}: relative error {error:.3g}"


def matrices(gpu, rng):
    for fmt in FORMATS:
        matrix = oracle.random_encoded(rng, fmt, (9, 300))
        tensor = gpu.upload(matrix)
        for rows in (1, 4, 17):
            x = gaussian(rng, rows, 300)
            check(f"matmul {fmt}", gpu.matmul(tensor, x, matrix), x.astype(np.float64) @ matrix.decode().T)
        gpu.update(tensor, matrix)
        data, _ = gpu.download(tensor, matrix)
        assert (data == matrix.data).all(), f"download {fmt}"
        gpu.free(tensor)


def experts(gpu, rng):
    group = [random_expert(rng, 72, 40, (fmt, fmt, fmt)) for fmt in FORMATS]
    rows = [1, 17, 2, 3, 1, 4, 5, 1, 2]
    x = gaussian(rng, sum(rows), 72)
    parts = np.split(x, np.cumsum(rows)[:-1])
    expected = [oracle.expert(part, *expert) for part, expert in zip(parts, group, strict=True)]
    tensors = [gpu.upload_expert(expert) for expert in group]
    check("group", gpu.group(tensors, rows, x), np.concatenate(expected))
    gpu.issue(tensors[:2], [1, 1], x[:2])
    check("issued group", gpu.take((2, 72)), np.concatenate([expected[0], expected[1][:1]]))
    gpu.free_all()


def rotation(gpu, rng):
    memory = DeviceMemory(gpu.path if DeviceMemory.is_exported_by(gpu.path) else None)
    x = gaussian(rng, 2, 8192 + 256 + 5)
    source, target = memory.put(x), memory.allocate(x.nbytes)
    gpu.check(gpu.lib.coli_cuda_rotate_rows_dev(0, pointer(target), pointer(source), *x.shape, 0, ffi.NULL))
    memory.synchronize(None)
    check("rotation", memory.get(target, x.shape), oracle.rotate(x))
    memory.close()


def pointer(where):
    return ffi.cast("float *", where)


def out_of_bounds(gpu):
    """The caller's fault: a row more than its memory holds."""
    memory = DeviceMemory(gpu.path if DeviceMemory.is_exported_by(gpu.path) else None)
    source, target = memory.put(np.zeros((1, 256), np.float32)), memory.allocate(2 * 1024)
    gpu.lib.coli_cuda_rotate_rows_dev(0, pointer(target), pointer(source), 2, 256, 0, ffi.NULL)
    memory.synchronize(None)


def main():
    gpu = Gpu(sys.argv[1])
    rng = np.random.default_rng(7)
    gpu.init(0)
    gpu.publish_tables()
    if "--out-of-bounds" in sys.argv:
        return out_of_bounds(gpu)
    matrices(gpu, rng)
    experts(gpu, rng)
    rotation(gpu, rng)
    gpu.shutdown()
    print("all results are right")


if __name__ == "__main__":
    main()
