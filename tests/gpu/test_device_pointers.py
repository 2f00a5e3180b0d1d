"""The calls that take device pointers and the caller's stream."""

import numpy as np
import oracle
import pytest
from abi import NULL, Refused, ffi, tensor_array
from device_memory import DeviceMemory
from samples import EXACT, gaussian, random_expert

D, H = 64, 48
ROTATION = 2e-7


@pytest.fixture
def memory(gpu, simulator):
    memory = DeviceMemory(gpu.path if simulator else None)
    yield memory
    memory.close()


def on_device(where):
    return ffi.cast("float *", where)


def matmul_dev(gpu, tensor, y, x, S, stream):
    gpu.check(gpu.lib.coli_cuda_matmul_dev(tensor, on_device(y), on_device(x), S, ffi.cast("void *", stream or 0)))


def workspace_size(gpu, experts, rows):
    columns = [tensor_array(column) for column in zip(*experts, strict=True)]
    return gpu.lib.coli_cuda_expert_group_workspace(*columns, list(rows), len(experts))


def group_dev(gpu, experts, rows, y, x, workspace, workspace_bytes, stream):
    columns = [tensor_array(column) for column in zip(*experts, strict=True)]
    stream = ffi.cast("void *", stream or 0)
    gpu.check(
        gpu.lib.coli_cuda_expert_group_dev(
            *columns,
            list(rows),
            len(experts),
            on_device(y),
            on_device(x),
            ffi.cast("void *", workspace),
            workspace_bytes,
            stream,
        )
    )


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("S", [1, 5, 16, 33])
@pytest.mark.parametrize("fmt", ["e8", "int4", "mxfp4", "f32"])
def test_matmul_gives_the_bits_of_the_host_call(gpu, rng, memory, fmt, S, own_stream):
    matrix = oracle.random_encoded(rng, fmt, (19, 300))
    tensor = gpu.upload(matrix)
    x = gaussian(rng, S, 300)
    x_dev, y_dev = memory.put(x), memory.allocate(4 * S * 19)
    stream = memory.stream() if own_stream else None
    matmul_dev(gpu, tensor, y_dev, x_dev, S, stream)
    memory.synchronize(stream)
    assert np.array_equal(memory.get(y_dev, (S, 19)), gpu.matmul(tensor, x, matrix))
    assert np.array_equal(memory.get(x_dev, x.shape), x)


def test_group_takes_experts_without_rows(gpu, rng, memory):
    rows = [3, 0, 1, 0, 2]
    formats = [("e8",) * 3, ("int4",) * 3, ("int8", "e8", "e8"), ("e8",) * 3, ("mxfp4", "int4", "e8")]
    tensors = [gpu.upload_expert(random_expert(rng, D, H, expert_formats)) for expert_formats in formats]
    x = gaussian(rng, 6, D)
    busy = [(expert, count) for expert, count in zip(tensors, rows, strict=True) if count]
    expected = gpu.group([expert for expert, _ in busy], [count for _, count in busy], x)
    before = gpu.group_stats()[0]

    x_dev, y_dev = memory.put(x), memory.allocate(x.nbytes)
    size = workspace_size(gpu, tensors, rows)
    workspace, stream = memory.allocate(size), memory.stream()
    group_dev(gpu, tensors, rows, y_dev, x_dev, workspace, size, stream)
    memory.synchronize(stream)
    assert np.array_equal(memory.get(y_dev, x.shape), expected)
    assert tuple(a - b for a, b in zip(gpu.group_stats()[0], before, strict=True)) == (1, 5, 6)
    group_dev(gpu, tensors, [0] * 5, y_dev, x_dev, workspace, size, stream)
    memory.synchronize(stream)
    assert np.array_equal(memory.get(y_dev, x.shape), expected), "a group without rows wrote some"


def test_group_of_more_experts_than_a_launch_takes(gpu, rng, memory):
    experts = [random_expert(rng, D, H, ("e8", "int4", "e8")), random_expert(rng, D, H, ("int8",) * 3)]
    tensors = [gpu.upload_expert(expert) for expert in experts] * 75
    rows = [c % 3 for c in range(150)]
    x = gaussian(rng, sum(rows), D)
    x_dev, y_dev, stream = memory.put(x), memory.allocate(x.nbytes), memory.stream()
    size = workspace_size(gpu, tensors, rows)
    group_dev(gpu, tensors, rows, y_dev, x_dev, memory.allocate(size), size, stream)
    memory.synchronize(stream)
    parts = np.split(x, np.cumsum(rows)[:-1])
    expected = np.concatenate([oracle.expert(part, *experts[c % 2]) for c, part in enumerate(parts)])
    assert oracle.relative_rms(memory.get(y_dev, x.shape), expected) <= EXACT


def test_refusals(gpu, rng, memory):
    expert = random_expert(rng, D, H, ("e8",) * 3)
    tensors = gpu.upload_expert(expert)
    x_dev, y_dev = memory.put(gaussian(rng, 2, D)), memory.put(np.full((2, D), 7, np.float32))
    size = workspace_size(gpu, [tensors], [2])
    workspace = memory.allocate(size)
    assert size >= 2 * H * 4
    assert workspace_size(gpu, [tensors], [-1]) == 0
    assert "-1" in gpu.refusal().text
    for call, text in (
        (lambda: group_dev(gpu, [tensors], [2], y_dev, x_dev, workspace, size - 1, None), str(size - 1)),
        (lambda: group_dev(gpu, [tensors], [2], y_dev, x_dev, 0, size, None), "workspace"),
        (lambda: group_dev(gpu, [tensors], [-1], y_dev, x_dev, workspace, size, None), "-1"),
        (lambda: group_dev(gpu, [tensors], [2], 0, x_dev, workspace, size, None), "y"),
        (lambda: group_dev(gpu, [tensors], [2], y_dev, 0, workspace, size, None), "x"),
        (lambda: matmul_dev(gpu, tensors[0], y_dev, x_dev, -1, None), "-1"),
        (lambda: matmul_dev(gpu, tensors[0], 0, x_dev, 1, None), "y"),
        (lambda: matmul_dev(gpu, NULL, y_dev, x_dev, 1, None), "NULL"),
    ):
        with pytest.raises(Refused) as refused:
            call()
        assert text in refused.value.text, refused.value
    rotate = gpu.lib.coli_cuda_rotate_rows_dev
    assert rotate(4711, on_device(y_dev), on_device(x_dev), 1, D, 0, NULL) == 0
    assert "4711" in gpu.refusal().text
    assert rotate(0, on_device(y_dev), on_device(x_dev), 1, 0, 0, NULL) == 0
    assert rotate(0, on_device(y_dev), NULL, 1, D, 0, NULL) == 0
    assert rotate(0, on_device(x_dev), on_device(x_dev), 1, D, 0, NULL) == 0
    memory.synchronize(None)
    assert (memory.get(y_dev, (2, D)) == 7).all()


@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("dim", [1, 2, 7, 32, 96, 300, 768, 2048, 6144, 8192, 14336, 32768, 65536 + 96])
def test_rotation(gpu, rng, memory, dim, inverse):
    x = gaussian(rng, 2, dim)
    x_dev, y_dev, stream = memory.put(x), memory.allocate(x.nbytes), memory.stream()
    gpu.check(
        gpu.lib.coli_cuda_rotate_rows_dev(
            0, on_device(y_dev), on_device(x_dev), 2, dim, inverse, ffi.cast("void *", stream)
        )
    )
    memory.synchronize(stream)
    expected = oracle.unrotate(x) if inverse else oracle.rotate(x)
    assert oracle.relative_rms(memory.get(y_dev, x.shape), expected) <= ROTATION
    assert np.array_equal(memory.get(x_dev, x.shape), x)


def test_rotation_is_exact_on_integers(gpu, rng, memory):
    x = rng.integers(-100, 101, (2, 4096)).astype(np.float32)
    x_dev, y_dev = memory.put(x), memory.allocate(x.nbytes)
    gpu.check(gpu.lib.coli_cuda_rotate_rows_dev(0, on_device(y_dev), on_device(x_dev), 2, 4096, 0, NULL))
    memory.synchronize(None)
    assert np.array_equal(memory.get(y_dev, x.shape), oracle.rotate(x))


@pytest.mark.parametrize("formats", [("e8",) * 3, ("int4", "int8", "e8")], ids="-".join)
def test_captured_in_a_graph(gpu, rng, memory, formats):
    rows = [2, 0, 1]
    tensors = [gpu.upload_expert(random_expert(rng, D, H, formats)) for _ in rows]
    matrix = oracle.random_encoded(rng, "e8", (D, D))
    tensor = gpu.upload(matrix)
    x_dev, rotated_dev, y_dev, product_dev = (memory.allocate(4 * 3 * D) for _ in range(4))
    size = workspace_size(gpu, tensors, rows)
    workspace, stream = memory.allocate(size), memory.stream()

    def work():
        gpu.check(
            gpu.lib.coli_cuda_rotate_rows_dev(
                0, on_device(rotated_dev), on_device(x_dev), 3, D, 0, ffi.cast("void *", stream)
            )
        )
        group_dev(gpu, tensors, rows, y_dev, rotated_dev, workspace, size, stream)
        matmul_dev(gpu, tensor, product_dev, y_dev, 3, stream)

    graph = memory.capture(stream, work)
    for _ in range(3):
        x = gaussian(rng, 3, D)
        memory.put(x, x_dev)
        memory.launch(graph, stream)
        memory.synchronize(stream)
        rotated = memory.get(rotated_dev, x.shape)
        assert oracle.relative_rms(rotated, oracle.rotate(x)) <= ROTATION
        y = gpu.group([tensors[0], tensors[2]], [2, 1], rotated)
        assert np.array_equal(memory.get(y_dev, x.shape), y)
        assert np.array_equal(memory.get(product_dev, x.shape), gpu.matmul(tensor, y, matrix))


def test_update_and_free_wait_for_the_callers_stream(gpu, rng, memory):
    old, new = (oracle.random_encoded(rng, "e8", (64, 512)) for _ in range(2))
    tensor = gpu.upload(old)
    x = gaussian(rng, 4, 512)
    x_dev, y_dev, z_dev, stream = (
        memory.put(x),
        memory.allocate(4 * 4 * 64),
        memory.allocate(4 * 4 * 64),
        memory.stream(),
    )
    matmul_dev(gpu, tensor, y_dev, x_dev, 4, stream)
    gpu.update(tensor, new)
    matmul_dev(gpu, tensor, z_dev, x_dev, 4, stream)
    gpu.free(tensor)
    memory.synchronize(stream)
    assert oracle.relative_rms(memory.get(y_dev, (4, 64)), x @ old.decode().T) <= EXACT
    assert oracle.relative_rms(memory.get(z_dev, (4, 64)), x @ new.decode().T) <= EXACT
