"""Tensors of a safetensors file, mapped or read: the one home of reading such files.

The safetensors library decides whether a file is sound; what it refuses is named here by its tensor. Its numpy front
end cannot return fp8, nor a part of a tensor, so the arrays are views made here.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError

DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""The floating-point types that can be viewed, by their names in the file."""

BITS = {
    **{name: 8 * dtype.itemsize for name, dtype in DTYPES.items()},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16"), 16),
    **dict.fromkeys(("I32", "U32"), 32),
    **dict.fromkeys(("I64", "U64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
"""Bits of an element, of all types that a file may have."""

_SAMPLE_BYTES = 256
"""Of each tensor in fingerprint(): more than a hundred weights, as training further leaves some as they are."""


class TensorFile:
    """One safetensors file. Any number of threads may use it at once.

    Parameters
    ----------
    path : str or Path
        The file. It is mapped, and stays mapped as long as an array of it lives.

    Raises
    ------
    CheckpointError
        The file is missing, truncated or not a safetensors file; the text names the tensor that is wrong.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            with safe_open(self.path, framework="numpy") as file:
                self.metadata: dict[str, str] = file.metadata() or {}
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: no such file") from None
        except (OSError, ValueError, SafetensorError) as error:
            reason = self._what_is_wrong() or error
            raise CheckpointError(f"{self.path}: not a readable safetensors file: {reason}") from error
        header_bytes = int.from_bytes(self._map[:8], "little")
        self._data_start = 8 + header_bytes
        self._tensors = json.loads(self._map[8 : self._data_start], object_pairs_hook=self._unique)
        self._tensors.pop("__metadata__", None)

    def _unique(self, entries: list[tuple[str, object]]) -> dict:
        """A JSON object of the header, in which the safetensors library takes the last of entries of one name."""
        unique = dict(entries)
        if len(unique) < len(entries):
            seen: set[str] = set()
            twice = next(name for name, _ in entries if name in seen or seen.add(name))
            raise CheckpointError(f"{self.path}: not a readable safetensors file: its header has {twice} twice")
        return unique

    def _what_is_wrong(self) -> str | None:
        """The first tensor of a file that was refused with which something is wrong, and what; None where it is
        something else."""
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                header_bytes = int.from_bytes(file.read(8), "little")
                if 8 + header_bytes > size:
                    return None
                header = json.loads(file.read(header_bytes), object_pairs_hook=self._unique)
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        except CheckpointError:  # a tensor is there twice
            raise
        except (OSError, ValueError, RecursionError, AttributeError):
            return None
        for name, entry in tensors.items():
            if wrong := _wrong_entry(entry, size - 8 - header_bytes):
                return f"tensor {name}: {wrong}"
        end, before = 0, "the header"
        for name in sorted(tensors, key=lambda name: tensors[name]["data_offsets"]):
            start = tensors[name]["data_offsets"][0]
            if start != end:
                overlap = "overlaps" if start < end else "leaves a hole after"
                return f"tensor {name}: it starts at byte {start} and {overlap} {before}, which ends at {end}"
            end, before = tensors[name]["data_offsets"][1], name
        return None

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, which must be there."""
        return tuple(self._tensors[name]["shape"])

    def dtype(self, name: str) -> str:
        """Type of a tensor as the file names it, such as ``"BF16"``."""
        return self._tensors[name]["dtype"]

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor's data."""
        start, end = self._tensors[name]["data_offsets"]
        return end - start

    def view(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in its own type, one of `DTYPES`.

        Raises
        ------
        CheckpointError
            There is no such tensor, or it has another type.
        """
        dtype = self._viewable(name)
        return np.ndarray(self.shape(name), dtype, buffer=self._map, offset=self.offset(name))

    def data(self, name: str) -> np.ndarray:
        """The bytes of a tensor of any type, a read-only uint8 [nbytes] view of the map; the tensor must be there."""
        return np.ndarray(self.nbytes(name), np.uint8, buffer=self._map, offset=self.offset(name))

    def read_into(self, name: str, out: np.ndarray, start: int = 0) -> None:
        """Reads bytes of a tensor, which must be there, from its byte `start` on into the uint8 array `out`.

        Unlike a view this leaves nothing of the file mapped. CheckpointError where the file has become shorter.
        """
        buffer = memoryview(out).cast("B")
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset(name) + start)
            while buffer:
                count = file.readinto(buffer)
                if not count:
                    raise CheckpointError(
                        f"{self.path}: it ends within {name}; it has become shorter since it was opened"
                    )
                buffer = buffer[count:]

    def read(self, name: str, first: int, last: int, columns: int) -> np.ndarray:
        """A copy of the rows first ... last - 1 of a tensor that is taken for rows of so many columns: [n, columns] in
        its own type, one of `DTYPES`.

        Raises
        ------
        CheckpointError
            As view(); or the file has become shorter.
        """
        dtype = self._viewable(name)
        out = np.empty((last - first, columns), dtype)
        self.read_into(name, out.reshape(-1).view(np.uint8), first * columns * dtype.itemsize)
        return out

    def fingerprint(self) -> str:
        """A text that is another one for a file of other tensors."""
        places = ((self.offset(name), self.nbytes(name)) for name in self._tensors)
        return fingerprint(self.path, self._data_start, places)

    def offset(self, name: str) -> int:
        """Where a tensor's data begins in the file."""
        return self._data_start + self._tensors[name]["data_offsets"][0]

    def _viewable(self, name: str) -> np.dtype:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: no tensor {name}")
        dtype = DTYPES.get(self.dtype(name))
        if dtype is None:
            raise CheckpointError(
                f"{name} in {self.path}: expected one of the types {', '.join(DTYPES)}, got {self.dtype(name)}"
            )
        return dtype


def fingerprint(path: Path, header_bytes: int, places: Iterable[tuple[int, int]]) -> str:
    """A text that is another one for a file of other tensors, be they of the same names and shapes, as those of a model
    that was trained further: its size, and the SHA-256 of its header and of a sample of each tensor.

    Parameters
    ----------
    places : iterable of (int, int)
        Where in the file each tensor is, and its bytes.
    """
    with open(path, "rb", buffering=0) as file:
        result = hashlib.sha256(file.read(header_bytes))
        for offset, nbytes in places:
            file.seek(offset + max(0, nbytes - _SAMPLE_BYTES) // 2)
            result.update(file.read(min(nbytes, _SAMPLE_BYTES)))
        return f"{os.fstat(file.fileno()).st_size} {result.hexdigest()}"


def _wrong_entry(entry: object, data_bytes: int) -> str | None:
    """What is wrong with a tensor's entry in the header of a file with so many bytes of data."""
    if not isinstance(entry, dict):
        return f"expected an object, got {entry!r:.60}"
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"unknown type {dtype!r:.60}"
    if not _are_naturals(shape):
        return f"expected a shape of whole numbers, got {shape!r:.60}"
    if not _are_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"expected data_offsets of a start and an end, got {offsets!r:.60}"
    if offsets[1] > data_bytes:
        return f"it ends at byte {offsets[1]}, but the file has {data_bytes} bytes of data"
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        return f"{dtype} {shape!r:.60} takes {-(-bits // 8)} bytes, but its data_offsets have {offsets[1] - offsets[0]}"
    return None


def _are_naturals(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)
