"""How containers store an encoded matrix, and how existing hosts tell its format: by sizes, or by a stamp.

A matrix ``name`` is a flat U8 tensor; its scales are the flat F32 tensor ``name.qs``. An E8 matrix has no scales and
instead one float there, 6.0. Nothing says the format: a reader takes the one in which a matrix of that shape has as
many bytes of weights and of scales. Where several formats fit, the file's metadata has to name it.

docs/containers.md describes all of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ._lib import lib
from .errors import CheckpointError, ColiError
from .weights import Format, formats, parse_format

SCALES_SUFFIX = ".qs"

_E8_TAG = np.array([6.0], "<f4")
_E8_TAG_UNROTATED = np.array([6.0, 0.0], "<f4")

HOST_STAMP, OWN_STAMP, CHECKSUMS = "colibri.fmt", "coli.tensors", "colibri.sha256"
"""Metadata entries, each the text of a JSON object by tensor name: the format as existing hosts name it (only where
sizes do not say it); ``{"format", "shape", "rotated"}`` of every encoded matrix; SHA-256 of the data."""

HOST_NAMES = {
    "f32": "f32",
    "int8": "int8-row",
    "int4": "int4-row",
    "int2": "int2-row",
    "int4-g64": "int4-grouped",
    "int3-g64": "int3-g64",
    "e8": "e8-iq3-lattice",
    "mxfp4": "mxfp4",
    "fp8-e4m3-b128": "fp8-e4m3-b128",
}
"""Existing hosts' names of the formats of formats()."""

HOST_GROUP_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
"""What hosts try, in this order, as the group size of grouped int4."""

_ROW_FORMATS = ("int8", "int4", "int2", "int3-g64", "fp8-e4m3-b128")


@dataclass(frozen=True)
class Encoding:
    """How a matrix is encoded: the format's name, and of an E8 matrix whether its rows are stored rotated."""

    fmt: str
    rotated: bool = False


def e8_tag(rotated: bool) -> np.ndarray:
    """What stands in place of an E8 matrix's scales.

    Existing hosts rotate the inputs of every E8 matrix; a second float makes them refuse one that is stored as it is.
    """
    return _E8_TAG if rotated else _E8_TAG_UNROTATED


@lru_cache(maxsize=4096)
def sizes(fmt: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Bytes of weights and of scales of a matrix [O, I]; for E8 of its tag."""
    number, group = parse_format(fmt)
    scales = _E8_TAG.nbytes if fmt == "e8" else lib.coli_scale_bytes(number, *shape, group)
    return lib.coli_weight_bytes(number, *shape), scales


@lru_cache(maxsize=4096)
def candidates(shape: tuple[int, int], weight_bytes: int, scale_bytes: int, scale_dtype: str) -> tuple[Encoding, ...]:
    """The encodings in which a matrix [O, I] has so many bytes of weights and scales, `scale_dtype` as the file names
    it. Grouped int4 counts once, with the first group size that fits; where a row is one group, as int4."""
    if scale_dtype != "F32":
        fits = scale_dtype == "U8" and sizes("mxfp4", shape) == (weight_bytes, scale_bytes)
        return (Encoding("mxfp4"),) if fits else ()
    found = []
    e8_bytes = sizes("e8", shape)[0]
    if weight_bytes == e8_bytes and scale_bytes == _E8_TAG.nbytes:
        found.append(Encoding("e8", rotated=True))
    if weight_bytes == e8_bytes and scale_bytes == _E8_TAG_UNROTATED.nbytes:
        found.append(Encoding("e8", rotated=False))
    found += [Encoding(fmt) for fmt in _ROW_FORMATS if sizes(fmt, shape) == (weight_bytes, scale_bytes)]
    grouped = (f"int4-g{size}" for size in HOST_GROUP_SIZES if size < shape[1])
    if fmt := next((fmt for fmt in grouped if sizes(fmt, shape) == (weight_bytes, scale_bytes)), None):
        found.append(Encoding(fmt))
    return tuple(found)


def by_sizes(found: tuple[Encoding, ...]) -> Encoding | None:
    """What hosts take candidates() for without a stamp; None where that is nothing, or not clear."""
    if [encoding.fmt for encoding in found] == ["int8", "fp8-e4m3-b128"]:  # fp8 is never written so without a stamp
        return found[0]
    return found[0] if len(found) == 1 else None


def host_stamp(shape: tuple[int, int], encoding: Encoding) -> str | None:
    """The name with which hosts have to be told of a matrix's format; None where its sizes say it.

    Raises
    ------
    CheckpointError
        Hosts would take the matrix for one of another format or group size, stamped or not.
    """
    weight_bytes, scale_bytes = sizes(encoding.fmt, shape)
    scale_bytes = _E8_TAG_UNROTATED.nbytes if encoding == Encoding("e8", rotated=False) else scale_bytes
    scale_dtype = "U8" if encoding.fmt == "mxfp4" else "F32"
    found = candidates(shape, weight_bytes, scale_bytes, scale_dtype)
    if encoding not in found:
        got = ", ".join(other.fmt for other in found) or "nothing they know"
        raise CheckpointError(f"an {encoding.fmt} matrix {list(shape)} cannot be told by its sizes from {got}")
    return None if by_sizes(found) == encoding else HOST_NAMES[_info(encoding.fmt).name]


def stored_as(fmt: str, shape: tuple[int, int]) -> str:
    """The format itself; int4 for grouped int4 whose groups are whole rows, which is the same bytes."""
    number, group = parse_format(fmt)
    return "int4" if number == lib.COLI_INT4_GROUPED and group >= shape[1] else fmt


class Stamps:
    """What the metadata of a container's file says about its tensors.

    Raises
    ------
    CheckpointError
        An entry is not what it has to be.
    """

    def __init__(self, metadata: dict[str, str], source: str):
        self._source = source
        self._host = self._object(metadata, HOST_STAMP, str)
        self._own = self._object(metadata, OWN_STAMP, dict)
        self.checksums = self._object(metadata, CHECKSUMS, str)

    def _object(self, metadata: dict[str, str], key: str, of: type) -> dict:
        try:
            entries = json.loads(metadata.get(key, "{}"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self._source}: metadata {key}: not readable as JSON: {error}") from error
        if not isinstance(entries, dict) or not all(isinstance(entry, of) for entry in entries.values()):
            raise CheckpointError(f"{self._source}: metadata {key}: expected an object of tensor names")
        return entries

    def names(self) -> set[str]:
        """All tensors that are spoken of."""
        return self._host.keys() | self._own.keys() | self.checksums.keys()

    def shape(self, name: str) -> tuple[int, int] | None:
        """The shape [O, I] that a matrix is said to have."""
        shape = self._own.get(name, {}).get("shape")
        if shape is None:
            return None
        if not (isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 2**31 for n in shape)):
            raise CheckpointError(f"{self._where(name, OWN_STAMP)}: expected a shape [O, I], got {shape!r:.60}")
        return shape[0], shape[1]

    def choose(
        self, name: str, found: tuple[Encoding, ...], shape: tuple[int, int], nbytes: tuple[int, int]
    ) -> Encoding:
        """The encoding of a matrix: of those that its sizes allow the one that is stamped, or the only one.

        Parameters
        ----------
        found : tuple of Encoding
            candidates() for the matrix.
        nbytes : (int, int)
            Bytes of weights and scales.

        Raises
        ------
        CheckpointError
            None fits, several do, or the stamps say something else than the sizes.
        """
        own, host = self._own_encoding(name), self._host.get(name)
        # The sizes give one group size; a stamp may name another with as many groups.
        if own and own not in found and own.fmt.startswith("int4-g") and sizes(own.fmt, shape) == nbytes:
            found = (*found, own)
        what = f"{self._source}: {name}: {list(shape)} in {nbytes[0]} bytes of weights and {nbytes[1]} of scales"
        if not found:
            raise CheckpointError(f"{what} is no format that is known")
        named = [e for e in found if own in (None, e) and host in (None, HOST_NAMES[_info(e.fmt).name])]
        if not named:
            said = " and ".join(text for text in (own and own.fmt, host) if text)
            got = ", ".join(e.fmt for e in found)
            raise CheckpointError(f"{what} is stamped {said}, but has the sizes of {got}")
        chosen = by_sizes(found) if own is None and host is None else named[0] if len(named) == 1 else None
        if chosen is None:
            got = " or ".join(e.fmt for e in named)
            raise CheckpointError(f"{what} may be {got}; a stamp in the file's metadata has to say which")
        return chosen

    def _own_encoding(self, name: str) -> Encoding | None:
        if name not in self._own:
            return None
        fmt, rotated = self._own[name].get("format"), self._own[name].get("rotated", False)
        where = self._where(name, OWN_STAMP)
        try:
            parse_format(fmt)
        except ColiError as error:
            raise CheckpointError(f"{where}: {error}") from error
        if not isinstance(rotated, bool) or (rotated and fmt != "e8"):
            raise CheckpointError(f"{where}: expected rotated to be true or false, and true for e8 alone")
        return Encoding(fmt, rotated)

    def _where(self, name: str, key: str) -> str:
        return f"{self._source}: {name}: metadata {key}"


def own_stamp(shape: tuple[int, int], encoding: Encoding) -> dict:
    """What OWN_STAMP says of a matrix."""
    stamp: dict[str, object] = {"format": encoding.fmt, "shape": list(shape)}
    return {**stamp, "rotated": encoding.rotated} if encoding.fmt == "e8" else stamp


@lru_cache(maxsize=64)
def _info(fmt: str) -> Format:
    number = parse_format(fmt)[0]
    return formats()[number]
