"""formats(), rotate(), encode() and Weights: what goes in, what comes out, and what is refused in which words."""

import mmap
import pickle
import re

import ml_dtypes
import numpy as np
import oracle
import pytest

import pycoli

SHAPE = (5, 300)
SCALE_SHAPES = {
    "f32": None,
    "int8": (5,),
    "int4": (5,),
    "int2": (5,),
    "int4-g64": (5, 5),
    "int4-g512": (5, 1),
    "int3-g64": (5, 5),
    "e8": None,
    "mxfp4": (5, 10),
    "fp8-e4m3-b128": (1, 3),
}


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def refused(error, *parts):
    """pytest.raises for an error whose text has these parts."""
    return pytest.raises(error, match=".*".join(re.escape(str(part)) for part in parts))


def test_formats_are_those_of_the_oracle():
    listed = pycoli.formats()
    assert [f.name for f in listed] == list(oracle.FORMATS)
    for f in listed:
        matrix = oracle.random_encoded(np.random.default_rng(0), f.name, (1024, 4096))
        assert f.bits_per_weight == pytest.approx(8 * matrix.nbytes / (1024 * 4096), rel=1e-2)
        assert f.summary
        dtype = None if matrix.scales is None else matrix.scales.dtype.name
        assert f.scale_dtype == dtype
    assert [f.name for f in listed if not f.on_gpu] == ["int3-g64"]
    fixed = {f.name: f.scale_columns for f in listed if f.scale_columns}
    assert fixed == {"int3-g64": 64, "mxfp4": 32, "fp8-e4m3-b128": 128}


@pytest.mark.parametrize("fmt", SCALE_SHAPES)
def test_encode_gives_the_natural_layout(fmt):
    weights = pycoli.encode(gaussian(*SHAPE), fmt)
    assert weights.fmt == fmt
    assert weights.shape == SHAPE
    assert weights.data.dtype == np.uint8
    assert weights.data.ndim == 1
    assert (None if weights.scales is None else weights.scales.shape) == SCALE_SHAPES[fmt]
    assert weights.nbytes == weights.data.nbytes + (0 if weights.scales is None else weights.scales.nbytes)
    assert weights.bits_per_weight == 8 * weights.nbytes / 1500
    assert weights.rotated == (fmt == "e8")
    assert weights.group_size == {"int4-g64": 64, "int4-g512": 512}.get(fmt)
    assert oracle.relative_rms(weights.decode(), gaussian(*SHAPE)) < (0.9 if fmt == "int2" else 0.3)
    assert fmt in repr(weights)
    assert "[5, 300]" in repr(weights)


def test_repr_shows_all_digits_of_e8():
    assert repr(pycoli.encode(gaussian(2, 256), "e8")) == "<Weights e8 [2, 256], 196 bytes, 3.0625 bits a weight>"


@pytest.mark.parametrize("fmt", SCALE_SHAPES)
def test_bytes_round_trip(fmt):
    weights = pycoli.encode(gaussian(*SHAPE), fmt)
    again = pycoli.Weights.from_bytes(weights.data.tobytes(), fmt=fmt, shape=SHAPE, scales=weights.scales)
    np.testing.assert_array_equal(again.decode(), weights.decode())
    unpickled = pickle.loads(pickle.dumps(weights))
    np.testing.assert_array_equal(unpickled.decode(), weights.decode())
    assert (unpickled.fmt, unpickled.shape, unpickled.rotated) == (weights.fmt, weights.shape, weights.rotated)


def test_e8_is_rotated_unless_told_otherwise():
    w = gaussian(*SHAPE)
    rotated, plain = pycoli.encode(w, "e8"), pycoli.encode(w, "e8", rotate=False)
    assert rotated.rotated
    assert not plain.rotated
    by_hand = pycoli.encode(pycoli.rotate(w), "e8", rotate=False)
    np.testing.assert_array_equal(rotated.data, by_hand.data)
    np.testing.assert_array_equal(rotated.decode(stored=True), by_hand.decode())
    np.testing.assert_array_equal(plain.decode(stored=True), plain.decode())
    np.testing.assert_array_equal(rotated.decode(), pycoli.unrotate(by_hand.decode()))
    pickled = pickle.loads(pickle.dumps(plain))
    assert not pickled.rotated
    assert "unrotated" in repr(pickled)


@pytest.mark.parametrize("shape", [(256,), (3, 96), (2, 3, 7), (0, 64), (2, 1)])
def test_rotate_takes_any_leading_dimensions(shape):
    x = gaussian(*shape)
    y = pycoli.rotate(x)
    assert y.shape == shape
    assert y.dtype == np.float32
    if x.size:
        expected = oracle.rotate(x.reshape(-1, shape[-1]).astype(np.float64)).reshape(shape)
        assert oracle.relative_rms(y, expected) < 2e-7
        assert oracle.relative_rms(pycoli.unrotate(y), x) < 4e-7


def test_group_size_and_name_agree():
    w = gaussian(4, 64)
    by_name, by_option = pycoli.encode(w, "int4-g32"), pycoli.encode(w, "int4", group_size=32)
    assert by_name.fmt == by_option.fmt == "int4-g32"
    np.testing.assert_array_equal(by_name.scales, by_option.scales)
    assert pycoli.encode(w, "int4-g32", group_size=32).group_size == 32
    assert pycoli.encode(w, "int3-g64", group_size=64).group_size is None


def test_contradicting_options():
    w = gaussian(4, 64)
    with refused(pycoli.FormatError, "int4-g32 has groups of 32, got group_size=64"):
        pycoli.encode(w, "int4-g32", group_size=64)
    with refused(pycoli.FormatError, "int3-g64 has groups of 64, got group_size=32"):
        pycoli.encode(w, "int3-g64", group_size=32)
    for fmt in ("int8", "e8", "f32"):
        with refused(pycoli.FormatError, f"{fmt} has no groups of columns, got group_size=32"):
            pycoli.encode(w, fmt, group_size=32)
    for group_size in (0, -1, 2.5, "64", True, 2**31):
        with refused(pycoli.ArgumentError, "group_size must be a whole number", repr(group_size)):
            pycoli.encode(w, "int4", group_size=group_size)


@pytest.mark.parametrize("fmt", ["e9", "", "e", "e88", "int4g64", "e8\0", "e8\0junk", "\ud800"])
def test_unknown_format(fmt):
    with pytest.raises(pycoli.FormatError) as error:
        pycoli.encode(gaussian(4, 64), fmt)
    assert "int3-g64" in str(error.value), "the message lists the formats that there are"


@pytest.mark.parametrize(
    "fmt", ["int4-g", "int4-g0", "int4-g-1", "int4-gx", "int4-g64x", "int4-g6\u0664", "int4-g2147483648"]
)
def test_group_of_no_size(fmt):
    with refused(pycoli.FormatError, "needs a group of at least 1 column", f'"{fmt}"'):
        pycoli.encode(gaussian(4, 64), fmt)


@pytest.mark.parametrize("fmt", ["E8", "Int8", "INT4-G64", "FP8-E4M3-B128"])
def test_capital_letters(fmt):
    with refused(pycoli.FormatError, f'"{fmt}"', f'lower case, "{fmt.lower()}"'):
        pycoli.encode(gaussian(4, 64), fmt)


def test_format_that_is_no_name():
    with refused(pycoli.DtypeError, "name such as 'e8'", "int", "6"):
        pycoli.encode(gaussian(4, 64), 6)


def equivalent_arrays():
    """float32 arrays of the same values in other guises, with the values."""
    values = gaussian(6, 128).astype(ml_dtypes.bfloat16).astype(np.float32)
    wide = np.zeros((12, 256), np.float32)
    wide[::2, ::2] = values
    read_only = values.copy()
    read_only.flags.writeable = False
    guises = {
        "strided": wide[::2, ::2],
        "column-major": np.asfortranarray(values),
        "reversed": values[::-1, ::-1].copy()[::-1, ::-1],
        "big-endian": values.astype(">f4"),
        "read-only": read_only,
        "bfloat16": values.astype(ml_dtypes.bfloat16),
    }
    return values, guises


@pytest.mark.parametrize("guise", equivalent_arrays()[1])
def test_guises_of_an_array(guise):
    values, guises = equivalent_arrays()
    array = guises[guise]
    np.testing.assert_array_equal(pycoli.rotate(array), pycoli.rotate(values))
    weights = pycoli.encode(array, "e8")
    np.testing.assert_array_equal(weights.data, pycoli.encode(values, "e8").data)
    np.testing.assert_array_equal(pycoli.matmul(array, weights, "cpu"), pycoli.matmul(values, weights, "cpu"))


def test_float16_is_exact_down_to_subnormals():
    values = np.arange(0, 0x7C00, dtype=np.uint16).view(np.float16).reshape(31, 1024)
    np.testing.assert_array_equal(pycoli.encode(values, "f32").decode(), values.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool", "complex64", "float8_e4m3fn", "longdouble"])
def test_dtypes_that_would_need_rounding(dtype):
    array = np.ones((2, 64)).astype(getattr(ml_dtypes, dtype, dtype))
    weights = pycoli.encode(gaussian(4, 64), "int8")
    for call in (
        lambda: pycoli.encode(array, "e8"),
        lambda: pycoli.matmul(array, weights),
        lambda: pycoli.rotate(array),
    ):
        with refused(pycoli.DtypeError, "must be float32", f"got {array.dtype.name}"):
            call()


def test_objects_that_are_no_arrays():
    class OnAnotherDevice:
        def __array__(self, dtype=None, copy=None):
            raise TypeError("copy me to the host first")

    elsewhere = OnAnotherDevice()
    with refused(pycoli.DtypeError, "w cannot be read as a numpy array: copy me to the host first"):
        pycoli.encode(elsewhere, "e8")
    for fmt, scales in (("e8", elsewhere), ("int8", elsewhere), ("mxfp4", elsewhere)):
        data = pycoli.encode(gaussian(1, 256), fmt).data
        with refused(pycoli.DtypeError, "scales cannot be read as a numpy array: copy me to the host first"):
            pycoli.Weights.from_bytes(data, fmt=fmt, shape=(1, 256), scales=scales)
    for options in ({"data": elsewhere}, {"data": bytes(98), "codebook": elsewhere}):
        with refused(pycoli.DtypeError, "cannot be read as a numpy array: copy me to the host first"):
            pycoli.Weights.from_bytes(**options, fmt="e8", shape=(1, 256))
    with refused(pycoli.DtypeError, "got object"):
        pycoli.encode(None, "e8")
    with refused(pycoli.DtypeError, "data must be bytes or a uint8 array, got list"):
        pycoli.Weights.from_bytes([1, 2], fmt="int8", shape=(1, 2))


@pytest.mark.parametrize("shape", [(), (8,), (2, 3, 4), (0, 8), (8, 0)])
def test_shapes_that_are_no_matrix(shape):
    with refused(pycoli.ShapeError, "w must be a matrix [O, I]", f"got shape {list(shape)}"):
        pycoli.encode(np.zeros(shape, np.float32), "e8")


def test_rotate_needs_a_dimension():
    for shape in ((), (3, 0)):
        with refused(pycoli.ShapeError, "x must be [..., dim]", f"got shape {list(shape)}"):
            pycoli.rotate(np.zeros(shape, np.float32))


def test_dimensions_that_c_cannot_count():
    row = np.zeros(2**31, np.float32)  # never touched, so it takes no memory
    for rotate in (pycoli.rotate, pycoli.unrotate):
        with refused(pycoli.ShapeError, "x must be [..., dim] with dim of at most 2147483647, got shape [2147483648]"):
            rotate(row)
    with refused(pycoli.ShapeError, "both at most 2147483647, got shape [1, 2147483648]"):
        pycoli.encode(row[None], "int8")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", ["e8", "int8", "f32"])
def test_encode_names_the_first_number_that_is_not_finite(fmt, value):
    w = gaussian(4, 64)
    w[2, 7] = w[3, 1] = value
    with refused(pycoli.NotFiniteError, f"w[2, 7] must be finite, got {value}"):
        pycoli.encode(w, fmt)


def test_encode_refuses_what_overflows_in_the_rotation():
    w = np.full((1, 256), 3e38, np.float32)
    with refused(pycoli.NotFiniteError, "rotating overflows float32: w has magnitudes up to 3e+38"):
        pycoli.encode(w, "e8")
    assert np.isfinite(pycoli.encode(w, "f32").decode()).all()


class TestFromBytes:
    @pytest.mark.parametrize("fmt", SCALE_SHAPES)
    @pytest.mark.parametrize("change", [-1, 1])
    def test_wrong_number_of_weight_bytes(self, fmt, change):
        weights = pycoli.encode(gaussian(*SHAPE), fmt)
        size = weights.data.size
        data = bytes(size + change)
        with refused(pycoli.SizeError, f"{fmt} matrix [5, 300] needs {size} weight bytes, got {size + change}"):
            pycoli.Weights.from_bytes(data, fmt=fmt, shape=SHAPE, scales=weights.scales)

    @pytest.mark.parametrize("fmt", [fmt for fmt, shape in SCALE_SHAPES.items() if shape])
    def test_wrong_scales(self, fmt):
        weights = pycoli.encode(gaussian(*SHAPE), fmt)
        count, dtype = weights.scales.size, weights.scales.dtype.name
        options = {"fmt": fmt, "shape": SHAPE}
        needs = f"{fmt} matrix [5, 300] needs {count} {dtype} scales"
        with refused(pycoli.SizeError, f"{needs}, got none"):
            pycoli.Weights.from_bytes(weights.data, **options)
        for wrong in (count - 1, count + 1, 0):
            with refused(pycoli.SizeError, f"{needs}, got {wrong}"):
                pycoli.Weights.from_bytes(weights.data, scales=np.ones(wrong, dtype), **options)
        wrong_dtype = np.float64 if dtype == "float32" else np.int16
        with refused(pycoli.DtypeError, "scales must be", np.dtype(wrong_dtype).name):
            pycoli.Weights.from_bytes(weights.data, scales=np.ones(count, wrong_dtype), **options)

    def test_scales_may_be_flat_or_have_ones_but_not_be_transposed(self):
        weights = pycoli.encode(gaussian(5, 192), "int4-g64")
        options = {"fmt": "int4-g64", "shape": (5, 192)}
        for scales in (weights.scales.ravel(), weights.scales[:, :, None], weights.scales.astype(">f4")):
            again = pycoli.Weights.from_bytes(weights.data, scales=scales, **options)
            np.testing.assert_array_equal(again.scales, weights.scales)
        with refused(pycoli.ShapeError, "needs scales of shape [5, 3], got [3, 5]"):
            pycoli.Weights.from_bytes(weights.data, scales=weights.scales.T, **options)

    def test_scales_that_are_not_finite_are_data(self):
        scales = np.array([np.nan, np.inf], np.float32)
        weights = pycoli.Weights.from_bytes(bytes([1, 1, 1, 1]), fmt="int8", shape=(2, 2), scales=scales)
        decoded = weights.decode()
        assert np.isnan(decoded[0]).all()
        assert np.isinf(decoded[1]).all()
        y = pycoli.matmul(np.ones((1, 2), np.float32), weights, "cpu")
        assert np.isnan(y[0, 0])
        assert np.isinf(y[0, 1])

    def test_the_tag_of_containers_is_dropped(self):
        data = pycoli.encode(gaussian(2, 256), "e8").data
        tagged = pycoli.Weights.from_bytes(data, fmt="e8", shape=(2, 256), scales=np.array([6.0], np.float32))
        assert tagged.scales is None
        for scales in (np.array([5.0], np.float32), np.ones(2, np.float32), np.array([6])):
            with refused(pycoli.SizeError, "e8 matrix [2, 256] has no scales", f"got {scales.size}"):
                pycoli.Weights.from_bytes(data, fmt="e8", shape=(2, 256), scales=scales)
        with refused(pycoli.SizeError, "f32 matrix [1, 1] has no scales", "got 1"):
            pycoli.Weights.from_bytes(bytes(4), fmt="f32", shape=(1, 1), scales=np.array([6.0], np.float32))

    def test_kinds_of_bytes(self):
        data = np.arange(8, dtype=np.uint8)
        padded = np.zeros((4, 4), np.uint8)
        padded[:, ::2] = data.reshape(4, 2)
        scales = np.ones(2, np.float32)
        expected = data.view(np.int8).reshape(2, 4).astype(np.float32)
        sources = [
            data.tobytes(),
            bytearray(data),
            memoryview(data),
            data.reshape(4, 2),
            data.view(np.int8),
            padded[:, ::2],
            memoryview(data.tobytes()),
        ]
        for source in sources:
            weights = pycoli.Weights.from_bytes(source, fmt="int8", shape=(2, 4), scales=scales)
            np.testing.assert_array_equal(weights.decode(), expected)
        for wrong in (np.ones(2, np.float32), np.ones(8, bool), memoryview(np.ones(2, np.float32)), np.ones(8, "S1")):
            with refused(pycoli.DtypeError, "data must be bytes or a uint8 array"):
                pycoli.Weights.from_bytes(wrong, fmt="int8", shape=(2, 4), scales=scales)

    def test_one_byte_floats_are_bytes(self):
        values = np.array([[1.5, -2.0]], np.float32)
        data = values.astype(ml_dtypes.float8_e4m3fn)
        weights = pycoli.Weights.from_bytes(data, fmt="fp8-e4m3-b128", shape=(1, 2), scales=np.ones((1, 1), np.float32))
        np.testing.assert_array_equal(weights.decode(), values)

    def test_immutable_memory_is_shared(self, tmp_path):
        file = tmp_path / "weights"
        file.write_bytes(bytes(range(4)))
        frozen, options = bytes(range(4)), {"fmt": "int8", "shape": (1, 4)}
        scales = np.frombuffer(np.ones(1, np.float32).tobytes(), np.float32)
        with open(file, "rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        for source in (
            frozen,
            memoryview(frozen),
            np.frombuffer(frozen, np.uint8).reshape(2, 2),
            mapped,
            np.memmap(file, np.uint8, "r"),
        ):
            weights = pycoli.Weights.from_bytes(source, scales=scales, **options)
            assert np.shares_memory(weights.data, np.asarray(memoryview(source)))
            assert np.shares_memory(weights.scales, scales)
            np.testing.assert_array_equal(weights.decode(), [[0, 1, 2, 3]])

    def test_what_somebody_can_write_to_is_copied(self, tmp_path):
        """Read-only views too: of memory that is writable by another name, or that its owner can make writable."""
        file = tmp_path / "weights"
        file.write_bytes(bytes(4))
        memory = [bytearray(4), np.zeros(4, np.uint8), np.memmap(file, np.uint8, "r+"), np.memmap(file, np.uint8, "c")]
        read_only = [memoryview(memory[0]).toreadonly(), *(m.view() for m in memory[1:])]
        read_only += [np.frombuffer(memory[0], np.uint8), np.asarray(read_only[0])]
        locked = np.zeros(4, np.uint8)
        locked.flags.writeable = False
        for array in read_only[1:]:
            array.flags.writeable = False
        owner, scales = bytearray(4), bytearray(np.ones(1, np.float32))
        options = {"fmt": "int8", "shape": (1, 4)}
        shown = np.frombuffer(memoryview(scales).toreadonly(), np.float32)
        made = [pycoli.Weights.from_bytes(s, scales=shown, **options) for s in (*read_only, locked, owner)]
        for writable in (*memory, owner):
            writable[:] = b"9999" if isinstance(writable, bytearray) else 9
        locked.flags.writeable = True
        locked[:] = 9
        scales[:] = np.full(1, 7, np.float32).tobytes()
        for weights in made:
            np.testing.assert_array_equal(weights.decode(), np.zeros((1, 4)))
            np.testing.assert_array_equal(weights.scales, [1])

    def test_read_only_views_of_arrays_are_copied(self):
        writable, scales = np.arange(4, dtype=np.uint8), np.ones(1, np.float32)
        view = writable.view()
        view.flags.writeable = False
        for source in (writable, view, memoryview(writable)):
            weights = pycoli.Weights.from_bytes(source, fmt="int8", shape=(1, 4), scales=scales)
            before = weights.decode()
            writable[:], scales[:] = 9, 9
            np.testing.assert_array_equal(weights.decode(), before)
            writable[:], scales[:] = np.arange(4), 1

    def test_nobody_can_write_to_it(self):
        for weights in (
            pycoli.encode(gaussian(4, 64), "int8"),
            pycoli.Weights.from_bytes(bytearray(4), fmt="int8", shape=(1, 4), scales=np.ones(1, np.float32)),
        ):
            for array in (weights.data, weights.scales):
                with pytest.raises(ValueError, match="read-only"):
                    array[0] = 1
                with pytest.raises(ValueError, match="WRITEABLE"):
                    array.flags.writeable = True
            with pytest.raises(AttributeError):
                weights.fmt = "int4"

    @pytest.mark.parametrize("shape", [(2,), (1, 2, 3), "ab", 4, None, (1.5, 2)])
    def test_shapes_that_are_none(self, shape):
        with refused(pycoli.ShapeError, "shape must be (O, I)", repr(shape)):
            pycoli.Weights.from_bytes(b"", fmt="int8", shape=shape)

    @pytest.mark.parametrize("shape", [(0, 4), (4, 0), (-1, 4), (2**31, 1), (1, 2**40)])
    def test_shapes_out_of_range(self, shape):
        with refused(pycoli.ShapeError, "from 1 to 2147483647", f"got {shape}"):
            pycoli.Weights.from_bytes(b"", fmt="int8", shape=shape)

    def test_codebooks(self):
        data = pycoli.encode(gaussian(2, 256), "e8", rotate=False).data
        options = {"fmt": "e8", "shape": (2, 256), "rotated": False}
        published = pycoli.Weights.from_bytes(data, **options)
        own = bytes(b ^ 1 for b in oracle.CODEBOOK.tobytes())
        weights = pycoli.Weights.from_bytes(data, codebook=own, **options)
        assert weights.codebook == own
        assert "own codebook" in repr(weights)
        assert not np.array_equal(weights.decode(), published.decode())
        assert pycoli.Weights.from_bytes(data, codebook=oracle.CODEBOOK.tobytes(), **options).codebook is None
        assert pickle.loads(pickle.dumps(weights)).codebook == own
        with refused(pycoli.SizeError, "codebook needs 1024 bytes", "got 1000"):
            pycoli.Weights.from_bytes(data, codebook=bytes(1000), **options)
        with refused(pycoli.FormatError, "format int8 has no codebook"):
            pycoli.Weights.from_bytes(
                bytes(4), fmt="int8", shape=(1, 4), scales=np.ones(1, np.float32), codebook=bytes(1024)
            )


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (pycoli.ArgumentError, ValueError),
        (pycoli.ShapeError, ValueError),
        (pycoli.DtypeError, TypeError),
        (pycoli.FormatError, ValueError),
        (pycoli.SizeError, ValueError),
        (pycoli.CheckpointError, ValueError),
        (pycoli.NotFiniteError, ValueError),
        (pycoli.StateError, RuntimeError),
        (pycoli.FreedError, pycoli.StateError),
        (pycoli.DeviceError, RuntimeError),
        (pycoli.OutOfMemoryError, MemoryError),
        (pycoli.BackendError, RuntimeError),
        (pycoli.NotProvidedError, NotImplementedError),
    ],
)
def test_errors_are_also_the_builtin_ones(error, builtin):
    assert issubclass(error, pycoli.ColiError)
    assert issubclass(error, builtin)
