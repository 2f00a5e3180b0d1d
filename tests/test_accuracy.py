"""Products and experts on the CPU against float64 of the decoded weights, with every instruction set."""

import numpy as np
import oracle
import pytest
from strategies import INSTRUCTION_SETS, on_every_instruction_set

import pycoli
from pycoli import cpu

LIMIT = 3e-6  # relative RMS
ALL_FORMATS = [*oracle.FORMATS, "int4-g1", "int4-g5", "int4-g48"]


def as_weights(matrix):
    return pycoli.Weights.from_bytes(
        matrix.data,
        fmt=matrix.fmt,
        shape=matrix.shape,
        scales=matrix.scales,
        rotated=matrix.rotated,
        codebook=None if matrix.codebook is oracle.CODEBOOK else matrix.codebook,
    )


def random_matrix(rng, fmt, shape, magnitude=1.0, **options):
    """Stored without rotation, so that a product is that of the stored rows with x as it is."""
    matrix = oracle.random_encoded(rng, fmt, shape, magnitude, **options)
    matrix.rotated = False
    return matrix


def gaussian(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def product(x, matrix):
    return pycoli.matmul(x, as_weights(matrix), device="cpu")


def error_of_product(x, matrix):
    return oracle.relative_rms(product(x, matrix), x.astype(np.float64) @ matrix.decode().T)


@pytest.mark.parametrize("S", [1, 4, 16])
@pytest.mark.parametrize("columns", [2048, 6144])
@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_matmul(isa, rng, record_property, fmt, columns, S):
    error = error_of_product(gaussian(rng, S, columns), random_matrix(rng, fmt, (65, columns)))
    record_property("relative_rms", float(error))
    assert error <= LIMIT


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 31), (33, 33), (7, 97), (130, 129), (5, 257), (4, 1001)])
@pytest.mark.parametrize("fmt", ALL_FORMATS)
def test_odd_shapes(isa, rng, fmt, shape):
    for S in (1, 3, 17):
        assert error_of_product(gaussian(rng, S, shape[1]), random_matrix(rng, fmt, shape)) <= LIMIT


@pytest.mark.parametrize("fmt", ALL_FORMATS)
def test_a_row_does_not_depend_on_the_others(isa, rng, fmt):
    matrix = random_matrix(rng, fmt, (37, 330))
    x = gaussian(rng, 40, 330)
    together = product(x, matrix)
    assert np.array_equal(product(x, matrix), together)
    assert np.array_equal(np.concatenate([product(row[None], matrix) for row in x]), together)
    assert np.array_equal(product(x[3:19], matrix), together[3:19])


@pytest.mark.skipif(not {"avx2", "avx512"} <= set(INSTRUCTION_SETS), reason="needs a processor with AVX-512")
@pytest.mark.parametrize("columns", [31, 97, 2048, 6144])
@pytest.mark.parametrize("fmt", ALL_FORMATS)
def test_instruction_sets_with_fused_sums_give_the_same_bits(rng, fmt, columns):
    matrix, x = random_matrix(rng, fmt, (65, columns)), gaussian(rng, 17, columns)
    results = on_every_instruction_set(lambda: product(x, matrix))
    assert np.array_equal(results["avx2"], results["avx512"])


@pytest.mark.parametrize("fmt", ["e8", "int4", "fp8-e4m3-b128"])
def test_threads_do_not_change_the_result(isa, rng, fmt):
    matrix = random_matrix(rng, fmt, (301, 600))
    x = gaussian(rng, 3, 600)
    try:
        results = []
        for count in (1, 2, 3, 8):
            cpu.set_threads(count)
            results.append(product(x, matrix))
    finally:
        cpu.set_threads(0)
    assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize("scale", [1e4, 1e-6, 1e-20])
@pytest.mark.parametrize("fmt", ALL_FORMATS)
def test_large_and_small_activations(isa, rng, fmt, scale):
    x = gaussian(rng, 2, 300) * np.float32(scale)
    assert error_of_product(x, random_matrix(rng, fmt, (9, 300))) <= LIMIT


@pytest.mark.parametrize("fmt", ALL_FORMATS)
def test_products_with_unit_vectors_are_the_decoded_weights(isa, rng, fmt):
    matrix = random_matrix(rng, fmt, (18, 139))
    assert np.array_equal(product(np.eye(139, dtype=np.float32), matrix).T, matrix.decode(np.float32))


@pytest.mark.parametrize("value", [0, 255, None])
def test_any_codebook(isa, rng, value):
    codebook = rng.integers(0, 256, (256, 4), dtype=np.uint8) if value is None else np.full((256, 4), value, np.uint8)
    matrix = random_matrix(rng, "e8", (5, 300), codebook=codebook)
    x = gaussian(rng, 2, 300)
    if value == 0:
        assert not product(x, matrix).any()
    else:
        assert error_of_product(x, matrix) <= LIMIT


@pytest.mark.parametrize("bits", [0x0001, 0x0200, 0x03FF, 0x8001])
def test_subnormal_super_scales(isa, rng, bits):
    matrix = random_matrix(rng, "e8", (6, 512))
    matrix.data.reshape(-1, 98)[:, 96:] = bits & 255, bits >> 8
    assert error_of_product(gaussian(rng, 2, 512), matrix) <= LIMIT


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_super_scales_that_are_not_finite_propagate(isa, rng, bits):
    matrix = random_matrix(rng, "e8", (4, 600))
    matrix.data.reshape(4, 3, 98)[2, 1, 96:] = bits & 255, bits >> 8
    assert np.isfinite(product(gaussian(rng, 2, 600), matrix)).tolist() == [[True, True, False, True]] * 2


def test_rotated_weights_take_plain_activations(isa, rng):
    w, x = gaussian(rng, 40, 1536), gaussian(rng, 3, 1536)
    weights = pycoli.encode(w, "e8")
    stored = oracle.Encoded("e8", w.shape, weights.data).decode()
    y = pycoli.matmul(x, weights, device="cpu")
    assert oracle.relative_rms(y, oracle.rotate(x) @ stored.T) <= LIMIT
    assert oracle.relative_rms(y, x.astype(np.float64) @ w.T) < 0.25


# ---- experts ----


def test_golden_expert(isa, golden):
    D, H = golden["mlp_shape"]
    gate, up, down = (
        pycoli.Weights.from_bytes(golden[f"mlp_{name}"], fmt="e8", shape=shape)
        for name, shape in (("gate", (H, D)), ("up", (H, D)), ("down", (D, H)))
    )
    y = pycoli.expert_mlp(golden["mlp_x"], gate, up, down, device="cpu")
    assert oracle.relative_rms(y, golden["mlp_y"]) <= LIMIT


@pytest.mark.parametrize(
    "formats",
    [
        ("e8", "e8", "e8"),
        ("int4", "int4", "e8"),
        ("e8", "e8", "int4"),
        ("e8", "int8", "mxfp4"),
        ("int3-g64", "f32", "fp8-e4m3-b128"),
        ("int2", "int4-g48", "e8"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize(("D", "H"), [(96, 64), (65, 300), (3, 5), (48, 8192)])
def test_expert(isa, rng, formats, D, H):
    gate, up, down = (
        oracle.random_encoded(rng, fmt, shape, 1 / np.sqrt(shape[1]))
        for fmt, shape in zip(formats, ((H, D), (H, D), (D, H)), strict=True)
    )
    x = gaussian(rng, 3, D)
    y = pycoli.expert_mlp(x, as_weights(gate), as_weights(up), as_weights(down), device="cpu")
    rotated_x = oracle.rotate(x)
    hidden_gate = (rotated_x if gate.fmt == "e8" else x) @ gate.decode().T
    hidden_up = (rotated_x if up.fmt == "e8" else x) @ up.decode().T
    hidden = oracle.silu(hidden_gate) * hidden_up
    if down.fmt == "e8":
        hidden = oracle.rotate(hidden)
    assert oracle.relative_rms(y, hidden @ down.decode().T) <= LIMIT
