"""The E8 format: every field of the super-block, any codebook, the reference encoder, other decoders of the block."""

import ctypes
import pathlib

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import COLUMNS, assert_same_bits, on_every_instruction_set

import pycoli


def decode(data, shape, codebook=None):
    options = {} if codebook is None else {"codebook": codebook}
    return pycoli.Weights.from_bytes(data, fmt="e8", shape=shape, **options).decode(stored=True)


def test_every_index_sign_field_and_sub_scale(isa):
    # One lane for each triple; its second index is another permutation of the table than its first.
    code, index, sign_field = (a.reshape(-1, 8, 4) for a in np.mgrid[:16, :256, :128].reshape(3, 16384, 32))
    indices = np.stack([index, (index * 77 + sign_field) % 256], axis=-1)
    data = oracle.e8_blocks(indices, sign_field, code[..., 0], np.full(len(code), 0.0123))
    shape = (128, 128 * 256)
    assert_same_bits(decode(data, shape), oracle.Encoded("e8", shape, data).decode(np.float32))


@pytest.mark.parametrize("first", range(0, 65536, 8192))
def test_every_super_scale(isa, first, rng):
    count = 8192
    super_scales = np.arange(first, first + count, dtype=np.uint16).view(np.float16)
    data = rng.integers(0, 256, 98 * count, dtype=np.uint8)
    data.reshape(-1, 98)[:, 96:] = super_scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    shape = (count // 64, 64 * 256)
    assert_same_bits(decode(data, shape), oracle.Encoded("e8", shape, data).decode(np.float32))


CODEBOOKS = {
    "zeros": np.zeros((256, 4), np.uint8),
    "largest": np.full((256, 4), 255, np.uint8),
    "counting": (np.arange(1024) % 256).astype(np.uint8).reshape(256, 4),
    "random": np.random.default_rng(5).integers(0, 256, (256, 4), dtype=np.uint8),
}


@pytest.mark.parametrize("name", CODEBOOKS)
def test_any_codebook(isa, name, rng):
    matrix = oracle.random_encoded(rng, "e8", (6, 700), codebook=CODEBOOKS[name])
    assert_same_bits(decode(matrix.data, matrix.shape, matrix.codebook), matrix.decode(np.float32))


@settings(max_examples=50)
@given(st.integers(1, 4), COLUMNS, st.integers(0, 2**32 - 1))
def test_partial_super_blocks_decode(rows, columns, seed):
    matrix = oracle.random_encoded(np.random.default_rng(seed), "e8", (rows, columns))
    assert_same_bits(decode(matrix.data, matrix.shape), matrix.decode(np.float32))


# ---- reference encoder ----


def encode(w):
    """Bytes of `w` encoded as it is, by the reference rule."""
    return pycoli.encode(w, "e8", rotate=False, quality="reference").data


@pytest.mark.parametrize("columns", [1, 8, 31, 96, 256, 300, 768, 1000])
def test_encoder_follows_the_reference_rule(isa, columns, rng):
    w = rng.standard_normal((9, columns)).astype(np.float32)
    w[1] *= 1e-3
    w[2] *= 1e3
    w[3] = 0
    w[4] = rng.standard_t(2, columns)
    w[5, columns // 2] = 40
    w[6] = np.rint(w[6])  # equal magnitudes and zeros: ties in the parity rule
    assert encode(w).tobytes() == oracle.encode_e8(w).tobytes()


def test_encoder_matches_golden(isa, golden):
    w = golden["encode_w"]
    assert encode(oracle.rotate(w).astype(np.float32)).tobytes() == golden["encode_raw_baseline"].tobytes()


def test_encode_rotates_by_itself(golden):
    w = golden["encode_w"]
    encoded = pycoli.encode(w, "e8", quality="reference")
    assert encoded.rotated
    assert encoded.data.tobytes() == encode(pycoli.rotate(w)).tobytes()
    assert oracle.relative_rms(encoded.decode(stored=True), oracle.rotate(w)) ** 2 == pytest.approx(
        float(golden["encode_nmse_baseline"]), rel=1e-3
    )
    # Taken back to the original basis, the error is the same: the rotation is orthogonal.
    assert oracle.relative_rms(encoded.decode(), w) ** 2 == pytest.approx(
        float(golden["encode_nmse_baseline"]), rel=1e-3
    )


def test_encoder_gives_the_same_bytes_on_every_instruction_set(rng):
    w = rng.standard_normal((64, 2048)).astype(np.float32)
    w[1::4] = np.rint(4 * w[1::4]) / 4  # ties between entries and between sub-scales
    w[2::4] *= 2.0 ** rng.integers(-30, 12, (16, 1))
    w[3::4] = rng.standard_t(2, (16, 2048))
    scalar, *others = on_every_instruction_set(lambda: encode(w).tobytes()).values()
    assert all(other == scalar for other in others)


def test_gaussian_error(record_property):
    w = np.random.default_rng(1).standard_normal((384, 2048)).astype(np.float32)
    decoded = pycoli.encode(w, "e8", rotate=False, quality="reference").decode(stored=True)
    nmse = oracle.relative_rms(decoded, w) ** 2
    record_property("nmse", float(nmse))
    assert nmse <= 0.0381


def test_zeros_encode_to_zeros():
    weights = pycoli.encode(np.zeros((3, 300), np.float32), "e8")
    assert not weights.decode(stored=True).any()


def test_partial_super_block_is_padded_with_zeros(rng):
    w = rng.standard_normal((4, 300)).astype(np.float32)
    padded = np.zeros((4, 512), np.float32)
    padded[:, :300] = w
    assert encode(w).tobytes() == encode(padded).tobytes()


def test_powers_of_two_change_the_super_scale_alone(rng):
    w = rng.standard_normal((4, 512)).astype(np.float32)
    indices, sign_fields, codes, super_scales = oracle.e8_fields(encode(w))
    scaled = oracle.e8_fields(encode(w * 8))
    assert np.array_equal(scaled[0], indices)
    assert np.array_equal(scaled[1], sign_fields)
    assert np.array_equal(scaled[2], codes)
    assert np.array_equal(scaled[3], super_scales * np.float16(8))


# ---- other decoders of the same block ----


def iq3_xxs_blocks(matrix):
    """The ggml order of the block: the super-scale first. There a block decodes to twice the value."""
    blocks = matrix.data.reshape(-1, 98)
    return np.ascontiguousarray(np.concatenate([blocks[:, 96:], blocks[:, :96]], axis=1))


def matrix_with_subnormals(rng):
    matrix = oracle.random_encoded(rng, "e8", (16, 1024))
    matrix.data.reshape(-1, 98)[::3, 97] &= 0x83  # exponent field 0: every third super-scale becomes subnormal
    return matrix


def test_agrees_with_gguf(rng):
    gguf = pytest.importorskip("gguf", reason="gguf decodes the same block in numpy")
    from gguf import quants

    matrix = matrix_with_subnormals(rng)
    twice = quants.dequantize(iq3_xxs_blocks(matrix), gguf.GGMLQuantizationType.IQ3_XXS)
    assert_same_bits(decode(matrix.data, matrix.shape), (twice.reshape(matrix.shape) / 2).astype(np.float32))


def test_agrees_with_ggml(rng):
    package = pytest.importorskip("libggml", reason="libggml-python carries ggml's own decoder")
    libraries = sorted(pathlib.Path(package.__file__).parent.rglob("libggml-base*.so*"))
    if not libraries:
        pytest.skip("libggml-python has no libggml-base library on this platform")
    dequantize = ctypes.CDLL(str(libraries[0])).dequantize_row_iq3_xxs
    matrix = matrix_with_subnormals(rng)
    blocks = iq3_xxs_blocks(matrix)
    twice = np.empty(matrix.shape, np.float32)
    dequantize(ctypes.c_void_p(blocks.ctypes.data), ctypes.c_void_p(twice.ctypes.data), ctypes.c_int64(twice.size))
    assert_same_bits(decode(matrix.data, matrix.shape), twice / np.float32(2))
