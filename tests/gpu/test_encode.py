"""E8 encoded on a GPU: byte for byte what the CPU gives, or a refusal in the CPU's words."""

import re

import numpy as np
import oracle
import pytest
from abi import Refused, floats, pointer
from samples import EXACT, gaussian, random_expert
from strategies import ODD_BLOCKS

import pycoli

QUALITIES = ["reference", "search"]
KIBI = 1 << 10


def on_cpu(w, quality, rotate=False, importance=None):
    rotated = pycoli.rotate(w) if rotate else w
    data = pycoli.encode(rotated, "e8", rotate=False, quality=quality, importance=importance).data
    return data.reshape(len(w), -1)


def assert_same_bytes(gpu, w, quality, rotate=False, importance=None):
    w = np.ascontiguousarray(w, np.float32)
    blocks = gpu.encode(w, quality, rotate, importance)
    expected = on_cpu(w, quality, rotate, importance)
    differ = np.flatnonzero((blocks != expected).any(axis=1))
    assert not differ.size, f"{differ.size} of {len(w)} rows differ, the first is {differ[0]}"


def heavy_tails(rng, rows, columns):
    """Rows of every size that float32 has, with outliers."""
    sizes = np.exp2(rng.uniform(-145, 110, (rows, 1)))
    return np.clip(rng.standard_t(2, (rows, columns)) * sizes, -3e38, 3e38).astype(np.float32)


def ties(rng, rows, columns):
    """Small integers: squared errors of many choices are equal."""
    return rng.integers(-4, 5, (rows, columns)).astype(np.float32)


def decoded(rng, rows, columns):
    """What E8 holds without any error."""
    return oracle.random_encoded(rng, "e8", (rows, columns)).decode().astype(np.float32)


# ---- the same bytes ----


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("rotate", [False, True], ids=["as it is", "rotated"])
@pytest.mark.parametrize("columns", [1, 7, 8, 31, 255, 256, 257, 300, 512, 776])
def test_shapes(gpu, rng, columns, rotate, quality):
    assert_same_bytes(gpu, gaussian(rng, 3, columns), quality, rotate)


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("kind", ODD_BLOCKS)
def test_odd_blocks(gpu, kind, quality):
    assert_same_bytes(gpu, np.reshape(ODD_BLOCKS[kind], (1, 256)), quality)


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("weights", [heavy_tails, ties, decoded])
def test_weights_that_are_not_gaussian(gpu, rng, weights, quality):
    assert_same_bytes(gpu, weights(rng, 12, 512), quality)
    assert_same_bytes(gpu, weights(rng, 4, 100), quality)


@pytest.mark.parametrize("columns", [256, 600])
def test_importance(gpu, rng, columns):
    w, importance = gaussian(rng, 3, columns), (rng.exponential(size=columns) ** 3).astype(np.float32)
    importance[rng.random(columns) < 0.2] = 0
    for scale in (1, 1e-30, 1e25):
        assert_same_bytes(gpu, w, "search", importance=importance * np.float32(scale))
    assert not np.array_equal(gpu.encode(w, "search"), gpu.encode(w, "search", importance=importance))


def test_importance_of_zero(gpu, rng):
    importance = np.concatenate([np.zeros(256), np.ones(256)]).astype(np.float32)
    assert_same_bytes(gpu, gaussian(rng, 2, 512), "search", importance=importance)


@pytest.mark.parametrize("columns", [8192, 8192 + 16384, 32768 + 256, 65536])
def test_long_rotations(gpu, rng, columns):
    """Blocks of a rotation that are several pieces on the GPU."""
    assert_same_bytes(gpu, gaussian(rng, 2, columns), "reference", rotate=True)


@pytest.mark.parametrize("shape", [(10_801, 3), (5, 512 * KIBI)], ids=["short rows", "the longest rows"])
def test_more_chunks_than_slots(gpu, rng, shape):
    assert_same_bytes(gpu, gaussian(rng, *shape), "reference")


@pytest.mark.gpu
def test_a_whole_matrix(gpu, simulator, rng):
    """All of a large matrix; on a real GPU, as the simulated one would take minutes."""
    if simulator:
        pytest.skip("for a real GPU")
    for quality in QUALITIES:
        assert_same_bytes(gpu, gaussian(rng, 2048, 6144), quality, rotate=True)
        assert_same_bytes(gpu, heavy_tails(rng, 512, 1100), quality)


def test_second_device(two_gpus, rng):
    w = gaussian(rng, 3, 300)
    for device in (0, 1, 0):
        assert np.array_equal(two_gpus.encode(w, "search", device=device), on_cpu(w, "search"))


def test_another_codebook_on_the_devices_changes_nothing(gpu, rng):
    gpu.set_codebook(rng.integers(1, 60, (256, 4), dtype=np.uint8))
    for quality in QUALITIES:
        assert_same_bytes(gpu, gaussian(rng, 2, 300), quality)


def test_between_issue_and_take(gpu, rng):
    expert, x = random_expert(rng, 40, 24, ("e8",) * 3), gaussian(rng, 2, 40)
    gpu.issue([gpu.upload_expert(expert)], [2], x)
    assert_same_bytes(gpu, gaussian(rng, 2, 300), "search", rotate=True)
    assert oracle.relative_rms(gpu.take(x.shape), oracle.expert(x, *expert)) <= EXACT


def test_memory_is_bounded_and_released(closed_gpu, simulator, rng):
    if simulator is None:
        pytest.skip("a real GPU does not count what is allocated")
    before = simulator.live()
    closed_gpu.init(0)
    _, tables = simulator.live()
    for shape in ((1, 1), (3000, 3)):
        closed_gpu.encode(gaussian(rng, *shape), "reference", rotate=True)
        _, nbytes = simulator.live()
        assert nbytes - tables <= 11 << 20
    closed_gpu.shutdown()
    assert simulator.live() == before


# ---- refusals ----


def refused(call):
    with pytest.raises(Refused) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("rotate", [False, True], ids=["as it is", "rotated"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (2, 299), (2900, 1)])
def test_weights_that_are_not_finite_are_named(gpu, rng, place, value, rotate):
    w = gaussian(rng, 3, 300) if place[0] < 3 else gaussian(rng, 3000, 2)
    w[place] = value
    refusal = refused(lambda: gpu.encode(w, "reference", rotate))
    assert refusal.status == "NOT_FINITE"
    with pytest.raises(pycoli.NotFiniteError):
        pycoli.encode(w, "e8")
    assert refusal.text == f"weights must be finite, got {value:f} at row {place[0]}, column {place[1]}"
    assert_same_bytes(gpu, gaussian(rng, 2, 300), "search", rotate)


def test_rotating_that_overflows(gpu):
    w = np.full((2, 256), 3e38, np.float32)
    refusal = refused(lambda: gpu.encode(w, "search", rotate=True))
    assert refusal.status == "NOT_FINITE"
    assert "rotating overflows" in refusal.text
    assert_same_bytes(gpu, w, "search")


ONES = np.ones(300, np.float32)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ({"quality": 2}, "ARGUMENT", "COLI_E8_CALIBRATED is for the CPU"),
        ({"quality": 3}, "ARGUMENT", "quality must be COLI_E8_SEARCH or COLI_E8_REFERENCE, got 3"),
        ({"quality": 1, "importance": ONES}, "ARGUMENT", "importance is for COLI_E8_SEARCH"),
        ({"importance": ONES * np.float32(np.nan)}, "NOT_FINITE", "importance must be finite, got nan at column 0"),
        ({"importance": -np.eye(1, 300, 7)[0].astype(np.float32)}, "ARGUMENT", "0 or more, got -1 at column 7"),
        ({"rows": 0}, "SHAPE", r"\[0, 300\]"),
        ({"columns": -1}, "SHAPE", r"\[2, -1\]"),
        ({"columns": 512 * KIBI + 1}, "SHAPE", "524289 columns, expected at most 524288"),
        ({"w": None}, "ARGUMENT", "w, .* is NULL"),
        ({"blocks": None}, "ARGUMENT", "blocks, .* is NULL"),
        ({"device": 7}, "NO_DEVICE", "device 7 is not configured"),
    ],
    ids=str,
)
def test_bad_arguments(gpu, rng, arguments, status, message):
    blocks = np.full(2 * 196, 0xA5, np.uint8)
    given = {
        "device": 0,
        "quality": 0,
        "rotate": 1,
        "importance": None,
        "w": gaussian(rng, 2, 300),
        "rows": 2,
        "columns": 300,
        "blocks": blocks,
        **arguments,
    }
    call = {name: floats(given[name]) if name in ("importance", "w") else given[name] for name in given}
    call["blocks"] = pointer(given["blocks"], "void *")
    refusal = refused(lambda: gpu.check(gpu.lib.coli_cuda_encode_e8(*call.values())))
    assert refusal.status == status
    assert re.search(message, refusal.text), refusal.text
    assert (blocks == 0xA5).all(), "a refused call wrote blocks"


def test_before_init(closed_gpu, rng):
    refusal = refused(lambda: closed_gpu.encode(gaussian(rng, 1, 8), "search"))
    assert refusal.status == "STATE"
    assert "coli_cuda_init" in refusal.text
