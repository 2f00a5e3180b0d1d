"""Encoded models on disk in the layout of existing hosts: Container reads their experts, mapped rather than copied.

docs/containers.md describes the files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ._arrays import seal
from ._json import parse_json, positive_integer, read_json
from .errors import ArgumentError, CheckpointError, ColiError, StateError
from .layout import SCALES_SUFFIX, Encoding, Stamps, candidates, e8_tag, sizes
from .naming import ROLES, FusedLayer, SeparateLayer, expert_role, model_layers, number_ranges
from .routing import router_settings
from .tensorfile import TensorFile
from .weights import Weights, parse_format

__all__ = ["Container", "EncodedExpert", "StoredMatrix", "is_container"]

MANIFEST = ".out-progress.json"
"""What a conversion has done so far, in the container's folder."""

_ALIGNMENT = 64


class EncodedExpert(NamedTuple):
    """The three matrices of an expert: gate and up [I, D], down [D, I]."""

    gate: Weights
    up: Weights
    down: Weights


@dataclass(frozen=True)
class StoredMatrix:
    """Where an encoded matrix lies, and how it is encoded."""

    name: str
    file: TensorFile
    scales_file: TensorFile | None  # None for formats without scales
    shape: tuple[int, int]
    encoding: Encoding

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales, without the tag of E8."""
        return self.file.nbytes(self.name) + self._scale_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes that read_into() takes up, rounded up so that another matrix can follow."""
        return _aligned(self.file.nbytes(self.name)) + _aligned(self._scale_bytes)

    def weights(self, first: int = 0, last: int | None = None) -> Weights:
        """The matrix, or its rows first ... last - 1 (`first` a multiple of 128); its data is the map of the file."""
        fmt, last = self.encoding.fmt, self.shape[0] if last is None else last
        start = sizes(fmt, (first, self.shape[1])) if first else (0, 0)
        end = sizes(fmt, (last, self.shape[1]))
        data, scales = self.file.data(self.name)[start[0] : end[0]], None
        if self.scales_file:
            scales = self._scales(self.scales_file.data(self.name + SCALES_SUFFIX)[start[1] : end[1]])
        shape = (last - first, self.shape[1])
        try:
            return Weights.from_bytes(data, fmt=fmt, shape=shape, scales=scales, rotated=self.encoding.rotated)
        except ColiError as error:
            raise CheckpointError(f"{self.name} in {self.file.path}: {error}") from error

    def read_into(self, out: np.ndarray) -> Weights:
        """Reads the matrix to the front of `out`, uint8 [at least staged_bytes]. The result lies in that memory."""
        number, group = parse_format(self.encoding.fmt)
        data, scales = out[: self.file.nbytes(self.name)], None
        self.file.read_into(self.name, data)
        if self.scales_file:
            start = _aligned(data.size)
            raw = out[start : start + self._scale_bytes]
            self.scales_file.read_into(self.name + SCALES_SUFFIX, raw)
            scales = seal(self._scales(raw[:]).reshape(self.weights().scales.shape))
        return Weights._of(number, group, self.shape, seal(data[:]), scales, self.encoding.rotated)

    @property
    def _scale_bytes(self) -> int:
        return self.scales_file.nbytes(self.name + SCALES_SUFFIX) if self.scales_file else 0

    def _scales(self, data: np.ndarray) -> np.ndarray:
        return data if self.encoding.fmt == "mxfp4" else data.view("<f4")


class _Experts(Sequence):
    """The experts of a layer, read when they are asked for."""

    def __init__(self, container: Container, layer: int):
        self._container, self._layer = container, layer
        self._count = container._count(layer)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self._container.expert(self._layer, i) for i in range(self._count)[index]]
        return self._container.expert(self._layer, range(self._count)[index])


class Container:
    """The experts of an encoded model. Any number of threads may use it at once.

        with pycoli.Container("model-e8") as container:
            for layer in container.layers:
                gate, up, down = container.expert(layer, 0)

    Parameters
    ----------
    path : str or Path
        A folder with ``out-*.safetensors`` and ``config.json``, or one ``.safetensors`` file of such a folder.

    Attributes
    ----------
    path : Path
    config : dict
        The model's ``config.json``; empty without one.
    layers : list of int
        Numbers of the layers with routed experts, ascending.

    Raises
    ------
    CheckpointError
        The path is no container, its conversion is not finished, a file of it is damaged, or experts are missing. The
        text names file and tensor.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._files = _open_files(self.path)
        self._file_of = _by_tensor(self._files)
        self._stamps = {file.path: Stamps(file.metadata, str(file.path)) for file in self._files}
        self.config, self._config_source = _read_config(self.path, self._files)
        text_config = self.config.get("text_config")
        self._sizes = {**self.config, **text_config} if isinstance(text_config, dict) else self.config
        self._layers = model_layers(self._file_of, self.path)
        self.layers = sorted(self._layers)
        self._closed = False

    def experts(self, layer: int) -> Sequence[EncodedExpert]:
        """The experts of a layer: a sequence of (gate, up, down), each read when it is asked for.

        Raises
        ------
        CheckpointError
            There is no such layer, or experts of it are missing.
        """
        return _Experts(self, layer)

    def expert(self, layer: int, index: int) -> EncodedExpert:
        """One expert. Nothing of the others is touched, and nothing is copied: its Weights are the map of the file, and
        stay valid when the container is closed.

        Raises
        ------
        CheckpointError
            There is no such expert, or one of its tensors is missing, or of sizes that fit no format.
        StateError
            The container is closed.
        """
        return EncodedExpert(*(matrix.weights() for matrix in self.stored_expert(layer, index)))

    def expert_nbytes(self, layer: int, index: int) -> int:
        """Bytes of memory that read_into() needs for an expert."""
        return sum(matrix.staged_bytes for matrix in self.stored_expert(layer, index))

    def read_into(self, layer: int, index: int, out) -> EncodedExpert:
        """Reads an expert into memory of the caller, such as page-locked memory, to update a device tensor from there.

        Parameters
        ----------
        out : writable uint8 array or buffer, one-dimensional
            At least expert_nbytes(). Nothing is written where it is too small or the expert is not sound.

        Returns
        -------
        EncodedExpert
            In the memory of `out`: valid until that is written to again.

        Raises
        ------
        ArgumentError
            `out` is read-only, too small or not bytes.
        CheckpointError, StateError
            As expert().
        """
        matrices = self.stored_expert(layer, index)
        room = _writable_bytes(out, sum(matrix.staged_bytes for matrix in matrices))
        read = []
        for matrix in matrices:
            read.append(matrix.read_into(room))
            room = room[matrix.staged_bytes :]
        return EncodedExpert(*read)

    def stored_expert(self, layer: int, index: int) -> tuple[StoredMatrix, StoredMatrix, StoredMatrix]:
        """Where the matrices of an expert lie. Raises as expert()."""
        count = self._count(layer)
        if not 0 <= index < count:
            raise CheckpointError(f"{self.path}: layer {layer} has experts 0 to {count - 1}, got {index}")
        names = self._layer(layer).tensors(index)
        gate, up, down = (self.stored(name) for name in names)
        if gate.shape != up.shape or down.shape != gate.shape[::-1]:
            shapes = ", ".join(f"{m.name} {list(m.shape)}" for m in (gate, up, down))
            raise CheckpointError(f"{self.path}: expected gate and up [I, D] and down [D, I], got {shapes}")
        return gate, up, down

    def stored(self, name: str, shape: tuple[int, int] | None = None) -> StoredMatrix:
        """Where an encoded matrix lies.

        Parameters
        ----------
        shape : (int, int), optional
            [O, I], for a matrix of which neither the configuration nor a stamp says it.

        Raises
        ------
        CheckpointError
            The matrix is missing, or its shape or format is not known, or another shape is.
        """
        file, stamps = self._holder(name), self._stamps[self._holder(name).path]
        kind = f"{file.dtype(name)} {list(file.shape(name))}"
        if file.dtype(name) == "F32" and len(file.shape(name)) == 2:
            return StoredMatrix(name, file, None, self._shape(name, stamps, file.shape(name)), Encoding("f32"))
        if file.dtype(name) != "U8" or len(file.shape(name)) not in (1, 2):
            raise CheckpointError(f"{name} in {file.path}: expected an encoded matrix (U8, one dimension), got {kind}")
        scales_file = self._file_of.get(name + SCALES_SUFFIX)
        if scales_file is None:
            raise CheckpointError(f"{name} in {file.path}: its scales {name}{SCALES_SUFFIX} are missing")
        shape = self._shape(name, stamps, shape)
        nbytes = file.nbytes(name), scales_file.nbytes(name + SCALES_SUFFIX)
        found = candidates(shape, *nbytes, scales_file.dtype(name + SCALES_SUFFIX))
        encoding = stamps.choose(name, found, shape, nbytes)
        if encoding.fmt != "e8":
            return StoredMatrix(name, file, scales_file, shape, encoding)
        tag = scales_file.view(name + SCALES_SUFFIX).reshape(-1)
        if not np.array_equal(tag, e8_tag(encoding.rotated)):
            expected = f"the tag {e8_tag(encoding.rotated).tolist()} of an e8 matrix"
            raise CheckpointError(
                f"{name}{SCALES_SUFFIX} in {scales_file.path}: expected {expected}, got {tag.tolist()}"
            )
        return StoredMatrix(name, file, None, shape, encoding)

    def router(self, layer: int) -> dict:
        """What a layer's router is, as `Router` takes it: weight float32 [E, D], top_k, kind, ...

        Raises
        ------
        CheckpointError
            The router's weight is missing or of a wrong shape, or the configuration does not say how many experts a row
            has.
        """
        name = f"{self._block(layer)}gate.weight"
        if name not in self:
            raise CheckpointError(f"{self.path}: layer {layer} has no router that is known here: {name} is missing")
        count, hidden = self._count(layer), self.stored_expert(layer, 0)[0].shape[1]
        bias_name = f"{name.removesuffix('weight')}e_score_correction_bias"
        bias = self._floats(bias_name, (count,)) if bias_name in self else None
        config = {**self._sizes, "model_type": self.config.get("model_type")}
        return router_settings(self._floats(name, (count, hidden)), bias, config, self._config_source)

    def shared_expert(self, layer: int) -> tuple[EncodedExpert, np.ndarray | None] | None:
        """The expert that every row of a layer passes, and the vector float32 [D] whose product with a row, through a
        sigmoid, is its factor (None: 1). None where the layer has no such expert. Raises as expert()."""
        for stem in (f"{self._block(layer)}shared_experts.", f"{self._block(layer)}shared_expert."):
            if f"{stem}gate_proj.weight" in self:
                matrices = (self.stored(f"{stem}{matrix}.weight") for matrix in ("gate_proj", "up_proj", "down_proj"))
                expert = EncodedExpert(*(matrix.weights() for matrix in matrices))
                factor = f"{self._block(layer)}shared_expert_gate.weight"
                hidden = expert.gate.shape[1]
                return expert, self._floats(factor, (1, hidden)).reshape(-1) if factor in self else None
        return None

    def _block(self, layer: int) -> str:
        """What the names of everything in a layer's MoE block begin with."""
        return self._layer(layer).stem.removesuffix("experts.")

    def _floats(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor as float32, whether it is kept so or encoded."""
        file = self._holder(name)
        if file.dtype(name) == "U8" and len(shape) == 2:
            return self.stored(name, shape).weights().decode()
        if file.dtype(name) != "F32" or file.shape(name) != shape:
            got = f"{file.dtype(name)} {list(file.shape(name))}"
            raise CheckpointError(f"{name} in {file.path}: expected F32 of shape {list(shape)}, got {got}")
        return file.view(name).astype(np.float32)

    def shape_is_known(self, name: str) -> bool:
        """Whether configuration or stamp say the shape of a matrix; existing hosts' files do so for few but experts."""
        return bool(self._config_shape(name) or self._stamps[self._holder(name).path].shape(name))

    def names(self) -> list[str]:
        """Names of all matrices and other tensors, without those of scales."""
        return [
            name
            for name in self._file_of
            if not (name.endswith(SCALES_SUFFIX) and name[: -len(SCALES_SUFFIX)] in self._file_of)
        ]

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def file(self, name: str) -> TensorFile:
        """The file that holds a tensor. CheckpointError where there is none."""
        return self._holder(name)

    def checksum(self, name: str) -> str | None:
        """SHA-256 of a tensor's data as its file states it, in hexadecimal; None where it does not."""
        return self._stamps[self._holder(name).path].checksums.get(name)

    def close(self) -> None:
        """Lets go of the files. Weights that were read stay valid. A second call does nothing."""
        self._closed = True
        self._files, self._file_of, self._stamps = [], {}, {}

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __repr__(self) -> str:
        layers = f"layers {number_ranges(self.layers)}"
        return f"<Container {self.path}: {layers}{', closed' if self._closed else ''}>"

    def _holder(self, name: str) -> TensorFile:
        file = self._file_of.get(name)
        if file is None:
            self._check_open()
            raise CheckpointError(f"{self.path}: no tensor {name}")
        return file

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"the container {self.path} is closed")

    def _layer(self, layer: int) -> SeparateLayer:
        self._check_open()
        found = self._layers.get(layer)
        if found is None:
            have = number_ranges(self.layers)
            raise CheckpointError(f"{self.path}: layers with routed experts are {have}, got layer {layer}")
        if isinstance(found, FusedLayer):
            raise CheckpointError(f"{self.path}: layer {layer} has all experts in one tensor, {found.gate_up}")
        return found

    def _count(self, layer: int) -> int:
        count = self._layer(layer).count(layer, self.path)
        expected = self._config_size("num_experts", "n_routed_experts", "num_local_experts")
        if expected is not None and expected != count:
            raise CheckpointError(
                f"{self.path}: layer {layer}: expected {expected} experts ({self._config_source}), got {count}"
            )
        return count

    def _config_size(self, *keys: str) -> int | None:
        return positive_integer(self._sizes, self._config_source, *keys)

    def _shape(self, name: str, stamps: Stamps, in_file: tuple[int, ...] | None) -> tuple[int, int]:
        """The shape of a matrix by the configuration, the stamp and the file or caller, which must agree."""
        said = {
            self._config_source: self._config_shape(name),
            "its stamp": stamps.shape(name),
            "the file": tuple(in_file) if in_file else None,
        }
        shapes = {shape for shape in said.values() if shape}
        if len(shapes) > 1:
            text = ", ".join(f"{list(shape)} ({source})" for source, shape in said.items() if shape)
            raise CheckpointError(f"{self.path}: {name}: its shapes differ: {text}")
        shape = shapes.pop() if shapes else None
        if shape is None:
            raise CheckpointError(
                f"{self.path}: the shape of {name} is not known: neither {self._config_source} nor a stamp says it"
            )
        return shape

    def _config_shape(self, name: str) -> tuple[int, int] | None:
        hidden = self._config_size("hidden_size")
        if role := expert_role(name):
            inner = self._config_size("moe_intermediate_size", "intermediate_size")
            if hidden is None or inner is None:
                return None
            return (hidden, inner) if role == ROLES[2] else (inner, hidden)
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            vocabulary = self._config_size("vocab_size")
            return (vocabulary, hidden) if vocabulary and hidden else None
        return None


def is_container(path: str | os.PathLike) -> bool:
    """Whether a path looks like a container rather than a checkpoint: by its files' names, or its tensors'."""
    path = Path(path)
    if path.is_dir():
        return (path / MANIFEST).exists() or any(path.glob("out-*.safetensors"))
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    file = TensorFile(path)
    return any(name.endswith(SCALES_SUFFIX) and name[: -len(SCALES_SUFFIX)] in file for name in file.names())


def _open_files(path: Path) -> list[TensorFile]:
    if path.is_file():
        return [TensorFile(path)]
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder; the folder of a container is expected")
    files = {file.name: file for file in sorted(path.glob("out-*.safetensors"))}
    for name, nbytes in _listed_shards(path / MANIFEST).items():
        if name not in files:
            raise CheckpointError(f"{path / name}: no such file, but {MANIFEST} lists it")
        if files[name].stat().st_size != nbytes:
            size = files[name].stat().st_size
            raise CheckpointError(f"{path / name}: expected {nbytes} bytes ({MANIFEST}), got {size}")
    if not files:
        raise CheckpointError(f"{path}: expected out-*.safetensors in this folder, found none")
    return [TensorFile(file) for file in files.values()]


def _listed_shards(manifest: Path) -> dict[str, int]:
    """Bytes of the shards that pycoli's manifest lists; none for the manifests of other programs, or without one."""
    if not manifest.exists():
        return {}
    content = read_json(manifest)
    if content.get("program") != "pycoli":
        return {}
    if content.get("complete") is not True:
        raise CheckpointError(f"{manifest.parent}: its conversion is not finished; run pycoli convert again")
    shards = content.get("shards")
    if not isinstance(shards, dict) or not all(
        isinstance(shard, dict) and type(shard.get("bytes")) is int for shard in shards.values()
    ):
        raise CheckpointError(f"{manifest}: expected an object shards with the bytes of each")
    return {name: shard["bytes"] for name, shard in shards.items()}


def _by_tensor(files: list[TensorFile]) -> dict[str, TensorFile]:
    by_tensor: dict[str, TensorFile] = {}
    for file in files:
        for name in file.names():
            if name in by_tensor:
                raise CheckpointError(f"{name} is in {by_tensor[name].path} and again in {file.path}")
            by_tensor[name] = file
    return by_tensor


def _read_config(path: Path, files: list[TensorFile]) -> tuple[dict, str]:
    if path.is_file() and "config" in files[0].metadata:
        source = f"metadata of {path}"
        return parse_json(files[0].metadata["config"], source), source
    file = (path if path.is_dir() else path.parent) / "config.json"
    return (read_json(file) if file.exists() else {}), str(file)


def _writable_bytes(out, needed: int) -> np.ndarray:
    try:
        room = np.frombuffer(out, np.uint8) if not isinstance(out, np.ndarray) else out
    except (TypeError, ValueError, BufferError) as error:
        raise ArgumentError(f"out must be a writable uint8 array or buffer: {error}") from error
    if room.dtype != np.uint8 or room.ndim != 1 or not room.flags.c_contiguous or not room.flags.writeable:
        state = "writable" if room.flags.writeable else "read-only"
        raise ArgumentError(f"out must be a writable uint8 array [n], got {room.dtype} {list(room.shape)}, {state}")
    if room.size < needed:
        raise ArgumentError(f"out must have at least {needed} bytes, got {room.size}")
    return room


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
