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
from samples import EXACT, MOST_EXACT_ROWS, gaussian, random_expert
from simulator import Simulator

import pycoli

FORMATS = ["f32", "int8", "int4", "int2", "int4-g32", "int4-g64", "int4-g5", "e8", "mxfp4", "fp8-e4m3-b128"]


def check(name, actual, expected, rows=1):
    """`rows` that met one matrix, at most. How exact many are is for other tests to find."""
    error = oracle.relative_rms(actual, expected)
    assert error <= (EXACT if rows <= MOST_EXACT_ROWS else 1e-3), f"{name}: relative error {error:.3g}"


def check_download(gpu, tensor, matrix):
    data, scales = gpu.download(tensor, matrix)
    assert (data == matrix.data).all(), f"download {matrix.fmt}: other weights"
    assert scales is None or (scales == matrix.scales).all(), f"download {matrix.fmt}: other scales"


def on_each_path(gpu, paths=("plain", "ampere", "hopper")):
    for path in paths:
        gpu.limit_path(path)
        yield path


def product(x, matrix):
    return x.astype(np.float64) @ matrix.decode().T


def matrices(gpu, rng):
    """Every format on every path, with one decode for a row, for a few, and as fp16."""
    for fmt in FORMATS:
        matrix = oracle.random_encoded(rng, fmt, (9, 300))
        tensor = gpu.upload(matrix)
        x = gaussian(rng, 17, 300)
        expected = product(x, matrix)
        for path in on_each_path(gpu):
            for rows in (1, 4, 17):
                check(f"matmul {fmt} {path}", gpu.matmul(tensor, x[:rows], matrix), expected[:rows], rows)
        gpu.update(tensor, matrix)
        check_download(gpu, tensor, matrix)
        gpu.free(tensor)


def long_work(gpu, rng):
    """What goes round more than once: slots of the rings, rounds, passes over rows, chunks of columns."""
    shape = 290, 1800
    for fmt in ("int8", "mxfp4"):
        matrix = oracle.random_encoded(rng, fmt, shape)
        tensor, x = gpu.upload(matrix), gaussian(rng, 4, shape[1])
        expected = product(x, matrix)
        for path in on_each_path(gpu):
            check(f"long {fmt} {path}", gpu.matmul(tensor, x, matrix), expected)
        gpu.free(tensor)
    for fmt, path in (("int8", "ampere"), ("fp8-e4m3-b128", "hopper")):
        matrix = oracle.random_encoded(rng, fmt, (130, 5000))
        x = gaussian(rng, 16, 5000)
        gpu.limit_path(path)
        check(f"chunks and rounds {fmt}", gpu.matmul(gpu.upload(matrix), x, matrix), product(x, matrix))
    gpu.limit_path("hopper")
    gpu.free_all()


def large_e8(gpu, rng):
    """8.8 MB, more than E8 blocks are packed at a time."""
    old, new = (oracle.random_encoded(rng, "e8", (9, 256 * 10_000)) for _ in range(2))
    tensor = gpu.upload(old)
    check_download(gpu, tensor, old)
    gpu.update(tensor, new)
    check_download(gpu, tensor, new)
    gpu.free(tensor)


def run_experts(gpu, rng, D, H, formats, rows, *paths):
    """A group with experts of these formats."""
    group = [random_expert(rng, D, H, expert_formats) for expert_formats in formats]
    x = gaussian(rng, sum(rows), D)
    ends = np.cumsum(rows)[:-1]
    expected = [oracle.expert(part, *expert) for part, expert in zip(np.split(x, ends), group, strict=True)]
    tensors = [gpu.upload_expert(expert) for expert in group]
    for path in on_each_path(gpu, paths):
        parts = np.split(gpu.group(tensors, rows, x), ends)
        for expert_formats, count, actual, right in zip(formats, rows, parts, expected, strict=True):
            check(f"{expert_formats} of a group {path}", actual, right, count)
    return tensors, x, expected


def experts(gpu, rng):
    formats, rows = [(fmt,) * 3 for fmt in FORMATS], [1, 16, 2, 3, 1, 4, 5, 3, 2, 1]
    tensors, x, expected = run_experts(gpu, rng, 72, 40, formats, rows, "plain", "ampere", "hopper")
    gpu.issue(tensors[:2], [1, 1], x[:2])
    check("issued group", gpu.take((2, 72)), np.concatenate([expected[0], expected[1][:1]]))
    gpu.issue_sum(tensors[:2], [1, 1], x[:2], [0, 1], 1, [0, 0], [1, 2])
    check("issued sum", gpu.take((1, 72)), expected[0] + 2 * expected[1][:1])
    gpu.free_all()


def few_rows(gpu, rng):
    """Hidden rows that the product rotates by itself."""
    run_experts(gpu, rng, 40, 700, [("e8",) * 3, ("int8",) * 3], [4, 3], "ampere", "hopper")
    gpu.free_all()


def some_rows(gpu, rng):
    """The kernels for 5 to 16 rows, with more stages than the ring has, and more items than blocks."""
    run_experts(gpu, rng, 1800, 70, [("int8", "int8", "e8"), ("e8", "int8", "int8")], [5, 8], "hopper")
    run_experts(gpu, rng, 300, 70, [("e8", "e8", "mxfp4")], [13], "hopper")
    gpu.free_all()


def many_rows(gpu, rng):
    """The kernels for more than 16 rows, with more stages than the ring has."""
    run_experts(gpu, rng, 800, 70, [("int8", "int8", "e8"), ("e8", "int8", "int8")], [17, 33], "ampere", "hopper")
    gpu.free_all()


def mxfp4_from_host_memory(gpu, rng):
    D, H, S, b1, b2 = 72, 40, 5, 7.0, 1.75
    expert = random_expert(rng, D, H, ("mxfp4",) * 3)
    parts = [pointer(part, "unsigned char *") for matrix in expert for part in (matrix.data, matrix.scales)]
    x, hidden, y = gaussian(rng, S, D), np.empty((S, H), np.float32), np.empty((S, D), np.float32)
    gpu.check(gpu.lib.coli_cuda_matmul_mxfp4(floats(hidden), floats(x), *parts[:2], S, D, H))
    check("mxfp4 matmul", hidden, product(x, expert[0]))
    gpu.check(gpu.lib.coli_cuda_expert_mxfp4(floats(y), floats(x), *parts, S, D, H, b1, b2))
    check("mxfp4 expert", y, oracle.expert_mxfp4(x, *expert, b1, b2))


# ---- device pointers ----


def open_memory(gpu):
    return DeviceMemory(gpu.path if Simulator.is_in(gpu.path) else None)


def on_device(where):
    return ffi.cast("float *", where)


def device_pointers(gpu, rng):
    memory, stream = open_memory(gpu), ffi.NULL
    D, H, rows = 72, 40, [2, 0, 16]
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
    check("matmul_dev", memory.get(hidden_dev, (len(x), H)), product(x, group[0][0]))
    parts = np.split(x, np.cumsum(rows)[:-1])
    expected = np.concatenate([oracle.expert(part, *expert) for part, expert in zip(parts, group, strict=True)])
    check("expert_group_dev", memory.get(y_dev, x.shape), expected)

    tokens, weights = rng.integers(0, 3, len(x), dtype=np.int32), gaussian(rng, len(x))
    sums = np.zeros((3, D))
    np.add.at(sums, tokens, weights[:, None] * expected)
    size = gpu.lib.coli_cuda_expert_group_combine_workspace(*columns, rows, len(rows))
    gpu.check(
        gpu.lib.coli_cuda_expert_group_combine_dev(
            *columns,
            rows,
            len(rows),
            on_device(y_dev),
            len(sums),
            on_device(x_dev),
            ffi.cast("int *", memory.put(tokens)),
            on_device(memory.put(weights)),
            ffi.cast("void *", memory.allocate(size)),
            size,
            stream,
        )
    )
    memory.synchronize(None)
    check("expert_group_combine_dev", memory.get(y_dev, sums.shape), sums)
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


def encoding(gpu, rng):
    """Both qualities; whole super-blocks, partial ones and importance; rotations of one piece and of several."""
    importance = rng.random(300).astype(np.float32)
    for columns, quality, rotate, weights in (
        (300, "search", True, None),
        (300, "search", False, importance),
        (16384 + 8192 + 5, "reference", True, None),
    ):
        w = gaussian(rng, 2, columns)
        stored = pycoli.rotate(w) if rotate else w
        expected = pycoli.encode(stored, "e8", rotate=False, quality=quality, importance=weights).data
        blocks = gpu.encode(w, quality, rotate, weights)
        assert (blocks.reshape(-1) == expected).all(), f"encoding by {quality}: other bytes"


def out_of_bounds(gpu):
    """The caller's fault: a row more than its memory holds."""
    memory = open_memory(gpu)
    source, target = memory.put(np.zeros((1, 256), np.float32)), memory.allocate(2 * 1024)
    gpu.lib.coli_cuda_rotate_rows_dev(0, on_device(target), on_device(source), 2, 256, 0, ffi.NULL)
    memory.synchronize(None)


def probes(gpu, rng):
    memory, bytes_ = open_memory(gpu), 16 * 1500
    source, target = memory.put(gaussian(rng, bytes_ // 4)), memory.allocate(bytes_)
    for kind in (0, 1):
        probe = gpu.lib.coli_cuda_probe_dev
        gpu.check(probe(0, kind, ffi.cast("void *", source), ffi.cast("void *", target), bytes_, ffi.NULL))
    memory.synchronize(None)
    assert (memory.get(target, bytes_ // 4) == memory.get(source, bytes_ // 4)).all(), "the probe did not copy"
    memory.close()


PARTS = {
    part.__name__: part
    for part in (
        matrices,
        long_work,
        large_e8,
        experts,
        few_rows,
        some_rows,
        many_rows,
        mxfp4_from_host_memory,
        device_pointers,
        rotation,
        encoding,
        probes,
    )
}


def main(library, *parts):
    gpu = Gpu(library)
    rng = np.random.default_rng(7)
    gpu.init(0)
    gpu.publish_tables()
    gpu.require_exact(False)
    if parts == ("--out-of-bounds",):
        return out_of_bounds(gpu)
    for part in parts or PARTS:
        PARTS[part](gpu, rng)
    gpu.shutdown()
    print("all results are right")


if __name__ == "__main__":
    main(*sys.argv[1:])
