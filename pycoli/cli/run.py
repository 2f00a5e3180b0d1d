"""``pycoli run``: encode the experts of a MoE layer, run them on GPU and CPU, compare with float64.

One expert is held at a time, so the memory needed is that of one expert in float64, not of the layer.
"""

from __future__ import annotations

import argparse
import importlib.resources
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

import pycoli

from ..checkpoint import Checkpoint, ExpertWeights, recorded_input_name
from ..errors import ArgumentError, ColiError, NotFiniteError
from ..tensorfile import CheckpointError, TensorFile
from .report import RIGHT, WRONG_RESULT, table, write_report

ROWS_PER_CALL = 16
"""Rows given to an expert at once; up to this number every device keeps `ERROR_LIMIT`."""

ERROR_LIMIT = 3e-6
"""Relative RMS error against float64 of the decoded weights above which a result is wrong."""

UNRELATED = 1.0
"""Relative RMS error against the original weights at which outputs are no better than zeros: the encoding is wrong.
Formats below 3 bits a weight come near it and are not judged by it."""

DEFAULT_TOKENS = 64

TIMING_SECONDS = 0.1
TIMING_CALLS = 30
"""Calls are repeated for the median until either is reached."""


@dataclass(frozen=True)
class Activations:
    """Rows [tokens, D] in float32, and where they are from in words."""

    rows: np.ndarray
    source: str


@dataclass(frozen=True)
class Placement:
    """Devices to run on, the chosen one first, and why that one."""

    devices: tuple[str, ...]
    reason: str


@dataclass
class RelativeError:
    """Relative RMS error, accumulated over several results."""

    error: float = 0.0
    reference: float = 0.0

    def add(self, result: np.ndarray, reference: np.ndarray) -> None:
        self.error += float(np.sum((result - reference) ** 2))
        self.reference += float(np.sum(reference**2))

    @property
    def value(self) -> float:
        if self.error == 0:
            return 0.0
        return float(np.sqrt(self.error / self.reference)) if self.reference > 0 else float("inf")


@dataclass
class Measurement:
    """What was measured of one expert, or of several together."""

    label: str
    nbytes: int = 0
    weights: int = 0
    against_original: RelativeError = field(default_factory=RelativeError)
    against_decoded: dict[str, RelativeError] = field(default_factory=dict)  # by device
    seconds: dict[str, float] = field(default_factory=dict)  # a call, by device

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights

    def wrong(self) -> list[str]:
        """What is wrong about the results, in words; empty when all is right."""
        reasons = [
            f"expert {self.label} on {device}: error {error.value:.2e}, above the limit of {ERROR_LIMIT:.0e}"
            for device, error in self.against_decoded.items()
            if not error.value <= ERROR_LIMIT
        ]
        if self.bits_per_weight >= 3 and not self.against_original.value < UNRELATED:
            reasons.append(
                f"expert {self.label}: {self.against_original.value:.2f} off the original, no better than zeros"
            )
        return reasons

    def add(self, other: Measurement) -> None:
        self.nbytes += other.nbytes
        self.weights += other.weights
        self.against_original.error += other.against_original.error
        self.against_original.reference += other.against_original.reference
        for device, error in other.against_decoded.items():
            total = self.against_decoded.setdefault(device, RelativeError())
            total.error += error.error
            total.reference += error.reference
            self.seconds[device] = self.seconds.get(device, 0.0) + other.seconds[device]


def command(options: argparse.Namespace) -> int:
    """The command itself; returns the exit code."""
    if options.checkpoint is not None:
        return _run(options, Checkpoint(options.checkpoint), options.checkpoint)
    sample = importlib.resources.files("pycoli") / "data" / "sample.safetensors"
    with importlib.resources.as_file(sample) as path:
        return _run(options, Checkpoint(path), "the sample")


def _run(options: argparse.Namespace, checkpoint: Checkpoint, name: str) -> int:
    if checkpoint.activation not in ("silu", "swish"):
        raise CheckpointError(f"{name}: expected experts with the activation silu, got {checkpoint.activation}")
    layer = checkpoint.moe_layers()[0] if options.layer is None else options.layer
    experts = parse_experts(options.experts, checkpoint.expert_count(layer))
    placement = place(options.format, options.device)
    activations = load_activations(options, checkpoint, layer, checkpoint.expert(layer, experts[0]).gate.shape[1])

    measurements = []
    # disable=None: no bar where standard error is not a terminal.
    with tqdm(total=3 * len(experts), desc=f"encode {options.format}", unit="matrix", disable=None, leave=False) as bar:
        for number in experts:
            original = checkpoint.expert(layer, number)
            measurements.append(measure(str(number), original, options.format, activations.rows, placement, bar.update))
    total = Measurement("total")
    for measurement in measurements:
        total.add(measurement)

    inner, hidden = original.gate.shape
    wrong = [reason for measurement in measurements for reason in measurement.wrong()]
    report = {
        "checkpoint": str(checkpoint.path),
        "model_type": checkpoint.model_type,
        "layer": layer,
        "format": options.format,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "activations": activations.source,
        "rows": len(activations.rows),
        "rows_per_call": min(ROWS_PER_CALL, len(activations.rows)),
        "device": placement.devices[0],
        "why": placement.reason,
        "error_limit": ERROR_LIMIT,
        "experts": [_as_json(measurement) for measurement in measurements],
        "total": _as_json(total),
        "right": not wrong,
        "wrong": wrong,
    }
    write_report(report, _as_text(report, name, measurements, total, placement), options.json)
    return WRONG_RESULT if wrong else RIGHT


def parse_experts(text: str, count: int) -> list[int]:
    """``"0,3,5-7"`` or ``"all"`` as ascending numbers below ``count``."""
    if text == "all":
        return list(range(count))
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if not match:
            raise ArgumentError(f"--experts: expected numbers and ranges such as 0,3,5-7 or all, got {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= count:
            raise ArgumentError(f"--experts: expected experts from 0 to {count - 1}, got {part.strip()}")
        chosen.update(range(first, last + 1))
    return sorted(chosen)


def place(fmt: str, wanted: str) -> Placement:
    """Where matrices of a format run: ``wanted`` is auto, cpu or cuda:N.

    Raises
    ------
    ColiError
        There is no such format or it cannot be encoded, or the wanted device cannot take it.
    """
    if wanted not in ("auto", "cpu") and not re.fullmatch(r"cuda:\d{1,6}", wanted):
        raise ArgumentError(f"--device: expected auto, cpu or cuda:N, got {wanted!r}")
    probe = pycoli.encode(np.zeros((1, 1), np.float32), fmt)
    if wanted == "cpu":
        return Placement(("cpu",), "as asked")
    try:
        device, reason = pycoli.explain(probe, None if wanted == "auto" else wanted)
    except ColiError as error:
        raise ArgumentError(f"--device {wanted}: {error}") from error
    if device == "cpu":
        if wanted != "auto":
            raise ArgumentError(f"--device {wanted}: {reason}")
        return Placement(("cpu",), reason)
    return Placement((device, "cpu"), reason)


def load_activations(options: argparse.Namespace, checkpoint: Checkpoint, layer: int, hidden: int) -> Activations:
    """The rows to run: those of ``--activations``, else the recorded ones, else Gaussian ones."""
    if options.activations is not None:
        rows, source = _read_activations(options.activations, layer, hidden)
    elif (recorded := checkpoint.recorded_input(layer)) is not None:
        rows, source = recorded, f"recorded inputs of layer {layer}"
    else:
        generator = np.random.default_rng(options.seed)
        rows = generator.standard_normal((options.tokens or DEFAULT_TOKENS, hidden), np.float32)
        source = f"Gaussian random rows (seed {options.seed}), not real activations"
    if rows.ndim != 2 or rows.shape[1] != hidden or len(rows) == 0:
        raise ArgumentError(f"activations: expected shape [tokens, {hidden}], got {list(rows.shape)}")
    if options.tokens is not None and options.tokens > len(rows):
        raise ArgumentError(f"--tokens: {source} hold {len(rows)} rows, got {options.tokens}")
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(rows[: options.tokens or DEFAULT_TOKENS], np.float32)
    if not np.isfinite(rows).all():
        raise ArgumentError(f"activations: expected finite numbers, got NaN or infinity in {source}")
    return Activations(rows, source)


def _read_activations(argument: str, layer: int, hidden: int) -> tuple[np.ndarray, str]:
    path, tensor = argument, None
    if not Path(argument).exists() and ".safetensors:" in argument:
        path, tensor = argument.rsplit(":", 1)
    if path.endswith(".safetensors"):
        file = TensorFile(path)
        tensor = tensor or _only_input(file, layer, hidden)
        rows = file.view(tensor)
        source = f"{tensor} of {path}"
    else:
        try:
            rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ArgumentError(f"{path}: expected a .npy file of plain numbers, or a .safetensors file") from error
        source = path
        if not isinstance(rows, np.ndarray) or rows.dtype.kind != "f":
            raise ArgumentError(
                f"{path}: expected a .npy file of floating-point rows, got {getattr(rows, 'dtype', 'an archive')}"
            )
    return rows, source


def _only_input(file: TensorFile, layer: int, hidden: int) -> str:
    """The tensor that holds the layer's input: ``layerN.x``, or the only one of a fitting shape."""
    recorded = recorded_input_name(layer)
    if recorded in file:
        return recorded
    fitting = [name for name in file.names() if len(file.shape(name)) == 2 and file.shape(name)[1] == hidden]
    if len(fitting) != 1:
        raise ArgumentError(
            f"{file.path}: expected {recorded} or one tensor of shape [tokens, {hidden}], got {len(fitting)} such "
            f"tensors among {', '.join(file.names()[:8])}; name one as {file.path}:TENSOR"
        )
    return fitting[0]


def measure(
    label: str,
    original: ExpertWeights,
    fmt: str,
    rows: np.ndarray,
    placement: Placement,
    encoded_one: Callable[[], object],
) -> Measurement:
    """Encodes one expert and runs it on every device; `encoded_one` is called after each of its three matrices."""
    encoded = []
    for name in ("gate", "up", "down"):
        try:
            encoded.append(pycoli.encode(getattr(original, name), fmt))
        except NotFiniteError as error:
            raise CheckpointError(f"expert {label}, {name} matrix: {error}") from error
        encoded_one()
    result = Measurement(label, sum(w.nbytes for w in encoded), sum(w.shape[0] * w.shape[1] for w in encoded))
    from_decoded = expert_float64(*(w.decode() for w in encoded), rows)
    from_original = expert_float64(original.gate, original.up, original.down, rows)
    for device in placement.devices:
        outputs, result.seconds[device] = run_expert(encoded, rows, device)
        result.against_decoded[device] = RelativeError()
        result.against_decoded[device].add(outputs, from_decoded)
        if device == placement.devices[0]:
            result.against_original.add(outputs, from_original)
    return result


def run_expert(encoded: list[pycoli.Weights], rows: np.ndarray, device: str) -> tuple[np.ndarray, float]:
    """Outputs of an expert for all rows, and the median time of a call in seconds, copies of the rows included."""
    with pycoli.Expert(*encoded, device=device) as expert:
        outputs = np.concatenate(
            [expert(rows[first : first + ROWS_PER_CALL]) for first in range(0, len(rows), ROWS_PER_CALL)]
        )
        times: list[float] = []
        while len(times) < TIMING_CALLS and sum(times) < TIMING_SECONDS:
            start = time.perf_counter()
            expert(rows[:ROWS_PER_CALL])
            times.append(time.perf_counter() - start)
    return outputs, statistics.median(times)


def expert_float64(gate: np.ndarray, up: np.ndarray, down: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """``down(silu(gate x) * (up x))`` in float64."""
    x = rows.astype(np.float64)
    gated = x @ gate.T.astype(np.float64)
    with np.errstate(over="ignore"):  # exp(-gated) may be infinite; the quotient is 0 then
        hidden = gated / (1 + np.exp(-gated)) * (x @ up.T.astype(np.float64))
    return hidden @ down.T.astype(np.float64)


def _as_json(measurement: Measurement) -> dict:
    return {
        "expert": int(measurement.label) if measurement.label.isdigit() else measurement.label,
        "bytes": measurement.nbytes,
        "bits_per_weight": measurement.bits_per_weight,
        "error_against_decoded": {d: _finite(e.value) for d, e in measurement.against_decoded.items()},
        "error_against_original": _finite(measurement.against_original.value),
        "seconds_per_call": measurement.seconds,
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if np.isfinite(value) else None


def _as_text(report: dict, name: str, measurements: list[Measurement], total: Measurement, placement: Placement) -> str:
    header = ["expert", "bytes", "bits/weight"]
    header += [f"error {device}" for device in placement.devices] + ["vs original"]
    header += [f"time {device}" for device in placement.devices]
    lines = [
        [
            m.label,
            f"{m.nbytes:,}",
            f"{m.bits_per_weight:.4f}",
            *(f"{m.against_decoded[device].value:.2e}" for device in placement.devices),
            f"{m.against_original.value:.4f}",
            *(_duration(m.seconds[device]) for device in placement.devices),
        ]
        for m in [*measurements, total]
    ]
    worst = max(error.value for m in measurements for error in m.against_decoded.values())
    verdict = [f"right: the largest error is {worst:.2e}, the limit {ERROR_LIMIT:.0e}"]
    if not report["right"]:
        verdict = [f"WRONG: {reason}" for reason in report["wrong"]]
    return "\n".join(
        [
            f"experts      layer {report['layer']} of {name} ({report['model_type']}), {len(measurements)} experts of "
            f"{report['hidden_size']} -> {report['intermediate_size']} -> {report['hidden_size']}, format "
            f"{report['format']}",
            f"activations  {report['rows']} rows: {report['activations']}",
            f"device       {placement.devices[0]}: {placement.reason}",
            "",
            table(header, lines),
            "",
            f"error: relative RMS against float64 of the decoded weights, in calls of {report['rows_per_call']} rows",
            f"vs original: the same on {placement.devices[0]} against float64 of the checkpoint's weights: the loss of "
            "the format",
            f"time: median of a call of {report['rows_per_call']} rows; the total is the sum over the experts",
            "",
            *verdict,
        ]
    )


def _duration(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
