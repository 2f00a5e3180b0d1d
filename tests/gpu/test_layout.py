"""Matrices on their way to the device and back: every layout, several chunks, pinned memory, failures half-way."""

import ctypes
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import oracle
import pytest
from abi import Refused, pointer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import MANY_ROWS, gaussian

FORMATS = [name for name in oracle.FORMATS if name not in ("int3-g64", "int4-g64")]
GROUP_SIZES = [1, 5, 16, 32, 48, 64, 96, 128, 256, 300, 512, 768, 10_000]
GROUPED = [f"int4-g{size}" for size in GROUP_SIZES]

# Strips, tiles, super-blocks and scale blocks, one more and one less.
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257, 511, 512, 513]

# More than one chunk, wide rows and narrow ones; the last two have rows that are chunks by themselves.
SEVERAL_CHUNKS = {
    "e8": [(700, 2333), (3, 800_000)],
    "int4": [(1300, 1001), (2, 3_000_001)],
    "int4-g5": [(300, 2001)],
    "int4-g64": [(1300, 1001), (2, 3_000_000)],
    "int4-g768": [(700, 2001), (17, 200_001)],
    "mxfp4": [(1300, 1001), (2, 3_000_001)],
    "int2": [(1300, 1003), (2, 3_000_003)],
    "int8": [(1300, 1001), (40_000, 7), (2, 600_001)],
    "fp8-e4m3-b128": [(1300, 1001), (2, 600_001), (130, 50_001)],
    "f32": [(300, 1001), (3, 200_001)],
}


def check_contents(gpu, tensor, matrix):
    data, scales = gpu.download(tensor, matrix)
    assert data.tobytes() == matrix.data.tobytes()
    assert scales is None or scales.tobytes() == matrix.scales.tobytes()


def several_chunks():
    return [pytest.param(fmt, shape, id=f"{fmt}-{shape}") for fmt, shapes in SEVERAL_CHUNKS.items() for shape in shapes]


# ---- there and back ----


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fmt=st.sampled_from(FORMATS + GROUPED),
    rows=st.one_of(st.integers(1, 50), st.sampled_from(EDGES)),
    columns=st.one_of(st.integers(1, 800), st.sampled_from(EDGES)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_matrix_comes_back(gpu, fmt, rows, columns, seed):
    rng = np.random.default_rng(seed)
    matrix = oracle.random_bytes(rng, fmt, (rows, columns))
    tensor = gpu.upload(matrix)
    check_contents(gpu, tensor, matrix)
    other = oracle.random_bytes(rng, fmt, (rows, columns))
    gpu.update(tensor, other)
    check_contents(gpu, tensor, other)
    gpu.free(tensor)


@pytest.mark.parametrize("shape", [(1, 1), (16, 256), (17, 257), (130, 513)])
@pytest.mark.parametrize("fmt", FORMATS + GROUPED)
def test_every_format_comes_back(gpu, rng, fmt, shape):
    matrix = oracle.random_bytes(rng, fmt, shape)
    check_contents(gpu, gpu.upload(matrix), matrix)


@pytest.mark.parametrize(("fmt", "shape"), several_chunks())
def test_several_chunks(gpu, rng, fmt, shape):
    old, new = oracle.random_bytes(rng, fmt, shape), oracle.random_bytes(rng, fmt, shape)
    tensor = gpu.upload(old)
    other = gpu.upload(new)  # passes through the same memory as the first
    check_contents(gpu, tensor, old)
    check_contents(gpu, other, new)
    gpu.update(tensor, new)
    check_contents(gpu, tensor, new)


@pytest.mark.parametrize(
    ("fmt", "shape"), [("fp8-e4m3-b128", (600, 1001)), ("int4-g768", (17, 40_001)), ("mxfp4", (17, 40_001))]
)
def test_scales_that_chunks_share(gpu, rng, fmt, shape):
    """Every tile has its own copy of a scale; a product reads them all, a download the first alone."""
    matrix = oracle.random_encoded(rng, fmt, shape)
    x = gaussian(rng, 1, shape[1])
    y = gpu.matmul(gpu.upload(matrix), x, matrix)
    assert oracle.relative_rms(y, x @ matrix.decode().T) <= MANY_ROWS


def test_more_chunks_than_slots(gpu, rng):
    """18 MB, so that every slot is used again."""
    matrix = oracle.random_bytes(rng, "f32", (512, 9001))
    check_contents(gpu, gpu.upload(matrix), matrix)


@pytest.mark.parametrize("fmt", ["int8", "mxfp4"])
def test_memory_of_any_alignment(gpu, rng, fmt):
    matrix = oracle.random_bytes(rng, fmt, (37, 301))
    shifted = np.empty(matrix.data.size + 1, np.uint8)[1:]
    shifted[:] = matrix.data
    tensor = gpu.upload(oracle.Encoded(fmt, matrix.shape, shifted, matrix.scales))
    check_contents(gpu, tensor, matrix)


@pytest.mark.parametrize("fmt", ["mxfp4", "fp8-e4m3-b128", "int4-g64", "int4-g5", "e8"])
def test_weights_come_back_alone(gpu, rng, fmt):
    matrix = oracle.random_bytes(rng, fmt, (37, 301))
    tensor = gpu.upload(matrix)
    check_contents(gpu, tensor, oracle.Encoded(fmt, matrix.shape, matrix.data))


# ---- pinned memory of the caller ----


@pytest.fixture
def pinned_like(gpu, simulator):
    """A function that copies an array to pinned memory."""
    library = ctypes.CDLL(gpu.path if simulator else "libcuda.so.1")
    allocate, free = ("cudaMallocHost", "cudaFreeHost") if simulator else ("cuMemAllocHost_v2", "cuMemFreeHost")
    addresses = []

    def copy(array):
        address = ctypes.c_void_p()
        assert getattr(library, allocate)(ctypes.byref(address), ctypes.c_size_t(array.nbytes)) == 0
        addresses.append(address)
        memory = (ctypes.c_uint8 * array.nbytes).from_address(address.value)
        result = np.frombuffer(memory, np.uint8).view(array.dtype).reshape(array.shape)
        result[:] = array
        return result

    if not simulator:  # the library's context is that of the runtime: make it this thread's for the driver
        device, context = ctypes.c_int(), ctypes.c_void_p()
        assert library.cuDeviceGet(ctypes.byref(device), 0) == 0
        assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert library.cuCtxSetCurrent(context) == 0
    yield copy
    for address in addresses:
        getattr(library, free)(address)


@pytest.mark.parametrize(("fmt", "shape"), several_chunks())
def test_pinned_memory(gpu, rng, pinned_like, fmt, shape):
    """It goes to the device and comes back without another copy on the host."""
    matrix = oracle.random_bytes(rng, fmt, shape)
    scales = None if matrix.scales is None else pinned_like(matrix.scales)
    tensor = gpu.upload(oracle.Encoded(fmt, shape, pinned_like(matrix.data), scales))
    check_contents(gpu, tensor, matrix)
    data = pinned_like(np.zeros_like(matrix.data))
    if scales is not None:
        scales = pinned_like(np.zeros_like(matrix.scales))
    gpu.check(gpu.lib.coli_cuda_tensor_download(tensor, pointer(data, "void *"), pointer(scales, "void *")))
    assert data.tobytes() == matrix.data.tobytes()
    assert scales is None or scales.tobytes() == matrix.scales.tobytes()


# ---- memory ----


def test_e8_takes_98_bytes_for_256_weights(gpu, rng, simulator):
    matrix = oracle.random_bytes(rng, "e8", (2048, 6144))
    gpu.free(gpu.upload(matrix))
    before = simulator and simulator.live()[1]
    tensor = gpu.upload(matrix)
    wanted = 2048 * 6144 // 256 * 98
    assert gpu.lib.coli_cuda_tensor_vram(tensor) == gpu.lib.coli_cuda_alloc_footprint(wanted)
    if simulator:
        assert wanted <= simulator.live()[1] - before <= 1.05 * wanted


def test_only_the_first_upload_allocates_staging(gpu, rng, simulator):
    if not simulator:
        pytest.skip("counts calls of the simulated runtime")
    matrix = oracle.random_bytes(rng, "int8", (1300, 1001))
    before = simulator.live()[1]
    tensor = gpu.upload(matrix)
    assert simulator.live()[1] - before - gpu.lib.coli_cuda_tensor_vram(tensor) <= 32 << 20
    live, allocations = simulator.live(), simulator.calls(b"cudaMalloc")
    for _ in range(3):
        gpu.update(tensor, matrix)
        gpu.download(tensor, matrix)
    assert (simulator.live(), simulator.calls(b"cudaMalloc")) == (live, allocations)


# ---- failures ----


@pytest.mark.parametrize("call", [b"cudaMemcpyAsync", b"launch", b"cudaEventRecord", b"cudaEventSynchronize"])
@pytest.mark.parametrize("shape", [(1300, 3001), (2, 2_000_001)])
def test_an_update_that_fails_half_way(gpu, rng, faults, shape, call):
    old, new = oracle.random_bytes(rng, "mxfp4", shape), oracle.random_bytes(rng, "mxfp4", shape)
    if call == b"cudaEventSynchronize":
        old, new = (oracle.random_bytes(rng, "int8", (1300, 4001)) for _ in range(2))
    tensor = gpu.upload(old)
    faults.fail(call, 1 if call == b"cudaEventSynchronize" else 3)
    with pytest.raises(Refused) as refused:
        gpu.update(tensor, new)
    assert refused.value.status == "DEVICE"
    assert str(list(old.shape)) in refused.value.text
    with pytest.raises(Refused, match="update"):
        gpu.download(tensor, old)
    gpu.update(tensor, new)
    check_contents(gpu, tensor, new)


def test_an_upload_that_fails_half_way_keeps_nothing(gpu, rng, faults):
    matrix = oracle.random_bytes(rng, "e8", (700, 2333))
    gpu.free(gpu.upload(matrix))
    live = faults.live()
    faults.fail(b"cudaMemcpyAsync", 2)
    with pytest.raises(Refused):
        gpu.upload(matrix)
    assert (faults.live(), gpu.stats()) == (live, (0, 0))
    check_contents(gpu, gpu.upload(matrix), matrix)


@pytest.mark.parametrize("call", [b"cudaMemcpyAsync", b"launch", b"cudaEventSynchronize"])
def test_a_download_that_fails_half_way(gpu, rng, faults, call):
    matrix = oracle.random_bytes(rng, "int8", (1300, 1001))
    tensor = gpu.upload(matrix)
    faults.fail(call, 2)
    with pytest.raises(Refused):
        gpu.download(tensor, matrix)
    check_contents(gpu, tensor, matrix)


# ---- copy threads ----


def test_two_devices_at_once(two_gpus, rng):
    matrices = [oracle.random_bytes(rng, "int8", (1300, 1001)) for _ in range(2)]

    def there_and_back(device):
        for _ in range(3):
            tensor = two_gpus.upload(matrices[device], device)
            check_contents(two_gpus, tensor, matrices[device])
            two_gpus.free(tensor)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(there_and_back, range(2)))


def test_shutdown_ends_the_copy_threads(gpu, rng, simulator):
    if not simulator:
        pytest.skip("a real driver has threads of its own")

    def threads():
        return set(os.listdir("/proc/self/task"))

    before = threads()
    for _ in range(2):
        gpu.upload(oracle.random_bytes(rng, "int8", (1300, 1001)))
        assert len(threads() - before) <= 8
        gpu.shutdown()
        gpu.init(0)
        last_wait = time.monotonic() + 10  # the system may show a thread for a while after it has ended
        while threads() - before:
            assert time.monotonic() < last_wait
            time.sleep(0.01)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_starts_its_own(gpu, rng, simulator):
    if not simulator:
        pytest.skip("a real device is lost to a fork")
    matrix = oracle.random_bytes(rng, "int8", (1300, 1001))
    gpu.upload(matrix)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 1
        try:
            check_contents(gpu, gpu.upload(matrix), matrix)
            gpu.shutdown()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    check_contents(gpu, gpu.upload(matrix), matrix)
