"""What a conversion will write: an encoding for every tensor, by rules, and the shards that hold them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from .._arrays import MAX_DIM
from ..errors import ArgumentError, CheckpointError
from ..layout import (
    CHECKSUMS,
    HOST_STAMP,
    OWN_STAMP,
    SCALES_SUFFIX,
    Encoding,
    e8_tag,
    host_stamp,
    own_stamp,
    sizes,
    stored_as,
)
from ..naming import expert_role, layer_number, layers_by_prefix, natural_order
from ..tensorfile import BITS
from ..weights import format_feature, formats
from .source import Source, SourceTensor

__all__ = ["Plan", "PlannedTensor", "Settings", "ShardPlan", "make_plan"]

SOURCE = "source"
"""As a format: the one of the source, where it holds the same values without loss."""

CALIBRATED = "calibrated"
"""The quality of E8 that takes the three matrices of an expert together."""

_SUPER_BLOCK = 256


@dataclass(frozen=True)
class Settings:
    """What a conversion makes of a model.

    Attributes
    ----------
    experts : str
        Format of the routed experts: a name that encode() takes, or "source" to keep what the source has.
    dense : str
        Format of the other matrices but routers; not "e8", which existing hosts have in experts alone.
    keep : str or None
        A regular expression; tensors in whose names it is found stay float32.
    fallback : str
        Format of experts whose rows E8 would pad to more bytes than this one takes.
    quality : "search", "reference" or "calibrated"
        How E8 is encoded: see encode(). "calibrated" needs convert() to be given what is known of activations.
    shard_bytes : int
        Data of a shard at most, if it is not one tensor alone.
    """

    experts: str = "e8"
    dense: str = "int8"
    keep: str | None = None
    fallback: str = "int4-g64"
    quality: str = "search"
    shard_bytes: int = 2 * 2**30

    def __post_init__(self):
        for option, fmt in (("experts", self.experts), ("dense", self.dense), ("fallback", self.fallback)):
            if fmt == SOURCE and option != "fallback":
                continue
            feature = format_feature(fmt)
            if not next(known for known in formats() if known.name == feature).can_encode:
                raise ArgumentError(f"{option}: {fmt} cannot be encoded")
        if "e8" in (self.dense, self.fallback):
            option = "dense" if self.dense == "e8" else "fallback"
            raise ArgumentError(f"{option}: e8 is for experts alone: hosts rotate the inputs of no other matrix")
        if self.quality not in ("search", "reference", CALIBRATED):
            raise ArgumentError(f"quality: expected search, reference or calibrated, got {self.quality!r}")
        if self.keep is not None:
            try:
                re.compile(self.keep)
            except re.error as error:
                raise ArgumentError(f"keep: {self.keep!r} is no regular expression: {error}") from error
        if type(self.shard_bytes) is not int or self.shard_bytes < 1:
            raise ArgumentError(f"shard_bytes: expected a positive integer, got {self.shard_bytes!r}")


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the source and what becomes of it.

    `encoding` is None for one that stays as it is: float32 if it is float, else byte for byte. `take_over`: its bytes
    are rewritten without loss, not encoded.
    """

    tensor: SourceTensor
    kind: str
    encoding: Encoding | None
    take_over: bool = False
    quality: str | None = None  # of E8 that is encoded

    @property
    def fmt(self) -> str:
        return self.encoding.fmt if self.encoding else "f32" if self.tensor.is_float else self.tensor.dtype.lower()

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.tensor.row_count, self.tensor.columns

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of data and of scales, the tag of E8 included."""
        if self.encoding:
            weight_bytes, scale_bytes = sizes(self.encoding.fmt, self.matrix_shape)
            return weight_bytes, e8_tag(self.encoding.rotated).nbytes if self.encoding.fmt == "e8" else scale_bytes
        bits = 32 if self.tensor.is_float else BITS[self.tensor.dtype]
        return -(-math.prod(self.tensor.shape) * bits // 8), 0


@dataclass(frozen=True)
class Entry:
    """A tensor of a file that is to be written; `offset` counts from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


@dataclass
class ShardPlan:
    """A file of the container."""

    name: str
    tensors: list[PlannedTensor]
    entries: dict[str, Entry] = field(init=False)

    def __post_init__(self):
        tensors: list[tuple[str, str, tuple[int, ...], int]] = []
        for planned in self.tensors:
            tensor, (nbytes, scale_bytes) = planned.tensor, planned.nbytes
            if planned.encoding is None:
                tensors.append((tensor.name, "F32" if tensor.is_float else tensor.dtype, tensor.shape, nbytes))
                continue
            tensors.append((tensor.name, "U8", (nbytes,), nbytes))
            dtype = "U8" if planned.encoding.fmt == "mxfp4" else "F32"
            count = 8 * scale_bytes // BITS[dtype]
            tensors.append((tensor.name + SCALES_SUFFIX, dtype, (count,), scale_bytes))
        tensors.sort(key=lambda tensor: -BITS[tensor[1]])  # so that wide elements are aligned
        offset, self.entries = 0, {}
        for name, dtype, shape, nbytes in tensors:
            self.entries[name] = Entry(name, dtype, tuple(shape), nbytes, offset)
            offset += nbytes

    @property
    def data_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def header(self, checksums: dict[str, str]) -> bytes:
        """The start of the file. Its length does not depend on the checksums, SHA-256 in hexadecimal by name."""
        encoded = [planned for planned in self.tensors if planned.encoding]
        own = {p.tensor.name: own_stamp(p.matrix_shape, p.encoding) for p in encoded}
        host = {p.tensor.name: host_stamp(p.matrix_shape, p.encoding) for p in encoded}
        stamps = {OWN_STAMP: own, HOST_STAMP: {name: stamp for name, stamp in host.items() if stamp}}
        stamps[CHECKSUMS] = {name: checksums.get(name, "0" * 64) for name in self.entries}
        header = {"__metadata__": {key: json.dumps(stamp) for key, stamp in stamps.items() if stamp}}
        for entry in self.entries.values():
            ends = [entry.offset, entry.offset + entry.nbytes]
            header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": ends}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def file_bytes(self) -> int:
        return len(self.header({})) + self.data_bytes


@dataclass(frozen=True)
class Plan:
    """All shards, and what a user should know: fallbacks, padding, what is not taken over."""

    shards: list[ShardPlan]
    warnings: list[str]

    @property
    def nbytes(self) -> int:
        return sum(shard.file_bytes for shard in self.shards)


def make_plan(source: Source, settings: Settings, layer_count: int | None = None) -> Plan:
    """Decides what becomes of every tensor.

    Parameters
    ----------
    layer_count : int, optional
        Layers of the model proper; those beyond are speculative heads, which hosts look for in files of their own.

    Raises
    ------
    CheckpointError
        A tensor cannot be stored as the settings say.
    """
    tensors = source.tensors()
    _check_experts(source, tensors)
    warnings = _Warnings(source.warnings())
    taken_over = _layers_to_take_over(tensors, settings, warnings)
    planned = [_plan_tensor(tensor, settings, taken_over, warnings) for tensor in tensors]
    names: set[str] = set()
    for one in planned:
        for name in (one.tensor.name, one.tensor.name + SCALES_SUFFIX) if one.encoding else (one.tensor.name,):
            if name in names:
                raise CheckpointError(f"{source.path}: the container would have {name} twice")
            names.add(name)
    return Plan(_shards(planned, settings.shard_bytes, layer_count), warnings.lines())


class _Warnings:
    """Warnings with a count of the tensors that each is about, and the first of them."""

    def __init__(self, fixed: list[str]):
        self._fixed = fixed
        self._of: dict[str, list[str]] = {}

    def add(self, text: str, name: str) -> None:
        self._of.setdefault(text, []).append(name)

    def lines(self) -> list[str]:
        counted = [
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {text}"
            for text, names in self._of.items()
        ]
        return [*self._fixed, *counted]


def kind_of(tensor: SourceTensor) -> str:
    """What a tensor is to the model, by its name and shape; the first word decides the rule."""
    name = tensor.name
    if role := expert_role(name):
        return f"expert {role}"
    if not tensor.is_float:
        return "other"
    if re.search(
        r"(\.mlp|\.block_sparse_moe|\.feed_forward)\.(gate|router)\.|shared_expert_gate|e_score_correction", name
    ):
        return "router"
    if len(tensor.shape) != 2 or re.search(r"norm", name):
        return "vector" if len(tensor.shape) < 2 else "norm" if "norm" in name else "other"
    for pattern, kind in (
        (r"embed_tokens|lm_head|embed", "dense embedding"),
        (r"attn|attention|indexer", "dense attention"),
        (r"shared_expert", "dense shared expert"),
        (r"mlp|feed_forward", "dense mlp"),
    ):
        if re.search(pattern, name):
            return kind
    return "dense other"


def _plan_tensor(tensor: SourceTensor, settings: Settings, taken_over: set[str], warnings: _Warnings) -> PlannedTensor:
    kind = kind_of(tensor)
    group = kind.split()[0]
    wanted = {"expert": settings.experts, "dense": settings.dense}.get(group)
    if wanted is None or (settings.keep is not None and re.search(settings.keep, tensor.name)):
        return PlannedTensor(tensor, kind, None)
    if 0 in tensor.shape:
        return PlannedTensor(tensor, kind, None)
    if max(tensor.shape) > MAX_DIM:
        raise CheckpointError(f"{tensor.source}: expected dimensions of at most {MAX_DIM}, got {list(tensor.shape)}")
    if wanted == SOURCE:
        return _as_in_source(tensor, kind)
    if wanted == "f32":
        return PlannedTensor(tensor, kind, None)
    shape = (tensor.row_count, tensor.columns)
    if wanted == "e8" and tensor.name in taken_over:
        return PlannedTensor(tensor, kind, Encoding("e8", rotated=False), take_over=True)
    fmt = _storable(wanted, shape, settings.fallback, warnings, tensor.name)
    if fmt is None:
        return PlannedTensor(tensor, kind, None)
    encoding = Encoding(fmt, rotated=fmt == "e8")
    if wanted != "e8" and tensor.native == encoding:
        return PlannedTensor(tensor, kind, encoding, take_over=True)
    return PlannedTensor(tensor, kind, encoding, quality=settings.quality if encoding.fmt == "e8" else None)


def _check_experts(source: Source, tensors: Iterable[SourceTensor]) -> None:
    """Raises unless all matrices of a layer's experts are there, and float: gate and up [I, D] and down [D, I], of the
    sizes that the configuration has, or of those of the layer's first."""
    present = {tensor.name: tensor for tensor in tensors}
    for layers in layers_by_prefix(present, source.path).values():
        for number, layer in layers.items():
            needed = (name for expert in range(layer.count(number, source.path)) for name in layer.tensors(expert))
            if missing := next((name for name in needed if name not in present), None):
                raise CheckpointError(f"{source.path}: no tensor {missing}")
    wanted = source.expert_shape()
    gate_of: dict[int, tuple[int | None, int | None]] = {}
    for tensor in tensors:
        role = expert_role(tensor.name)
        if role is None:
            continue
        if not tensor.is_float:
            raise CheckpointError(f"{tensor.source}: expected a float type that float32 can hold, got {tensor.dtype}")
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise CheckpointError(f"{tensor.source}: expected a matrix, got shape {list(tensor.shape)}")
        inner, hidden = tensor.shape[::-1] if role == "down" else tensor.shape
        layer = layer_number(tensor.name)
        expected = gate_of.setdefault(layer, (wanted[0] or inner, wanted[1] or hidden))
        if (inner, hidden) != expected:
            shape = list(expected[::-1] if role == "down" else expected)
            raise CheckpointError(
                f"{tensor.source}: expected shape {shape} (of the configuration or the layer's other experts), "
                f"got {list(tensor.shape)}"
            )


def _as_in_source(tensor: SourceTensor, kind: str) -> PlannedTensor:
    if tensor.native:
        return PlannedTensor(tensor, kind, tensor.native, take_over=True)
    if tensor.dtype in ("F32", "F16", "BF16"):
        return PlannedTensor(tensor, kind, None)
    raise CheckpointError(
        f"{tensor.source}: no format holds {tensor.dtype} without loss; choose one in place of source"
    )


def _layers_to_take_over(tensors: Iterable[SourceTensor], settings: Settings, warnings: _Warnings) -> set[str]:
    """Names of the E8 matrices that are taken over without rotation: gate and up of a layer share their inputs, so that
    all of them are, or none; down by itself."""
    if settings.experts != "e8":
        return set()
    groups: dict[tuple, list[SourceTensor]] = {}
    for tensor in tensors:
        if role := expert_role(tensor.name):
            groups.setdefault((layer_number(tensor.name), role == "down"), []).append(tensor)
    names: set[str] = set()
    for members in groups.values():
        native = [tensor for tensor in members if tensor.native and tensor.native.fmt == "e8"]
        if len(native) == len(members):
            names |= {tensor.name for tensor in members}
        else:
            for tensor in native:
                text = f"{tensor.dtype}, but not all of its layer's gate and up are: encoded again, with rotation"
                warnings.add(text, tensor.name)
    if names:
        for name in sorted(names, key=natural_order):
            warnings.add("taken over without rotation; existing hosts, which always rotate, refuse it", name)
    return names


def _storable(wanted: str, shape: tuple[int, int], fallback: str, warnings: _Warnings, name: str) -> str | None:
    """The wanted format, or the first of fallback, int8 and None (float32) in which hosts can tell the matrix."""
    choices = [wanted, fallback, "int8"] if wanted == "e8" else [wanted, "int8"]
    reason = ""
    for fmt in (stored_as(fmt, shape) for fmt in choices):
        if fmt == "e8" and shape[1] % _SUPER_BLOCK:
            padded, instead = sizes("e8", shape)[0], sum(sizes(stored_as(fallback, shape), shape))
            if padded > instead:
                reason = (
                    f"rows of {shape[1]} padded to whole super-blocks take {8 * padded / shape[0] / shape[1]:.2f} bits"
                )
                continue
            warnings.add(
                f"rows of {shape[1]} are padded to whole super-blocks of {_SUPER_BLOCK}, "
                f"{8 * padded / shape[0] / shape[1]:.2f} bits a weight; existing converters refuse that",
                name,
            )
        try:
            host_stamp(shape, Encoding(fmt, rotated=fmt == "e8"))
        except CheckpointError as error:
            reason = str(error)
            continue
        if fmt != stored_as(wanted, shape):
            warnings.add(f"stored as {fmt} in place of {wanted}: {reason}", name)
        return fmt
    warnings.add(f"stored as f32 in place of {wanted}: {reason}", name)
    return None


def _shards(planned: list[PlannedTensor], shard_bytes: int, layer_count: int | None) -> list[ShardPlan]:
    """Cuts the tensors into files, those of speculative heads and of indexers apart, as existing hosts have them."""
    streams: dict[str, list[PlannedTensor]] = {"out-": [], "out-mtp-": [], "out-idx-": []}
    for one in planned:
        layer = layer_number(one.tensor.name)
        speculative = layer is not None and layer_count is not None and layer >= layer_count
        is_indexer = ".indexer." in one.tensor.name
        streams["out-mtp-" if speculative else "out-idx-" if is_indexer else "out-"].append(one)
    shards = []
    for prefix, members in streams.items():
        pieces: list[list[PlannedTensor]] = []
        filled = shard_bytes
        for one in members:
            nbytes = sum(one.nbytes)
            if filled + nbytes > shard_bytes:
                pieces.append([])
                filled = 0
            pieces[-1].append(one)
            filled += nbytes
        shards += [ShardPlan(f"{prefix}{number:05}.safetensors", piece) for number, piece in enumerate(pieces)]
    return shards
