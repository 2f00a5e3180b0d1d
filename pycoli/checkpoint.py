"""Routed experts of a mixture-of-experts model, read from a Hugging Face checkpoint.

A checkpoint is a folder (``config.json`` with ``model.safetensors``, or with ``model.safetensors.index.json`` and its
shards) or a single ``.safetensors`` file. Weights come out as exact float32; nothing is read before it is asked for.

naming.py has the names that are understood. A single file may carry its configuration as the metadata entry ``config``
(the text of a ``config.json``) and the recorded inputs of its MoE blocks as tensors ``layerN.x``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ._json import parse_json, positive_integer, read_json
from .errors import CheckpointError
from .naming import FusedLayer, SeparateLayer, model_layers, number_ranges
from .routing import router_settings
from .tensorfile import TensorFile

__all__ = ["Checkpoint", "ExpertWeights", "recorded_input_name"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

FP8_SCALES_SUFFIX = "_scale_inv"
"""The scales of an fp8 matrix have its name and this."""

_FOREIGN = {
    ".bin": "PyTorch .bin files are not read; convert to safetensors",
    ".pt": "PyTorch .pt files are not read; convert to safetensors",
    ".pth": "PyTorch .pth files are not read; convert to safetensors",
    ".gguf": "GGUF files are read by pycoli convert; convert it, or give the checkpoint that it was made from",
}
"""Weights that are often given in place of safetensors, by the end of their names, and what to do."""


def recorded_input_name(layer: int) -> str:
    """Name of the tensor that holds recorded inputs of a layer's MoE block, [tokens, D]."""
    return f"layer{layer}.x"


@dataclass(frozen=True)
class ExpertWeights:
    """One expert: ``down(silu(gate x) * (up x))``; float32, gate and up [I, D], down [D, I].

    ``sources`` says for messages where each of the three is from: tensor and file.
    """

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    sources: tuple[str, str, str]


class Checkpoint:
    """The MoE layers of a checkpoint.

    Parameters
    ----------
    path : str or Path
        A Hugging Face folder or a ``.safetensors`` file.

    Attributes
    ----------
    path : Path
    model_type : str
        As the configuration says, such as ``"olmoe"``; ``"unknown"`` without one.

    Raises
    ------
    CheckpointError
        The path is neither, a file of it cannot be read, or it holds no routed experts in a known naming.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._files: dict[Path, TensorFile] = {}
        if self.path.is_dir():
            self._listing, self._file_of = self._list_folder()
            self._config_source = self.path / "config.json"
            config = read_json(self._config_source) if self._config_source.exists() else {}
        elif self.path.is_file():
            self._refuse_other_kinds()
            self._listing, self._file_of = self._list_file(self.path)
            config = self._single_file_config()
        else:
            raise CheckpointError(f"{self.path}: no such file or folder; a local Hugging Face folder is expected")
        self.model_type = str(config.get("model_type", "unknown"))
        text_config = config.get("text_config")
        self._config = {**config, **text_config} if isinstance(text_config, dict) else config
        self._layers = model_layers(self._file_of, self._listing)

    @property
    def activation(self) -> str:
        """The experts' activation function as the configuration names it; ``"silu"`` without one."""
        name = self._config.get("hidden_act")
        return "silu" if name is None else str(name)

    def moe_layers(self) -> list[int]:
        """Numbers of the layers with routed experts, ascending."""
        return sorted(self._layers)

    def expert_count(self, layer: int) -> int:
        """Number of routed experts of a layer.

        Raises
        ------
        CheckpointError
            The layer has none, some are missing, or the configuration tells another number.
        """
        found = self._layer(layer)
        count = self.fused_shapes(found)[0] if isinstance(found, FusedLayer) else found.count(layer, self._listing)
        expected = self._config_size("num_experts", "n_routed_experts", "num_local_experts")
        if expected is not None and expected != count:
            raise CheckpointError(
                f"{self._listing}: layer {layer}: expected {expected} experts ({self._config_source}), got {count}"
            )
        return count

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """Reads one expert.

        Returns
        -------
        ExpertWeights
            float32, exact: fp8 weights are multiplied by their block scales.

        Raises
        ------
        CheckpointError
            There is no such expert, or one of its tensors is missing, of a wrong shape or of an unknown type.
        """
        found = self._layer(layer)
        if isinstance(found, FusedLayer):
            return self._fused_expert(found, layer, expert)
        if expert not in found.experts:
            raise CheckpointError(
                f"{self._listing}: layer {layer} has experts {number_ranges(sorted(found.experts))}, got {expert}"
            )
        gate, up, down = (self._matrix(found.tensor(expert, matrix)) for matrix in found.matrices)
        inner, hidden = (said or got for said, got in zip(self.expert_shape(), gate.shape, strict=True))
        shapes = ((gate, (inner, hidden)), (up, (inner, hidden)), (down, (hidden, inner)))
        for matrix, (weights, shape) in zip(found.matrices, shapes, strict=True):
            self._check_shape(found.tensor(expert, matrix), weights.shape, shape)
        return ExpertWeights(gate, up, down, tuple(self._source(found.tensor(expert, m)) for m in found.matrices))

    def expert_shape(self) -> tuple[int | None, int | None]:
        """Rows and columns of an expert's gate as the configuration says them, None where it does not."""
        inner = self._config_size("moe_intermediate_size", "intermediate_size")
        return inner, self._config_size("hidden_size")

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file_of)

    def file(self, name: str) -> TensorFile:
        """The file that holds a tensor. CheckpointError where it is missing."""
        return self._holder(name)

    def files(self) -> list[TensorFile]:
        """All files that hold tensors. CheckpointError where one is missing."""
        return [self._holder(name) for name in dict(zip(self._file_of.values(), self._file_of, strict=True)).values()]

    def config_text(self) -> bytes | None:
        """The configuration as it stands, the text of a config.json; None without one."""
        if self.path.is_file() and "config" in self._file(self.path).metadata:
            return self._file(self.path).metadata["config"].encode()
        folder = self.path if self.path.is_dir() else self.path.parent
        return (folder / "config.json").read_bytes() if (folder / "config.json").exists() else None

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """The rows first ... last - 1 of a matrix as exact float32, read and not mapped; fp8 through its block scales.

        Raises
        ------
        CheckpointError
            The matrix is missing or of an unknown type, or its block scales are missing or of a wrong shape.
        """
        file = self._holder(name)
        rows = file.read(name, first, last, file.shape(name)[1])
        if self._float_type(name) == "F8_E4M3":
            return _scaled(rows, *self._fp8_scales(name), first)
        return rows.astype(np.float32)

    def router(self, layer: int) -> dict:
        """What a layer's router is, as `Router` takes it: weight float32 [E, D], top_k, kind, ...

        Raises
        ------
        CheckpointError
            The router's weight is missing or of a wrong shape, or the configuration does not say how many experts a row
            has.
        """
        name = f"{self._block(layer)}gate.weight"
        weight, bias = self._float32_or_none(name), self._float32_or_none(f"{name[:-6]}e_score_correction_bias")
        if weight is None:  # a "router.weight" is one with rules of its own
            raise CheckpointError(f"{self._listing}: layer {layer} has no router that is known here: {name} is missing")
        hidden = self.expert_shape()[1] or self.expert(layer, 0).gate.shape[1]
        self._check_shape(name, weight.shape, (self.expert_count(layer), hidden))
        return router_settings(weight, bias, {**self._config, "model_type": self.model_type}, self._config_source)

    def shared_expert(self, layer: int) -> tuple[ExpertWeights, np.ndarray | None] | None:
        """The expert that every row of a layer passes, and the vector float32 [D] whose product with a row, through a
        sigmoid, is its factor (None: 1). None where the layer has no such expert."""
        for stem in (f"{self._block(layer)}shared_experts.", f"{self._block(layer)}shared_expert."):
            names = [f"{stem}{matrix}.weight" for matrix in ("gate_proj", "up_proj", "down_proj")]
            if names[0] in self._file_of:
                gate, up, down = (self._matrix(name) for name in names)
                factor = self._float32_or_none(f"{self._block(layer)}shared_expert_gate.weight")
                weights = ExpertWeights(gate, up, down, tuple(self._source(name) for name in names))
                return weights, None if factor is None else factor.reshape(-1)
        return None

    def _block(self, layer: int) -> str:
        """What the names of everything in a layer's MoE block begin with."""
        return self._layer(layer).stem.removesuffix("experts.")

    def _float32_or_none(self, name: str) -> np.ndarray | None:
        return self._float32(name) if name in self._file_of else None

    def recorded_input(self, layer: int) -> np.ndarray | None:
        """Recorded inputs of the layer's MoE block, float32 [tokens, D]; None where the checkpoint carries none."""
        name = recorded_input_name(layer)
        return self._float32(name) if name in self._file_of else None

    # Files

    def _refuse_other_kinds(self) -> None:
        """Raises for a file that is a part of a checkpoint, or one of another kind."""
        folder = self.path.absolute().parent
        if self.path.name.endswith(".safetensors.index.json"):
            raise CheckpointError(f"{self.path}: this is only the index of a checkpoint; give its folder, {folder}")
        if self.path.name == "config.json":
            raise CheckpointError(f"{self.path}: this is only the configuration of a model; give its folder, {folder}")
        if self.path.suffix in _FOREIGN:
            raise CheckpointError(f"{self.path}: {_FOREIGN[self.path.suffix]}")

    def _list_folder(self) -> tuple[Path, dict[str, Path]]:
        index = self.path / _INDEX
        if not index.exists():
            single = self.path / _SINGLE
            if not single.exists():
                text = f"{self.path}: expected {_SINGLE} or {_INDEX} in this folder, found neither"
                if any(self.path.glob("out-*.safetensors")):
                    raise CheckpointError(f"{text}, but a container; give the model that it was made from")
                foreign = next((file for file in sorted(self.path.iterdir()) if file.suffix in _FOREIGN), None)
                raise CheckpointError(f"{text}, but {foreign.name}: {_FOREIGN[foreign.suffix]}" if foreign else text)
            return self._list_file(single)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: expected an object weight_map, got {type(weight_map).__name__}")
        file_of = {}
        for name, shard in weight_map.items():
            # A shard is a plain file name: an index must not lead out of its folder.
            if not isinstance(shard, str) or shard in ("", ".", "..") or "/" in shard or "\\" in shard:
                raise CheckpointError(f"{index}: tensor {name}: expected a file name, got {shard!r}")
            file_of[name] = self.path / shard
        return index, file_of

    def _list_file(self, path: Path) -> tuple[Path, dict[str, Path]]:
        return path, dict.fromkeys(self._file(path).names(), path)

    def _single_file_config(self) -> dict:
        metadata = self._file(self.path).metadata
        if "config" in metadata:
            self._config_source = f"metadata of {self.path}"
            return parse_json(metadata["config"], self._config_source)
        self._config_source = self.path.parent / "config.json"
        return read_json(self._config_source) if self._config_source.exists() else {}

    def _file(self, path: Path) -> TensorFile:
        if path not in self._files:
            self._files[path] = TensorFile(path)
        return self._files[path]

    def _holder(self, name: str) -> TensorFile:
        """The file that holds a tensor."""
        if name not in self._file_of:
            raise CheckpointError(f"{self._listing}: no tensor {name}")
        path = self._file_of[name]
        if path not in self._files and not path.exists():
            raise CheckpointError(f"{path}: no such file, but {self._listing} places {name} in it")
        file = self._file(path)
        if name not in file:
            raise CheckpointError(f"{path}: no tensor {name}, but {self._listing} places it there")
        return file

    # Configuration

    def _config_size(self, *keys: str) -> int | None:
        """The first of the entries that the configuration has, a positive number."""
        return positive_integer(self._config, self._config_source, *keys)

    # Layers

    def _layer(self, layer: int) -> SeparateLayer | FusedLayer:
        if layer not in self._layers:
            raise CheckpointError(
                f"{self._listing}: layers with routed experts are {number_ranges(self.moe_layers())}, got layer {layer}"
            )
        found = self._layers[layer]
        for name in (f"{found.stem}gate_up_proj_bias", f"{found.stem}0.gate_proj.bias", f"{found.stem}0.w1.bias"):
            if name in self._file_of:
                raise CheckpointError(f"{self._listing}: experts with biases are not supported: {name}")
        return found

    # Tensors

    def _source(self, name: str) -> str:
        return f"{name} in {self._file_of[name]}"

    def _float32(self, name: str) -> np.ndarray:
        """A tensor as exact float32, fp8 through its block scales."""
        fp8 = self._float_type(name) == "F8_E4M3"
        values = self._holder(name).view(name)
        return _scaled(values, *self._fp8_scales(name)) if fp8 else values.astype(np.float32)

    def _float_type(self, name: str) -> str:
        """The type of a tensor that can be made float32."""
        file = self._holder(name)
        kind = file.dtype(name)
        if kind not in ("F32", "BF16", "F16", "F8_E4M3"):
            raise CheckpointError(f"{name} in {file.path}: expected type F32, BF16, F16 or F8_E4M3, got {kind}")
        return kind

    def _fp8_scales(self, name: str) -> tuple[np.ndarray, tuple[int, int]]:
        """The block scales of an fp8 matrix in float32, and the rows and columns of a block."""
        scale_name = name + FP8_SCALES_SUFFIX
        if scale_name not in self._file_of:
            raise CheckpointError(f"{self._listing}: {name} is F8_E4M3, but its block scales {scale_name} are missing")
        scale_file = self._holder(scale_name)
        if scale_file.dtype(scale_name) not in ("F32", "BF16", "F8_E8M0"):
            raise CheckpointError(
                f"{scale_name} in {scale_file.path}: expected type F32, BF16 or F8_E8M0, "
                f"got {scale_file.dtype(scale_name)}"
            )
        block, shape = self._fp8_block(), self._holder(name).shape(name)
        if len(shape) != 2:
            raise CheckpointError(f"{name}: expected a matrix beside block scales, got shape {list(shape)}")
        expected = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
        self._check_shape(scale_name, scale_file.shape(scale_name), expected)
        return scale_file.view(scale_name).astype(np.float32), block

    def _fp8_block(self) -> tuple[int, int]:
        quantization = self._config.get("quantization_config")
        block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
        if block is None:
            return 128, 128
        if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise CheckpointError(
                f"{self._config_source}: weight_block_size: expected two positive integers, got {block!r}"
            )
        return block[0], block[1]

    def _matrix(self, name: str) -> np.ndarray:
        shape = self._holder(name).shape(name)
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"{self._source(name)}: expected a matrix, got shape {list(shape)}")
        return self._float32(name)

    def _check_shape(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if tuple(shape) != tuple(expected):
            raise CheckpointError(
                f"{self._source(name)}: expected shape {list(expected)} "
                f"(from {self._config_source} and the expert's other matrices), got {list(shape)}"
            )

    # All experts in one tensor

    def fused_shapes(self, layer: FusedLayer) -> tuple[int, int, int, bool]:
        """Number of experts, inner and hidden size, and whether the matrices are transposed.

        As written, gate_up is [E, 2 I, D] and down [E, D, I]; transposed, [E, D, 2 I] and [E, I, D]. No shapes fit
        both.
        """
        gate_up = self._holder(layer.gate_up).shape(layer.gate_up)
        down = self._holder(layer.down).shape(layer.down)
        wanted_hidden = self._config_size("hidden_size")
        wanted_inner = self._config_size("moe_intermediate_size")
        for name, shape in ((layer.gate_up, gate_up), (layer.down, down)):
            if 0 in shape:
                wanted = "expected at least 1 expert, row and column"
                raise CheckpointError(f"{self._source(name)}: {wanted}, got shape {list(shape)}")
        if len(gate_up) == len(down) == 3 and gate_up[0] == down[0]:
            for transposed in (False, True):
                rows, hidden = reversed(gate_up[1:]) if transposed else gate_up[1:]
                inner = rows // 2
                fits = rows % 2 == 0 and down[1:] == ((inner, hidden) if transposed else (hidden, inner))
                if fits and wanted_hidden in (None, hidden) and wanted_inner in (None, inner):
                    return gate_up[0], inner, hidden, transposed
        raise CheckpointError(
            f"{layer.gate_up} {list(gate_up)} and {layer.down} {list(down)} in {self._listing}: expected "
            f"[E, 2 I, D] and [E, D, I], or [E, D, 2 I] and [E, I, D], with hidden_size {wanted_hidden} (D) and "
            f"moe_intermediate_size {wanted_inner} (I) as {self._config_source} has them"
        )

    def _fused_expert(self, layer: FusedLayer, number: int, expert: int) -> ExpertWeights:
        count, inner, _, transposed = self.fused_shapes(layer)
        if not 0 <= expert < count:
            raise CheckpointError(f"{self._listing}: layer {number} has experts 0 to {count - 1}, got {expert}")
        gate_up, down = self._slice(layer.gate_up, expert), self._slice(layer.down, expert)
        if transposed:
            gate_up, down = gate_up.T, down.T
        sources = (self._source(layer.gate_up), self._source(layer.gate_up), self._source(layer.down))
        return ExpertWeights(*(np.ascontiguousarray(w) for w in (gate_up[:inner], gate_up[inner:], down)), sources)

    def _slice(self, name: str, expert: int) -> np.ndarray:
        """One expert's matrix of a tensor of all experts, float32."""
        file = self._holder(name)
        if file.dtype(name) not in ("F32", "BF16", "F16"):
            raise CheckpointError(f"{name} in {file.path}: expected type F32, BF16 or F16, got {file.dtype(name)}")
        return file.view(name)[expert].astype(np.float32)


def _scaled(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], first: int = 0) -> np.ndarray:
    """Rows of an fp8 matrix, from row `first` on, times the scales of their blocks."""
    of_row = scales[(first + np.arange(len(codes))) // min(block[0], first + len(codes))]
    return codes.astype(np.float32) * np.repeat(of_row, min(block[1], codes.shape[1]), axis=1)[:, : codes.shape[1]]
