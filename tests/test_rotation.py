"""The E8 rotation against a dense matrix (small), float64 butterflies (large) and golden vectors."""

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import assert_same_bits, on_every_instruction_set

import pycoli

TOLERANCE = 2e-7  # relative RMS of the float32 transform

LARGE = [384, 512, 768, 1000, 1536, 2048, 4096, 6144, 7168, 8192, 12288, 14336, 18432, 20480, 32768]
BEYOND_ONE_BLOCK = [32768 + 256, 65536, 98304 + 48]


def dense_rotation(dim):
    """The matrix whose product with a column vector rotates it."""
    matrix = np.zeros((dim, dim))
    start = 0
    for n in oracle.rotation_blocks(dim):
        block = slice(start, start + n)
        matrix[block, block] = oracle.hadamard(n) * oracle.signs(n) / np.sqrt(n)
        start += n
    return matrix


@pytest.mark.parametrize("dim", range(1, 301))
def test_dense(isa, dim, rng):
    x = rng.standard_normal((3, dim)).astype(np.float32)
    expected = x.astype(np.float64) @ dense_rotation(dim).T
    assert oracle.relative_rms(pycoli.rotate(x), expected) <= TOLERANCE


@pytest.mark.parametrize("dim", LARGE + BEYOND_ONE_BLOCK)
def test_large(isa, dim, rng):
    x = rng.standard_normal((2, dim)).astype(np.float32)
    assert oracle.relative_rms(pycoli.rotate(x), oracle.rotate(x)) <= TOLERANCE
    assert oracle.relative_rms(pycoli.unrotate(x), oracle.unrotate(x)) <= TOLERANCE


@pytest.mark.parametrize("dim", [128, 768, 1536, 8192])
def test_golden(isa, golden, dim):
    y = pycoli.rotate(golden[f"rotate_{dim}_x"])
    assert y.dtype == np.float32
    assert oracle.relative_rms(y, golden[f"rotate_{dim}_y"]) <= TOLERANCE


@pytest.mark.parametrize("n", [1, 4, 16, 64, 256, 1024, 4096, 16384])
def test_exact_on_integers(isa, n, rng):
    # Sums of small integers are exact, and so is 1/sqrt(n) for a power of four.
    x = rng.integers(-100, 101, (3, n)).astype(np.float32)
    assert np.array_equal(pycoli.rotate(x), oracle.rotate(x))


@pytest.mark.parametrize("n", [2**k for k in range(16)])
def test_signs_of_every_block_size(n):
    # The first column of a Hadamard matrix is all ones, so unit vector i gives sign i as the sum's sign in entry 0.
    for i in {0, n // 2, n - 1}:
        unit = np.zeros(n, np.float32)
        unit[i] = 1
        assert np.sign(pycoli.rotate(unit)[0]) == oracle.signs(n)[i]


@pytest.mark.parametrize("dim", [1, 7, 48, 300, 768, 6144, 32768, 65536 + 512])
def test_inverse_and_length(dim, rng):
    x = rng.standard_normal((2, dim)).astype(np.float32)
    y = pycoli.rotate(x)
    assert oracle.relative_rms(pycoli.unrotate(y), x) <= 2 * TOLERANCE
    lengths = np.linalg.norm(x.astype(np.float64), axis=1)
    np.testing.assert_allclose(np.linalg.norm(y.astype(np.float64), axis=1), lengths, rtol=1e-6)


@pytest.mark.parametrize("dim", [96, 1536])
def test_products_are_kept(dim, rng):
    x, w = rng.standard_normal((2, 4, dim)).astype(np.float32)
    rotated = pycoli.rotate(x).astype(np.float64) @ pycoli.rotate(w).T
    np.testing.assert_allclose(rotated, x.astype(np.float64) @ w.T, atol=1e-6 * dim)


def test_leading_axes_and_single_rows(rng):
    x = rng.standard_normal((2, 3, 4, 96)).astype(np.float32)
    y = pycoli.rotate(x)
    assert y.shape == x.shape
    assert np.array_equal(pycoli.rotate(x[1, 2, 3]), y[1, 2, 3])


def check_same_bits_on_every_instruction_set(x):
    for rotation in (pycoli.rotate, pycoli.unrotate):
        scalar, *others = on_every_instruction_set(lambda rotation=rotation: rotation(x)).values()
        for other in others:
            assert_same_bits(other, scalar)


@pytest.mark.parametrize("dim", LARGE + BEYOND_ONE_BLOCK)
def test_every_instruction_set_gives_the_same_bits(dim, rng):
    check_same_bits_on_every_instruction_set(rng.standard_normal((2, dim)).astype(np.float32))


@settings(max_examples=200)
@given(st.integers(1, 600), st.integers(0, 2**32 - 1), st.sampled_from([0, 30, -30, 127, -120, -140]))
def test_every_instruction_set_gives_the_same_bits_at_any_magnitude(dim, seed, exponent):
    # From 2^127 on sums overflow, around 2^-140 they are subnormal.
    x = np.random.default_rng(seed).standard_normal((3, dim))
    with np.errstate(over="ignore"):
        check_same_bits_on_every_instruction_set((x * 2.0**exponent).astype(np.float32))
