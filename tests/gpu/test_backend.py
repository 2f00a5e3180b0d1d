"""Devices, tables, tensors and statistics of the GPU library, through its C ABI."""

import numpy as np
import oracle
import pytest
from abi import NULL, STATUS, Refused, ffi, floats, pointer
from samples import ON_GPU

SHAPES = [(1, 1), (3, 7), (5, 33), (2, 130), (130, 64), (4, 256), (3, 300), (2, 1001)]


def raw_upload(gpu, slot, matrix, *, fmt=None, shape=None, device=0, group_size=None, data=True, scales=True):
    """coli_cuda_tensor_upload_g with any argument replaced."""
    rows, columns = shape or matrix.shape
    return gpu.lib.coli_cuda_tensor_upload_g(
        slot,
        pointer(matrix.data, "void *") if data else NULL,
        floats(matrix.scales) if scales else NULL,
        oracle.abi_number(matrix.fmt) if fmt is None else fmt,
        columns,
        rows,
        device,
        (matrix.group_size or 0) if group_size is None else group_size,
    )


# ---- version and errors ----


def test_version(closed_gpu):
    lib = closed_gpu.lib
    assert lib.coli_cuda_abi_version() == lib.COLI_CUDA_ABI_MAJOR * 1000 + lib.COLI_CUDA_ABI_MINOR
    version = ffi.string(lib.coli_cuda_version_string()).decode()
    assert version == f"{lib.COLI_VERSION_MAJOR}.{lib.COLI_VERSION_MINOR}.{lib.COLI_VERSION_PATCH}"
    assert version in ffi.string(lib.coli_cuda_build_info()).decode()


def test_status_values_are_those_of_the_header(closed_gpu):
    assert {
        name: int(getattr(closed_gpu.lib, f"COLI_{'' if name == 'OK' else 'E_'}{name}")) for name in STATUS
    } == STATUS


def test_errors_go_to_the_log_callback(closed_gpu):
    lines = []

    @ffi.callback("void(int, const char *, void *)")
    def log(_level, line, _user):
        lines.append(ffi.string(line).decode())

    closed_gpu.lib.coli_cuda_set_log(log, NULL)
    try:
        with pytest.raises(Refused) as refused:
            closed_gpu.init(4711)
    finally:
        closed_gpu.lib.coli_cuda_set_log(NULL, NULL)
    assert any("4711" in line for line in lines)
    assert "4711" in refused.value.text


def test_nothing_is_printed(closed_gpu, capfd):
    with pytest.raises(Refused):
        closed_gpu.init(4711)
    closed_gpu.init(0)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "call",
    [
        lambda lib: lib.coli_cuda_pipe_alloc(0, 16),
        lambda lib: lib.coli_cuda_pipe_sync(0),
        lambda lib: lib.coli_cuda_chain_ops(),
        lambda lib: lib.coli_cuda_pipe_gemm(NULL, NULL, NULL, 1),
        lambda lib: lib.coli_cuda_attention_absorb(NULL, NULL, NULL, NULL, NULL, 1, 1, 1, 1, 1, 1, 1.0),
    ],
)
def test_names_that_are_not_provided(gpu, call):
    assert call(gpu.lib) in (0, NULL)
    assert gpu.refusal().status == "NOT_PROVIDED"


# ---- init, shutdown, devices ----


def test_before_init(closed_gpu):
    lib = closed_gpu.lib
    assert lib.coli_cuda_available_device_count() >= 1
    assert lib.coli_cuda_device_count() == 0
    assert lib.coli_cuda_device_at(0) == -1
    assert closed_gpu.stats() == (0, 0)
    with pytest.raises(Refused, match="init"):
        closed_gpu.memory(0)
    with pytest.raises(Refused, match="init"):
        closed_gpu.upload(oracle.random_encoded(np.random.default_rng(1), "int8", (2, 2)))
    with pytest.raises(Refused, match="init"):
        closed_gpu.set_codebook(oracle.CODEBOOK)
    with pytest.raises(Refused, match="init"):
        closed_gpu.publish_tables()


def test_refused_device_lists(closed_gpu):
    lib = closed_gpu.lib
    visible = lib.coli_cuda_available_device_count()
    assert lib.coli_cuda_init(NULL, 1) == 0
    assert closed_gpu.refusal().status == "ARGUMENT"
    assert lib.coli_cuda_init([0], 0) == 0
    assert closed_gpu.refusal().status == "ARGUMENT"
    assert lib.coli_cuda_init([0], -1) == 0
    assert "-1" in closed_gpu.refusal().text
    assert lib.coli_cuda_init([0] * 17, 17) == 0
    assert "17" in closed_gpu.refusal().text
    with pytest.raises(Refused, match=str(visible)) as refused:
        closed_gpu.init(0, visible)
    assert refused.value.status == "NO_DEVICE"
    with pytest.raises(Refused, match="-3"):
        closed_gpu.init(-3)
    with pytest.raises(Refused, match="twice"):
        closed_gpu.init(0, 0)
    assert lib.coli_cuda_device_count() == 0, "a refused list was configured in part"


def test_same_list_again_does_nothing(gpu):
    tensor = gpu.upload(oracle.random_encoded(np.random.default_rng(1), "int8", (2, 2)))
    gpu.init(0)
    assert gpu.lib.coli_cuda_tensor_device(tensor) == 0
    assert gpu.stats()[0] == 1


def test_another_list_needs_shutdown(two_gpus):
    for devices in ([0], [1, 0], [1]):
        with pytest.raises(Refused, match="shutdown") as refused:
            two_gpus.init(*devices)
        assert refused.value.status == "STATE"
    assert [two_gpus.lib.coli_cuda_device_at(i) for i in (-1, 0, 1, 2)] == [-1, 0, 1, -1]
    two_gpus.shutdown()
    two_gpus.init(1, 0)
    assert [two_gpus.lib.coli_cuda_device_at(i) for i in range(2)] == [1, 0]


def test_an_ordinal_is_not_a_position(two_gpus, rng):
    two_gpus.shutdown()
    two_gpus.init(1)
    assert two_gpus.lib.coli_cuda_device_count() == 1
    assert two_gpus.lib.coli_cuda_device_at(0) == 1
    matrix = oracle.random_encoded(rng, "int8", (4, 8))
    tensor = two_gpus.upload(matrix, device=1)
    assert two_gpus.stats(1) == (1, matrix.nbytes)
    assert two_gpus.stats(0) == (0, 0)
    with pytest.raises(Refused, match="device 0"):
        two_gpus.upload(matrix, device=0)
    x = np.ones((1, 8), np.float32)
    assert oracle.relative_rms(two_gpus.matmul(tensor, x, matrix), x @ matrix.decode().T) < 1e-6


def test_memory(gpu):
    free, total = gpu.memory()
    assert 0 < free <= total
    assert gpu.lib.coli_cuda_mem_info(0, NULL, NULL) == 0
    assert gpu.refusal().status == "ARGUMENT"
    with pytest.raises(Refused, match="77"):
        gpu.memory(77)
    assert gpu.lib.coli_cuda_device_integrated(0) in (0, 1)
    assert gpu.lib.coli_cuda_device_integrated(4711) == 0


def test_device_name(closed_gpu):
    room = ffi.new("char[]", b"?" * 63)
    closed_gpu.check(closed_gpu.lib.coli_cuda_device_name(0, room, 64))
    name = ffi.string(room)
    assert len(name) > 3
    assert b"?" not in name
    closed_gpu.check(closed_gpu.lib.coli_cuda_device_name(0, room, 4))
    assert ffi.string(room) == name[:3]
    for arguments in ((4711, room, 64), (0, NULL, 64), (0, room, 0)):
        assert closed_gpu.lib.coli_cuda_device_name(*arguments) == 0
        assert closed_gpu.refusal().text


def test_shutdown_releases_tensors(gpu, rng):
    matrix = oracle.random_encoded(rng, "e8", (4, 256))
    tensor = gpu.upload(matrix)
    gpu.shutdown()
    assert gpu.stats() == (0, 0)
    assert gpu.lib.coli_cuda_tensor_device(tensor) == -1
    gpu.init(0)
    x = np.ones((1, 256), np.float32)
    for use in (
        lambda: gpu.update(tensor, matrix),
        lambda: gpu.download(tensor, matrix),
        lambda: gpu.expert_mlp((tensor, tensor, tensor), x),
    ):
        with pytest.raises(Refused, match="shutdown") as refused:
            use()
        assert refused.value.status == "STATE"
    slot = ffi.new("ColiCudaTensor **", tensor)
    y = np.zeros((1, 4), np.float32)
    assert gpu.lib.coli_cuda_matmul(slot, floats(y), floats(x), NULL, NULL, 6, 1, 256, 4, 0, 0) == 0
    assert gpu.refusal().status == "STATE"
    gpu.free(tensor)
    assert gpu.stats() == (0, 0)


def test_init_and_shutdown_many_times(closed_gpu, rng):
    matrix = oracle.random_encoded(rng, "e8", (3, 300))
    x = rng.standard_normal((1, 300)).astype(np.float32)
    results = []
    for _ in range(5):
        closed_gpu.init(0)
        tensor = closed_gpu.upload(matrix)
        results.append(closed_gpu.matmul(tensor, x, matrix))
        closed_gpu.free(tensor)
        closed_gpu.shutdown()
    assert all(np.array_equal(result, results[0]) for result in results)


# ---- tables ----


def test_fp8_needs_its_table(closed_gpu, rng):
    closed_gpu.init(0)
    matrix = oracle.random_encoded(rng, "fp8-e4m3-b128", (4, 8))
    with pytest.raises(Refused, match="fp8_set_lut") as refused:
        closed_gpu.upload(matrix)
    assert refused.value.status == "STATE"
    assert closed_gpu.stats() == (0, 0)
    assert closed_gpu.lib.coli_cuda_fp8_set_lut(NULL) == 0
    closed_gpu.publish_tables()
    closed_gpu.free(closed_gpu.upload(matrix))
    closed_gpu.shutdown()
    closed_gpu.init(0)
    with pytest.raises(Refused, match="fp8_set_lut"):
        closed_gpu.upload(matrix)


def test_codebook_is_replaced_and_comes_back(gpu, rng):
    published = oracle.random_encoded(rng, "e8", (9, 300))
    x = rng.standard_normal((2, 300)).astype(np.float32)
    tensor = gpu.upload(published)
    before = gpu.matmul(tensor, x, published)
    assert oracle.relative_rms(before, x @ published.decode().T) < 3e-6

    other = rng.integers(0, 256, (256, 4), dtype=np.uint8)
    gpu.set_codebook(other)
    replaced = oracle.Encoded("e8", published.shape, published.data, codebook=other)
    assert oracle.relative_rms(gpu.matmul(tensor, x, replaced), x @ replaced.decode().T) < 3e-6

    assert gpu.lib.coli_cuda_e8_set_grid(NULL) == 0
    assert gpu.refusal().status == "ARGUMENT"
    gpu.set_codebook(oracle.CODEBOOK)
    assert np.array_equal(gpu.matmul(tensor, x, published), before)

    gpu.set_codebook(other)
    gpu.free(tensor)
    gpu.shutdown()
    gpu.init(0)
    tensor = gpu.upload(published)
    assert np.array_equal(gpu.matmul(tensor, x, published), before), "shutdown did not bring the published table back"


@pytest.mark.parametrize("value", [0, 255])
def test_extreme_codebooks(gpu, rng, value):
    codebook = np.full((256, 4), value, np.uint8)
    gpu.set_codebook(codebook)
    matrix = oracle.random_encoded(rng, "e8", (5, 256), codebook=codebook)
    x = rng.standard_normal((2, 256)).astype(np.float32)
    y = gpu.matmul(gpu.upload(matrix), x, matrix)
    if value:
        assert oracle.relative_rms(y, x @ matrix.decode().T) < 3e-6
    else:
        assert not y.any()


# ---- upload ----


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", ON_GPU)
def test_download_gives_back_the_bytes(gpu, rng, fmt, shape):
    matrix = oracle.random_encoded(rng, fmt, shape)
    matrix.data[:] = rng.integers(0, 256, matrix.data.size, dtype=np.uint8)  # pad bits and NaN included
    tensor = gpu.upload(matrix)
    data, scales = gpu.download(tensor, matrix)
    assert data.tobytes() == matrix.data.tobytes()
    assert scales is None or scales.tobytes() == matrix.scales.tobytes()
    assert gpu.stats(0) == gpu.stats() == (1, matrix.nbytes)
    assert gpu.lib.coli_cuda_tensor_bytes(tensor) == matrix.nbytes
    assert gpu.lib.coli_cuda_tensor_vram(tensor) >= matrix.nbytes
    assert gpu.lib.coli_cuda_tensor_device(tensor) == 0


def test_download_of_the_weights_alone(gpu, rng):
    matrix = oracle.random_encoded(rng, "int8", (3, 5))
    tensor = gpu.upload(matrix)
    data = np.empty_like(matrix.data)
    gpu.check(gpu.lib.coli_cuda_tensor_download(tensor, pointer(data, "void *"), NULL))
    assert data.tobytes() == matrix.data.tobytes()
    assert gpu.lib.coli_cuda_tensor_download(tensor, NULL, NULL) == 0
    assert gpu.lib.coli_cuda_tensor_download(NULL, pointer(data, "void *"), NULL) == 0


def test_device_copies_are_little_bigger(gpu, rng):
    for fmt, shape in (("e8", (512, 2048)), ("int4", (512, 2048)), ("mxfp4", (512, 2048))):
        matrix = oracle.random_encoded(rng, fmt, shape)
        tensor = gpu.upload(matrix)
        vram = gpu.lib.coli_cuda_tensor_vram(tensor)
        footprint = gpu.lib.coli_cuda_alloc_footprint(matrix.nbytes)
        assert matrix.nbytes <= vram <= max(1.05 * matrix.nbytes, footprint), fmt


def test_null_tensors(gpu):
    lib = gpu.lib
    lib.coli_cuda_tensor_free(NULL)
    assert lib.coli_cuda_tensor_bytes(NULL) == 0
    assert lib.coli_cuda_tensor_vram(NULL) == 0
    assert lib.coli_cuda_tensor_device(NULL) == -1
    data = np.zeros(4, np.uint8)
    assert lib.coli_cuda_tensor_update(NULL, pointer(data, "void *"), NULL) == 0
    assert gpu.refusal().status == "ARGUMENT"


REFUSED_UPLOADS = {
    "null weights": ("int8", {"data": False}, "ARGUMENT", "weights"),
    "null scales int8": ("int8", {"scales": False}, "ARGUMENT", "scales"),
    "null scales int4": ("int4", {"scales": False}, "ARGUMENT", "scales"),
    "null scales int2": ("int2", {"scales": False}, "ARGUMENT", "scales"),
    "null scales int4-g16": ("int4-g16", {"scales": False}, "ARGUMENT", "scales"),
    "null scales mxfp4": ("mxfp4", {"scales": False}, "ARGUMENT", "scales"),
    "null scales fp8": ("fp8-e4m3-b128", {"scales": False}, "ARGUMENT", "scales"),
    "no columns": ("int8", {"shape": (4, 0)}, "SHAPE", "0"),
    "no rows": ("int8", {"shape": (0, 8)}, "SHAPE", "0"),
    "negative columns": ("e8", {"shape": (4, -8)}, "SHAPE", "-8"),
    "int3": ("int8", {"fmt": 5}, "FORMAT", "int3"),
    "format 9": ("int8", {"fmt": 9}, "FORMAT", "9"),
    "format 99": ("int8", {"fmt": 99}, "FORMAT", "99"),
    "format -1": ("int8", {"fmt": -1}, "FORMAT", "-1"),
    "device 9999": ("int8", {"device": 9999}, "NO_DEVICE", "9999"),
    "device -1": ("int8", {"device": -1}, "NO_DEVICE", "-1"),
    "16 TB": ("int8", {"shape": (1 << 22, 1 << 22)}, "MEMORY", "17592"),
    "past 64 bits": ("int4-g1", {"shape": ((1 << 31) - 1, 1908874353)}, "MEMORY", "1908874353"),
}


@pytest.mark.parametrize("name", REFUSED_UPLOADS)
def test_refused_uploads_change_nothing(gpu, rng, name):
    fmt, changes, status, text = REFUSED_UPLOADS[name]
    matrix = oracle.random_encoded(rng, fmt, (4, 8))
    bystander = gpu.upload(matrix)
    before, free = gpu.stats(), gpu.memory()[0]
    slot = ffi.new("ColiCudaTensor **")
    assert raw_upload(gpu, slot, matrix, **changes) == 0
    refused = gpu.refusal()
    assert (refused.status, text in refused.text) == (status, True), refused
    assert slot[0] == NULL
    assert gpu.stats() == before
    assert gpu.memory()[0] == free
    x = np.ones((1, 8), np.float32)
    assert oracle.relative_rms(gpu.matmul(bystander, x, matrix), x @ matrix.decode().T) < 1e-6


def test_upload_without_a_place_for_the_handle(gpu, rng):
    assert raw_upload(gpu, NULL, oracle.random_encoded(rng, "int8", (4, 8))) == 0
    assert gpu.refusal().status == "ARGUMENT"
    assert gpu.stats() == (0, 0)


def test_scales_are_ignored_where_the_format_has_none(gpu, rng):
    tag = np.array([6.0], np.float32)
    for fmt in ("e8", "f32"):
        matrix = oracle.random_encoded(rng, fmt, (3, 40))
        matrix.scales = tag
        tensor = gpu.upload(matrix)
        assert gpu.lib.coli_cuda_tensor_bytes(tensor) == matrix.data.nbytes
        gpu.update(tensor, matrix)


def test_upload_into_a_held_tensor(gpu, rng):
    matrix = oracle.random_encoded(rng, "int4-g16", (4, 48))
    tensor = gpu.upload(matrix)
    slot = ffi.new("ColiCudaTensor **", tensor)
    before = gpu.stats()
    # The same again is fine, with no data at all, and uploads nothing.
    assert raw_upload(gpu, slot, matrix, data=False, scales=False) == 1
    other = oracle.random_encoded(rng, "int4-g16", (4, 48))
    assert raw_upload(gpu, slot, other) == 1
    assert gpu.download(tensor, matrix)[0].tobytes() == matrix.data.tobytes()
    for changes in (
        {"fmt": oracle.abi_number("int4")},
        {"shape": (4, 47)},
        {"shape": (5, 48)},
        {"device": 9999},
        {"group_size": 8},
    ):
        assert raw_upload(gpu, slot, matrix, **changes) == 0, changes
        assert gpu.refusal().text
        assert slot[0] == tensor
        assert gpu.stats() == before
    # Outside the grouped format the group size means nothing.
    plain = oracle.random_encoded(rng, "int8", (4, 8))
    slot = ffi.new("ColiCudaTensor **", gpu.upload(plain))
    assert raw_upload(gpu, slot, plain, group_size=7) == 1


def test_grouped_int4_without_a_group_size_is_of_no_use(gpu, rng):
    matrix = oracle.random_encoded(rng, "int4", (8, 8))
    slot = ffi.new("ColiCudaTensor **")
    number = oracle.abi_number("int4-g64")
    weights, scales = pointer(matrix.data, "void *"), floats(matrix.scales)
    assert gpu.lib.coli_cuda_tensor_upload(slot, weights, scales, number, 8, 8, 0) == 1
    tensor = slot[0]
    gpu.tensors.append(tensor)
    x, y = np.ones((1, 8), np.float32), np.full((1, 8), 7, np.float32)
    assert gpu.lib.coli_cuda_matmul(slot, floats(y), floats(x), NULL, NULL, number, 1, 8, 8, 0, 0) == 0
    assert "group size" in gpu.refusal().text
    assert (y == 7).all()
    with pytest.raises(Refused, match="group size"):
        gpu.expert_mlp((tensor, tensor, tensor), x)
    with pytest.raises(Refused, match="group size"):
        gpu.group([(tensor, tensor, tensor)], [1], x)


def test_host_memory_is_free_after_upload(gpu, rng):
    matrix = oracle.random_encoded(rng, "e8", (6, 300))
    expected = matrix.decode()
    tensor = gpu.upload(matrix)
    matrix.data[:] = 0xEE
    x = rng.standard_normal((1, 300)).astype(np.float32)
    assert oracle.relative_rms(gpu.matmul(tensor, x, matrix), x @ expected.T) < 3e-6


def test_statistics_follow_tensors(gpu, rng):
    assert gpu.stats() == (0, 0)
    matrices = [oracle.random_encoded(rng, fmt, (5, 70)) for fmt in ON_GPU]
    tensors, total = [], 0
    for count, matrix in enumerate(matrices, 1):
        tensors.append(gpu.upload(matrix))
        total += matrix.nbytes
        assert gpu.stats(0) == (count, total)
    assert gpu.stats(4711) == (0, 0)
    gpu.lib.coli_cuda_stats(0, NULL, NULL)
    for tensor, matrix in zip(tensors, matrices, strict=True):
        gpu.free(tensor)
        total -= matrix.nbytes
        assert gpu.stats()[1] == total


def test_a_thousand_uploads_leak_nothing(gpu, rng, simulator):
    matrices = [oracle.random_encoded(rng, fmt, (40, 520)) for fmt in ("e8", "int4-g16", "fp8-e4m3-b128")]
    for matrix in matrices:
        gpu.free(gpu.upload(matrix))
    free, live = gpu.memory()[0], simulator and simulator.live()
    for _ in range(334):
        for matrix in matrices:
            gpu.free(gpu.upload(matrix))
    assert gpu.memory()[0] == free
    assert (simulator and simulator.live()) == live


# ---- update ----


@pytest.mark.parametrize("entry", ["update", "overwrite"])
@pytest.mark.parametrize("fmt", ON_GPU)
def test_update(gpu, rng, fmt, entry):
    shape = (9, 290)
    old, new = oracle.random_encoded(rng, fmt, shape), oracle.random_encoded(rng, fmt, shape)
    tensor = gpu.upload(old)
    before = gpu.stats()
    write = getattr(gpu.lib, f"coli_cuda_tensor_{entry}")
    # E8 and f32 have no scales to give.
    gpu.check(write(tensor, pointer(new.data, "void *"), floats(new.scales)))
    assert gpu.stats() == before
    data, scales = gpu.download(tensor, new)
    assert data.tobytes() == new.data.tobytes()
    assert scales is None or scales.tobytes() == new.scales.tobytes()
    x = rng.standard_normal((2, shape[1])).astype(np.float32)
    assert oracle.relative_rms(gpu.matmul(tensor, x, new), x @ new.decode().T) < 3e-6


@pytest.mark.parametrize("fmt", ["int8", "mxfp4", "e8"])
def test_refused_updates_keep_the_contents(gpu, rng, fmt):
    matrix = oracle.random_encoded(rng, fmt, (4, 40))
    tensor = gpu.upload(matrix)
    assert gpu.lib.coli_cuda_tensor_update(tensor, NULL, floats(matrix.scales)) == 0
    assert "weights" in gpu.refusal().text
    if matrix.scales is not None:
        assert gpu.lib.coli_cuda_tensor_update(tensor, pointer(matrix.data, "void *"), NULL) == 0
        assert "scales" in gpu.refusal().text
    assert gpu.download(tensor, matrix)[0].tobytes() == matrix.data.tobytes()


def test_update_waits_for_an_issued_group(gpu, rng):
    shape = (64, 64)
    old = [oracle.random_encoded(rng, "int8", shape, magnitude=0.2) for _ in range(3)]
    tensors = gpu.upload_expert(old)
    x = rng.standard_normal((8, 64)).astype(np.float32)
    gpu.issue([tensors], [8], x)
    for tensor in tensors:
        gpu.update(tensor, oracle.random_encoded(rng, "int8", shape, magnitude=0.2))
    assert oracle.relative_rms(gpu.take(x.shape), oracle.expert(x, *old)) < 3e-6


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 4096, 5_000_000, 50_000_000])
def test_vram_is_what_the_allocator_takes(gpu, simulator, size):
    if simulator:
        pytest.skip("the simulator has no allocator of its own")
    rows = 16
    data = np.zeros(rows * (size // rows // 128 * 128), np.uint8)
    matrix = oracle.Encoded("f32", (rows, data.size // rows // 4), data)
    gpu.upload(matrix)  # whatever the first upload allocates besides
    before = gpu.memory()[0]
    tensors = [gpu.upload(matrix) for _ in range(8)]
    taken = before - gpu.memory()[0]
    stated = sum(gpu.lib.coli_cuda_tensor_vram(tensor) for tensor in tensors)
    assert abs(taken - stated) <= 2 << 20
    assert gpu.lib.coli_cuda_alloc_footprint(data.size) * 8 == stated
