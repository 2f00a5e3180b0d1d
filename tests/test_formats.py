"""Encode and decode of every format against the oracle, bit for bit."""

import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    GROUP_SIZES,
    any_bytes,
    assert_same_bits,
    on_every_instruction_set,
    weights_to_encode,
)

import pycoli

INTEGER_FORMATS = ["int8", "int4", "int2", "int3-g64", *(f"int4-g{size}" for size in GROUP_SIZES)]
SMALL_FLOATS = {"mxfp4": oracle.encode_mxfp4, "fp8-e4m3-b128": oracle.encode_fp8}


def to_weights(matrix):
    return pycoli.Weights.from_bytes(matrix.data, fmt=matrix.fmt, shape=matrix.shape, scales=matrix.scales)


def from_weights(weights):
    return oracle.Encoded(weights.fmt, weights.shape, weights.data, weights.scales)


def scale_bytes(weights):
    return b"" if weights.scales is None else weights.scales.tobytes()


@given(any_bytes())
def test_decode_on_every_instruction_set(matrix):
    weights, expected = to_weights(matrix), matrix.decode(np.float32)
    for decoded in on_every_instruction_set(lambda: weights.decode(stored=True)).values():
        assert_same_bits(decoded, expected)
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


@pytest.mark.parametrize("fmt", [*INTEGER_FORMATS, *SMALL_FLOATS])
def test_encoding_the_decoded_gives_the_same_codes(fmt, rng):
    w = rng.standard_normal((7, 321)).astype(np.float32)
    w[3] = 0
    once = from_weights(pycoli.encode(w, fmt))
    again = from_weights(pycoli.encode(once.decode(np.float32), fmt))
    np.testing.assert_allclose(again.scales, once.scales, rtol=2e-7)
    assert again.data.tobytes() == once.data.tobytes()


@given(weights_to_encode(), st.sampled_from(["f32", "e8", *INTEGER_FORMATS, *SMALL_FLOATS]), st.booleans())
def test_encode_gives_the_same_bytes_on_every_instruction_set(w, fmt, rotate):
    options = {"rotate": rotate} if fmt == "e8" else {}
    scalar, *others = on_every_instruction_set(lambda: pycoli.encode(w, fmt, **options)).values()
    for other in others:
        assert other.data.tobytes() == scalar.data.tobytes()
        assert scale_bytes(other) == scale_bytes(scalar)


# ---- encoders of small floats ----


def check_small_floats(fmt, w):
    encoded = pycoli.encode(w, fmt)
    data, scales = SMALL_FLOATS[fmt](w)
    assert encoded.scales.tobytes() == scales.tobytes()
    different = np.flatnonzero(encoded.data != data)
    assert not different.size, f"{different.size} bytes differ, the first at {different[0]}"


@pytest.mark.parametrize("fmt", SMALL_FLOATS)
@given(w=weights_to_encode())
def test_encode_small_floats(fmt, w):
    check_small_floats(fmt, w)


@pytest.mark.parametrize("shape", [(1, 1), (127, 31), (128, 32), (129, 33), (256, 129), (257, 300)])
@pytest.mark.parametrize("fmt", SMALL_FLOATS)
def test_encode_small_floats_at_block_edges(fmt, shape, rng):
    # Magnitudes differ from block to block, so that a weight under its neighbour's scale shows.
    block_size = (128, 128) if fmt.startswith("fp8") else (1, 32)
    block = np.add.outer(3 * (np.arange(shape[0]) // block_size[0]), 5 * (np.arange(shape[1]) // block_size[1]))
    check_small_floats(fmt, (rng.standard_normal(shape) * 2.0 ** (block % 41)).astype(np.float32))


@pytest.mark.parametrize("exponent", [0, 90, -90])
@pytest.mark.parametrize(
    ("fmt", "values", "group"), [("mxfp4", oracle.E2M1[:8], 32), ("fp8-e4m3-b128", oracle.E4M3[:127], 128)]
)
def test_encode_rounds_at_every_half_of_small_floats(fmt, values, group, exponent):
    # Each half between two values, and its neighbours on both sides. The largest value in front fixes the scale.
    largest, codes = np.float32(values[-1]), np.arange(len(values) - 1)
    halves = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    below, above = np.nextafter(halves, np.float32(0)), np.nextafter(halves, largest)
    magnitudes = np.concatenate([below, halves, above])
    expected = values[np.concatenate([codes, codes + codes % 2, codes + 1])]
    for sign in (1.0, -1.0):
        for start in range(0, len(magnitudes), group - 1):
            w = np.concatenate([[largest], sign * magnitudes[start : start + group - 1]])[None].astype(np.float32)
            decoded = pycoli.encode(w * np.float32(2.0**exponent), fmt).decode()
            assert decoded[0, 0] == largest * 2.0**exponent
            assert np.array_equal(decoded[0, 1:], sign * expected[start : start + group - 1] * 2.0**exponent)


def test_small_floats_agree_with_ml_dtypes(rng):
    magnitudes = np.abs(np.concatenate([rng.standard_normal(5000), 2.0 ** rng.uniform(-14, 0, 5000)]))
    w = (magnitudes * rng.choice([-1, 1], 10000) / magnitudes.max()).astype(np.float32)
    for fmt, dtype, largest in (("mxfp4", ml_dtypes.float4_e2m1fn, 6), ("fp8-e4m3-b128", ml_dtypes.float8_e4m3fn, 448)):
        rows = np.concatenate([np.full((len(w) // 25, 1), largest), (w * largest).reshape(-1, 25)], axis=1)
        rows = rows.astype(np.float32)
        decoded = pycoli.encode(rows, fmt).decode()
        assert np.array_equal(decoded, rows.astype(dtype).astype(np.float32))


def test_mxfp4_scale_is_a_power_of_two_below_the_largest_magnitude():
    # (largest magnitude, scale byte, its code): in a binade the scale stays, and what exceeds six scales becomes six.
    smallest = np.float32(1e-45)
    for largest, scale, code in (
        (4, 127, 6),
        (5, 127, 6),  # half-way between 4 and 6
        (5.0000005, 127, 7),
        (6, 127, 7),
        (7.9999995, 127, 7),
        (8, 128, 6),
        (3.9999998, 126, 7),
        (3.4028235e38, 252, 7),
        (2.0**-123, 2, 6),
        (2.0**-124, 1, 6),
        (2.0**-125, 1, 4),  # from here on the scale cannot shrink any more
        (2.0**-126, 1, 2),
        (2.0**-127, 1, 1),
        (2.0**-128, 1, 0),
        (smallest, 1, 0),
        (0, 0, 0),
    ):
        for sign in (1.0, -1.0):
            w = np.array([[sign * largest] + [0] * 31], np.float32)
            encoded = pycoli.encode(w, "mxfp4")
            assert encoded.scales.tolist() == [[scale]], largest
            assert encoded.data[0] == (code | 8 * (sign < 0)), largest


def test_fp8_scale_has_a_floor():
    smallest_normal = np.float32(2.0**-126)
    for largest, scale, code in (
        (448 * 2.0**-120, 2.0**-120, 0x7E),
        (448 * 2.0**-126, 2.0**-126, 0x7E),
        (224 * 2.0**-126, 2.0**-126, 0x76),
        (2.0**-126, 2.0**-126, 0x38),
        (2.0**-135, 2.0**-126, 0x01),
        (2.0**-136, 2.0**-126, 0x00),  # half-way to the smallest e4m3
        (0, 2.0**-126, 0x00),
    ):
        for sign in (1.0, -1.0):
            encoded = pycoli.encode(np.array([[sign * largest]], np.float32), "fp8-e4m3-b128")
            assert encoded.scales == max(np.float32(scale), smallest_normal), largest
            assert encoded.data[0] == (code | 128 * (sign < 0)), largest


@pytest.mark.parametrize("fmt", SMALL_FLOATS)
def test_small_floats_keep_the_signs_of_zeros(fmt):
    for other in (0, 1):
        w = np.array([[0.0, -0.0, other]], np.float32)
        assert np.signbit(pycoli.encode(w, fmt).decode()).tolist() == [[False, True, False]]
