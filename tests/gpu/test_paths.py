"""Products on every path of a GPU, chosen with coli_cuda_limit_path: the same accuracy and the same promises."""

import numpy as np
import oracle
import pytest
from samples import EXACT, MANY_ROWS, MIXED, MOST_EXACT_ROWS, ON_GPU, gaussian, limit, random_expert

ROWS = [1, 2, 3, 5, 9, 16, 17, 33]
SHAPES = [(64, 512), (37, 555)]  # whole pairs of strips and whole slices; neither
SMALL = (19, 300)


@pytest.fixture(params=["hopper", "ampere", "plain"], autouse=True)
def path(gpu, request):
    """The best path that products may take. A GPU that has it not takes the best that it has."""
    gpu.limit_path(request.param)
    gpu.require_exact(False)
    yield request.param
    gpu.limit_path("hopper")
    gpu.require_exact(True)


def float64(x, matrix):
    """x w^T. Products of infinities are what they are."""
    with np.errstate(invalid="ignore", over="ignore"):
        return x.astype(np.float64) @ matrix.decode().T


def check_rows(gpu, tensor, matrix, x):
    """Every row counts alike, whatever its size."""
    y, expected = gpu.matmul(tensor, x, matrix), float64(x, matrix)
    sizes = np.sqrt((expected**2).mean(axis=1, keepdims=True))
    sizes[sizes == 0] = 1
    error = oracle.relative_rms(y / sizes, expected / sizes)
    assert error <= limit(len(x)), f"{len(x)} rows: relative error {error:.3g}"
    return y


# ---- accuracy ----


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", ON_GPU)
def test_any_number_of_rows(gpu, rng, fmt, shape):
    matrix = oracle.random_encoded(rng, fmt, shape)
    tensor, x = gpu.upload(matrix), gaussian(rng, max(ROWS), shape[1])
    expected = float64(x, matrix)
    for rows in ROWS:
        for exact in (False, True) if rows > MOST_EXACT_ROWS else (False,):
            gpu.require_exact(exact)
            y = gpu.matmul(tensor, x[:rows], matrix)
            error = oracle.relative_rms(y, expected[:rows])
            assert error <= (EXACT if exact else limit(rows)), f"{rows} rows, exact {exact}: relative error {error:.3g}"


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("fmt", ON_GPU)
def test_rows_of_any_size(gpu, rng, fmt, rows):
    matrix = oracle.random_encoded(rng, fmt, SMALL)
    tensor = gpu.upload(matrix)
    for scale in (1e4, 1e-6):
        check_rows(gpu, tensor, matrix, gaussian(rng, rows, SMALL[1]) * np.float32(scale))
    mixed = gaussian(rng, rows, SMALL[1])
    mixed[0] *= np.float32(1e4)
    mixed[1] = 0
    mixed[2] *= np.float32(1e-6)
    y = check_rows(gpu, tensor, matrix, mixed)
    assert not y[1].any()
    assert not gpu.matmul(tensor, np.zeros_like(mixed), matrix).any()


@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("fmt", ON_GPU)
def test_one_heavy_value_in_a_row(gpu, rng, fmt, rows):
    matrix = oracle.random_encoded(rng, fmt, SMALL)
    x = gaussian(rng, rows, SMALL[1])
    x[rows // 2, 123] = 3e4
    check_rows(gpu, gpu.upload(matrix), matrix, x)


@pytest.mark.parametrize("highest", [66, 255])
def test_random_codebooks(gpu, rng, highest):
    """Up to 66, entries are multiplied as signed bytes; above, they are not."""
    codebook = rng.integers(1 if highest == 66 else 0, highest, oracle.CODEBOOK.shape, np.uint8, endpoint=True)
    gpu.set_codebook(codebook)
    matrix = oracle.random_encoded(rng, "e8", SHAPES[1], codebook=codebook)
    tensor, x = gpu.upload(matrix), gaussian(rng, 20, SHAPES[1][1])
    for rows in (1, 2, 4, 7, 16, 20):
        check_rows(gpu, tensor, matrix, x[:rows])


@pytest.mark.parametrize("formats", [("e8",) * 3, ("int4",) * 3, *MIXED])
def test_experts(gpu, rng, formats):
    D, H, rows = 300, 77, [1, 2, 5, 16, 17]
    group = [random_expert(rng, D, H, formats) for _ in rows]
    tensors, x = [gpu.upload_expert(expert) for expert in group], gaussian(rng, sum(rows), D)
    parts = np.split(x, np.cumsum(rows)[:-1])
    expected = [oracle.expert(part, *expert) for part, expert in zip(parts, group, strict=True)]
    for exact in (False, True):
        gpu.require_exact(exact)
        y = np.split(gpu.group(tensors, rows, x), np.cumsum(rows)[:-1])
        for count, actual, right in zip(rows, y, expected, strict=True):
            error = oracle.relative_rms(actual, right)
            assert error <= (EXACT if exact or count <= MOST_EXACT_ROWS else MANY_ROWS), (
                f"{count} rows: relative error {error:.3g}"
            )


@pytest.mark.parametrize("path", ["hopper"], indirect=True)
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 100, 120])
@pytest.mark.parametrize("fmt", ON_GPU)
def test_other_gpus(gpu, rng, simulator, monkeypatch, fmt, capability):
    """They have other paths, and less shared memory."""
    if simulator is None:
        pytest.skip("a real GPU is what it is")
    gpu.shutdown()
    monkeypatch.setenv("SIMT_CAPABILITY", str(capability))
    gpu.init(0)
    gpu.publish_tables()
    matrix = oracle.random_encoded(rng, fmt, SMALL)
    tensor, x = gpu.upload(matrix), gaussian(rng, 20, SMALL[1])
    for rows in (1, 5, 16, 20):
        check_rows(gpu, tensor, matrix, x[:rows])


# ---- rows that are no numbers ----


@pytest.mark.parametrize("rows", [3, 9, 20])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("fmt", ["e8", "int8", "mxfp4", "f32"])
def test_what_is_not_finite_stays_in_its_row(gpu, rng, fmt, value, rows):
    matrix = oracle.random_encoded(rng, fmt, SMALL)
    tensor, x = gpu.upload(matrix), gaussian(rng, rows, SMALL[1])
    others = np.arange(rows) != 1
    clean = gpu.matmul(tensor, x, matrix)
    x[1, 123] = value
    y = gpu.matmul(tensor, x, matrix)
    assert np.array_equal(y[others], clean[others])
    assert not np.isfinite(y[1]).any()


# ---- bits ----


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", ON_GPU)
def test_a_row_does_not_depend_on_the_others(gpu, rng, fmt, shape):
    matrix = oracle.random_encoded(rng, fmt, shape)
    tensor, x = gpu.upload(matrix), gaussian(rng, MOST_EXACT_ROWS, shape[1])
    together = gpu.matmul(tensor, x, matrix)
    for rows in (rows for rows in ROWS if rows < MOST_EXACT_ROWS):
        last = gpu.matmul(tensor, np.ascontiguousarray(x[-rows:]), matrix)
        assert np.array_equal(last, together[-rows:]), f"the last {rows} rows have other bits"


@pytest.mark.parametrize("rows", [1, 9, 33])
@pytest.mark.parametrize("fmt", ON_GPU)
def test_another_run_gives_the_same_bits(gpu, rng, fmt, rows):
    matrix = oracle.random_encoded(rng, fmt, SMALL)
    tensor, x = gpu.upload(matrix), gaussian(rng, rows, SMALL[1])
    assert np.array_equal(gpu.matmul(tensor, x, matrix), gpu.matmul(tensor, x, matrix))


def test_fp16_is_what_many_rows_take_when_allowed(gpu, rng, path):
    """Else the tests above would prove nothing of either."""
    matrix = oracle.random_encoded(rng, "int4", SHAPES[0])
    tensor, x = gpu.upload(matrix), gaussian(rng, 33, SHAPES[0][1])
    quick = gpu.matmul(tensor, x, matrix)
    gpu.require_exact(True)
    exact = gpu.matmul(tensor, x, matrix)
    error = oracle.relative_rms(quick, exact)
    assert error == 0 if path == "plain" else EXACT < error <= MANY_ROWS
