"""Weight formats and encoded matrices in host memory: formats(), rotate(), encode(), Weights."""

from __future__ import annotations

import math
import operator
import time
import warnings
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from ._arrays import (
    MAX_DIM,
    as_array,
    as_byte_array,
    as_bytes,
    as_float32,
    as_matrix,
    check_finite,
    floats,
    freeze,
    seal,
)
from ._lib import check, ffi, lib, name_bytes, text
from .calibrate import Calibration, CalibrationReport, CalibrationWarning, as_importance
from .errors import ArgumentError, DtypeError, FormatError, NotFiniteError, ShapeError, SizeError

_CONTAINER_TAG = 6.0  # containers store one float of this value where an E8 matrix has no scales


@dataclass(frozen=True)
class Format:
    """A weight format.

    Attributes
    ----------
    name : str
        "e8", "int8", ...; "int4-g64" stands for "int4-gN" with any group size N.
    bits_per_weight : float
        Of a large matrix, scales included.
    scale_dtype : str or None
        "float32" or "uint8"; None where the format has no scales of its own.
    scale_columns : int or None
        Columns of a row that share a scale; None where the whole row does, where the name or group_size says it, and
        where there are no scales.
    can_encode, on_gpu : bool
        Whether encode() takes it, and whether GPUs can hold it.
    summary : str
        One line for a person.
    """

    name: str
    bits_per_weight: float
    scale_dtype: str | None
    scale_columns: int | None
    can_encode: bool
    on_gpu: bool
    summary: str


def formats() -> list[Format]:
    """The weight formats, in the order of their numbers in the C interface."""
    return [_format(number) for number in range(lib.coli_format_count())]


def rotate(x) -> np.ndarray:
    """Rotates rows the way that E8 matrices are stored.

    Per power-of-two block of the last dimension: fixed random signs, fast Walsh-Hadamard transform, 1/sqrt(n). The
    rotation is orthogonal, so ``rotate(x) @ rotate(w).T == x @ w.T`` up to rounding.

    Parameters
    ----------
    x : float32 [..., dim]

    Returns
    -------
    float32 [..., dim]
        A new array.

    Raises
    ------
    DtypeError, ShapeError
    """
    return _rotated(x, lib.coli_rotate_rows)


def unrotate(x) -> np.ndarray:
    """The inverse of rotate(): float32 [..., dim] to a new float32 [..., dim]."""
    return _rotated(x, lib.coli_unrotate_rows)


def encode(
    w,
    fmt: str,
    *,
    rotate: bool = True,
    group_size: int | None = None,
    quality: str | None = None,
    activations=None,
    importance=None,
    damping: float = 0.02,
    device=None,
) -> Weights:
    """Encodes a matrix.

    Parameters
    ----------
    w : float32 [O, I]
        O outputs of I inputs, finite. float16 and bfloat16 are converted exactly.
    fmt : str
        A name of formats(), or "int4-gN" for N columns that share a scale.
    rotate : bool
        "e8" rotates the rows first, which spreads outliers; False stores them as they are. Other formats never rotate.
    group_size : int, optional
        With "int4": the same as "int4-gN".
    quality : str, optional
        How "e8" chooses among its bytes; other formats have one way. All give the same layout.

        - "search", the default: for the smallest squared error of the weights.
        - "reference": the rule of existing encoders, to the bit.
        - "calibrated": for the smallest squared error of the outputs, with `activations` or `importance`. Takes
          about 16 I^2 bytes of memory. Where there are too few activations, "search" is taken, with a
          CalibrationWarning; encode_calibrated() reports it instead.
    activations : float32 [..., I], or Calibration, optional
        With "calibrated": inputs that the matrix meets, not rotated.
    importance : float32 [I], optional
        In place of activations: mean squares of the inputs' elements, such as read_imatrix() gives. Also goes with
        "search" and rotate=False, where it weighs the squared errors.
    damping : float
        With "calibrated": part of the mean square of the inputs that is added to each, from 0 to 1.
    device : None, "cpu", "cuda:0", int or Device
        Where "e8" is encoded, in the same bytes everywhere; None is the CPU. "calibrated" and the other formats know
        the CPU alone. No weights stay on the device.

    Returns
    -------
    Weights

    Raises
    ------
    DtypeError, ShapeError, FormatError
    ArgumentError
        A quality that does not exist, or options that do not go with it.
    NotFiniteError
        Names the first element that is NaN or infinite; or rotating overflows float32.
    DeviceError, NotProvidedError, OutOfMemoryError
        The device that was named cannot do it.
    """
    number, _ = parse_format(fmt, group_size)
    _check_quality(number, fmt, rotate, quality, activations, importance)
    gpu = _encoding_device(device, number, fmt, quality)
    if gpu:
        return _encode_e8_on(gpu, w, rotate, quality or "search", importance)
    if quality == "calibrated":
        calibration = _as_calibration(activations, importance, w)
        weights, report = encode_calibrated(w, calibration, rotate=rotate, damping=damping)
        if report.reason:
            warnings.warn(f"encoded by searching: {report.reason}", CalibrationWarning, stacklevel=2)
        return weights
    return _encode(w, fmt, rotate, group_size, quality or "search", importance=importance)


def encode_calibrated(
    w, calibration: Calibration, *, rotate: bool = True, damping: float = 0.02
) -> tuple[Weights, CalibrationReport]:
    """Encodes a matrix as "e8" for the smallest squared error of its outputs, and says how that went.

    Columns are encoded from the first to the last, in lanes of 8; the error of each lane is made up for by those that
    follow, as far as the activations show a relation.

    Parameters
    ----------
    w : float32 [O, I]
    calibration : Calibration
        Of I columns.
    rotate, damping
        As in encode().

    Returns
    -------
    Weights, CalibrationReport

    Raises
    ------
    DtypeError, ShapeError, NotFiniteError
    ArgumentError
        The damping is not from 0 to 1.
    """
    start = time.perf_counter()
    w = as_matrix(w, "w")
    if not isinstance(calibration, Calibration):
        raise DtypeError(f"calibration must be a Calibration, got {type(calibration).__name__}")
    columns = w.shape[1]
    if calibration.columns != columns:
        raise ShapeError(f"w {list(w.shape)} needs a Calibration of {columns} columns, got {calibration.columns}")
    if not isinstance(damping, (int, float, np.floating)) or not 0 <= damping <= 1:
        raise ArgumentError(f"damping must be from 0 to 1, got {damping!r}")
    reason = calibration.fallback_reason()
    targets = w if reason else calibration.targets(w, damping)
    hessian = calibration.hessian(rotate)
    searched = _encode(targets, "e8", rotate, None, "search")
    weights = searched
    if reason is None:
        weights = _encode(targets, "e8", rotate, None, "calibrated", hessian=hessian, damping=damping)
    stored = _rotated(targets, lib.coli_rotate_rows) if rotate else targets
    errors = [_output_error(stored, encoded, hessian) for encoded in (weights, searched)]
    report = CalibrationReport(
        quality="search" if reason else "calibrated",
        reason=reason,
        rows=calibration.rows,
        output_error=errors[0],
        search_output_error=errors[1],
        collect_seconds=calibration.seconds,
        encode_seconds=time.perf_counter() - start,
        peak_bytes=calibration.peak_bytes + 12 * w.size,
    )
    return weights, report


def _encode(
    w, fmt: str, rotate: bool, group_size: int | None, quality: str, importance=None, hessian=None, damping=0.0
) -> Weights:
    """encode() with a Hessian in the basis of the stored rows."""
    number, group = parse_format(fmt, group_size)
    w = as_matrix(w, "w")
    check_finite(w, "w")
    rows, columns = w.shape
    rotated = rotate and number == lib.COLI_E8
    stored = _rotated(w, lib.coli_rotate_rows) if rotated else w
    data = np.empty(lib.coli_weight_bytes(number, rows, columns), np.uint8)
    scales = empty_scales(number, rows, columns, group)
    options, _kept = _e8_options(quality, columns, importance, hessian, damping)
    try:
        if number == lib.COLI_E8:
            check(lib.coli_encode_e8(options, floats(stored), rows, columns, pointer(data)))
        else:
            check(lib.coli_encode(number, floats(stored), rows, columns, group, pointer(data), pointer(scales)))
    except NotFiniteError:
        raise _rotating_overflows(w) from None
    scales = None if scales is None else seal(scales)
    return Weights._of(number, group, (rows, columns), seal(data), scales, rotated)


_QUALITIES = ("search", "reference", "calibrated")


def _check_quality(number: int, fmt: str, rotate: bool, quality, activations, importance) -> None:
    """Whether quality, activations and importance go together, and with the format."""
    if quality is not None and quality not in _QUALITIES:
        raise ArgumentError(f"quality must be one of {', '.join(_QUALITIES)}, got {quality!r}")
    given = {"quality": quality, "activations": activations, "importance": importance}
    named = next((name for name, value in given.items() if value is not None), None)
    if number != lib.COLI_E8:
        if named:
            raise FormatError(f"format {fmt} has one way of encoding, without {named}: only e8 has several")
        return
    if quality == "calibrated":
        if (activations is None) == (importance is None):
            raise ArgumentError('quality="calibrated" needs either activations or importance')
        return
    if activations is not None:
        raise ArgumentError(f'activations go with quality="calibrated", got quality={quality!r}')
    if importance is not None and (rotate or quality == "reference"):
        raise ArgumentError(
            'importance goes with quality="calibrated", or with "search" and rotate=False: '
            f"rotating mixes the columns; got quality={quality!r}, rotate={rotate}"
        )


def _as_calibration(activations, importance, w) -> Calibration:
    if importance is not None:
        return Calibration.from_importance(importance)
    if isinstance(activations, Calibration):
        return activations
    calibration = Calibration(as_matrix(w, "w").shape[1])
    activations = as_float32(activations, "activations")
    if activations.ndim == 0 or activations.shape[-1] != calibration.columns:
        raise ShapeError(f"activations must be [..., {calibration.columns}], got shape {list(activations.shape)}")
    check_finite(activations, "activations")
    calibration.add(activations)
    return calibration


def _e8_options(quality: str, columns: int, importance, hessian, damping: float):
    """A coli_e8_options, and what it points to."""
    options = ffi.new("coli_e8_options *")
    options.size = ffi.sizeof("coli_e8_options")
    options.quality = getattr(lib, f"COLI_E8_{quality.upper()}")
    options.damping = max(damping, 1e-9)  # 0 would stand for the default
    importance = _importance_of(columns, importance)
    if importance is not None:
        options.importance = floats(importance)
    if hessian is not None:
        options.hessian = floats(hessian)
    return options, (importance, hessian)


def _importance_of(columns: int, importance) -> np.ndarray | None:
    """The importance of so many columns, where there is one."""
    if importance is None:
        return None
    importance = as_importance(importance)
    if importance.size != columns:
        raise ShapeError(f"importance must be [{columns}], got {importance.size} elements")
    return importance


def _encoding_device(device, number: int, fmt: str, quality: str | None):
    """The Device that is to encode; None for the CPU."""
    from .device import e8_encoder, parse_device  # here, as that module builds on this one

    if device is not None and parse_device(device) is not None:
        if number != lib.COLI_E8:
            raise FormatError(f"format {fmt} is encoded on the CPU alone: GPUs encode e8, got device={device!r}")
        if quality == "calibrated":
            raise ArgumentError(f'quality="calibrated" encodes on the CPU alone, got device={device!r}')
    return e8_encoder(device)


def _encode_e8_on(device, w, rotate: bool, quality: str, importance) -> Weights:
    """encode() on a Device, which rotates the rows too."""
    w = as_matrix(w, "w")
    rows, columns = w.shape
    importance = _importance_of(columns, importance)
    data = np.empty(lib.coli_weight_bytes(lib.COLI_E8, rows, columns), np.uint8)
    weighted = ffi.NULL if importance is None else floats(importance)
    how = (getattr(lib, f"COLI_E8_{quality.upper()}"), int(rotate), weighted)
    try:
        device._call("coli_cuda_encode_e8", device.ordinal, *how, floats(w), rows, columns, pointer(data))
    except NotFiniteError:
        check_finite(w, "w")
        raise _rotating_overflows(w) from None
    return Weights._of(lib.COLI_E8, 0, (rows, columns), seal(data), None, rotate)


def _rotating_overflows(w: np.ndarray) -> NotFiniteError:
    """For a w that is finite itself."""
    return NotFiniteError(f"rotating overflows float32: w has magnitudes up to {np.abs(w).max():.4g}")


def _output_error(stored: np.ndarray, weights: Weights, hessian: np.ndarray) -> float:
    """Squared error of the outputs in relation to their squares, 0 where there are none."""
    largest = max(float(np.abs(stored).max()), np.finfo(np.float32).tiny)
    error = (weights.decode(stored=True) - stored) / np.float32(largest)
    stored = stored / np.float32(largest)
    hessian = hessian / np.float32(max(float(np.diagonal(hessian).max()), np.finfo(np.float32).tiny))
    lost, total = (float(np.einsum("ij,ij->", m @ hessian, m, dtype=np.float64)) for m in (error, stored))
    return lost / total if total > 0 else 0.0


@dataclass(frozen=True, eq=False, repr=False)
class Weights:
    """An encoded matrix in host memory. Made by encode() or Weights.from_bytes(); never changes.

    Attributes
    ----------
    data : uint8 [n], read-only
        The weights, byte for byte as the format lays them out.
    scales : ndarray or None, read-only
        float32 [O] for one scale a row, [O, groups] for groups of columns, [ceil(O/128), ceil(I/128)] for
        "fp8-e4m3-b128"; uint8 [O, ceil(I/32)] for "mxfp4"; None for "f32" and "e8".
    fmt : str
        The format's name.
    shape : (int, int)
        (O, I): outputs and inputs.
    group_size : int or None
        Columns that share a scale in "int4-gN".
    rotated : bool
        Whether the rows are stored as rotate(row). False for every format but "e8".
    codebook : bytes or None
        The 1024 bytes of an E8 codebook that is not the published one.
    """

    data: np.ndarray
    scales: np.ndarray | None
    fmt: str
    shape: tuple[int, int]
    group_size: int | None
    rotated: bool
    codebook: bytes | None
    _matrix: object  # coli_matrix *: the view of all this that C functions take

    @classmethod
    def from_bytes(
        cls,
        data,
        *,
        fmt: str,
        shape: tuple[int, int],
        scales=None,
        group_size: int | None = None,
        rotated: bool = True,
        codebook=None,
    ) -> Weights:
        """Takes over bytes that are encoded already.

        Parameters
        ----------
        data : bytes-like, or an array of one-byte elements, of any shape
            Shared where nobody can write to it: bytes, and read-only file maps. Else copied.
        fmt : str
            A name of formats(), or "int4-gN".
        shape : (int, int)
            (O, I): outputs and inputs.
        scales : array, optional
            As Weights.scales, or flat. float32 (float16 and bfloat16 are converted exactly), or one-byte elements for
            "mxfp4". For "e8", the one float 6.0 that containers store as a tag is accepted and dropped.
        group_size : int, optional
            With "int4": the same as "int4-gN".
        rotated : bool
            Whether an "e8" matrix is stored rotated. Of no meaning to other formats.
        codebook : bytes-like, 1024 bytes, optional
            An E8 codebook in place of the published one: 256 entries of 4 doubled magnitudes.

        Returns
        -------
        Weights

        Raises
        ------
        FormatError, ShapeError, DtypeError
        SizeError
            The number of weight bytes, scales or codebook bytes is not the one that format and shape require.
        """
        number, group = parse_format(fmt, group_size)
        rows, columns = _checked_shape(shape)
        name = _format_name(number, group)
        what = f"{name} matrix [{rows}, {columns}]"
        data = as_bytes(data, "data")
        needed = lib.coli_weight_bytes(number, rows, columns)
        if data.size != needed:
            raise SizeError(f"{what} needs {needed} weight bytes, got {data.size}")
        scales = _checked_scales(scales, number, group, rows, columns, what)
        return cls._of(number, group, (rows, columns), data, scales, rotated, _checked_codebook(codebook, number, name))

    @classmethod
    def _of(cls, number, group, shape, data, scales, rotated, codebook=None) -> Weights:
        """From read-only parts whose sizes are right."""
        e8 = number == lib.COLI_E8
        matrix = ffi.new("coli_matrix *")
        matrix.format = number
        matrix.rows, matrix.columns = shape
        matrix.group_size = group
        matrix.flags = lib.COLI_UNROTATED if e8 and not rotated else 0
        matrix.weights = pointer(data)
        matrix.scales = pointer(scales)
        matrix.codebook = ffi.from_buffer(codebook) if codebook else ffi.NULL
        check(lib.coli_matrix_check(matrix))
        name = _format_name(number, group)
        return cls(data, scales, name, shape, group or None, bool(e8 and rotated), codebook, matrix)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights and scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def bits_per_weight(self) -> float:
        """Bits of weights and scales for each element of the matrix."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    def decode(self, stored: bool = False) -> np.ndarray:
        """The matrix as float32 [O, I].

        Parameters
        ----------
        stored : bool
            True gives an E8 matrix as it is stored, still rotated, and then exactly what the bytes mean. By default the
            rotation is undone.
        """
        w = np.empty(self.shape, np.float32)
        check(lib.coli_decode(self._matrix, floats(w)))
        if self.rotated and not stored:
            check(lib.coli_unrotate_rows(floats(w), floats(w), *w.shape))
        return w

    def __repr__(self) -> str:
        notes = ", unrotated" if self.fmt == "e8" and not self.rotated else ""
        notes += ", own codebook" if self.codebook else ""
        size = f"{self.nbytes} bytes, {self.bits_per_weight:.5g} bits a weight"
        return f"<Weights {self.fmt} {list(self.shape)}, {size}{notes}>"

    def __reduce__(self):
        options = {"fmt": self.fmt, "shape": self.shape, "scales": self.scales}
        return partial(Weights.from_bytes, self.data, rotated=self.rotated, codebook=self.codebook, **options), ()


def parse_format(fmt: str, group_size: int | None = None) -> tuple[int, int]:
    """The format's number and group size (0 where it is not free) for a name and an optional group size."""
    if not isinstance(fmt, str):
        raise DtypeError(f"fmt must be a name such as 'e8', got {type(fmt).__name__} {fmt!r}")
    number, named_group = ffi.new("int *"), ffi.new("int *")
    check(lib.coli_format_parse(name_bytes(fmt), number, named_group))
    number = number[0]
    group = named_group[0] if number == lib.COLI_INT4_GROUPED else 0
    if group_size is None:
        return number, group
    whole = isinstance(group_size, (int, np.integer)) and not isinstance(group_size, bool)
    if not whole or not 1 <= group_size <= MAX_DIM:
        raise ArgumentError(f"group_size must be a whole number of at least 1, got {group_size!r}")
    if number == lib.COLI_INT4:
        return lib.COLI_INT4_GROUPED, int(group_size)
    fixed = group or _format(number).scale_columns
    if group_size != fixed:
        allowed = f"has groups of {fixed}" if fixed else "has no groups of columns"
        raise FormatError(f"format {fmt} {allowed}, got group_size={group_size}")
    return number, group


def format_feature(fmt: str) -> str:
    """The name under which formats() and the backend's features list a format: "int4-g32" goes by "int4-g64"."""
    return _format(parse_format(fmt)[0]).name


def published_codebook() -> bytes:
    """The published E8 codebook: 256 entries of 4 doubled magnitudes, 1024 bytes."""
    return bytes(ffi.buffer(lib.coli_e8_codebook(), 1024))


def checked_codebook(codebook) -> bytes:
    """An E8 codebook as bytes. SizeError unless it has 1024."""
    codebook = as_bytes(codebook, "codebook").tobytes()
    if len(codebook) != 1024:
        raise SizeError(f"an E8 codebook needs 1024 bytes (256 entries of 4 magnitudes), got {len(codebook)}")
    return codebook


def fp8_values() -> np.ndarray:
    """What the 256 bytes of e4m3 mean: float32 [256], NaN for 0x7f and 0xff."""
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def empty_scales(number: int, rows: int, columns: int, group: int) -> np.ndarray | None:
    """An array for the scales of a matrix; None where the format has none."""
    shape = _scales_shape(number, rows, columns, group)
    return None if shape is None else np.empty(shape, _format(number).scale_dtype)


def pointer(array: np.ndarray | None):
    """Address of an array's memory, which the caller keeps alive; NULL for None."""
    return ffi.NULL if array is None else ffi.cast("void *", array.ctypes.data)


def _format(number: int) -> Format:
    info = lib.coli_format_get(number)
    scale_dtype = text(info.scale_dtype)
    return Format(
        name=text(info.name),
        bits_per_weight=info.bits_per_weight,
        scale_dtype=None if scale_dtype == "none" else scale_dtype,
        scale_columns=info.scale_columns or None,
        can_encode=bool(info.can_encode),
        on_gpu=bool(info.on_gpu),
        summary=text(info.summary),
    )


def _format_name(number: int, group: int) -> str:
    return f"int4-g{group}" if number == lib.COLI_INT4_GROUPED else _format(number).name


def _scales_shape(number: int, rows: int, columns: int, group: int) -> tuple[int, ...] | None:
    count = lib.coli_scale_count(number, rows, columns, group)
    if count == 0:
        return None
    if not group and not _format(number).scale_columns:
        return (rows,)
    across = lib.coli_scale_count(number, 1, columns, group)
    return (count // across, across)


def _checked_shape(shape) -> tuple[int, int]:
    try:
        rows, columns = map(operator.index, shape)
    except (TypeError, ValueError):
        raise ShapeError(f"shape must be (O, I), two whole numbers, got {shape!r}") from None
    if not (1 <= rows <= MAX_DIM and 1 <= columns <= MAX_DIM):
        raise ShapeError(f"shape must be (O, I) with both from 1 to {MAX_DIM}, got ({rows}, {columns})")
    return rows, columns


def _checked_scales(scales, number: int, group: int, rows: int, columns: int, what: str) -> np.ndarray | None:
    """Scales in their natural shape, read-only; None where the format has none."""
    shape = _scales_shape(number, rows, columns, group)
    if shape is None:
        if scales is None:
            return None
        scales = as_array(scales, "scales")
        if scales.size == 0 or (number == lib.COLI_E8 and _is_container_tag(scales)):
            return None
        raise SizeError(f"{what} has no scales, got {scales.size}")
    needed = math.prod(shape)
    dtype = _format(number).scale_dtype
    wanted = f"{what} needs {needed} {dtype} scales"
    if scales is None:
        raise SizeError(f"{wanted}, got none")
    scales = as_byte_array(scales, "scales") if dtype == "uint8" else freeze(as_float32(scales, "scales"))
    if scales.size != needed:
        raise SizeError(f"{wanted}, got {scales.size}")
    if scales.ndim > 1 and _without_ones(scales.shape) != _without_ones(shape):
        raise ShapeError(f"{what} needs scales of shape {list(shape)}, got {list(scales.shape)}")
    return scales.reshape(shape)


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [n for n in shape if n != 1]


def _is_container_tag(scales: np.ndarray) -> bool:
    return scales.size == 1 and scales.dtype.kind == "f" and float(scales.reshape(-1)[0]) == _CONTAINER_TAG


def _checked_codebook(codebook, number: int, name: str) -> bytes | None:
    """None for the published codebook, so that equal matrices look equal."""
    if codebook is None:
        return None
    if number != lib.COLI_E8:
        raise FormatError(f"format {name} has no codebook: only e8 has")
    codebook = checked_codebook(codebook)
    return None if codebook == published_codebook() else codebook


def _rotated(x, function) -> np.ndarray:
    x = as_float32(x, "x")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ShapeError(f"x must be [..., dim] with dim of at least 1, got shape {list(x.shape)}")
    if x.shape[-1] > MAX_DIM:
        raise ShapeError(f"x must be [..., dim] with dim of at most {MAX_DIM}, got shape {list(x.shape)}")
    y = np.empty(x.shape, np.float32)
    dim = x.shape[-1]
    check(function(floats(x), floats(y), x.size // dim, dim))
    return y
