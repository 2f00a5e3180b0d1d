"""GGUF files as the source of a conversion, and containers of unrotated experts as GGUF files."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..container import Container
from ..errors import ArgumentError, CheckpointError, ColiError
from ..gguf import GgufFile, GgufTensor, from_iq3_xxs, from_q4_0, package, to_iq3_xxs
from ..layout import SCALES_SUFFIX, Encoding
from ..naming import expert_role, natural_order
from . import gguf_names as names
from .shard import sync
from .source import Source, SourceTensor

__all__ = ["GgufSource", "export_gguf"]

_AS_THEY_ARE = ("I8", "I16", "I32", "I64", "F64")
"""Types whose values float32 does not hold; such tensors are taken over byte for byte."""

_NATIVE = {
    "IQ3_XXS": (Encoding("e8", rotated=False), from_iq3_xxs),
    "Q4_0": (Encoding("int4-g32"), from_q4_0),
}
"""Types that a format of ours holds without loss, and what makes Weights of their blocks."""

_SPLIT = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.gguf$")


@dataclass
class _GgufMatrix(SourceTensor):
    """A tensor of a file, or the matrix of one expert out of it."""

    name: str
    file: GgufFile
    tensor: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0
    order: np.ndarray | None = None  # where in the file each row is

    def __post_init__(self):
        self.source = f"{self.name} ({self.tensor.name} in {self.file.path})"
        self.is_float = self.tensor.dtype not in _AS_THEY_ARE
        self.dtype = self.tensor.dtype
        if self.order is None and len(self.shape) == 2 and self.dtype in _NATIVE:
            self.native = _NATIVE[self.dtype][0]

    def rows(self, first: int, last: int) -> np.ndarray:
        if self.order is not None:
            wanted = self.order[first:last]
            low = int(wanted.min())
            return self.file.rows(self.tensor, low, int(wanted.max()) + 1)[wanted - low]
        return self.file.rows(self.tensor, self.first_row + first, self.first_row + last)

    def native_rows(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray | None]:
        row_bytes = self.file.row_bytes(self.tensor)
        raw = self.file.read(self.tensor, (self.first_row + first) * row_bytes, (last - first) * row_bytes)
        try:
            weights = _NATIVE[self.dtype][1](raw, (last - first, self.columns))
        except ColiError as error:
            raise CheckpointError(f"{self.source}: rows {first} to {last - 1}: {error}") from error
        return weights.data, weights.scales

    def raw(self) -> np.ndarray:
        return self.file.read(self.tensor, 0, self.tensor.nbytes)


class GgufSource(Source):
    """A GGUF file, or the first of a split model. CheckpointError as of GgufFile."""

    def __init__(self, path: Path):
        self.path = path
        self._files = [GgufFile(part) for part in _parts(path)]
        self._architecture = str(self._files[0].fields.get("general.architecture", "unknown"))
        self._unknown: list[str] = []
        self._tensors = sorted(self._find(), key=lambda tensor: natural_order(tensor.name))
        gates = [tensor for tensor in self._tensors if expert_role(tensor.name) == "gate"]
        if not gates:
            raise CheckpointError(f"{path}: no routed experts (such as blk.0.ffn_gate_exps.weight)")
        self._shape = gates[0].shape
        self._config = self._make_config(len(gates) // len({tensor.name.split(".experts.")[0] for tensor in gates}))

    def tensors(self) -> list[SourceTensor]:
        return list(self._tensors)

    def fingerprint(self) -> list[str]:
        return [f"{file.path.name} {file.fingerprint()}" for file in self._files]

    def companions(self) -> dict[str, bytes | Path]:
        return {"config.json": (json.dumps(self._config, indent=2) + "\n").encode()}

    def warnings(self) -> list[str]:
        lines = ["the configuration is made from the file's metadata; a tokenizer has to come from elsewhere"]
        if self._unknown:
            others = f" and {len(self._unknown) - 1} more" if len(self._unknown) > 1 else ""
            lines.append(f"{self._unknown[0]}{others}: a name that is not known, kept as it is")
        return lines

    def _find(self) -> Iterator[_GgufMatrix]:
        seen: dict[str, Path] = {}
        for file in self._files:
            for tensor in file.tensors.values():
                if tensor.name in seen:
                    raise CheckpointError(f"{tensor.name} is in {seen[tensor.name]} and again in {file.path}")
                seen[tensor.name] = file.path
                if place := names.experts_tensor(tensor.name):
                    yield from self._of_all_experts(file, tensor, *place)
                elif "_exps." in tensor.name:
                    raise CheckpointError(f"{tensor.name} in {file.path}: experts of this kind are not supported")
                else:
                    yield self._other(file, tensor)

    def _of_all_experts(self, file: GgufFile, tensor: GgufTensor, layer: int, role: str) -> Iterator[_GgufMatrix]:
        if len(tensor.shape) != 3 or 0 in tensor.shape:
            raise CheckpointError(
                f"{tensor.name} in {file.path}: expected a matrix for each expert, got shape {list(tensor.shape)}"
            )
        experts, rows, columns = tensor.shape
        for expert in range(experts):
            name = names.expert_name(layer, expert, role)
            yield _GgufMatrix(name, file, tensor, (rows, columns), expert * rows)

    def _other(self, file: GgufFile, tensor: GgufTensor) -> _GgufMatrix:
        name = names.to_container(tensor.name, self._architecture)
        if name is None:
            self._unknown.append(tensor.name)
        shape = (1, *tensor.shape) if _is_shared_gate(tensor.name) and len(tensor.shape) == 1 else tensor.shape
        return _GgufMatrix(name or tensor.name, file, tensor, shape, order=self._order(tensor))

    def _order(self, tensor: GgufTensor) -> np.ndarray | None:
        """Where in the file the rows of a tensor are; None where they are in their order."""
        if not _has_turned_rows(tensor.name, self._architecture):
            return None
        fields, key = self._files[0].fields, "llama.attention.head_count"
        return _row_orders(tensor.name, tensor.shape, fields.get(key), fields.get(f"{key}_kv"))[1]

    def _make_config(self, experts: int) -> dict:
        embedding = next((t for t in self._tensors if t.name == "model.embed_tokens.weight"), None)
        vocabulary = embedding.shape[0] if embedding and len(embedding.shape) == 2 else None
        return names.config_of(self._files[0].fields, experts, *self._shape, vocabulary)


def _has_turned_rows(gguf_name: str, architecture: str) -> bool:
    """Whether a tensor has rows in another order than Hugging Face: see _row_orders()."""
    return architecture == "llama" and bool(re.search(r"\.attn_(q|k)\.weight$", gguf_name))


def _row_orders(gguf_name: str, shape: tuple[int, ...], heads, key_heads) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a query or key matrix in the order of the architecture "llama", which has those of a head's two halves in
    turn, where Hugging Face has one half after the other; and the order back.

    Raises
    ------
    CheckpointError
        The shape does not go with the number of heads, or that is not known.
    """
    heads = key_heads if ".attn_k." in gguf_name and key_heads is not None else heads
    if type(heads) is not int or heads < 1 or len(shape) != 2 or shape[0] % (2 * heads):
        raise CheckpointError(f"{gguf_name}: {list(shape)} does not go with {heads!r} attention heads")
    rows, half = np.arange(shape[0]), shape[0] // heads // 2
    out, back = (rows.reshape(heads, *parts).swapaxes(1, 2).reshape(-1) for parts in ((2, half), (half, 2)))
    return out, back


def _is_shared_gate(gguf_name: str) -> bool:
    """Whether a tensor is the factor of a shared expert: [D] in GGUF files, [1, D] elsewhere."""
    return gguf_name.endswith(".ffn_gate_inp_shexp.weight")


def export_gguf(container: Container, path: str | os.PathLike) -> list[str]:
    """Writes a container's model as a GGUF file: unrotated E8 experts as IQ3_XXS, bit for bit, all other tensors
    decoded to float32. The file appears whole or not at all; one tensor is held in memory at a time.

    Returns
    -------
    list of str
        What a user should know.

    Raises
    ------
    CheckpointError
        An expert is E8 of rotated rows, which GGUF cannot say; or the container is damaged, or the disk has no room.
    ArgumentError
        The file exists.
    """
    path, gguf = Path(path), package()
    if path.exists():
        raise ArgumentError(f"{path}: exists already, and is not overwritten")
    architecture, sizes, reals = names.fields_of(container.config)
    planned = list(_export_plan(container, architecture))
    needed = sum(tensor.nbytes for tensor in planned)
    if needed > (free := shutil.disk_usage(path.absolute().parent).free):
        raise CheckpointError(f"{path}: {needed:,} bytes are needed, but only {free:,} are free")
    partial = path.with_name(f"{path.name}.partial")
    writer = gguf.GGUFWriter(partial, architecture)
    try:
        for key, whole in sizes.items():
            writer.add_uint32(key, whole)
        for key, real in reals.items():
            writer.add_float32(key, real)
        if renormalise := names.renormalise_field(container.config):
            writer.add_bool(*renormalise)
        for tensor in planned:
            kind = gguf.GGMLQuantizationType[tensor.dtype]
            dtype = np.dtype(np.uint8 if tensor.dtype == "IQ3_XXS" else np.float32)
            writer.add_tensor_info(tensor.name, tensor.stored_shape, dtype, tensor.nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in planned:
            writer.write_tensor_data(tensor.read())
        writer.close()
        sync(partial)
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):  # what is left in its buffer has no room either
            writer.close()
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (None, errno.ENOSPC, errno.EFBIG):  # None is numpy's
            raise CheckpointError(f"{path}: cannot be written, the disk may be full: {error}") from error
        raise
    warnings = ["a tokenizer has to be added", "matrices other than experts are float32"]
    if architecture not in gguf.MODEL_ARCH_NAMES.values():
        warnings.append(
            f"the model type {container.config.get('model_type')!r} goes out as the architecture {architecture!r}, "
            "which ggml does not know"
        )
    return warnings


@dataclass
class _Exported:
    """A tensor of a GGUF file that is to be written; of all experts of a layer if `members` are several."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    container: Container
    members: list[str]
    order: np.ndarray | None = None  # which row of the container each row is

    @property
    def nbytes(self) -> int:
        elements = math.prod(self.shape)
        return elements // 256 * 98 if self.dtype == "IQ3_XXS" else 4 * elements

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """As the package wants it: the last dimension of blocks in bytes."""
        return (*self.shape[:-1], self.shape[-1] // 256 * 98) if self.dtype == "IQ3_XXS" else self.shape

    def read(self) -> np.ndarray:
        whole = np.concatenate([self._member(name).reshape(-1) for name in self.members]).reshape(self.stored_shape)
        return whole if self.order is None else whole[self.order]

    def _member(self, name: str) -> np.ndarray:
        file = self.container.file(name)
        if name + SCALES_SUFFIX not in self.container:
            return file.view(name).astype(np.float32)
        weights = self.container.stored(name).weights()
        try:
            return to_iq3_xxs(weights) if self.dtype == "IQ3_XXS" else weights.decode()
        except ColiError as error:
            raise CheckpointError(f"{name} in {file.path}: {error}") from error


def _export_plan(container: Container, architecture: str) -> Iterator[_Exported]:
    for layer in container.layers:
        experts = [container.stored_expert(layer, index) for index in range(len(container.experts(layer)))]
        for number, role in enumerate(("gate", "up", "down")):
            matrices = [expert[number] for expert in experts]
            for matrix in matrices:
                if matrix.encoding == Encoding("e8", rotated=True):
                    raise CheckpointError(
                        f"{matrix.name} in {matrix.file.path}: its rows are stored rotated, which GGUF cannot say; "
                        "only E8 that was imported from GGUF can be exported"
                    )
            blocks = all(matrix.encoding.fmt == "e8" for matrix in matrices)
            shape = (len(matrices), *matrices[0].shape)
            members = [matrix.name for matrix in matrices]
            yield _Exported(names.experts_name(layer, role), "IQ3_XXS" if blocks else "F32", shape, container, members)
    for name in container.names():
        if expert_role(name):
            continue
        file = container.file(name)
        if name + SCALES_SUFFIX in container:
            shape: tuple[int, ...] = container.stored(name).shape
        elif file.dtype(name) in ("F32", "F16", "BF16"):
            shape = file.shape(name)
        else:
            raise CheckpointError(f"{name} in {file.path}: type {file.dtype(name)} is not exported")
        gguf_name, order = names.to_gguf(name, architecture), None
        if _is_shared_gate(gguf_name):
            shape = (math.prod(shape),)
        if _has_turned_rows(gguf_name, architecture):
            heads = (container.config.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
            order, _ = _row_orders(gguf_name, shape, *heads)
        yield _Exported(gguf_name, "F32", shape, container, [name], order)


def _parts(path: Path) -> list[Path]:
    """All files of a model that is split into several, which are named alike."""
    match = _SPLIT.search(path.name)
    if not match:
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    if not 0 < count <= 9999 or int(match[1]) != 1:
        raise CheckpointError(f"{path}: one file of a split model; give the first, {stem}-00001-of-{match[2]}.gguf")
    return [path.with_name(f"{stem}-{number:05}-of-{match[2]}.gguf") for number in range(1, count + 1)]
