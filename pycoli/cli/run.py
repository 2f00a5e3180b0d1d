"""``pycoli run``: encode the experts of a MoE layer, run them on GPU and CPU, compare with float64.

One expert is held at a time, so the memory needed is that of one expert in float64, not of the layer.
"""

from __future__ import annotations

import argparse
import importlib.resources
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from warnings import catch_warnings, simplefilter

import numpy as np
from tqdm import tqdm

import pycoli

from ..backend import NOT_INSTALLED
from ..checkpoint import Checkpoint, recorded_input_name
from ..container import Container, is_container
from ..errors import ArgumentError, CheckpointError, ColiError, OutOfMemoryError
from ..naming import number_ranges
from ..tensorfile import TensorFile
from .doctor import isa_warning
from .layer import LayerParts, encode_layer, layer_forward, layer_text, stored_layer
from .measure import (
    ERROR_LIMIT,
    ROWS_PER_CALL,
    TIMING_CALLS,
    UNRELATED,
    Measurement,
    encode_expert,
    format_of,
    measure,
)
from .report import RIGHT, WRONG_RESULT, check_output, reading, sections, table, write_report

DEFAULT_TOKENS = 64

MAX_ROW_BYTES = 2**30
"""Of the activations in float32; the comparison takes several times as much."""


@dataclass(frozen=True)
class Activations:
    """Rows [tokens, D] in float32, and where they are from in words."""

    rows: np.ndarray
    source: str


@dataclass(frozen=True)
class Devices:
    """Names of the devices to run on, the chosen one first, and why that one."""

    names: tuple[str, ...]
    reason: str


def command(options: argparse.Namespace) -> int:
    """The command itself; returns the exit code."""
    check_output(options)
    if options.layer_forward and options.experts != "all":
        raise ArgumentError("--experts: --layer-forward runs a whole layer, got both")
    if warning := isa_warning():
        print(f"pycoli run: {warning}", file=sys.stderr)
    if options.checkpoint is not None:
        return _run(options, options.checkpoint, options.checkpoint)
    if options.layer_forward:
        raise ArgumentError("--layer-forward: expected a CHECKPOINT, since the sample has no router")
    sample = importlib.resources.files("pycoli") / "data" / "sample.safetensors"
    with importlib.resources.as_file(sample) as path:
        return _run(options, path, "the sample")


class _FromCheckpoint:
    """Experts of a checkpoint, encoded when they are asked for."""

    def __init__(self, path: str | Path, fmt: str | None):
        self.checkpoint = Checkpoint(path)
        self.path, self.fmt = self.checkpoint.path, fmt or "e8"
        self.model_type, self.activation = self.checkpoint.model_type, self.checkpoint.activation
        self.layers, self.count = self.checkpoint.moe_layers(), self.checkpoint.expert_count

    def shape(self, layer: int, expert: int) -> tuple[int, int]:
        return self.checkpoint.expert(layer, expert).gate.shape

    def probes(self, layer: int, expert: int) -> list[pycoli.Weights]:
        """Matrices that show where the experts can run."""
        return [pycoli.encode(np.zeros((1, 1), np.float32), self.fmt)]

    def recorded_input(self, layer: int) -> np.ndarray | None:
        return self.checkpoint.recorded_input(layer)

    def parts(self, layer: int) -> LayerParts:
        """The whole layer."""
        return encode_layer(self.checkpoint, layer, self.fmt)

    def measure(self, layer: int, number: int, rows: np.ndarray, devices: Devices, bar: tqdm) -> Measurement:
        with reading(self.path):
            original = self.checkpoint.expert(layer, number)
        encoded = encode_expert(number, original, self.fmt, bar.update)
        return measure(number, encoded, original, rows, devices.names)


class _FromContainer:
    """Experts of a container, as they are there."""

    def __init__(self, path: str | Path, fmt: str | None):
        if fmt is not None:
            raise ArgumentError(f"--format: {path} is a container, whose experts are encoded already")
        self.container = Container(path)
        self.path, self.layers = self.container.path, self.container.layers
        config = self.container.config
        self.model_type, self.activation = (
            str(config.get("model_type", "unknown")),
            str(config.get("hidden_act") or "silu"),
        )
        self.fmt = ""  # known when the layer is

    def count(self, layer: int) -> int:
        return len(self.container.experts(layer))

    def shape(self, layer: int, expert: int) -> tuple[int, int]:
        return self.container.expert(layer, expert).gate.shape

    def probes(self, layer: int, expert: int) -> list[pycoli.Weights]:
        """Matrices that show where the experts can run."""
        matrices = list(self.container.expert(layer, expert))
        self.fmt = format_of(matrices)
        return matrices

    def recorded_input(self, layer: int) -> None:
        """Containers carry none."""

    def parts(self, layer: int) -> LayerParts:
        return stored_layer(self.container, layer)

    def measure(self, layer: int, number: int, rows: np.ndarray, devices: Devices, bar: tqdm) -> Measurement:
        with reading(self.path):
            encoded = self.container.expert(layer, number)
        bar.update(len(encoded))
        return measure(number, encoded, None, rows, devices.names)


def _run(options: argparse.Namespace, path: str | Path, name: str) -> int:
    with reading(path):
        model = (_FromContainer if is_container(path) else _FromCheckpoint)(path, options.format)
        if model.activation not in ("silu", "swish"):
            raise CheckpointError(f"{name}: expected experts with the activation silu, got {model.activation}")
        layer = model.layers[0] if options.layer is None else options.layer
        experts = parse_experts(options.experts, model.count(layer))
        inner, hidden = model.shape(layer, experts[0])
        probes = model.probes(layer, experts[0])
    devices = choose_devices(probes, options.device)
    activations = load_activations(options, model, layer, hidden)
    if options.layer_forward:
        return _run_layer(options, model, layer, activations, devices, name)
    try:
        measurements = _measure_all(model, layer, experts, activations, devices)
    except OutOfMemoryError as error:
        if options.device != "auto" or devices.names == ("cpu",):
            raise
        devices = Devices(("cpu",), str(error))
        measurements = _measure_all(model, layer, experts, activations, devices)
    total = Measurement(None, model.fmt)
    for measurement in measurements:
        total.merge(measurement)

    wrong = [reason for measurement in measurements for reason in measurement.wrong()]
    report = {
        "checkpoint": str(model.path),
        "model_type": model.model_type,
        "layer": layer,
        "format": model.fmt,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "activations": activations.source,
        "rows": len(activations.rows),
        "rows_per_call": min(ROWS_PER_CALL, len(activations.rows)),
        "device": devices.names[0],
        "why": devices.reason,
        "error_limit": ERROR_LIMIT,
        "experts": [_as_json(measurement) for measurement in measurements],
        "total": _as_json(total),
        "right": not wrong,
        "wrong": wrong,
        "warnings": _warnings(activations.rows, measurements),
    }
    write_report(report, _as_text(report, name, measurements, total, devices), options)
    return WRONG_RESULT if wrong else RIGHT


def _run_layer(
    options: argparse.Namespace,
    model: _FromCheckpoint | _FromContainer,
    layer: int,
    activations: Activations,
    devices: Devices,
    name: str,
) -> int:
    """The whole layer, router and all, in place of its experts one by one."""
    with reading(model.path):
        parts = model.parts(layer)
        report = layer_forward(parts, layer, model.fmt, activations.rows, devices.names[0])
    report |= {
        "checkpoint": str(model.path),
        "model_type": model.model_type,
        "activations": activations.source,
        "why": devices.reason,
    }
    write_report(report, layer_text(report, name), options)
    return RIGHT if report["right"] else WRONG_RESULT


def _measure_all(
    model: _FromCheckpoint | _FromContainer,
    layer: int,
    experts: list[int],
    activations: Activations,
    devices: Devices,
) -> list[Measurement]:
    """Measures the experts one after the other."""
    # disable=None: no bar where standard error is not a terminal.
    doing = f"encode {model.fmt}" if isinstance(model, _FromCheckpoint) else model.fmt
    with tqdm(total=3 * len(experts), desc=doing, unit="matrix", disable=None, leave=False) as bar:
        return [model.measure(layer, number, activations.rows, devices, bar) for number in experts]


def parse_experts(text: str, count: int) -> list[int]:
    """``"0,3,5-7"`` or ``"all"`` as ascending numbers below ``count``."""
    if text == "all":
        return list(range(count))
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", part)
        if not match:
            raise ArgumentError(f"--experts: expected numbers and ranges such as 0,3,5-7 or all, got {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= count:
            raise ArgumentError(f"--experts: expected experts from 0 to {count - 1}, got {part.strip()}")
        chosen.update(range(first, last + 1))
    return sorted(chosen)


def choose_devices(matrices: Sequence[pycoli.Weights], wanted: str) -> Devices:
    """Where experts of such matrices run: ``wanted`` is auto, cpu, cuda or cuda:N.

    Raises
    ------
    ColiError
        The wanted device cannot take them.
    """
    if wanted not in ("auto", "cpu") and not re.fullmatch(r"cuda(:[0-9]{1,6})?", wanted):
        raise ArgumentError(f"--device: expected auto, cpu, cuda or cuda:N, got {wanted!r}")
    if wanted == "cpu":
        return Devices(("cpu",), "as asked")
    try:
        places = [pycoli.explain(matrix, None if wanted == "auto" else wanted) for matrix in matrices]
        device, reason = next((place for place in places if place.device == "cpu"), places[0])
    except ColiError as error:
        raise ArgumentError(f"--device {wanted}: {error}") from error
    if device == "cpu":
        return Devices(("cpu",), NOT_INSTALLED if reason.startswith(NOT_INSTALLED) else reason)
    return Devices((device, "cpu"), "the best for this format" if wanted == "auto" else "as asked")


def load_activations(
    options: argparse.Namespace, model: _FromCheckpoint | _FromContainer, layer: int, hidden: int
) -> Activations:
    """The rows to run: those of ``--activations``, else the recorded ones, else Gaussian ones."""
    tokens = options.tokens or DEFAULT_TOKENS
    with reading(options.activations or model.path):
        if options.activations is not None:
            rows, source = _read_activations(options.activations, layer, hidden)
        else:
            rows, source = model.recorded_input(layer), f"recorded inputs of layer {layer}"
        if rows is None:
            _check_room(tokens, hidden)
            rows = np.random.default_rng(options.seed).standard_normal((tokens, hidden), np.float32)
            source = f"Gaussian random rows (seed {options.seed}), not real activations"
        if rows.ndim != 2 or rows.shape[1] != hidden or len(rows) == 0:
            raise ArgumentError(f"{source}: expected activations of shape [tokens, {hidden}], got {list(rows.shape)}")
        if options.tokens is not None and tokens > len(rows):
            raise ArgumentError(f"--tokens: expected at most {len(rows)}, the rows of {source}, got {tokens}")
        _check_room(tokens, hidden)
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(rows[:tokens], np.float32)
    if not np.isfinite(rows).all():
        raise ArgumentError(f"{source}: expected finite activations, got NaN or infinity")
    return Activations(rows, source)


def _check_room(tokens: int, hidden: int) -> None:
    most = MAX_ROW_BYTES // (4 * hidden)
    if tokens > most:
        room = f"{MAX_ROW_BYTES / 2**30:g} GiB of rows of {hidden} float32"
        raise ArgumentError(f"--tokens: expected at most {most}, {room}, got {tokens}")


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
            with catch_warnings():
                simplefilter("ignore")
                rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError:
            raise
        except Exception as error:  # numpy evaluates the header as Python, and maps what it says
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


def _warnings(rows: np.ndarray, measurements: list[Measurement]) -> list[str]:
    """What takes meaning from a result that is right."""
    warnings = []
    if not rows.any():
        warnings.append("the activations are all zero, and so is every result: that it is right means little")
    lost = [m.expert for m in measurements if m.fmt == "int2" and m.loses_everything]
    if lost:
        warnings.append(
            f"experts {number_ranges(lost)}: the format loses more than the weights hold (vs original is {UNRELATED:g} "
            "or more, as for zeros)"
        )
    return warnings


def _as_json(measurement: Measurement) -> dict:
    return {
        "expert": "total" if measurement.expert is None else measurement.expert,
        "bytes": measurement.nbytes,
        "bits_per_weight": measurement.bits_per_weight,
        "error_against_decoded": {d: _finite(e.value) for d, e in measurement.against_decoded.items()},
        "error_against_original": _finite(measurement.against_original.value) if measurement.has_original else None,
        "seconds_per_call": measurement.seconds,
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if np.isfinite(value) else None


def _as_text(report: dict, name: str, measurements: list[Measurement], total: Measurement, devices: Devices) -> str:
    header = ["expert", "bytes", "bits/weight"]
    header += [f"error {device}" for device in devices.names] + ["vs original"]
    header += [f"time {device}" for device in devices.names]
    lines = [
        [
            "total" if m.expert is None else str(m.expert),
            f"{m.nbytes:,}",
            f"{m.bits_per_weight:.4f}",
            *(f"{m.against_decoded[device].value:.2e}" for device in devices.names),
            f"{m.against_original.value:.4f}" if m.has_original else "not known",
            *(_duration(m.seconds[device]) for device in devices.names),
        ]
        for m in [*measurements, total]
    ]
    worst = max(error.value for m in measurements for error in m.against_decoded.values())
    verdict = [f"right: the largest error is {worst:.2e}, the limit {ERROR_LIMIT:.0e}"]
    if not report["right"]:
        verdict = [f"WRONG: {reason}" for reason in report["wrong"]]
    verdict = [*(f"warning: {warning}" for warning in report["warnings"]), *verdict]
    facts = [
        (
            "experts",
            [
                f"layer {report['layer']} of {name} ({report['model_type']}), experts "
                f"{number_ranges([m.expert for m in measurements])}, each {report['hidden_size']} -> "
                f"{report['intermediate_size']} -> {report['hidden_size']}, format {report['format']}"
            ],
        ),
        ("activations", [f"{report['rows']} rows: {report['activations']}"]),
        ("device", [f"{devices.names[0]}: {devices.reason}"]),
    ]
    meanings = [
        (
            "error",
            [f"relative RMS against float64 of the decoded weights, in calls of {report['rows_per_call']} rows"],
        ),
        (
            "vs original",
            [f"the same on {devices.names[0]} against the checkpoint's weights: the loss of the format"]
            if total.has_original
            else ["a container does not hold what it was made from; pycoli verify compares"],
        ),
        (
            "time",
            [
                f"median of at least {TIMING_CALLS} calls of {report['rows_per_call']} rows, after a warm-up; "
                "the total is the sum over the experts"
            ],
        ),
    ]
    return "\n\n".join([sections(facts), table(header, lines), sections(meanings), "\n".join(verdict)])


def _duration(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
