"""Encode and decode of every format against the oracle, bit for bit."""

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import GROUP_SIZES, any_bytes, assert_same_bits, weights_to_encode

import pycoli

INTEGER_FORMATS = ["int8", "int4", "int2", "int3-g64", *(f"int4-g{size}" for size in GROUP_SIZES)]


def to_weights(matrix):
    return pycoli.Weights.from_bytes(matrix.data, fmt=matrix.fmt, shape=matrix.shape, scales=matrix.scales)


def from_weights(weights):
    return oracle.Encoded(weights.fmt, weights.shape, weights.data, weights.scales)


@given(any_bytes())
def test_decode(matrix):
    weights = to_weights(matrix)
    assert_same_bits(weights.decode(stored=True), matrix.decode(np.float32))
    assert weights.nbytes == matrix.nbytes
    assert weights.data.tobytes() == matrix.data.tobytes()


@pytest.mark.parametrize("fmt", [*oracle.FORMATS, "int4-g1", "int4-g5"])
def test_decode_one_by_one(fmt, rng):
    matrix = oracle.random_encoded(rng, fmt, (1, 1))
    assert_same_bits(to_weights(matrix).decode(stored=True), matrix.decode(np.float32))


def test_decode_every_fp8_byte():
    data = np.arange(256, dtype=np.uint8)
    scales = np.array([[0.75, -3e-39]], np.float32)
    matrix = oracle.Encoded("fp8-e4m3-b128", (1, 256), data, scales)
    decoded = to_weights(matrix).decode()
    assert_same_bits(decoded, matrix.decode(np.float32))
    assert np.isnan(decoded[0, [0x7F, 0xFF]]).all()
    assert np.isnan(decoded).sum() == 2


def test_decode_every_mxfp4_nibble_and_scale():
    # Row r has scale r and all sixteen nibbles, each as an even and as an odd column.
    nibbles = np.concatenate([np.arange(16), np.roll(np.arange(16), 1)])
    row = (nibbles[0::2] | nibbles[1::2] << 4).astype(np.uint8)
    matrix = oracle.Encoded("mxfp4", (256, 32), np.tile(row, 256), np.arange(256, dtype=np.uint8)[:, None])
    decoded = to_weights(matrix).decode()
    assert_same_bits(decoded, matrix.decode(np.float32))
    assert not decoded[0].any()
    assert not np.isfinite(decoded[255]).any()


def test_decode_every_int8_code_and_scale_extremes():
    scales = np.array([0, -0.0, 1e-45, 3.4e38, np.inf, -np.inf, np.nan, -1.5], np.float32)
    matrix = oracle.Encoded("int8", (8, 256), np.tile(np.arange(256, dtype=np.uint8), 8), scales)
    assert_same_bits(to_weights(matrix).decode(), matrix.decode(np.float32))


@given(weights_to_encode(), st.sampled_from(INTEGER_FORMATS))
def test_encode_integers(w, fmt):
    encoded = from_weights(pycoli.encode(w, fmt))
    codes, scales = oracle.quantise(fmt, w)
    assert_same_bits(encoded.scales, scales)
    assert np.array_equal(oracle.integer_codes(fmt, encoded.data, encoded.shape), codes)


@given(weights_to_encode())
def test_encode_f32_is_a_copy(w):
    encoded = pycoli.encode(w, "f32")
    assert encoded.scales is None
    assert encoded.data.tobytes() == w.tobytes()


@pytest.mark.parametrize("fmt", [fmt for fmt in INTEGER_FORMATS if fmt != "int4-g1"])
def test_encode_rounds_ties_to_even(fmt):
    largest = {"int8": 127, "int2": 1, "int3-g64": 3}.get(fmt, 7)
    # The first column of every group fixes its scale at 1; the others lie half-way between codes.
    group = oracle.split_name(fmt)[1] or 64
    columns = np.arange(64)
    w = ((columns % (2 * largest)) - largest + 0.5).astype(np.float32)[None, :]
    w[:, ::group] = largest
    encoded = pycoli.encode(w, fmt)
    assert (encoded.scales == 1).all()
    assert np.array_equal(encoded.decode(), np.rint(w))


@pytest.mark.parametrize("fmt", INTEGER_FORMATS)
def test_encoding_the_decoded_gives_the_same_codes(fmt, rng):
    w = rng.standard_normal((7, 321)).astype(np.float32)
    w[3] = 0
    once = from_weights(pycoli.encode(w, fmt))
    again = from_weights(pycoli.encode(once.decode(np.float32), fmt))
    np.testing.assert_allclose(again.scales, once.scales, rtol=2e-7)
    assert np.array_equal(
        oracle.integer_codes(fmt, again.data, again.shape), oracle.integer_codes(fmt, once.data, once.shape)
    )


@pytest.mark.parametrize("fmt", ["f32", "e8", *INTEGER_FORMATS])
def test_encode_is_deterministic(fmt, rng):
    w = rng.standard_normal((5, 129)).astype(np.float32)
    first, second = pycoli.encode(w, fmt), pycoli.encode(w.copy(), fmt)
    assert first.data.tobytes() == second.data.tobytes()


def test_format_list_matches_the_oracle():
    assert [info.name for info in pycoli.formats()] == list(oracle.FORMATS)
    for info in pycoli.formats():
        bits = 8 * oracle.random_encoded(np.random.default_rng(0), info.name, (256, 256)).nbytes / 256**2
        # Scales of whole rows vanish in a large matrix.
        expected = bits if info.name not in ("int8", "int4", "int2") else round(bits)
        assert info.bits_per_weight == pytest.approx(expected)
        assert info.on_gpu == (info.name != "int3-g64")
