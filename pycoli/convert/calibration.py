"""Calibration of a conversion: what is known of the activations that experts meet, and experts encoded with it."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..calibrate import MIN_ROWS, Calibration, CalibrationReport, read_imatrix
from ..checkpoint import recorded_input_name
from ..errors import CheckpointError, ColiError
from ..expert_encoding import encode_expert
from ..moe import Router
from ..naming import ROLES, ExpertPlace, expert_place, model_layers
from ..routing import router_settings
from ..tensorfile import TensorFile
from ..weights import Weights, encode, encode_calibrated
from . import gguf_names
from .plan import PlannedTensor
from .source import SourceTensor, check_finite_rows

__all__ = ["CalibrationTotals", "Calibrator", "Imatrix", "Knowledge", "Recording"]

_BATCH = 4096
"""Recorded rows that are routed together."""


@dataclass
class CalibrationTotals:
    """How calibrating went.

    Attributes
    ----------
    matrices : int
        Those that were calibrated.
    searched : dict of str to int
        Those that were encoded by searching instead, by the reason.
    output_error, search_output_error : float
        Sums over the calibrated matrices: what part of the outputs' energy the errors have over the activations, and
        what it would be by searching.
    collect_seconds, encode_seconds : float
        Sums over threads.
    peak_bytes : int
        About the memory that one matrix took at most.
    """

    matrices: int = 0
    searched: dict[str, int] = field(default_factory=dict)
    output_error: float = 0.0
    search_output_error: float = 0.0
    collect_seconds: float = 0.0
    encode_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def count(self) -> int:
        """All matrices that were to be calibrated."""
        return self.matrices + sum(self.searched.values())

    def add(self, other: CalibrationTotals) -> None:
        for name in ("matrices", "output_error", "search_output_error", "collect_seconds", "encode_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, count in other.searched.items():
            self.searched[reason] = self.searched.get(reason, 0) + count
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)

    @classmethod
    def of_matrix(cls, report: CalibrationReport, collect_seconds: float) -> CalibrationTotals:
        """Those of one matrix."""
        totals = cls(0, {}, 0.0, 0.0, collect_seconds, report.encode_seconds, report.peak_bytes)
        if report.reason is None:
            totals.matrices = 1
            totals.output_error, totals.search_output_error = report.output_error, report.search_output_error
        else:
            few = report.rows is not None and report.rows < MIN_ROWS
            totals.searched[f"fewer than {MIN_ROWS} activations" if few else report.reason] = 1
        return totals


class EncodedMatrix(NamedTuple):
    """A matrix, and how calibrating it went."""

    weights: Weights
    totals: CalibrationTotals

    @classmethod
    def searched(cls, w: np.ndarray, reason: str) -> EncodedMatrix:
        """One that cannot be calibrated."""
        return cls(encode(w, "e8"), CalibrationTotals(searched={reason: 1}))


class Knowledge(ABC):
    """A file that says what activations the experts of a model meet.

    Attributes
    ----------
    path : Path
    """

    path: Path

    @abstractmethod
    def bind(self, tensors: Iterable[SourceTensor], config: dict, config_source: str) -> None:
        """Takes the model that is converted. CheckpointError where the file does not go with it."""

    @abstractmethod
    def encode(self, layer: int, expert: int, matrices: dict[str, np.ndarray]) -> dict[str, EncodedMatrix]:
        """Encodes the matrices of an expert, by role, as E8; may be called by several threads."""


class Imatrix(Knowledge):
    """An importance matrix of ggml: the mean squares of the activations' elements.

    Raises
    ------
    CheckpointError, NotProvidedError
        As read_imatrix().
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._vectors = read_imatrix(self.path)

    def bind(self, tensors: Iterable[SourceTensor], config: dict, config_source: str) -> None:
        places = [(expert_place(tensor.name), tensor) for tensor in tensors]
        experts = {(place.layer, place.expert, place.role): tensor.columns for place, tensor in places if place}
        # all of them, so that a wrong one is found now and not when its expert's turn comes
        known = [self._importance(*place, columns) is not None for place, columns in experts.items()]
        if not any(known):
            layer, expert, role = next(iter(experts))
            names = " or ".join(_imatrix_names(layer, expert, role))
            raise CheckpointError(f"{self.path}: nothing on the experts of this model, such as {names}")

    def encode(self, layer: int, expert: int, matrices: dict[str, np.ndarray]) -> dict[str, EncodedMatrix]:
        encoded = {}
        for role, w in matrices.items():
            importance = self._importance(layer, expert, role, w.shape[1])
            if importance is None or not importance.any():
                reason = "not in the imatrix" if importance is None else "no activations in the imatrix"
                encoded[role] = EncodedMatrix.searched(w, reason)
            else:
                weights, report = encode_calibrated(w, Calibration.from_importance(importance))
                encoded[role] = EncodedMatrix(weights, CalibrationTotals.of_matrix(report, report.collect_seconds))
        return encoded

    def _importance(self, layer: int, expert: int, role: str, columns: int) -> np.ndarray | None:
        """The vector of a matrix, None where there is none."""
        of_all, of_one = _imatrix_names(layer, expert, role)
        name = of_one if of_one in self._vectors else of_all
        vector = self._vectors.get(name)
        if vector is None:
            return None
        count, rest = divmod(vector.size, columns)  # of all experts one after another, or the only one
        row = 0 if name == of_one or count == 1 else expert
        if rest or not row < count or (name == of_one and count != 1):
            raise CheckpointError(
                f"{self.path}: {name}: expected {columns} numbers an expert, for at least {row + 1}, got {vector.size}"
            )
        return vector.reshape(count, columns)[row]


def _imatrix_names(layer: int, expert: int, role: str) -> tuple[str, str]:
    """What a matrix is called where all experts are in one tensor, and where each has its own."""
    return gguf_names.experts_name(layer, role), gguf_names.single_expert_name(layer, expert, role)


class Recording(Knowledge):
    """Inputs of the MoE blocks, recorded while the model read text: a ``.safetensors`` file with a tensor ``layerN.x``
    [tokens, D] of floats for each layer. The routers choose among its rows, as in the model.

    Raises
    ------
    CheckpointError
        The file cannot be read.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._file = TensorFile(self.path)
        self._routers: dict[int, Router] = {}
        self._routed: tuple[int, np.ndarray, np.ndarray] | None = None  # layer, experts, shares [tokens, K]
        self._lock = threading.Lock()

    def bind(self, tensors: Iterable[SourceTensor], config: dict, config_source: str) -> None:
        by_name = {tensor.name: tensor for tensor in tensors}
        found = {}
        for number, layer in model_layers(by_name, config_source).items():
            if recorded_input_name(number) not in self._file:
                continue
            router = self._router(by_name, layer.stem.removesuffix("experts."), config, config_source)
            self._check_rows(number, router.dim)
            found[number] = router
        if not found:
            listed = ", ".join(self._file.names()[:4])
            raise CheckpointError(f"{self.path}: expected tensors such as {recorded_input_name(0)}, found {listed}")
        self._routers = found

    def _router(self, tensors: dict[str, SourceTensor], block: str, config: dict, config_source: str) -> Router:
        weight = tensors.get(f"{block}gate.weight")
        if weight is None:
            raise CheckpointError(f"{self.path}: rows cannot be routed: the model has no tensor {block}gate.weight")
        bias = tensors.get(f"{block}gate.e_score_correction_bias")
        values = None if bias is None else bias.rows(0, bias.row_count).reshape(-1)
        settings = router_settings(weight.rows(0, weight.row_count), values, config, config_source)
        try:
            return Router(**settings)
        except ColiError as error:
            raise CheckpointError(f"{weight.source}: {error}") from error

    def _check_rows(self, layer: int, hidden: int) -> None:
        name = recorded_input_name(layer)
        kind, shape = self._file.dtype(name), self._file.shape(name)
        if kind not in ("F32", "F16", "BF16") or len(shape) != 2 or shape[1] != hidden:
            raise CheckpointError(
                f"{name} in {self.path}: expected F32, F16 or BF16 [tokens, {hidden}], got {kind} {list(shape)}"
            )

    def encode(self, layer: int, expert: int, matrices: dict[str, np.ndarray]) -> dict[str, EncodedMatrix]:
        if layer not in self._routers:
            reason = f"no {recorded_input_name(layer)} in {self.path.name}"
            return {role: EncodedMatrix.searched(w, reason) for role, w in matrices.items()}
        x, shares = self._rows_of(layer, expert)
        try:
            encoded, reports = encode_expert(*(matrices[role] for role in ROLES), x, shares=shares)
        except ColiError as error:
            raise CheckpointError(
                f"{recorded_input_name(layer)} in {self.path}: rows of expert {expert}: {error}"
            ) from error
        seconds = (reports[0].collect_seconds, 0.0, reports[2].collect_seconds)  # gate and up share what was collected
        return {
            role: EncodedMatrix(weights, CalibrationTotals.of_matrix(report, collecting))
            for role, weights, report, collecting in zip(ROLES, encoded, reports, seconds, strict=True)
        }

    def _rows_of(self, layer: int, expert: int) -> tuple[np.ndarray, np.ndarray]:
        """What the router sends to an expert, and the shares of those rows."""
        with self._lock:  # one layer at a time is kept
            if self._routed is None or self._routed[0] != layer:
                self._routed = (layer, *self._route(layer))
            _, chosen, shares = self._routed
        rows, places = np.nonzero(chosen == expert)
        return self._file.view(recorded_input_name(layer))[rows].astype(np.float32), shares[rows, places]

    def _route(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        x, router = self._file.view(recorded_input_name(layer)), self._routers[layer]
        try:
            parts = [router(x[start : start + _BATCH].astype(np.float32)) for start in range(0, len(x), _BATCH)]
        except ColiError as error:
            raise CheckpointError(f"{recorded_input_name(layer)} in {self.path}: {error}") from error
        if not parts:
            return np.empty((0, router.top_k), np.int32), np.empty((0, router.top_k), np.float32)
        ids, shares = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return ids, shares


class Calibrator:
    """Encodes the experts of a model that is being converted.

    All matrices of an expert are encoded together, as down depends on the encoded gate and up. Those that another shard
    will ask for are kept until then, if `wanted` has them.
    """

    def __init__(self, knowledge: Knowledge, tensors: Iterable[SourceTensor], config: dict, config_source: str):
        tensors = list(tensors)
        knowledge.bind(tensors, config, config_source)
        self._knowledge = knowledge
        # speculative heads repeat the numbers of layers, under other stems
        self._stems = {layer.stem for layer in model_layers((t.name for t in tensors), config_source).values()}
        self._experts: dict[tuple, dict[str, SourceTensor]] = {}
        for tensor in tensors:
            if place := expert_place(tensor.name):
                self._experts.setdefault(place[:3], {})[place.role] = tensor
        self._kept: dict[str, EncodedMatrix] = {}
        self._lock = threading.Lock()
        self.wanted: set[str] = set()

    def encode(self, members: Sequence[PlannedTensor]) -> list[tuple[np.ndarray, EncodedMatrix]]:
        """The matrices of one expert that a shard holds, each as it was and encoded.

        Raises
        ------
        CheckpointError
            Names the tensor that cannot be encoded.
        """
        names = [member.tensor.name for member in members]
        place = expert_place(names[0])
        tensors = self._experts[place[:3]]
        matrices = {role: _matrix(tensors[role]) for role in ROLES}
        with self._lock:
            encoded = {name: self._kept.pop(name) for name in names if name in self._kept}
        if len(encoded) < len(names):
            encoded = {tensors[role].name: matrix for role, matrix in self._encode_all(place, matrices).items()}
            with self._lock:
                self._kept |= {name: encoded[name] for name in (encoded.keys() & self.wanted) - set(names)}
        originals = {tensors[role].name: w for role, w in matrices.items()}
        return [(originals[name], encoded[name]) for name in names]

    def _encode_all(self, place: ExpertPlace, matrices: dict[str, np.ndarray]) -> dict[str, EncodedMatrix]:
        if place.stem not in self._stems:
            return {role: EncodedMatrix.searched(w, "of a speculative head") for role, w in matrices.items()}
        try:
            return self._knowledge.encode(place.layer, place.expert, matrices)
        except CheckpointError:
            raise
        except ColiError as error:
            raise CheckpointError(f"experts {place.stem}{place.expert}: {error}") from error


def _matrix(tensor: SourceTensor) -> np.ndarray:
    """A whole matrix in float32. CheckpointError names the first element that is NaN or infinite."""
    w = tensor.rows(0, tensor.row_count)
    check_finite_rows(tensor, 0, w)
    return w
