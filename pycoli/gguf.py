"""GGUF files: their tensors, and blocks of IQ3_XXS, Q4_0 and Q8_0 as encoded matrices and back.

An IQ3_XXS block is an E8 super-block in another order, and stands for twice the value at the same super-scale: import
doubles it, export halves it, and neither loses a bit. Its rows are not rotated, which the Weights say.

Files are parsed here and not by the ``gguf`` package, whose reader trusts the counts in a file; the package has the
tables of types, decodes the others and writes files. It comes with ``pip install 'pycoli[convert]'``.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from .errors import CheckpointError, FormatError, NotProvidedError, ShapeError, SizeError
from .tensorfile import fingerprint
from .weights import Weights

__all__ = ["GgufFile", "GgufTensor", "from_iq3_xxs", "from_q4_0", "to_iq3_xxs"]

_SUPER_BLOCK, _BLOCK_BYTES = 256, 98
_Q4_0_COLUMNS, _Q4_0_BYTES = 32, 18

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
"""Types of metadata values; scalars by their struct code."""

_LARGEST_ALIGNMENT = 2**20

_PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16), "F64": np.dtype("<f8")}


def package():
    """The package ``gguf``. NotProvidedError where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise NotProvidedError(f"GGUF files need the package gguf: pip install 'pycoli[convert]' ({error})") from error
    return gguf


def from_iq3_xxs(blocks, shape: tuple[int, int]) -> Weights:
    """IQ3_XXS blocks as an unrotated E8 matrix of the very same values.

    Parameters
    ----------
    blocks : uint8 array or bytes
        O * I / 256 blocks of 98 bytes, row by row.
    shape : (int, int)
        (O, I), I a multiple of 256.

    Raises
    ------
    ShapeError, SizeError
    FormatError
        A super-scale cannot be doubled: it is infinite, NaN, or 32768 or more. The text says in which row.
    """
    rows, columns = _whole_super_blocks(shape)
    raw = _bytes(blocks, rows * columns // _SUPER_BLOCK * _BLOCK_BYTES, "IQ3_XXS", shape).reshape(-1, _BLOCK_BYTES)
    scales = np.ascontiguousarray(raw[:, :2]).view("<f2").reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        doubled = scales * np.float16(2)
    _check_scales(np.isfinite(doubled), scales, columns, "be doubled")
    return _unrotated(np.concatenate([raw[:, 2:], doubled.view(np.uint8).reshape(-1, 2)], axis=1), shape)


def to_iq3_xxs(weights: Weights) -> np.ndarray:
    """An unrotated E8 matrix as IQ3_XXS blocks of the very same values.

    Returns
    -------
    uint8 [O * I / 256 * 98]

    Raises
    ------
    FormatError
        The matrix is not E8, is stored rotated or has a codebook of its own; or a super-scale cannot be halved without
        loss, being subnormal and odd, or is not finite.
    ShapeError
        Its rows are no whole super-blocks.
    """
    if weights.fmt != "e8" or weights.rotated or weights.codebook:
        what = "a codebook of its own" if weights.codebook else "rotated rows" if weights.rotated else weights.fmt
        raise FormatError(f"IQ3_XXS holds unrotated e8 matrices with the published codebook, got {what}")
    _, columns = _whole_super_blocks(weights.shape)
    raw = weights.data.reshape(-1, _BLOCK_BYTES)
    scales = np.ascontiguousarray(raw[:, 96:]).view("<f2").reshape(-1)
    with np.errstate(invalid="ignore"):
        halved = scales / np.float16(2)
        same = halved * np.float16(2) == scales
    _check_scales(same & np.isfinite(scales), scales, columns, "be halved")
    return np.concatenate([halved.view(np.uint8).reshape(-1, 2), raw[:, :96]], axis=1).reshape(-1)


def from_q4_0(blocks, shape: tuple[int, int]) -> Weights:
    """Q4_0 blocks as an "int4-g32" matrix of the very same values.

    Parameters
    ----------
    blocks : uint8 array or bytes
        O * I / 32 blocks of 18 bytes, row by row.
    shape : (int, int)
        (O, I), I a multiple of 32.

    Raises
    ------
    ShapeError, SizeError
    """
    rows, columns = shape
    if columns % _Q4_0_COLUMNS:
        raise ShapeError(f"rows of Q4_0 are whole blocks of {_Q4_0_COLUMNS}, got shape {list(shape)}")
    raw = _bytes(blocks, rows * columns // _Q4_0_COLUMNS * _Q4_0_BYTES, "Q4_0", shape).reshape(-1, _Q4_0_BYTES)
    scales = np.ascontiguousarray(raw[:, :2]).view("<f2").astype(np.float32)
    low, high = raw[:, 2:] & 15, raw[:, 2:] >> 4  # columns 0 ... 15, and 16 ... 31
    codes = np.concatenate([low, high], axis=1)
    data = codes[:, 0::2] | codes[:, 1::2] << 4
    shape_of_scales = (rows, columns // _Q4_0_COLUMNS)
    return Weights.from_bytes(
        data.tobytes(), fmt=f"int4-g{_Q4_0_COLUMNS}", shape=shape, scales=scales.reshape(shape_of_scales)
    )


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file: its type by ggml's name, shape with the columns last, and where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufFile:
    """One GGUF file, little-endian, version 2 or 3. Nothing in it is believed.

    Attributes
    ----------
    path : Path
    fields : dict
        The metadata: numbers, texts, lists.
    tensors : dict
        GgufTensor by name.

    Raises
    ------
    CheckpointError
        The file is missing, truncated or damaged; the text names the tensor or the entry.
    NotProvidedError
        The package gguf is not installed.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._package = package()
        try:
            with open(self.path, "rb") as file:
                self._size = os.fstat(file.fileno()).st_size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: no such file") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: not a readable GGUF file: {error}") from error
        self._at = 0
        self.fields, self.tensors = self._parse()
        self._header_bytes = self._at

    def fingerprint(self) -> str:
        """A text that is another one for a file of other tensors."""
        places = ((tensor.offset, tensor.nbytes) for tensor in self.tensors.values())
        return fingerprint(self.path, self._header_bytes, places)

    def read(self, tensor: GgufTensor, start: int, nbytes: int) -> np.ndarray:
        """A copy of bytes of a tensor, uint8 [nbytes]. CheckpointError where the file has become shorter."""
        out = np.empty(nbytes, np.uint8)
        with open(self.path, "rb") as file:
            file.seek(tensor.offset + start)
            if file.readinto(memoryview(out)) != nbytes:
                raise CheckpointError(f"{self.path}: it has become shorter, and ends within {tensor.name}")
        return out

    def row_bytes(self, tensor: GgufTensor) -> int:
        """Bytes of a row, which is whole blocks of the tensor's type."""
        return self._bytes_of(tensor.dtype, tensor.shape[-1] if tensor.shape else 1)

    def rows(self, tensor: GgufTensor, first: int, last: int) -> np.ndarray:
        """The rows first ... last - 1 of a tensor, all dimensions but the last in one, as float32 [n, columns].

        Raises
        ------
        CheckpointError
            The type is none that can be decoded.
        """
        row_bytes = self.row_bytes(tensor)
        raw = self.read(tensor, first * row_bytes, (last - first) * row_bytes).reshape(last - first, row_bytes)
        if tensor.dtype in _PLAIN:
            return raw.view(_PLAIN[tensor.dtype]).astype(np.float32)
        try:
            kind = self._package.GGMLQuantizationType[tensor.dtype]
            with np.errstate(all="ignore"):
                return self._package.quants.dequantize(raw, kind).astype(np.float32, copy=False)
        except (NotImplementedError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{tensor.name} in {self.path}: type {tensor.dtype} is not decoded: {error}"
            ) from error

    # Parsing

    def _fail(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: not a readable GGUF file: {text}")

    def _parse(self) -> tuple[dict, dict[str, GgufTensor]]:
        if self._take(4, "the magic") != b"GGUF":
            raise self._fail("it does not begin with GGUF")
        version = self._number("I", "the version")
        if version not in (2, 3):
            raise self._fail(f"expected version 2 or 3, little-endian, got {version}")
        tensor_count, field_count = self._number("Q", "the counts"), self._number("Q", "the counts")
        fields: dict[str, object] = {}
        for number in range(field_count):
            key = self._text(f"the name of metadata entry {number}")
            if key in fields:
                raise self._fail(f"metadata {key} is there twice")
            fields[key] = self._value(self._number("I", f"metadata {key}"), f"metadata {key}", 0)
        found = [self._tensor(number) for number in range(tensor_count)]
        return fields, self._place(found, self._alignment(fields))

    def _alignment(self, fields: dict) -> int:
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
            raise self._fail(f"general.alignment: expected a power of two, got {alignment!r:.40}")
        return alignment

    def _tensor(self, number: int) -> tuple[str, tuple[int, ...], str, int]:
        """Name, shape, type and offset in the data, as the header has them."""
        name = self._text(f"the name of tensor {number}")
        dimensions = self._number("I", f"tensor {name}")
        if dimensions > 8:
            raise self._fail(f"tensor {name}: expected up to 8 dimensions, got {dimensions}")
        shape = tuple(self._number("Q", f"tensor {name}") for _ in range(dimensions))[::-1]
        code, offset = self._number("I", f"tensor {name}"), self._number("Q", f"tensor {name}")
        try:
            dtype = self._package.GGMLQuantizationType(code).name
        except ValueError:
            raise self._fail(f"tensor {name}: unknown type {code}") from None
        block = self._package.GGML_QUANT_SIZES[dtype_of(self._package, dtype)][0]
        if shape and shape[-1] % block:
            raise self._fail(f"tensor {name}: rows of {shape[-1]} are no whole blocks of {block} of {dtype}")
        return name, shape, dtype, offset

    def _place(self, found: list, alignment: int) -> dict[str, GgufTensor]:
        """The tensors by name, each within the file and apart from the others."""
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, dtype, offset in found:
            nbytes = self._bytes_of(dtype, math.prod(shape))
            if name in tensors:
                raise self._fail(f"tensor {name} is there twice")
            if offset % alignment or start + offset + nbytes > self._size:
                raise self._fail(
                    f"tensor {name}: {nbytes} bytes at offset {offset} of the data, but the file has "
                    f"{max(0, self._size - start)} bytes of it, aligned to {alignment}"
                )
            tensors[name] = GgufTensor(name, dtype, shape, start + offset, nbytes)
        end, before = start, "the header"
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
            if tensor.offset < end:
                raise self._fail(f"tensor {tensor.name}: overlaps {before}")
            end, before = tensor.offset + tensor.nbytes, tensor.name
        return tensors

    def _bytes_of(self, dtype: str, elements: int) -> int:
        block, nbytes = self._package.GGML_QUANT_SIZES[dtype_of(self._package, dtype)]
        return elements // block * nbytes

    def _take(self, nbytes: int, what: str) -> bytes:
        if nbytes > self._size - self._at:
            raise self._fail(f"{what}: the file ends within it")
        self._at += nbytes
        return self._map[self._at - nbytes : self._at]

    def _number(self, code: str, what: str):
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code), what))[0]

    def _text(self, what: str) -> str:
        raw = self._take(self._number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._fail(f"{what}: not UTF-8: {error}") from None

    def _value(self, kind: int, what: str, depth: int):
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], what)
        if kind == _STRING:
            return self._text(what)
        if kind != _ARRAY or depth > 4:
            raise self._fail(f"{what}: unknown type {kind}")
        of, count = self._number("I", what), self._number("Q", what)
        if of in _SCALARS:
            size = struct.calcsize(_SCALARS[of])
            raw = self._take(count * size, what)
            return np.frombuffer(raw, np.dtype(_SCALARS[of]).newbyteorder("<")).tolist()
        return [self._value(of, what, depth + 1) for _ in range(count)]  # ends at the end of the file at the latest


def dtype_of(gguf, name: str):
    """ggml's type by its name."""
    return gguf.GGMLQuantizationType[name]


def _whole_super_blocks(shape: tuple[int, int]) -> tuple[int, int]:
    rows, columns = shape
    if columns % _SUPER_BLOCK:
        raise ShapeError(f"rows of IQ3_XXS are whole super-blocks of {_SUPER_BLOCK}, got shape {list(shape)}")
    return rows, columns


def _bytes(blocks, needed: int, kind: str, shape: tuple[int, int]) -> np.ndarray:
    raw = np.frombuffer(blocks, np.uint8) if not isinstance(blocks, np.ndarray) else blocks.reshape(-1).view(np.uint8)
    if raw.size != needed:
        raise SizeError(f"{kind} {list(shape)} needs {needed} bytes, got {raw.size}")
    return raw


def _check_scales(good: np.ndarray, scales: np.ndarray, columns: int, doing: str) -> None:
    if not good.all():
        block = int(np.argmin(good))
        row = block // (columns // _SUPER_BLOCK)
        raise FormatError(f"the super-scale {scales[block]!s} of block {block} (row {row}) cannot {doing} without loss")


def _unrotated(blocks: np.ndarray, shape: tuple[int, int]) -> Weights:
    return Weights.from_bytes(blocks.tobytes(), fmt="e8", shape=shape, rotated=False)
