"""What a conversion reads: the tensors of a checkpoint, each matrix of an expert by itself, a few rows at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..checkpoint import FP8_SCALES_SUFFIX, Checkpoint
from ..errors import CheckpointError
from ..layout import Encoding
from ..naming import FusedLayer, SeparateLayer, layers_by_prefix, natural_order

__all__ = ["CheckpointSource", "Source", "SourceTensor"]

_FLOATS = ("F32", "BF16", "F16", "F8_E4M3")

_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files beside the weights that go into the container as they are."""


class SourceTensor(ABC):
    """A tensor as the container will have it.

    Attributes
    ----------
    name : str
        In the container.
    source : str
        Tensor and file in words, for messages.
    shape : tuple of int
    dtype : str
        The type in the source, such as "BF16" or "IQ3_XXS".
    is_float : bool
        Whether rows() gives its values; else it is taken over byte for byte.
    native : Encoding or None
        What its bytes can be rewritten to without loss.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    is_float: bool = True
    native: Encoding | None = None

    @property
    def columns(self) -> int:
        """Size of the last dimension, 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    @property
    def row_count(self) -> int:
        """All dimensions but the last in one."""
        return math.prod(self.shape[:-1])

    @abstractmethod
    def rows(self, first: int, last: int) -> np.ndarray:
        """The rows first ... last - 1, exact float32 [n, columns]."""

    def native_rows(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Bytes and scales of the rows in the `native` encoding."""
        raise NotImplementedError

    def raw(self) -> np.ndarray:
        """All bytes, uint8 [n], of a tensor that is not float."""
        raise NotImplementedError


def check_finite_rows(tensor: SourceTensor, first: int, w: np.ndarray) -> None:
    """CheckpointError, which names the first element that is NaN or infinite, for rows from `first` on."""
    finite = np.isfinite(w)
    if not finite.all():
        row, column = (int(i) for i in np.unravel_index(int(np.argmin(finite)), w.shape))
        raise CheckpointError(
            f"{tensor.source}: expected finite weights, got {w[row, column]} at [{first + row}, {column}]"
        )


class Source(ABC):
    """A model to convert.

    Attributes
    ----------
    path : Path
    """

    path: Path

    @abstractmethod
    def tensors(self) -> list[SourceTensor]:
        """All tensors, in the order of the container. CheckpointError where one cannot be understood."""

    @abstractmethod
    def fingerprint(self) -> list[str]:
        """A text for each file, which changes when its tensors do, be it their values alone."""

    @abstractmethod
    def companions(self) -> dict[str, bytes | Path]:
        """Other files of the container, by name: their content, or a file to copy."""

    def expert_shape(self) -> tuple[int | None, int | None]:
        """Rows and columns of an expert's gate as the configuration says them."""
        return None, None

    def warnings(self) -> list[str]:
        """What a user should know of what cannot be taken over."""
        return []


@dataclass
class _Plain(SourceTensor):
    """A tensor of a checkpoint as it is."""

    checkpoint: Checkpoint
    name: str

    def __post_init__(self):
        file = self.checkpoint.file(self.name)
        self.source = f"{self.name} in {file.path}"
        self.shape, self.dtype = file.shape(self.name), file.dtype(self.name)
        self.is_float = self.dtype in _FLOATS

    def rows(self, first: int, last: int) -> np.ndarray:
        if len(self.shape) == 2:
            return self.checkpoint.rows(self.name, first, last)
        if self.dtype == "F8_E4M3":
            raise CheckpointError(f"{self.source}: expected a matrix, as fp8 has scales, got {list(self.shape)}")
        return self.checkpoint.file(self.name).read(self.name, first, last, self.columns).astype(np.float32)

    def raw(self) -> np.ndarray:
        file = self.checkpoint.file(self.name)
        out = np.empty(file.nbytes(self.name), np.uint8)
        file.read_into(self.name, out)
        return out


@dataclass
class _OfFused(SourceTensor):
    """One expert's matrix out of a tensor with those of all experts."""

    checkpoint: Checkpoint
    name: str
    tensor: str
    shape: tuple[int, int]
    expert: int
    offset: int  # of its first row in the expert's slice
    slice_rows: int  # of the slice, if it is not transposed
    transposed: bool

    def __post_init__(self):
        file = self.checkpoint.file(self.tensor)
        self.source = f"{self.name} ({self.tensor} in {file.path})"
        self.dtype = file.dtype(self.tensor)
        if self.dtype not in _FLOATS[:3]:
            raise CheckpointError(f"{self.source}: expected type {', '.join(_FLOATS[:3])}, got {self.dtype}")

    def rows(self, first: int, last: int) -> np.ndarray:
        file, columns = self.checkpoint.file(self.tensor), self.shape[1]
        if not self.transposed:
            start = self.expert * self.slice_rows + self.offset
            return file.read(self.tensor, start + first, start + last, columns).astype(np.float32)
        whole = file.read(self.tensor, self.expert * columns, (self.expert + 1) * columns, self.slice_rows)
        part = whole[:, self.offset + first : self.offset + last]
        return np.ascontiguousarray(part.T).astype(np.float32)


class CheckpointSource(Source):
    """A Hugging Face folder or a ``.safetensors`` file. CheckpointError as of Checkpoint."""

    def __init__(self, path: Path):
        self.path = path
        self._checkpoint = Checkpoint(path)

    def tensors(self) -> list[SourceTensor]:
        names = self._checkpoint.names()
        layers = layers_by_prefix(names, self.path)
        fused = [
            layer for by_number in layers.values() for layer in by_number.values() if isinstance(layer, FusedLayer)
        ]
        taken = {name for layer in fused for name in (layer.gate_up, layer.down)}
        found: list[SourceTensor] = [tensor for layer in fused for tensor in self._of_fused(layer)]
        present = set(names)
        for name in names:
            is_scale = name.endswith(FP8_SCALES_SUFFIX) and name.removesuffix(FP8_SCALES_SUFFIX) in present
            if name not in taken and not is_scale:
                found.append(_Plain(self._checkpoint, name))
        for by_number in layers.values():
            for layer in by_number.values():
                self._refuse_biases(layer, present)
        for number in self._checkpoint.moe_layers():
            self._checkpoint.expert_count(number)  # as many as the configuration says
        return sorted(found, key=lambda tensor: natural_order(tensor.name))

    def _refuse_biases(self, layer: SeparateLayer | FusedLayer, present: set[str]) -> None:
        biased = next((name for name in present if name.startswith(layer.stem) and name.endswith("bias")), None)
        if biased:
            raise CheckpointError(f"{self.path}: experts with biases are not supported: {biased}")

    def _of_fused(self, layer: FusedLayer) -> Iterator[SourceTensor]:
        count, inner, hidden, transposed = self._checkpoint.fused_shapes(layer)
        for expert in range(count):
            gate, up, down = layer.tensors(expert)
            where = (self._checkpoint, gate, layer.gate_up, (inner, hidden), expert, 0, 2 * inner, transposed)
            yield _OfFused(*where)
            yield _OfFused(self._checkpoint, up, layer.gate_up, (inner, hidden), expert, inner, 2 * inner, transposed)
            yield _OfFused(self._checkpoint, down, layer.down, (hidden, inner), expert, 0, hidden, transposed)

    def fingerprint(self) -> list[str]:
        return [f"{file.path.name} {file.fingerprint()}" for file in self._checkpoint.files()]

    def expert_shape(self) -> tuple[int | None, int | None]:
        return self._checkpoint.expert_shape()

    def companions(self) -> dict[str, bytes | Path]:
        folder = self.path if self.path.is_dir() else self.path.parent
        files: dict[str, bytes | Path] = {name: folder / name for name in _COMPANIONS if (folder / name).is_file()}
        if config := self._checkpoint.config_text():
            files["config.json"] = config
        return files
