"""Checks and conversions of the arrays that callers pass: the one home of the rules about dtypes, shapes and copies."""

from __future__ import annotations

import mmap

import numpy as np

from ._lib import ffi
from .errors import DtypeError, NotFiniteError, ShapeError

# Every value of these is a float32 value. bfloat16 is numpy's when ml_dtypes is imported.
_EXACT_IN_FLOAT32 = ("float32", "float16", "bfloat16")

MAX_DIM = 2**31 - 1
"""Rows and columns are ints in C."""


def as_array(array, what: str) -> np.ndarray:
    """Anything as an array. DtypeError with the reason where that fails; `what` names it there."""
    try:
        return np.asarray(array)
    except Exception as error:  # objects with __array__ raise what they like, such as tensors on a GPU
        raise DtypeError(f"{what} cannot be read as a numpy array: {error}") from error


def as_float32(array, what: str) -> np.ndarray:
    """The array as C-contiguous native float32; a copy only where that takes one. `what` names it in errors."""
    array = as_array(array, what)
    if array.dtype.name not in _EXACT_IN_FLOAT32:
        raise DtypeError(
            f"{what} must be float32 (float16 and bfloat16 are converted exactly), got {array.dtype.name}: "
            "converting could round, so pass float32"
        )
    return np.asarray(array, dtype=np.float32, order="C")


def as_matrix(array, what: str) -> np.ndarray:
    """A float32 matrix [O, I] with at least one row and column."""
    array = as_float32(array, what)
    if array.ndim != 2 or 0 in array.shape:
        raise ShapeError(f"{what} must be a matrix [O, I] with O and I of at least 1, got shape {list(array.shape)}")
    if max(array.shape) > MAX_DIM:
        raise ShapeError(f"{what} must be a matrix [O, I] with both at most {MAX_DIM}, got shape {list(array.shape)}")
    return array


def as_rows(array, columns: int, what: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """Activations [..., columns] as float32 [S, columns], and the leading dimensions that the result shall have."""
    array = as_float32(array, what)
    if array.ndim == 0 or array.shape[-1] != columns:
        raise ShapeError(f"{what} must be [..., {columns}], got shape {list(array.shape)}")
    return array.reshape(-1, columns), array.shape[:-1]


def as_byte_array(data, what: str) -> np.ndarray:
    """Bytes-like objects and arrays of one-byte elements as a read-only uint8 array of the same shape.

    The memory of bytes and of read-only file maps is shared; what somebody could still write to is copied.
    """
    if not hasattr(data, "__array__"):
        try:
            data = memoryview(data)
        except TypeError:
            raise DtypeError(f"{what} must be bytes or a uint8 array, got {type(data).__name__}") from None
    array = as_array(data, what)
    if array.dtype.itemsize != 1 or array.dtype.kind in "bSU":
        raise DtypeError(f"{what} must be bytes or a uint8 array, got an array of {array.dtype.name}")
    return freeze(array).view(np.uint8)


def as_bytes(data, what: str) -> np.ndarray:
    """as_byte_array() as a vector."""
    return as_byte_array(data, what).reshape(-1)


def freeze(array: np.ndarray) -> np.ndarray:
    """A C-contiguous array that nobody can write to: the same memory where that cannot change, else a copy."""
    return seal(np.asarray(array, order="C") if _is_immutable(array) else array.copy(order="C"))


def seal(array: np.ndarray) -> np.ndarray:
    """A view of a fresh array that nobody can make writable again: numpy allows that for an array itself alone."""
    array.flags.writeable = False
    return array.view(np.ndarray)


def check_finite(array: np.ndarray, what: str) -> None:
    """Raises NotFiniteError with the first element that is NaN or infinite."""
    finite = np.isfinite(array)
    if not finite.all():
        place = np.unravel_index(int(np.argmin(finite)), array.shape)
        index = ", ".join(str(int(i)) for i in place)
        raise NotFiniteError(f"{what}[{index}] must be finite, got {array[place]}")


def floats(array: np.ndarray):
    """The C pointer of a float32 array, which must outlive the call it is passed to."""
    return ffi.from_buffer("float[]", array)


def _is_immutable(array: np.ndarray) -> bool:
    """Whether the array lies in memory that nobody can write to, whatever they hold: of bytes, or a read-only file map.

    A read-only view says nothing: what it is a view of may be written to, or be made writable.
    """
    owner = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if isinstance(owner, mmap.mmap):
        with memoryview(owner) as view:
            return view.readonly
    return isinstance(owner, bytes)
