"""Matrix products and single experts on the GPU library, against float64 of the decoded weights."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import oracle
import pytest
from abi import NULL, Refused, ffi, floats, pointer
from samples import EXACT, MIXED, MOST_EXACT_ROWS, ON_GPU, gaussian, limit, random_expert


def check_matmul(gpu, matrix, x):
    y = gpu.matmul(gpu.upload(matrix), x, matrix)
    error = oracle.relative_rms(y, x.astype(np.float64) @ matrix.decode().T)
    assert error <= limit(len(x)), f"relative error {error:.3g}"
    return y


# ---- matmul ----


@pytest.mark.parametrize("S", [1, 4, 16])
@pytest.mark.parametrize("columns", [2048, 6144])
@pytest.mark.parametrize("fmt", [name for name in oracle.FORMATS if name != "int3-g64"])
def test_accuracy(gpu, rng, simulator, record_property, fmt, columns, S):
    matrix = oracle.random_encoded(rng, fmt, (6 if simulator else 384, columns))
    x = gaussian(rng, S, columns)
    y = gpu.matmul(gpu.upload(matrix), x, matrix)
    error = oracle.relative_rms(y, x.astype(np.float64) @ matrix.decode().T)
    record_property("relative_rms", float(error))
    assert error <= EXACT


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (9, 31), (33, 33), (5, 97), (130, 65), (7, 129), (3, 257), (2, 700)])
@pytest.mark.parametrize("fmt", ON_GPU)
def test_odd_shapes(gpu, rng, fmt, shape):
    check_matmul(gpu, oracle.random_encoded(rng, fmt, shape), gaussian(rng, 3, shape[1]))


@pytest.mark.parametrize("S", [1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 31, 33, 64, 100])
@pytest.mark.parametrize("fmt", ["e8", "int4", "fp8-e4m3-b128"])
def test_any_number_of_rows(gpu, rng, fmt, S):
    check_matmul(gpu, oracle.random_encoded(rng, fmt, (17, 300)), gaussian(rng, S, 300))


@pytest.mark.parametrize("fmt", ["int8", "e8"])
def test_more_rows_than_a_grid_holds(gpu, rng, fmt):
    check_matmul(gpu, oracle.random_encoded(rng, fmt, (1, 2)), gaussian(rng, 65537, 2))


@pytest.mark.parametrize("fmt", ["int8", "e8"])
def test_more_outputs_than_a_grid_holds(gpu, rng, simulator, fmt):
    if simulator:
        pytest.skip("takes too long on the simulator")
    check_matmul(gpu, oracle.random_encoded(rng, fmt, (600_001, 3)), gaussian(rng, 2, 3))


@pytest.mark.parametrize("shape", [(2048, 6144), (6144, 2048), (1000, 4999)])
@pytest.mark.parametrize("fmt", ON_GPU)
def test_large(gpu, rng, simulator, fmt, shape):
    if simulator:
        pytest.skip("takes too long on the simulator")
    matrix = oracle.random_encoded(rng, fmt, shape)
    tensor, decoded = gpu.upload(matrix), matrix.decode()
    for S in (1, 8, 16, 40, 256):
        x = gaussian(rng, S, shape[1])
        assert oracle.relative_rms(gpu.matmul(tensor, x, matrix), x @ decoded.T) <= limit(S), S


@pytest.mark.parametrize("fmt", ON_GPU)
def test_a_row_does_not_depend_on_the_others(gpu, rng, fmt):
    matrix = oracle.random_encoded(rng, fmt, (19, 330))
    tensor = gpu.upload(matrix)
    x = gaussian(rng, 16, 330)
    together = gpu.matmul(tensor, x, matrix)
    assert np.array_equal(gpu.matmul(tensor, x, matrix), together), "another run gave other bits"
    alone = np.concatenate([gpu.matmul(tensor, x[i : i + 1], matrix) for i in range(16)])
    assert np.array_equal(alone, together)
    for first, last in ((0, 2), (3, 10), (5, 16)):
        part = gpu.matmul(tensor, np.ascontiguousarray(x[first:last]), matrix)
        assert np.array_equal(part, together[first:last])


@pytest.mark.parametrize("scale", [1e4, 1e-6, 1e-20])
@pytest.mark.parametrize("S", [2, 20])
@pytest.mark.parametrize("fmt", ON_GPU)
def test_large_and_small_activations(gpu, rng, fmt, S, scale):
    check_matmul(gpu, oracle.random_encoded(rng, fmt, (9, 300)), gaussian(rng, S, 300) * np.float32(scale))


@pytest.mark.parametrize("fmt", ["int8", "e8", "mxfp4"])
@pytest.mark.parametrize("magnitude", [2.0**-18, 2.0**12])
def test_large_and_small_weights(gpu, rng, fmt, magnitude):
    # 2^-18 puts all E8 super-scales among the subnormals of fp16.
    check_matmul(gpu, oracle.random_encoded(rng, fmt, (9, 300), magnitude), gaussian(rng, 3, 300))


def test_rows_of_one_call_are_apart(gpu, rng):
    matrix = oracle.random_encoded(rng, "e8", (8, 256))
    x = gaussian(rng, 3, 256)
    x[1, 7] = np.nan
    y = gpu.matmul(gpu.upload(matrix), x, matrix)
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


def test_matmul_uploads_by_itself(gpu, rng):
    matrix = oracle.random_encoded(rng, "int4-g16", (6, 48))
    x, y = gaussian(rng, 2, 48), np.empty((2, 6), np.float32)
    slot = ffi.new("ColiCudaTensor **")
    weights, scales = pointer(matrix.data, "void *"), floats(matrix.scales)
    for call in range(3):
        # Once the tensor is there, the host pointers may be NULL.
        given = (weights, scales) if call == 0 else (NULL, NULL)
        gpu.check(gpu.lib.coli_cuda_matmul(slot, floats(y), floats(x), *given, 4, 2, 48, 6, 0, 16))
        assert oracle.relative_rms(y, x @ matrix.decode().T) < EXACT
        assert gpu.stats() == (1, matrix.nbytes)
    gpu.tensors.append(slot[0])


def test_refused_matmuls(gpu, rng):
    matrix = oracle.random_encoded(rng, "int8", (6, 8))
    tensor = gpu.upload(matrix)
    x, y = gaussian(rng, 2, 8), np.full((2, 6), 7, np.float32)
    slot = ffi.new("ColiCudaTensor **", tensor)

    y_pointer, x_pointer = floats(y), floats(x)

    def call(*, slot=slot, y=y_pointer, x=x_pointer, fmt=1, S=2, columns=8, rows=6, device=0):
        return gpu.lib.coli_cuda_matmul(slot, y, x, NULL, NULL, fmt, S, columns, rows, device, 0)

    assert call() == 1
    y[:] = 7
    for changes, text in (
        ({"S": 0}, "0"),
        ({"S": -5}, "-5"),
        ({"x": NULL}, "x"),
        ({"y": NULL}, "y"),
        ({"slot": NULL}, "tensor"),
        ({"fmt": 2}, "format 2"),
        ({"columns": 9}, "9"),
        ({"rows": 7}, "7"),
        ({"device": 9999}, "9999"),
        ({"slot": ffi.new("ColiCudaTensor **")}, "weights"),
    ):
        assert call(**changes) == 0, changes
        refused = gpu.refusal()
        assert text in refused.text, (changes, refused.text)
    assert (y == 7).all()
    assert gpu.stats() == (1, matrix.nbytes)


# ---- decode, seen through products with unit vectors ----


def columns_of(gpu, matrix):
    """The matrix that the device sees, column by column: products with unit vectors have one term that is not zero."""
    tensor = gpu.upload(matrix)
    units = np.eye(matrix.shape[1], dtype=np.float32)
    calls = [np.ascontiguousarray(units[i : i + MOST_EXACT_ROWS]) for i in range(0, len(units), MOST_EXACT_ROWS)]
    return np.concatenate([gpu.matmul(tensor, x, matrix) for x in calls]).T


@pytest.mark.parametrize("fmt", ON_GPU)
def test_decode_is_exact(gpu, rng, fmt):
    matrix = oracle.random_encoded(rng, fmt, (18, 70))
    assert np.array_equal(columns_of(gpu, matrix), matrix.decode(np.float32))


def test_every_e8_index_and_sign_field(gpu, rng):
    # 64 super-blocks hold 2048 lanes: all 256 indices in each half, all 128 sign fields, all 16 sub-scales many times.
    lane = np.arange(2048).reshape(64, 8, 4)
    indices = np.stack([lane % 256, (lane * 77 + 31) % 256], axis=-1)
    data = oracle.e8_blocks(indices, lane % 128, (lane[..., 0] // 4 + lane[..., 0] // 64) % 16, np.full(64, 0.0123))
    matrix = oracle.Encoded("e8", (64, 256), data)
    assert np.array_equal(columns_of(gpu, matrix), matrix.decode(np.float32))


def test_every_super_scale(gpu, rng, simulator):
    patterns = np.arange(65536, dtype=np.uint16)
    if simulator:
        # All subnormals, and every other exponent and sign with a few mantissas.
        patterns = patterns[(patterns & 0x7C00 == 0) | (patterns % 37 == 0) | (patterns & 0x3FF == 0x3FF)]
    data = np.zeros((len(patterns), 98), np.uint8)
    data[:, 0] = 7
    data[:, 64:96] = rng.integers(0, 256, (len(patterns), 32), dtype=np.uint8)
    data[:, 96:] = patterns.astype("<u2").view(np.uint8).reshape(-1, 2)
    matrix = oracle.Encoded("e8", (len(patterns), 1), data.ravel())
    one = np.ones((1, 1), np.float32)
    y, expected = gpu.matmul(gpu.upload(matrix), one, matrix)[0], matrix.decode(np.float32)[:, 0]
    finite = np.isfinite(expected)
    assert np.array_equal(y[finite], expected[finite])
    assert not np.isfinite(y[~finite]).any()
    assert np.isnan(y[np.isnan(expected)]).all()


def test_every_fp8_byte(gpu):
    matrix = oracle.Encoded(
        "fp8-e4m3-b128", (256, 1), np.arange(256, dtype=np.uint8), np.full((2, 1), 0.75, np.float32)
    )
    y = gpu.matmul(gpu.upload(matrix), np.ones((1, 1), np.float32), matrix)[0]
    assert np.array_equal(y, matrix.decode(np.float32)[:, 0], equal_nan=True)
    assert np.flatnonzero(np.isnan(y)).tolist() == [0x7F, 0xFF]


def test_every_mxfp4_scale_and_nibble(gpu):
    row = (np.arange(0, 16, 2) | np.arange(1, 16, 2) << 4).astype(np.uint8)
    matrix = oracle.Encoded("mxfp4", (256, 16), np.tile(row, 256), np.arange(256, dtype=np.uint8)[:, None])
    seen, expected = columns_of(gpu, matrix), matrix.decode(np.float32)
    # From scale 253 on, some products of nibble and scale are infinite, and infinity times the zeros of x is NaN.
    finite = np.isfinite(expected).all(axis=1)
    assert np.flatnonzero(~finite).tolist() == [253, 254, 255]
    assert np.array_equal(seen[finite], expected[finite])
    assert not np.isfinite(seen[255]).any()


def test_every_mxfp4_nibble_in_every_column(gpu):
    row, column = np.indices((32, 256))
    nibbles = (row + column + column // 16 * 5) % 16
    data = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).astype(np.uint8)
    scales = (120 + np.arange(32 * 8) % 13).astype(np.uint8)
    matrix = oracle.Encoded("mxfp4", (32, 256), data.ravel(), scales.reshape(32, 8))
    assert np.array_equal(columns_of(gpu, matrix), matrix.decode(np.float32))


def of_limbs(*limbs):
    """An activation between 1 and 2 in magnitude that is cut into these limbs, the lowest first (kernels/limbs.cuh)."""
    return sum(limb * 64**i for i, limb in enumerate(limbs)) / 2**22


LARGEST_LIMBS = [(31, 31, 28, 31), (-32, -32, -28, -31)]


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_of_mxfp4(gpu, sign, rows):
    """They stay in the mantissa of a float until they are scaled."""
    data = np.full(8 * 512 // 2, 0x77 if sign > 0 else 0xFF, np.uint8)
    matrix = oracle.Encoded("mxfp4", (8, 512), data, np.full((8, 16), 127, np.uint8))
    for limbs in LARGEST_LIMBS:
        check_matmul(gpu, matrix, np.full((rows, 512), of_limbs(*limbs), np.float32))


def largest_e8(sign):
    """Entries and sub-scales as large as the kernels for bytes take them: weights of 66 * 31 / 8, all of one sign."""
    codebook = np.full_like(oracle.CODEBOOK, 66)
    data = np.zeros((40 * 2, 98), np.uint8)
    data[:, 64:96] = np.full(8, 0xF0000000 if sign > 0 else 0xFFFFFFFF, "<u4").view(np.uint8)
    data[:, 96:] = np.float16([1]).view(np.uint8)
    return oracle.Encoded("e8", (40, 512), data.ravel(), codebook=codebook)


@pytest.mark.parametrize("limbs", LARGEST_LIMBS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_of_e8(gpu, sign, limbs):
    """Sums of limbs over a tile reach almost 2^24, where float's integers end: rows that go through floats have the
    bits of one that goes through integers."""
    matrix = largest_e8(sign)
    gpu.set_codebook(matrix.codebook)
    tensor, x = gpu.upload(matrix), np.full((16, 512), of_limbs(*limbs), np.float32)
    x[:, 1::2] = np.nextafter(x[:, 1::2], np.float32(0))  # sums are not all equal
    x[1::2, 100:] *= -1
    alone = np.concatenate([gpu.matmul(tensor, x[i : i + 1], matrix) for i in range(16)])
    assert oracle.relative_rms(alone, x.astype(np.float64) @ matrix.decode().T) <= EXACT
    for rows in (2, 4, 5, 8, 16):
        assert np.array_equal(gpu.matmul(tensor, x[:rows], matrix), alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_the_smallest_and_largest_mxfp4_scales(gpu, rng, rows):
    """Sums are as accurate with scales at the ends of float32, of rows that have one scale and of rows with another."""
    scales = np.array([1, 2, 23, 127, 240, 246, 0, 255], np.uint8)
    data = oracle.random_bytes(rng, "mxfp4", (len(scales), 600)).data
    matrix = oracle.Encoded("mxfp4", (len(scales), 600), data, np.repeat(scales[:, None], 19, axis=1))
    x = gaussian(rng, rows, 600)
    y = gpu.matmul(gpu.upload(matrix), x, matrix)
    assert not y[:, 6].any()
    assert not np.isfinite(y[:, 7]).any()
    matrix = oracle.Encoded("mxfp4", matrix.shape, data, np.minimum(matrix.scales, 254))
    expected = x.astype(np.float64) @ matrix.decode().T
    for i in range(6):
        assert oracle.relative_rms(y[:, i], expected[:, i]) <= EXACT, f"scale {scales[i]}"


def test_an_mxfp4_scale_that_is_not_finite_stays_in_its_row(gpu, rng):
    matrix = oracle.random_encoded(rng, "mxfp4", (40, 300))
    matrix.scales[21, 5] = 255
    y = gpu.matmul(gpu.upload(matrix), gaussian(rng, 2, 300), matrix)
    assert np.isfinite(y).all(axis=0).tolist() == [row != 21 for row in range(40)]
    assert not np.isfinite(y[:, 21]).any()


def test_every_integer_code(gpu):
    for fmt, codes in (("int8", 256), ("int4", 16), ("int2", 4), ("int4-g5", 16)):
        columns = codes * 2
        data = {
            "int8": np.tile(np.arange(256), 2),
            "int2": np.array([0b11100100, 0b00011011]),
        }.get(fmt, np.arange(16) | np.arange(16)[::-1] << 4)
        shape, dtype = oracle.scale_layout(fmt, (1, columns))
        matrix = oracle.Encoded(fmt, (1, columns), data.astype(np.uint8), np.full(shape, 0.3, dtype))
        assert np.array_equal(columns_of(gpu, matrix), matrix.decode(np.float32)), fmt


@pytest.mark.parametrize("fmt", ["int8", "int4", "int2", "int4-g16", "fp8-e4m3-b128"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_scales_that_are_not_finite_propagate(gpu, rng, fmt, value):
    matrix = oracle.random_encoded(rng, fmt, (200, 40))
    matrix.scales[0] = value
    y = gpu.matmul(gpu.upload(matrix), gaussian(rng, 2, 40), matrix)
    poisoned = 128 if fmt.startswith("fp8") else 1
    assert not np.isfinite(y[:, :poisoned]).any()
    assert np.isfinite(y[:, poisoned:]).all()


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_super_scales_that_are_not_finite_propagate(gpu, rng, bits):
    matrix = oracle.random_encoded(rng, "e8", (4, 600))
    matrix.data.reshape(4, 3, 98)[2, 1, 96:] = bits & 255, bits >> 8
    y = gpu.matmul(gpu.upload(matrix), gaussian(rng, 2, 600), matrix)
    assert np.isfinite(y).tolist() == [[True, True, False, True]] * 2


# ---- expert ----


def check_expert(gpu, expert, x, tolerance=None):
    y = gpu.expert_mlp(gpu.upload_expert(expert), x)
    error = oracle.relative_rms(y, oracle.expert(x, *expert))
    assert error <= (tolerance or limit(len(x))), f"relative error {error:.3g}"
    return y


@pytest.mark.parametrize("fmt", ON_GPU)
def test_expert(gpu, rng, fmt):
    check_expert(gpu, random_expert(rng, 96, 64, (fmt, fmt, fmt)), gaussian(rng, 3, 96))


@pytest.mark.parametrize("formats", MIXED, ids="-".join)
def test_expert_of_mixed_formats(gpu, rng, formats):
    check_expert(gpu, random_expert(rng, 70, 48, formats), gaussian(rng, 2, 70))


@pytest.mark.parametrize(("D", "H"), [(1, 1), (3, 5), (256, 128), (65, 300), (33, 257)])
@pytest.mark.parametrize("fmt", ["e8", "int4"])
def test_expert_of_odd_dimensions(gpu, rng, fmt, D, H):
    check_expert(gpu, random_expert(rng, D, H, (fmt,) * 3), gaussian(rng, 2, D))


@pytest.mark.parametrize("H", [128, 96, 384, 1536, 6144, 8192, 20480, 32768, 65536 + 64])
def test_hidden_rows_are_rotated_in_blocks_of_any_size(gpu, rng, H):
    expert = random_expert(rng, 4, H, ("int8", "int8", "e8"))
    check_expert(gpu, expert, gaussian(rng, 2, 4))
    if H in (384, 8192, 20480):  # other kernels prepare 5 rows and more
        check_expert(gpu, expert, gaussian(rng, 6, 4))
        check_expert(gpu, expert, gaussian(rng, 17, 4))


@pytest.mark.parametrize("S", [1, 8, 16, 17, 40])
@pytest.mark.parametrize("fmt", ["e8", "int4"])
def test_expert_with_any_number_of_rows(gpu, rng, fmt, S):
    check_expert(gpu, random_expert(rng, 64, 48, (fmt,) * 3), gaussian(rng, S, 64))


@pytest.mark.parametrize("scale", [1e4, 1e-6])
def test_expert_with_large_and_small_activations(gpu, rng, scale):
    check_expert(gpu, random_expert(rng, 96, 64, ("e8",) * 3), gaussian(rng, 3, 96) * np.float32(scale))


def test_expert_rows_do_not_depend_on_each_other(gpu, rng):
    for formats in (("e8",) * 3, ("int4", "int8", "e8")):
        tensors = gpu.upload_expert(random_expert(rng, 96, 64, formats))
        x = gaussian(rng, 16, 96)
        together = gpu.expert_mlp(tensors, x)
        alone = np.concatenate([gpu.expert_mlp(tensors, x[i : i + 1]) for i in range(16)])
        assert np.array_equal(alone, together)
        assert np.array_equal(gpu.expert_mlp(tensors, x), together)


def test_unrotated_down(gpu, rng):
    gate, up, down = random_expert(rng, 64, 96, ("e8",) * 3)
    x = gaussian(rng, 3, 64)
    rotated = check_expert(gpu, (gate, up, down), x)
    down.rotated = False
    plain = check_expert(gpu, (gate, up, down), x)
    assert oracle.relative_rms(plain, rotated) > 0.1


def test_refused_set_rotated(gpu, rng):
    assert gpu.lib.coli_cuda_tensor_set_rotated(NULL, 0) == 0
    assert gpu.refusal().status == "ARGUMENT"
    tensor = gpu.upload(oracle.random_encoded(rng, "int8", (4, 4)))
    assert gpu.lib.coli_cuda_tensor_set_rotated(tensor, 0) == 0
    assert "format 1" in gpu.refusal().text


def test_refused_experts(gpu, rng):
    gate, up, down = gpu.upload_expert(random_expert(rng, 16, 8, ("int8",) * 3))
    other = gpu.upload(oracle.random_encoded(rng, "int8", (8, 15)))
    x, y = gaussian(rng, 2, 16), np.full((2, 16), 7, np.float32)

    y_pointer, x_pointer = floats(y), floats(x)

    def call(gate=gate, up=up, down=down, y=y_pointer, x=x_pointer, S=2):
        return gpu.lib.coli_cuda_expert_mlp(gate, up, down, y, x, S)

    assert call() == 1
    y[:] = 7
    for changes, text in (
        ({"gate": NULL}, "gate"),
        ({"up": NULL}, "up"),
        ({"down": NULL}, "down"),
        ({"x": NULL}, "x"),
        ({"y": NULL}, "y"),
        ({"S": 0}, "0"),
        ({"up": other}, "15"),
        ({"down": gate}, "16"),
    ):
        assert call(**changes) == 0, changes
        refused = gpu.refusal()
        assert text in refused.text, (changes, refused.text)
    assert (y == 7).all()


# ---- the entry points of single formats ----


def test_shared_mlp_of_int4(gpu, rng):
    expert = random_expert(rng, 96, 64, ("int4",) * 3)
    tensors = gpu.upload_expert(expert)
    x, y = gaussian(rng, 5, 96), np.full((5, 96), 7, np.float32)
    gpu.check(gpu.lib.coli_cuda_shared_mlp_w4a16(*tensors, floats(y), floats(x), 5))
    assert oracle.relative_rms(y, oracle.expert(x, *expert)) <= EXACT
    y[:] = 7
    others = gpu.upload_expert(random_expert(rng, 96, 64, ("int4", "int8", "int4")))
    assert gpu.lib.coli_cuda_shared_mlp_w4a16(*others, floats(y), floats(x), 5) == 0
    assert gpu.refusal().status == "FORMAT"
    assert "format 1" in gpu.refusal().text
    assert (y == 7).all()


@pytest.mark.parametrize("S", [1, 6])
def test_mxfp4_from_host_memory(gpu, rng, S):
    matrix = oracle.random_encoded(rng, "mxfp4", (11, 75))
    x, y = gaussian(rng, S, 75), np.full((S, 11), 7, np.float32)
    weights, scales = pointer(matrix.data, "unsigned char *"), pointer(matrix.scales, "unsigned char *")
    gpu.check(gpu.lib.coli_cuda_matmul_mxfp4(floats(y), floats(x), weights, scales, S, 75, 11))
    assert oracle.relative_rms(y, x @ matrix.decode().T) <= EXACT
    assert gpu.stats() == (0, 0)
    y[:] = 7
    assert gpu.lib.coli_cuda_matmul_mxfp4(floats(y), floats(x), weights, NULL, S, 75, 11) == 0
    assert gpu.refusal().status == "ARGUMENT"
    assert (y == 7).all()


def test_mxfp4_expert_from_host_memory(gpu, rng):
    D, H, S, b1, b2 = 64, 48, 3, 7.0, 1.75
    expert = random_expert(rng, D, H, ("mxfp4",) * 3)
    x, y = gaussian(rng, S, D), np.full((S, D), 7, np.float32)
    parts = [pointer(part, "unsigned char *") for matrix in expert for part in (matrix.data, matrix.scales)]
    gpu.check(gpu.lib.coli_cuda_expert_mxfp4(floats(y), floats(x), *parts, S, D, H, b1, b2))
    assert oracle.relative_rms(y, oracle.expert_mxfp4(x, *expert, b1, b2)) <= EXACT
    assert gpu.stats() == (0, 0)
    y[:] = 7
    assert gpu.lib.coli_cuda_expert_mxfp4(floats(y), floats(x), *parts[:-1], NULL, S, D, H, b1, b2) == 0
    assert gpu.refusal().status == "ARGUMENT"
    assert (y == 7).all()


def test_tensors_lost_to_a_shutdown_say_so(gpu, rng):
    expert = random_expert(rng, 8, 8, ("int8",) * 3)
    tensors = gpu.upload_expert(expert)
    gpu.shutdown()
    gpu.init(0)
    with pytest.raises(Refused, match="shutdown"):
        gpu.expert_mlp(tensors, gaussian(rng, 1, 8))


def in_threads(work, count):
    """Runs work(i) in `count` threads that start together; raises what any of them raised."""
    start = threading.Barrier(count)

    def run(i):
        start.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_products_during_updates_use_old_or_new_weights(gpu, rng):
    old, new = (oracle.random_encoded(rng, "int8", (16, 256)) for _ in range(2))
    tensor = gpu.upload(old)
    x = gaussian(rng, 2, 256)
    allowed = [gpu.matmul(tensor, x, old)]
    gpu.update(tensor, new)
    allowed.append(gpu.matmul(tensor, x, new))

    def work(i):
        for turn in range(20):
            if i == 0:
                gpu.update(tensor, (old, new)[turn % 2])
            else:
                y = gpu.matmul(tensor, x, old)
                assert any(np.array_equal(y, right) for right in allowed)

    in_threads(work, 3)


def test_first_products_of_several_threads_upload_once(gpu, rng):
    matrix = oracle.random_encoded(rng, "int8", (16, 256))
    x = gaussian(rng, 1, 256)
    before = gpu.stats()[0]
    for turn in range(10):
        slot = ffi.new("ColiCudaTensor **")

        def work(_, slot=slot):
            y = np.empty((1, 16), np.float32)
            data, scales = pointer(matrix.data, "void *"), floats(matrix.scales)
            gpu.check(gpu.lib.coli_cuda_matmul(slot, floats(y), floats(x), data, scales, 1, 1, 256, 16, 0, 0))

        in_threads(work, 2)
        gpu.tensors.append(slot[0])
        assert gpu.stats()[0] == before + turn + 1
