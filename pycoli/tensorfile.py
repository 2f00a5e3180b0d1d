"""Tensors of a safetensors file as numpy arrays, mapped rather than read.

The safetensors library checks the file; its numpy front end cannot return fp8, so the arrays are views made here.
"""

from __future__ import annotations

import json
import mmap
import os
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


class TensorFile:
    """One safetensors file.

    Parameters
    ----------
    path : str or Path
        The file. It is mapped, and stays mapped as long as an array of it lives.

    Raises
    ------
    CheckpointError
        The file is missing, truncated or not a safetensors file.
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
            raise CheckpointError(f"{self.path}: not a readable safetensors file: {error}") from error
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

    def view(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in its own type, one of `DTYPES`.

        Raises
        ------
        CheckpointError
            There is no such tensor, or it has another type.
        """
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: no tensor {name}")
        dtype = DTYPES.get(self.dtype(name))
        if dtype is None:
            raise CheckpointError(
                f"{name} in {self.path}: expected one of the types {', '.join(DTYPES)}, got {self.dtype(name)}"
            )
        shape = self.shape(name)
        start = self._data_start + self._tensors[name]["data_offsets"][0]
        return np.ndarray(shape, dtype, buffer=self._map, offset=start)
