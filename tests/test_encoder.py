"""The qualities of the E8 encoder: what they promise by their own measures, options, and files of importance."""

import struct
import warnings

import numpy as np
import olmoe
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ODD_BLOCKS, on_every_instruction_set, weights_to_encode

import pycoli
from pycoli import cpu
from pycoli._lib import ffi, lib, text


def encode(w, quality, **options):
    return pycoli.encode(w, "e8", rotate=False, quality=quality, **options)


def block_errors(w, weights, importance=1.0):
    """Squared error of each super-block, as the format description decodes it: float64 [rows, blocks]."""
    decoded = oracle.Encoded("e8", w.shape, weights.data).decode()
    error = importance * (w.astype(np.float64) - decoded) ** 2
    error = np.pad(error, ((0, 0), (0, -w.shape[1] % 256)))
    return error.reshape(len(w), -1, 256).sum(axis=-1)


def assert_no_block_is_worse(errors, than):
    worse = errors > than * (1 + 1e-12)
    assert not worse.any(), f"super-block {np.argwhere(worse)[0]}: {errors[worse][0]} > {than[worse][0]}"


def nmse(w, weights):
    return oracle.relative_rms(weights.decode(stored=True), w) ** 2


def correlated(rng, rows, columns, relations=12):
    """Activations whose columns are related, of widely different sizes."""
    mixing = rng.standard_normal((relations, columns)) * 3
    x = rng.standard_normal((rows, relations)) @ mixing + rng.standard_normal((rows, columns))
    return (x * np.exp(rng.standard_normal(columns))).astype(np.float32)


# ---- search ----


def test_search_is_the_default(rng):
    w = rng.standard_normal((3, 512)).astype(np.float32)
    assert pycoli.encode(w, "e8").data.tobytes() == pycoli.encode(w, "e8", quality="search").data.tobytes()
    assert pycoli.encode(w, "e8").data.tobytes() != pycoli.encode(w, "e8", quality="reference").data.tobytes()


def test_search_error_on_gaussian_weights(record_property):
    w = np.random.default_rng(1).standard_normal((384, 2048)).astype(np.float32)
    error = nmse(w, encode(w, "search"))
    record_property("nmse", float(error))
    assert error <= 0.0314


@settings(max_examples=60)
@given(weights_to_encode())
def test_search_is_nowhere_worse_than_the_reference(w):
    assert_no_block_is_worse(block_errors(w, encode(w, "search")), block_errors(w, encode(w, "reference")))


@settings(max_examples=60)
@given(weights_to_encode(), st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1e-3, 1.0, 1e20]))
def test_weighted_search_is_nowhere_worse_than_the_reference(w, seed, scale):
    rng = np.random.default_rng(seed)
    importance = (rng.exponential(size=w.shape[1]) ** 3 * scale).astype(np.float32)
    importance[rng.random(w.shape[1]) < 0.2] = 0
    importance[0] = scale
    errors = block_errors(w, encode(w, "search", importance=importance), importance)
    assert_no_block_is_worse(errors, block_errors(w, encode(w, "reference"), importance))


def test_importance_moves_the_error_to_where_it_counts_less(rng):
    w = rng.standard_normal((64, 512)).astype(np.float32)
    importance = np.where(np.arange(512) % 3 == 0, 10, 0.1).astype(np.float32)
    plain, weighted = (encode(w, "search", **given) for given in ({}, {"importance": importance}))
    assert block_errors(w, weighted, importance).sum() < 0.8 * block_errors(w, plain, importance).sum()
    same = encode(w, "search", importance=np.full(512, 0.37, np.float32))
    assert block_errors(w, same).sum() == pytest.approx(block_errors(w, plain).sum(), rel=2e-3)


@pytest.mark.parametrize("kind", ODD_BLOCKS)
def test_odd_blocks(isa, kind):
    w = ODD_BLOCKS[kind].reshape(1, 256).astype(np.float32)
    searched, reference = encode(w, "search"), encode(w, "reference")
    assert np.isfinite(searched.decode(stored=True)).all()
    assert_no_block_is_worse(block_errors(w, searched), block_errors(w, reference))
    x = np.random.default_rng(8).standard_normal((100, 256)).astype(np.float32)
    assert np.isfinite(encode(w, "calibrated", activations=x).decode(stored=True)).all()


def test_constant_rows_are_nearly_exact():
    w = np.full((1, 512), 0.7, np.float32)
    assert nmse(w, encode(w, "search")) < 1e-6  # entries of equal magnitudes exist; the super-scale is fp16


def test_one_outlier_among_zeros_is_kept():
    w = np.zeros((1, 256), np.float32)
    w[0, 100] = -5
    assert encode(w, "search").decode(stored=True)[0, 100] == pytest.approx(-5, rel=0.15)  # zeros cost two steps


@pytest.mark.parametrize("quality", ["reference", "search", "calibrated"])
@pytest.mark.parametrize("columns", [1, 7, 8, 31, 256, 300, 520])
def test_padding_of_partial_super_blocks(quality, columns, rng):
    w = rng.standard_normal((3, columns)).astype(np.float32)
    options = {"activations": rng.standard_normal((600, columns)).astype(np.float32)} if quality == "calibrated" else {}
    weights = encode(w, quality, **options)
    assert weights.data.size == 3 * 98 * -(-columns // 256)
    assert nmse(w, weights) < 0.1


# ---- calibrated ----


@pytest.fixture(scope="module")
def layer():
    """A matrix, activations that it is calibrated with, and others that it meets later."""
    rng = np.random.default_rng(11)
    x = correlated(rng, 3000, 320)
    return rng.standard_normal((48, 320)).astype(np.float32), x[:2000], x[2000:]


def output_error(w, weights, x):
    wanted = x.astype(np.float64) @ w.T.astype(np.float64)
    return float(((x @ weights.decode().T - wanted) ** 2).sum() / (wanted**2).sum())


@pytest.mark.parametrize("rotate", [False, True])
def test_calibration_lowers_the_error_of_outputs(layer, rotate):
    w, x, later = layer
    errors = {
        quality: output_error(w, pycoli.encode(w, "e8", rotate=rotate, quality=quality, **options), later)
        for quality, options in (("search", {}), ("calibrated", {"activations": x}))
    }
    assert errors["calibrated"] < 0.5 * errors["search"]


def test_calibration_reports_what_it_did(layer):
    w, x, _ = layer
    calibration = pycoli.Calibration(320)
    for part in np.array_split(x, 3):
        calibration.add(part)
    weights, report = pycoli.encode_calibrated(w, calibration)
    assert (report.quality, report.reason, report.rows) == ("calibrated", None, 2000)
    assert report.output_error == pytest.approx(output_error(w, weights, x), rel=1e-2)
    assert report.search_output_error == pytest.approx(output_error(w, pycoli.encode(w, "e8"), x), rel=1e-2)
    assert report.output_error < report.search_output_error
    assert report.collect_seconds > 0
    assert report.encode_seconds > 0
    assert report.peak_bytes >= 3 * 4 * 320 * 320
    # the same activations at once, and in encode()
    at_once = pycoli.encode(w, "e8", quality="calibrated", activations=x)
    assert output_error(w, at_once, x) == pytest.approx(report.output_error, rel=0.05)


@settings(max_examples=25)
@given(weights_to_encode(), st.integers(64, 400), st.integers(0, 2**32 - 1))
def test_no_row_is_calibrated_to_be_worse_than_searched(w, rows, seed):
    columns = w.shape[1]
    x = correlated(np.random.default_rng(seed), rows, columns).astype(np.float64)
    hessian = x.T @ x
    hessian += 0.01 * np.trace(hessian) / columns * np.eye(columns)

    def costs(weights):
        error = w.astype(np.float64) - weights.decode(stored=True)
        return np.einsum("ij,jk,ik->i", error, hessian, error)

    calibrated, searched = costs(encode(w, "calibrated", activations=x.astype(np.float32))), costs(encode(w, "search"))
    # sums are float32: rows that cannot be told apart may fall either way
    assert (calibrated <= searched * 1.001 + 1e-30).all()


@pytest.mark.parametrize("rows", [0, 1, 63])
def test_too_few_activations_fall_back_to_searching(layer, rows):
    w, x, _ = layer
    searched = pycoli.encode(w, "e8")
    with pytest.warns(pycoli.CalibrationWarning, match=f"{rows} activations are too few"):
        weights = pycoli.encode(w, "e8", quality="calibrated", activations=x[:rows])
    assert weights.data.tobytes() == searched.data.tobytes()
    calibration = pycoli.Calibration(320)
    calibration.add(x[:rows])
    weights, report = pycoli.encode_calibrated(w, calibration)
    assert report.quality == "search"
    assert "too few" in report.reason
    assert weights.data.tobytes() == searched.data.tobytes()


def test_activations_of_zero_fall_back_to_searching(layer):
    with pytest.warns(pycoli.CalibrationWarning, match="all zero"):
        pycoli.encode(layer[0], "e8", quality="calibrated", activations=np.zeros((100, 320), np.float32))


def test_fewer_activations_than_columns_still_help(layer):
    w, x, later = layer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = pycoli.encode(w, "e8", quality="calibrated", activations=x[:100])
    assert output_error(w, weights, later) < output_error(w, pycoli.encode(w, "e8"), later)


def test_importance_in_place_of_activations(layer):
    w, _, _ = layer
    rng = np.random.default_rng(12)
    sizes = np.exp(2 * rng.standard_normal(320))
    x = (rng.standard_normal((2000, 320)) * sizes).astype(np.float32)
    weights = pycoli.encode(w, "e8", quality="calibrated", importance=(sizes**2).astype(np.float32))
    assert output_error(w, weights, x) < 0.6 * output_error(w, pycoli.encode(w, "e8"), x)


def test_importance_of_any_size(layer):
    w, _, _ = layer
    importance = np.random.default_rng(13).integers(1, 9, 320).astype(np.float32)
    encoded = {
        pycoli.encode(w, "e8", quality="calibrated", importance=np.ldexp(importance, power)).data.tobytes()
        for power in (-149, -60, 0, 60, 124)
    }
    assert len(encoded) == 1


@pytest.mark.parametrize("quality", ["search", "calibrated"])
def test_same_bytes_on_every_instruction_set_and_number_of_threads(layer, quality):
    w, x, _ = layer
    options = {}
    if quality == "calibrated":
        options["activations"] = calibration = pycoli.Calibration(320)
        calibration.add(x)
    weights = on_every_instruction_set(lambda: pycoli.encode(w, "e8", quality=quality, **options))
    for threads in (1, 2, 5):
        cpu.set_threads(threads)
        weights[threads] = pycoli.encode(w, "e8", quality=quality, **options)
    cpu.set_threads(0)
    assert len({encoded.data.tobytes() for encoded in weights.values()}) == 1


def test_weighted_search_gives_the_same_bytes_on_every_instruction_set(rng):
    w = rng.standard_normal((16, 700)).astype(np.float32)
    importance = rng.exponential(size=700).astype(np.float32)
    results = on_every_instruction_set(lambda: encode(w, "search", importance=importance).data.tobytes())
    assert len(set(results.values())) == 1


# ---- whole experts ----


def silu_expert(gate, up, down, x):
    pre = x.astype(np.float64) @ gate.T
    return (pre / (1 + np.exp(-pre)) * (x @ up.T)) @ down.T


@pytest.fixture(scope="module")
def expert():
    """gate, up, down, and rows to calibrate with and to test on."""
    rng = np.random.default_rng(21)
    gate, up = (rng.standard_normal((2, 96, 160)) / 20).astype(np.float32)
    down = rng.standard_normal((160, 96)).astype(np.float32)
    x = correlated(rng, 3000, 160)
    return gate, up, down, x[:2000], x[2000:]


def expert_error(expert, weights, x, seen=None):
    """Relative error of the encoded expert for `seen` against the exact one for x."""
    wanted = silu_expert(*expert[:3], x)
    got = silu_expert(*(w.decode() for w in weights), x if seen is None else seen)
    return np.square(got - wanted).sum() / np.square(wanted).sum()


def test_encode_expert(expert):
    gate, up, down, x, later = expert
    weights, reports = pycoli.encode_expert(gate, up, down, x)
    assert [report.quality for report in reports] == ["calibrated"] * 3
    assert [w.shape for w in weights] == [(96, 160), (96, 160), (160, 96)]
    searched = [pycoli.encode(w, "e8") for w in (gate, up, down)]
    assert expert_error(expert, weights, later) < 0.7 * expert_error(expert, searched, later)


def test_encode_expert_makes_up_for_drifted_inputs(expert):
    gate, up, down, x, later = expert
    rng = np.random.default_rng(22)
    drift = np.eye(160, dtype=np.float32) + (rng.standard_normal((160, 160)) / 200).astype(np.float32)
    plain, _ = pycoli.encode_expert(gate, up, down, x @ drift)
    drifted, _ = pycoli.encode_expert(gate, up, down, x @ drift, exact=x)
    assert expert_error(expert, drifted, later, later @ drift) < 0.7 * expert_error(expert, plain, later, later @ drift)


def test_encode_expert_shares_weigh_rows(expert):
    gate, up, down, x, later = expert
    shares = np.ones(len(x), np.float32)
    shares[1000:] = 0  # as if they were not there
    half, _ = pycoli.encode_expert(gate, up, down, x[:1000])
    weighted, reports = pycoli.encode_expert(gate, up, down, x, shares=shares)
    assert reports[0].rows == 2000
    assert expert_error(expert, weighted, later) == pytest.approx(expert_error(expert, half, later), rel=0.2)


def test_encode_expert_without_rows(expert):
    gate, up, down, x, _ = expert
    weights, reports = pycoli.encode_expert(gate, up, down, x[:0])
    assert [report.quality for report in reports] == ["search"] * 3
    for w, encoded in zip((gate, up, down), weights, strict=True):
        assert encoded.data.tobytes() == pycoli.encode(w, "e8").data.tobytes()


def test_encode_expert_refuses_what_does_not_fit(expert):
    gate, up, down, x, _ = expert
    with pytest.raises(pycoli.ShapeError, match=r"got \[96, 160\], \[96, 160\], \[96, 160\]"):
        pycoli.encode_expert(gate, up, up, x)
    with pytest.raises(pycoli.ShapeError, match="x has 2000 rows, exact 1999"):
        pycoli.encode_expert(gate, up, down, x, exact=x[1:])
    with pytest.raises(pycoli.ShapeError, match=r"shares the shape \[3\]"):
        pycoli.encode_expert(gate, up, down, x, shares=np.ones(3, np.float32))
    with pytest.raises(pycoli.ShapeError, match=r"x must be \[..., 160\]"):
        pycoli.encode_expert(gate, up, down, x[:, 1:])


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"quality": "best"}, pycoli.ArgumentError, "quality must be one of search, reference, calibrated, got 'best'"),
        ({"quality": "calibrated"}, pycoli.ArgumentError, "needs either activations or importance"),
        ({"activations": np.ones((9, 4), np.float32)}, pycoli.ArgumentError, "activations go with quality"),
        ({"importance": np.ones(4, np.float32)}, pycoli.ArgumentError, "rotating mixes the columns"),
        (
            {"quality": "reference", "importance": np.ones(4, np.float32), "rotate": False},
            pycoli.ArgumentError,
            "importance goes with",
        ),
        (
            {"importance": np.ones(5, np.float32), "rotate": False},
            pycoli.ShapeError,
            r"importance must be \[4\], got 5 elements",
        ),
        (
            {"importance": np.float32([1, -2, 1, 1]), "rotate": False},
            pycoli.ArgumentError,
            r"importance\[1\] must be 0 or more, got -2",
        ),
        ({"importance": np.float32([1, 2, np.nan, 1]), "rotate": False}, pycoli.NotFiniteError, r"importance\[2\]"),
        ({"importance": np.zeros(4, np.float32), "quality": "calibrated"}, pycoli.ArgumentError, "0 everywhere"),
        (
            {"quality": "calibrated", "activations": np.ones((9, 5), np.float32)},
            pycoli.ShapeError,
            r"activations must be \[..., 4\], got shape \[9, 5\]",
        ),
        (
            {"quality": "calibrated", "activations": np.float32([[1, 1, np.inf, 1]])},
            pycoli.NotFiniteError,
            r"activations\[0, 2\] must be finite, got inf",
        ),
        (
            {"quality": "calibrated", "activations": pycoli.Calibration(3)},
            pycoli.ShapeError,
            "needs a Calibration of 4 columns, got 3",
        ),
        (
            {"quality": "calibrated", "activations": np.ones((99, 4), np.float32), "damping": 2},
            pycoli.ArgumentError,
            "damping must be from 0 to 1, got 2",
        ),
        (
            {"quality": "calibrated", "activations": np.ones((99, 4), np.float32), "damping": "much"},
            pycoli.ArgumentError,
            "damping must be from 0 to 1, got 'much'",
        ),
    ],
)
def test_options_that_do_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        pycoli.encode(np.ones((2, 4), np.float32), "e8", **options)


@pytest.mark.parametrize("options", [{"quality": "search"}, {"importance": np.ones(4)}, {"activations": np.ones(4)}])
def test_other_formats_have_one_quality(options):
    with pytest.raises(pycoli.FormatError, match="format int4 has one way of encoding"):
        pycoli.encode(np.ones((2, 4), np.float32), "int4", **options)


@pytest.mark.parametrize("quality", ["reference", "search", "calibrated"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(quality, value):
    w = np.ones((3, 300), np.float32)
    w[1, 270] = value
    options = {"activations": np.ones((99, 300), np.float32)} if quality == "calibrated" else {}
    with pytest.raises(pycoli.NotFiniteError, match=r"w\[1, 270\] must be finite"):
        pycoli.encode(w, "e8", quality=quality, **options)


# ---- on a GPU; tests/gpu/test_encode.py compares the bytes of every kind of block ----


@pytest.mark.parametrize("device", ["cuda:0", 0, "cuda"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quality": "reference"},
        {"quality": "search", "rotate": False},
        {"importance": np.linspace(0, 2, 300, dtype=np.float32), "rotate": False},
    ],
    ids=["default", "reference", "unrotated", "importance"],
)
def test_a_gpu_encodes_the_same(backend, rng, options, device):
    w = rng.standard_normal((3, 300), np.float32)
    there, here = (pycoli.encode(w, "e8", device=place, **options) for place in (device, "cpu"))
    assert there.data.tobytes() == here.data.tobytes()
    assert (there.fmt, there.shape, there.rotated) == (here.fmt, here.shape, here.rotated)
    assert there.scales is None
    with pycoli.Tensor(there) as tensor:
        assert tensor.download().data.tobytes() == here.data.tobytes()


def test_a_gpu_of_another_library_encodes(another_backend, rng):
    w = rng.standard_normal((2, 64), np.float32)
    there = pycoli.encode(w, "e8", device=pycoli.Device(0, another_backend))
    assert there.data.tobytes() == pycoli.encode(w, "e8").data.tobytes()


@pytest.mark.parametrize(
    ("fmt", "options", "error", "message"),
    [
        ("int8", {}, pycoli.FormatError, "int8 is encoded on the CPU alone"),
        ("e8", {"quality": "calibrated", "importance": np.ones(4)}, pycoli.ArgumentError, "encodes on the CPU alone"),
        ("e8", {"device": "gpu"}, pycoli.ArgumentError, "device must be"),
        ("e8", {"device": 99}, pycoli.DeviceError, "cuda:99"),
        ("e8", {"importance": np.ones(3, np.float32), "rotate": False}, pycoli.ShapeError, r"must be \[4\]"),
    ],
)
def test_what_a_gpu_does_not_encode(backend, fmt, options, error, message):
    with pytest.raises(error, match=message):
        pycoli.encode(np.ones((2, 4), np.float32), fmt, **{"device": "cuda:0", **options})


def test_weights_that_a_gpu_finds_not_finite_are_named(backend):
    w = np.ones((3, 300), np.float32)
    w[1, 270] = np.nan
    with pytest.raises(pycoli.NotFiniteError, match=r"w\[1, 270\] must be finite, got nan"):
        pycoli.encode(w, "e8", device="cuda:0")
    with pytest.raises(pycoli.NotFiniteError, match=r"rotating overflows float32: w has magnitudes up to 3e\+38"):
        pycoli.encode(np.full((3, 256), 3e38, np.float32), "e8", device="cuda:0")


def test_an_old_gpu_library_does_not_encode(old_backend):
    with pytest.raises(pycoli.NotProvidedError, match="coli_cuda_encode_e8"):
        pycoli.encode(np.ones((2, 4), np.float32), "e8", device="cuda:0")


def test_without_a_gpu_library_no_gpu_encodes(built_without_cuda):
    with pytest.raises(pycoli.DeviceError, match="cuda:0 cannot be used"):
        pycoli.encode(np.ones((2, 4), np.float32), "e8", device="cuda:0")


# ---- the C interface ----


def encode_e8(hessian=None, importance=None, w=None, **fields):
    """coli_encode_e8 itself, on a matrix [2, 4]: its status, the error's text, and the bytes where 0x55 was before."""
    options = ffi.new("coli_e8_options *", {"size": ffi.sizeof("coli_e8_options"), **fields})
    for name, array in (("hessian", hessian), ("importance", importance)):
        if array is not None:
            setattr(options, name, ffi.from_buffer("float[]", array))
    w = np.ones((2, 4), np.float32) if w is None else w
    data = np.full(2 * 98, 0x55, np.uint8)
    status = lib.coli_encode_e8(options, ffi.from_buffer("float[]", w), 2, 4, ffi.from_buffer(data))
    return status, text(lib.coli_last_error()), data


INDEFINITE = np.float32([[1, 5, 0, 0], [5, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
NAN_HESSIAN = np.diag(np.float32([1, 1, np.nan, 1]))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ({"size": 3}, "ARGUMENT", "size must be sizeof"),
        ({"quality": 3}, "ARGUMENT", "quality must be COLI_E8_SEARCH"),
        ({"quality": 2}, "ARGUMENT", "needs a hessian; got quality 2 and NULL"),
        ({"quality": 0, "hessian": np.eye(4, dtype=np.float32)}, "ARGUMENT", "needs a hessian; got quality 0 and one"),
        ({"quality": 1, "importance": np.ones(4, np.float32)}, "ARGUMENT", "importance is for COLI_E8_SEARCH"),
        ({"importance": np.float32([1, 1, 1, -1])}, "ARGUMENT", "got -1 at column 3"),
        ({"importance": np.float32([1, np.inf, 1, 1])}, "NOT_FINITE", "importance must be finite, got inf at column 1"),
        ({"damping": -1}, "ARGUMENT", "damping must be 0 ... 1, got -1"),
        ({"damping": np.nan}, "ARGUMENT", "damping must be 0 ... 1, got nan"),
        ({"quality": 2, "hessian": NAN_HESSIAN}, "NOT_FINITE", "row 2, column 2"),
        ({"quality": 2, "hessian": np.zeros((4, 4), np.float32)}, "ARGUMENT", "positive mean, got 0"),
        ({"quality": 2, "hessian": INDEFINITE}, "ARGUMENT", "not positive semidefinite"),
        ({"w": np.float32([[1, 1, 1, 1], [1, 1, np.nan, 1]])}, "NOT_FINITE", "row 1, column 2"),
    ],
)
def test_c_interface_refuses_and_writes_nothing(arguments, status, message):
    got, error, data = encode_e8(**arguments)
    assert got == getattr(lib, f"COLI_E_{status}"), error
    assert message in error
    assert (data == 0x55).all()


def test_a_nearly_singular_hessian_ends_in_finite_weights(rng):
    direction = rng.standard_normal(4).astype(np.float32)
    w = rng.standard_normal((2, 4)).astype(np.float32)
    status, error, data = encode_e8(np.outer(direction, direction), w=w, quality=2, damping=1e-7)
    assert status == lib.COLI_OK or "not positive semidefinite" in error
    if status == lib.COLI_OK:
        assert np.isfinite(pycoli.Weights.from_bytes(data, fmt="e8", shape=(2, 4)).decode()).all()


def test_calibration_refuses_what_it_cannot_add():
    calibration = pycoli.Calibration(4)
    with pytest.raises(pycoli.ShapeError, match=r"x must be \[..., 4\]"):
        calibration.add(np.ones((2, 5), np.float32))
    with pytest.raises(pycoli.NotFiniteError, match=r"x\[1, 3\]"):
        calibration.add(np.float32([[1, 1, 1, 1], [1, 1, 1, np.nan]]))
    with pytest.raises(pycoli.NotFiniteError, match="sum of x x"):
        calibration.add(np.full((1, 4), 1e30, np.float32))
    with pytest.raises(pycoli.ShapeError, match=r"exact must have the shape of x, \[2, 4\], got \[3, 4\]"):
        calibration.add(np.ones((2, 4), np.float32), np.ones((3, 4), np.float32))
    with pytest.raises(pycoli.NotFiniteError, match=r"exact\[0, 0\]"):
        calibration.add(np.ones((1, 4), np.float32), np.float32([[np.inf, 1, 1, 1]]))
    assert calibration.rows == 0
    assert not calibration.hessian(False).any()
    with pytest.raises(pycoli.StateError, match="came from importance"):
        pycoli.Calibration.from_importance(np.ones(4, np.float32)).add(np.ones((1, 4), np.float32))
    with pytest.raises(pycoli.ArgumentError, match="columns must be a whole number"):
        pycoli.Calibration(0)


def test_calibration_sums_rotated_activations(rng):
    x = rng.standard_normal((50, 24)).astype(np.float32)
    calibration = pycoli.Calibration(24)
    calibration.add(x[:20])
    calibration.add(x[20:])
    for rotated, seen in ((False, x.astype(np.float64)), (True, oracle.rotate(x))):
        np.testing.assert_allclose(calibration.hessian(rotated), seen.T @ seen, rtol=1e-4, atol=1e-4)


# ---- files of importance ----


def binary_imatrix(entries):
    parts = [struct.pack("<i", len(entries))]
    for name, calls, values in entries:
        parts.append(struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values)))
        parts.append(np.asarray(values, "<f4").tobytes())
    return b"".join(parts)


ENTRIES = [("blk.0.ffn_gate_exps.weight", 4, [4, 8, 12]), ("blk.0.ffn_down_exps.weight", 2, [1, 0])]


def test_binary_imatrix(tmp_path):
    file = tmp_path / "imatrix.dat"
    file.write_bytes(binary_imatrix(ENTRIES) + struct.pack("<i", 7) + b"\0\0\0\0")  # newer writers add what they read
    vectors = pycoli.read_imatrix(file)
    assert {name: vector.tolist() for name, vector in vectors.items()} == {
        "blk.0.ffn_gate_exps.weight": [1, 2, 3],
        "blk.0.ffn_down_exps.weight": [0.5, 0],
    }
    pycoli.Calibration.from_importance(vectors["blk.0.ffn_gate_exps.weight"])


@pytest.mark.parametrize("size", range(0, 98, 7))
def test_truncated_binary_imatrix(tmp_path, size):
    file = tmp_path / "imatrix.dat"
    content = binary_imatrix(ENTRIES)
    file.write_bytes(content[: min(size, len(content) - 1)])
    with pytest.raises(pycoli.CheckpointError, match=r"imatrix\.dat: not a readable imatrix file"):
        pycoli.read_imatrix(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<i", 0), "it has 0 entries"),
        (struct.pack("<ii", 1, -5), "beyond its end"),
        (struct.pack("<ii", 1, 2**30), "beyond its end"),
        (struct.pack("<ii", 1, 2) + b"\xff\xfe" + bytes(8), "is not text"),
        (binary_imatrix([ENTRIES[0], ENTRIES[0]]), "is there twice"),
        (binary_imatrix([("a", 1, [np.nan])]), "a: expected finite numbers"),
        (binary_imatrix([("a", 1, [-1])]), "a: expected finite numbers"),
        (b"GGUF" + bytes(40), "not a readable GGUF file"),
        # a field with more elements than the file has bytes: one by one they would take seconds and gigabytes
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"a", 9, 0, 2**22) + bytes(40), "a: the file ends within it"),
    ],
)
def test_damaged_imatrix(tmp_path, content, message):
    pytest.importorskip("gguf")
    file = tmp_path / "imatrix"
    file.write_bytes(content)
    with pytest.raises(pycoli.CheckpointError, match=message):
        pycoli.read_imatrix(file)


def test_missing_imatrix(tmp_path):
    with pytest.raises(pycoli.CheckpointError, match="cannot be read"):
        pycoli.read_imatrix(tmp_path / "none")


def write_gguf(file, tensors):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(file, "")
    writer.add_type("imatrix")
    for name, values in tensors.items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_imatrix(tmp_path):
    file = tmp_path / "imatrix.gguf"
    tensors = {
        "blk.0.ffn_down_exps.weight.in_sum2": [[2, 4, 6], [0, 0, 0], [9, 3, 3]],
        "blk.0.ffn_down_exps.weight.counts": [[2], [0], [3]],
        "output.weight.in_sum2": [[5, 10]],
        "output.weight.counts": [[5]],
    }
    write_gguf(file, tensors)
    vectors = pycoli.read_imatrix(file)
    assert {name: vector.tolist() for name, vector in vectors.items()} == {
        "blk.0.ffn_down_exps.weight": [[1, 2, 3], [0, 0, 0], [3, 1, 1]],
        "output.weight": [1, 2],
    }


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"output.weight": [1, 2]}, "without importance"),
        ({"a.in_sum2": [[1, 2]]}, "expected a.counts, one for each row"),
        ({"a.in_sum2": [[1, 2], [3, 4]], "a.counts": [[1]]}, "expected a.counts, one for each row"),
        (
            {"a.in_sum2": [[[1, 2]]], "a.counts": [[1]]},
            r"a.in_sum2: expected F32 \[rows, columns\], got F32 \[1, 1, 2\]",
        ),
    ],
)
def test_gguf_without_importance(tmp_path, tensors, message):
    file = tmp_path / "imatrix.gguf"
    write_gguf(file, tensors)
    with pytest.raises(pycoli.CheckpointError, match=message):
        pycoli.read_imatrix(file)


# ---- what it means for a model ----


def test_calibration_lowers_the_error_of_a_models_experts(shared):
    """Three experts of a trained model on held-out rows; docs/quality.md has the loss of the whole."""
    models = shared / "models"
    model = olmoe.Olmoe(models / "tiny-olmoe")

    def routed(windows):
        x = model.moe_input(0, model.attend(0, model.embed(windows)))
        return x, model.route(0, x)[0]

    (x, chosen), (later, later_chosen) = (
        routed(windows) for windows in (olmoe.calibration_windows(models, 8192), olmoe.evaluation_windows(models)[:8])
    )
    for number in np.argsort(np.bincount(chosen.ravel()))[-3:]:
        gate, up, down = model.experts[0][number]
        rows, later_rows = x[(chosen == number).any(axis=1)], later[(later_chosen == number).any(axis=1)]
        wanted = silu_expert(gate, up, down, later_rows)
        lost = []
        for weights in (
            [pycoli.encode(w, "e8") for w in (gate, up, down)],
            *pycoli.encode_expert(gate, up, down, rows)[:1],
        ):
            got = silu_expert(*(w.decode() for w in weights), later_rows)
            lost.append(np.square(got - wanted).sum())
        assert lost[1] < 0.6 * lost[0]
