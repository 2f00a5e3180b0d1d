"""The oracle itself, held against golden vectors made elsewhere and against other libraries."""

import numpy as np
import oracle
import pytest
import scipy.linalg


@pytest.mark.parametrize("kind", ["normal", "subnormal", "partial"])
def test_decode_matches_golden(golden, kind):
    shape = tuple(golden[f"decode_{kind}_shape"])
    decoded = oracle.Encoded("e8", shape, golden[f"decode_{kind}_raw"]).decode(np.float32)
    assert decoded.tobytes() == golden[f"decode_{kind}_w"].tobytes()


@pytest.mark.parametrize("dim", [128, 768, 1536, 8192])
def test_rotation_matches_golden(golden, dim):
    np.testing.assert_allclose(oracle.rotate(golden[f"rotate_{dim}_x"]), golden[f"rotate_{dim}_y"], rtol=0, atol=1e-14)


def test_expert_matches_golden(golden):
    D, H = golden["mlp_shape"]
    gate = oracle.Encoded("e8", (H, D), golden["mlp_gate"])
    up = oracle.Encoded("e8", (H, D), golden["mlp_up"])
    down = oracle.Encoded("e8", (D, H), golden["mlp_down"])
    y = oracle.expert(oracle.rotate(golden["mlp_x"]), gate, up, down)
    assert oracle.relative_rms(y, golden["mlp_y"]) < 1e-13


def test_encoder_matches_golden(golden):
    w = golden["encode_w"]
    rotated = oracle.rotate(w)
    data = oracle.encode_e8(rotated)
    assert data.tobytes() == golden["encode_raw_baseline"].tobytes()
    nmse = oracle.relative_rms(oracle.Encoded("e8", w.shape, data).decode(), rotated) ** 2
    assert nmse == pytest.approx(float(golden["encode_nmse_baseline"]), rel=1e-12)


def test_hadamard_is_scipys():
    assert np.array_equal(oracle.hadamard(256), scipy.linalg.hadamard(256))
    assert np.array_equal(oracle.walsh_hadamard(np.eye(256)), scipy.linalg.hadamard(256))


def test_sign_stream_check_values():
    first_bytes = {
        128: "dbcf329b71248fc3",
        256: "de658f1678eea03b",
        512: "153331ea11c078fc",
        1024: "3bc2ac6aeab15146",
        2048: "a038f927cb70352e",
        4096: "0b178fd2ccf13027",
        8192: "4720685802321c5a",
        32768: "4902632fc2d1da81",
    }
    assert {n: oracle.sign_bytes(n)[:8].hex() for n in first_bytes} == first_bytes


@pytest.mark.parametrize(
    ("dim", "blocks"),
    [
        (6144, [2048, 4096]),
        (1536, [512, 1024]),
        (7168, [1024, 2048, 4096]),
        (2048, [2048]),
        (5, [1, 4]),
        (98304, [32768, 32768, 32768]),
    ],
)
def test_rotation_blocks(dim, blocks):
    assert oracle.rotation_blocks(dim) == blocks


def test_e4m3_and_e2m1_are_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is the second opinion on the small float formats")
    e4m3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert np.array_equal(oracle.E4M3, e4m3, equal_nan=True)
    e2m1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert np.array_equal(oracle.E2M1, e2m1)
    assert np.array_equal(np.signbit(oracle.E2M1), np.signbit(e2m1))


def test_e8_fields_round_trip(rng):
    data = rng.integers(0, 256, 98 * 50, dtype=np.uint8)
    assert oracle.e8_blocks(*oracle.e8_fields(data)).tobytes() == data.tobytes()
