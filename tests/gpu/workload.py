"""Every kernel, on small odd shapes, results checked: what the sanitizers of GPU and CPU run.

python tests/gpu/workload.py LIBRARY [PART ...]    the parts named, or all of PARTS
python tests/gpu/workload.py LIBRARY --out-of-bounds    a fault that compute-sanitizer must report
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np
import oracle
from abi import Gpu, ffi, floats, pointer, tensor_array
from device_memory import DeviceMemory
from samples import EXACT, gaussian, random_expert
from simulator import Simulator

FORMATS = ["f32", "int8", "int4", "int2", "int4-g16", "int4-g5", "e8", "mxfp4", "fp8-e4m3-b128"]


def check(name, actual, expected):
    error = oracle.relative_rms(actual, expected)
    assert error <= EXACT, f"{name}: relative error {error:.3g}"


def check_download(gpu, tensor, matrix):
    data, scales = gpu.download(tensor, matrix)
    assert (data == matrix.data).all(), f"download {matrix.fmt}: other weights"
    assert scales is None or (scales == matrix.scales).all(), f"download {matrix.fmt}: other scales"


def matrices(gpu, rng):
    for fmt in FORMATS:
        matrix = oracle.random_encoded(rng, fmt, (9, 300))
        tensor = gpu.upload(matrix)
        for rows in (1, 4, 17):
            x = gaussian(rng, rows, 300)
            check(f"matmul {fmt}", gpu.matmul(tensor, x, matrix), x.astype(np.float64) @ matrix.decode().T)
        gpu.update(tensor, matrix)
        check_download(gpu, tensor, matrix)
        gpu.free(tensor)


def large_e8(gpu, rng):
    """8.8 MB, more than E8 blocks are packed at a time."""
    old, new = (oracle.random_encoded(rng, "e8", (9, 256 * 10_000)) for _ in range(2))
    tensor = gpu.upload(old)
    check_download(gpu, tensor, old)
    gpu.update(tensor, new)
    check_download(gpu, tensor, new)
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


def mxfp4_from_host_memory(gpu, rng):
    D, H, S, b1, b2 = 72, 40, 5, 7.0, 1.75
    expert = random_expert(rng, D, H, ("mxfp4",) * 3)
    parts = [pointer(part, "unsigned char *") for matrix in expert for part in (matrix.data, matrix.scales)]
    x, hidden, y = gaussian(rng, S, D), np.empty((S, H), np.float32), np.empty((S, D), np.float32)
    gpu.check(gpu.lib.coli_cuda_matmul_mxfp4(floats(hidden), floats(x), *parts[:2], S, D, H))
    check("mxfp4 matmul", hidden, x.astype(np.float64) @ expert[0].decode().T)
    gpu.check(gpu.lib.coli_cuda_expert_mxfp4(floats(y), floats(x), *parts, S, D, H, b1, b2))
    check("mxfp4 expert", y, oracle.expert_mxfp4(x, *expert, b1, b2))


# ---- device pointers ----


def open_memory(gpu):
    return DeviceMemory(gpu.path if Simulator.is_in(gpu.path) else None)


def on_device(where):
    return ffi.cast("float *", where)


def device_pointers(gpu, rng):
    memory, stream = open_memory(gpu), ffi.NULL
    D, H, rows = 72, 40, [2, 0, 17]
    group = [random_expert(rng, D, H, formats) for formats in (("e8",) * 3, ("int8",) * 3, ("int4", "e8", "mxfp4"))]
    columns = [tensor_array(column) for column in zip(*map(gpu.upload_expert, group), strict=True)]
    x = gaussian(rng, sum(rows), D)
    x_dev, y_dev, hidden_dev = memory.put(x), memory.allocate(x.nbytes), memory.allocate(4 * len(x) * H)

    gpu.check(gpu.lib.coli_cuda_matmul_dev(columns[0][0], on_device(hidden_dev), on_device(x_dev), len(x), stream))
    size = gpu.lib.coli_cuda_expert_group_workspace(*columns, rows, len(rows))
    if size == 0:
        raise gpu.refusal()
    workspace = ffi.cast("void *", memory.allocate(size))
    gpu.check(
        gpu.lib.coli_cuda_expert_group_dev(
            *columns, rows, len(rows), on_device(y_dev), on_device(x_dev), workspace, size, stream
        )
    )
    memory.synchronize(None)
    check("matmul_dev", memory.get(hidden_dev, (len(x), H)), x.astype(np.float64) @ group[0][0].decode().T)
    parts = np.split(x, np.cumsum(rows)[:-1])
    expected = [oracle.expert(part, *expert) for part, expert in zip(parts, group, strict=True)]
    check("expert_group_dev", memory.get(y_dev, x.shape), np.concatenate(expected))
    memory.close()
    gpu.free_all()


def rotation(gpu, rng):
    """A block that is one piece, one that is two, and small ones."""
    memory = open_memory(gpu)
    for dim in (8192 + 256 + 5, 16384 + 256 + 5):
        x = gaussian(rng, 2, dim)
        source, target = memory.put(x), memory.allocate(x.nbytes)
        for inverse, expected in ((0, oracle.rotate(x)), (1, oracle.unrotate(x))):
            rotate = gpu.lib.coli_cuda_rotate_rows_dev
            gpu.check(rotate(0, on_device(target), on_device(source), *x.shape, inverse, ffi.NULL))
            memory.synchronize(None)
            check(f"rotation of {dim}, inverse {inverse}", memory.get(target, x.shape), expected)
    memory.close()


def out_of_bounds(gpu):
    """The caller's fault: a row more than its memory holds."""
    memory = open_memory(gpu)
    source, target = memory.put(np.zeros((1, 256), np.float32)), memory.allocate(2 * 1024)
    gpu.lib.coli_cuda_rotate_rows_dev(0, on_device(target), on_device(source), 2, 256, 0, ffi.NULL)
    memory.synchronize(None)


PARTS = {
    part.__name__: part for part in (matrices, large_e8, experts, mxfp4_from_host_memory, device_pointers, rotation)
}


def main(library, *parts):
    gpu = Gpu(library)
    rng = np.random.default_rng(7)
    gpu.init(0)
    gpu.publish_tables()
    if parts == ("--out-of-bounds",):
        return out_of_bounds(gpu)
    for part in parts or PARTS:
        PARTS[part](gpu, rng)
    gpu.shutdown()
    print("all results are right")


if __name__ == "__main__":
    main(*sys.argv[1:])
