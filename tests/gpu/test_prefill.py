"""More than 16 rows: products on matrix units with activations as fp16, or as two of them, through the C ABI.

What every number of rows has to keep is in test_paths.py; here are the shapes, formats and mixtures that matter to the
kernels for many rows.
"""

import numpy as np
import oracle
import pytest
from abi import ffi, floats, pointer, tensor_array
from device_memory import DeviceMemory
from samples import EXACT, MANY_ROWS, gaussian, random_expert

ONE_PRODUCT = 2e-4  # relative RMS: there is one rounding of activations, in groups two

FORMATS = ["int8", "int4", "int2", "int4-g32", "int4-g64", "int4-g128", "int4-g512", "e8", "mxfp4", "fp8-e4m3-b128"]
OTHERS = ["f32", "int4-g5"]  # which these kernels do not take
ROWS = [17, 40, 64, 100, 300]
MIXTURE = [
    ("e8", "int8", "int4"),
    ("int4", "int2", "e8"),
    ("mxfp4", "e8", "fp8-e4m3-b128"),
    ("int4-g64", "fp8-e4m3-b128", "mxfp4"),
    ("int8", "int4-g32", "int2"),
]


@pytest.fixture(autouse=True)
def _rounding(gpu):
    gpu.require_exact(False)
    yield
    gpu.require_exact(True)
    gpu.limit_path("hopper")


@pytest.fixture(params=["hopper", "ampere"])
def path(gpu, request):
    """Both kernels for many rows; a GPU that has not the first one's instructions takes the second one twice."""
    gpu.limit_path(request.param)
    return request.param


@pytest.fixture(params=[False, True], ids=["rounded", "exact"])
def exact(gpu, request):
    """Whether what rounding takes from activations is multiplied too. Only groups do so."""
    gpu.require_exact(request.param)
    return request.param


def split(rows, x):
    return np.split(x, np.cumsum(rows)[:-1])


def make_group(gpu, rng, formats, D, H, rows):
    """Experts, their tensors and activations."""
    experts = [random_expert(rng, D, H, formats[e % len(formats)]) for e in range(len(rows))]
    return experts, [gpu.upload_expert(expert) for expert in experts], gaussian(rng, sum(rows), D)


def check_rounding(y, experts, rows, x, exact):
    """The error is that of these kernels."""
    error = check_group(y, experts, rows, x, EXACT if exact else MANY_ROWS)
    assert exact or error > EXACT, "other kernels did it"


def check_group(y, experts, rows, x, most=MANY_ROWS):
    """Returns the error."""
    expected = [oracle.expert(part, *expert) for part, expert in zip(split(rows, x), experts, strict=True)]
    error = oracle.relative_rms(y, np.concatenate(expected))
    assert error <= most, f"relative error {error:.3g}"
    return error


def check_product(gpu, tensor, matrix, x, most=ONE_PRODUCT):
    """Returns the error."""
    y = gpu.matmul(tensor, x, matrix)
    error = oracle.relative_rms(y, x.astype(np.float64) @ matrix.decode().T)
    assert error <= most, f"{len(x)} rows: relative error {error:.3g}"
    return error


# ---- products ----


@pytest.mark.parametrize("fmt", FORMATS)
def test_products(gpu, rng, path, fmt):
    matrix = oracle.random_encoded(rng, fmt, (40, 556))
    tensor = gpu.upload(matrix)
    for rows in ROWS:
        error = check_product(gpu, tensor, matrix, gaussian(rng, rows, 556))
        assert error > EXACT, "other kernels did it"


@pytest.mark.parametrize("shape", [(1, 1), (16, 256), (256, 512), (7, 255), (130, 257), (300, 31)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_shapes(gpu, rng, path, fmt, shape):
    matrix = oracle.random_encoded(rng, fmt, shape)
    check_product(gpu, gpu.upload(matrix), matrix, gaussian(rng, 40, shape[1]))


@pytest.mark.parametrize("fmt", OTHERS)
def test_other_formats_are_exact(gpu, rng, path, fmt):
    matrix = oracle.random_encoded(rng, fmt, (19, 300))
    check_product(gpu, gpu.upload(matrix), matrix, gaussian(rng, 40, 300), EXACT)


# ---- groups ----


@pytest.mark.parametrize(("D", "H"), [(256, 256), (300, 72)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_groups_of_one_format(gpu, rng, path, exact, fmt, D, H):
    rows = [17, 100]
    experts, tensors, x = make_group(gpu, rng, [(fmt,) * 3], D, H, rows)
    y = gpu.group(tensors, rows, x)
    check_rounding(y, experts, rows, x, exact)
    assert np.array_equal(gpu.group(tensors, rows, x), y), "another run gave other bits"


@pytest.mark.parametrize(("D", "H"), [(512, 272), (333, 129)])
def test_mixed_formats(gpu, rng, path, exact, D, H):
    experts, tensors, x = make_group(gpu, rng, MIXTURE, D, H, ROWS)
    y = gpu.group(tensors, ROWS, x)
    check_rounding(y, experts, ROWS, x, exact)
    assert np.array_equal(gpu.group(tensors, ROWS, x), y), "another run gave other bits"


def test_ragged_rows(gpu, rng, path, exact):
    """Experts of few rows, which are always exact, between those of many."""
    rows = [1, 200, 16, 17, 3, 96, 97, 33, 2, 64]
    experts, tensors, x = make_group(gpu, rng, [("e8",) * 3, ("int4",) * 3, *MIXTURE], 256, 80, rows)
    y = gpu.group(tensors, rows, x)
    check_group(y, experts, rows, x, EXACT if exact else MANY_ROWS)
    few = [e for e, count in enumerate(rows) if count <= 16]
    parts, results = split(rows, x), split(rows, y)
    for e in few:
        check_group(results[e], [experts[e]], [rows[e]], parts[e], EXACT)


def test_experts_without_rows(gpu, rng, simulator, path):
    """Only callers that keep everything on the device have them."""
    rows = [0, 40, 0, 0, 17, 5, 0]
    experts, tensors, x = make_group(gpu, rng, [("e8",) * 3, ("int4", "e8", "int8")], 256, 80, rows)
    memory = DeviceMemory(gpu.path if simulator else None)
    columns = [tensor_array(column) for column in zip(*tensors, strict=True)]
    size = gpu.lib.coli_cuda_expert_group_workspace(*columns, rows, len(rows))
    x_dev, y_dev = (ffi.cast("float *", memory.put(values)) for values in (x, np.zeros_like(x)))
    workspace = ffi.cast("void *", memory.allocate(size))
    gpu.check(gpu.lib.coli_cuda_expert_group_dev(*columns, rows, len(rows), y_dev, x_dev, workspace, size, ffi.NULL))
    memory.synchronize(None)
    y = memory.get(int(ffi.cast("uintptr_t", y_dev)), x.shape)
    memory.close()
    check_group(y, experts, rows, x)


def test_bounded_activation_is_exact(gpu, rng, path):
    """It would magnify what rounding takes away."""
    D, H, S, b1, b2 = 256, 80, 40, 7.0, 1.75
    expert = random_expert(rng, D, H, ("mxfp4",) * 3)
    parts = [pointer(part, "unsigned char *") for matrix in expert for part in (matrix.data, matrix.scales)]
    x, y = gaussian(rng, S, D), np.empty((S, D), np.float32)
    gpu.check(gpu.lib.coli_cuda_expert_mxfp4(floats(y), floats(x), *parts, S, D, H, b1, b2))
    error = oracle.relative_rms(y, oracle.expert_mxfp4(x, *expert, b1, b2))
    assert error <= EXACT, f"relative error {error:.3g}"


@pytest.mark.parametrize("formats", [("e8",) * 3, ("fp8-e4m3-b128", "int4", "mxfp4")], ids="-".join)
def test_pinned_groups_have_the_bits_of_few_rows(gpu, rng, path, exact, formats):
    rows = [40, 17]
    experts, tensors, x = make_group(gpu, rng, [formats], 300, 72, rows)
    y = gpu.group(tensors, rows, x, pinned=1)
    check_group(y, experts, rows, x, EXACT)
    for expert, part, result in zip(tensors, split(rows, x), split(rows, y), strict=True):
        assert np.array_equal(gpu.expert_mlp(expert, part[-16:]), result[-16:])
    assert not np.array_equal(gpu.group(tensors, rows, x), y), "the same kernels did both"


@pytest.mark.parametrize("scale", [1e4, 1e-6])
def test_large_and_small_activations(gpu, rng, path, exact, scale):
    rows = [40]
    experts, tensors, x = make_group(gpu, rng, [("int4", "int8", "e8")], 256, 80, rows)
    x *= np.float32(scale)
    check_group(gpu.group(tensors, rows, x), experts, rows, x, EXACT if exact else MANY_ROWS)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_row(gpu, rng, path, exact, value):
    rows = [40, 100]
    _, tensors, x = make_group(gpu, rng, [("e8",) * 3, ("mxfp4", "int4", "int8")], 300, 72, rows)
    clean = gpu.group(tensors, rows, x)
    for row, column in ((3, 5), (50, 0), (139, 299)):
        x[row, column] = value
    y = gpu.group(tensors, rows, x)
    touched = np.isin(np.arange(140), (3, 50, 139))
    assert np.array_equal(y[~touched], clean[~touched])
    assert not np.isfinite(y[touched]).any()


def test_plain_kernels_stay_exact(gpu, rng):
    rows = [17, 40]
    experts, tensors, x = make_group(gpu, rng, [("e8",) * 3, ("int4",) * 3], 256, 80, rows)
    gpu.limit_path("plain")
    y = gpu.group(tensors, rows, x)
    check_group(y, experts, rows, x, EXACT)


@pytest.mark.parametrize("formats", [("e8",) * 3, ("int4",) * 3, ("mxfp4", "e8", "int8")], ids="-".join)
def test_glm_sized_group(gpu, rng, simulator, path, exact, formats):
    if simulator:
        pytest.skip("takes too long on the simulator")
    rows = [64, 17, 300]
    experts, tensors, x = make_group(gpu, rng, [formats], 6144, 2048, rows)
    check_rounding(gpu.group(tensors, rows, x), experts, rows, x, exact)
