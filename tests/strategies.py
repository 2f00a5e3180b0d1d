"""What the tests of the formats draw with hypothesis, the CPU's instruction sets, and how floats are compared."""

import numpy as np
import oracle
from hypothesis import settings
from hypothesis import strategies as st

import pycoli
from pycoli import cpu

# A loaded machine must not fail a test by being slow.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

GROUP_SIZES = (1, 5, 16, 48, 64, 128)

# Columns on and beside the group, block and super-block edges of every format.
COLUMNS = st.one_of(
    st.integers(1, 300), st.sampled_from([31, 33, 63, 65, 127, 128, 129, 255, 256, 257, 511, 512, 520, 769])
)
ROWS = st.one_of(st.integers(1, 5), st.sampled_from([127, 128, 129]))

# Super-blocks of E8 that try the encoder.
ODD_BLOCKS = {
    "zeros": np.zeros(256),
    "negative zeros": np.full(256, -0.0),
    "constant": np.full(256, 0.7),
    "negative constant": np.full(256, -0.7),
    "alternating": np.resize([0.3, -0.3], 256),
    "one outlier among zeros": np.eye(1, 256, 100) * -5,
    "one outlier": np.random.default_rng(3).standard_normal(256) + 1e4 * np.eye(1, 256, 77),
    "largest floats": np.resize([3.4e38, -3.4e38, 1e38], 256),
    "beyond the largest super-scale": np.random.default_rng(4).standard_normal(256) * 1e6,
    "subnormal super-scale": np.random.default_rng(5).standard_normal(256) * 1e-4,
    "below every super-scale": np.random.default_rng(6).standard_normal(256) * 1e-9,
    "subnormal floats": np.random.default_rng(7).standard_normal(256) * 1e-42,
}

format_names = st.one_of(
    st.sampled_from([name for name in oracle.FORMATS if name != "int4-g64"]),
    st.sampled_from([f"int4-g{size}" for size in GROUP_SIZES]),
)


@st.composite
def any_bytes(draw, names=format_names):
    """A matrix of uniformly random bytes, scales included: every bit pattern may occur, infinities and NaN too."""
    fmt = draw(names)
    shape = draw(ROWS), draw(COLUMNS)
    return oracle.random_bytes(np.random.default_rng(draw(st.integers(0, 2**32 - 1))), fmt, shape)


@st.composite
def weights_to_encode(draw):
    """A finite float32 matrix whose rows range from zero and subnormal over ordinary to huge, with exact ties between
    codes (multiples of half a power of two) in some rows."""
    shape = draw(st.integers(1, 5)), draw(COLUMNS)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    w = rng.standard_normal(shape)
    for row in w:
        kind = draw(st.sampled_from(["gaussian", "ties", "zero", "spike"]))
        if kind == "ties":
            row[:] = rng.integers(-255, 256, shape[1]) / 2
            row[rng.integers(shape[1])] = rng.choice([-127, 127, -7, 7])
        elif kind == "zero":
            row[:] = rng.choice([0.0, -0.0], shape[1])
        elif kind == "spike":
            row[rng.integers(shape[1])] *= 1e4
        row *= 2.0 ** draw(st.sampled_from([0, 0, 0, -3, 7, 100, -30, -100, -140]))
    return w.astype(np.float32)


def with_instruction_set(name, call):
    """The result of `call()` on one instruction set; NotProvidedError where build or processor lack it."""
    cpu.set_isa(name)
    try:
        return call()
    finally:
        cpu.set_isa(None)


def _runs(name):
    try:
        with_instruction_set(name, lambda: None)
    except pycoli.NotProvidedError:
        return False
    return True


INSTRUCTION_SETS = [name for name in ("scalar", "avx2", "avx512") if _runs(name)]


def on_every_instruction_set(call):
    """{name: result of `call()`} for all instruction sets that build and processor have."""
    return {name: with_instruction_set(name, call) for name in INSTRUCTION_SETS}


def assert_same_bits(actual, expected):
    """Equal float32 bits; one NaN is as good as another."""
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    both_nan = np.isnan(actual) & np.isnan(expected)
    different = (actual.view(np.uint32) != expected.view(np.uint32)) & ~both_nan
    if different.any():
        where = tuple(axis[0] for axis in np.nonzero(different))
        raise AssertionError(
            f"{different.sum()} of {actual.size} values differ, the first at {where}: "
            f"{actual[where]!r} ({actual[where].view(np.uint32):#010x}), "
            f"expected {expected[where]!r} ({expected[where].view(np.uint32):#010x})"
        )
