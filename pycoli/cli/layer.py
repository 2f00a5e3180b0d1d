"""``pycoli run --layer-forward``: a whole MoE layer, from router to sum, compared with float64."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

import pycoli

from ..checkpoint import Checkpoint, ExpertWeights
from ..container import Container
from ..errors import CheckpointError, NotFiniteError, ShapeError
from .measure import ERROR_LIMIT, TIMING_CALLS, RelativeError, expert_float64
from .report import sections, table

ROUTING_LIMIT = 1e-5
"""Difference from float64 above which a router's weight is wrong, and up to which two logits may change places."""

Encoded = tuple[pycoli.Weights, pycoli.Weights, pycoli.Weights]


@dataclass(frozen=True)
class LayerParts:
    """A MoE layer: its router as `Router` takes it, experts, the shared expert and the vector of that one's gate."""

    router: dict
    experts: Sequence[Encoded]
    shared: Encoded | None
    gate: np.ndarray | None


def encode_layer(checkpoint: Checkpoint, layer: int, fmt: str) -> LayerParts:
    """A layer of a checkpoint, all of its experts encoded."""
    router = checkpoint.router(layer)
    return LayerParts(router, _encoded_experts(checkpoint, layer, fmt), *_shared(checkpoint, layer, fmt))


def stored_layer(container: Container, layer: int) -> LayerParts:
    """A layer of a container, as it is there."""
    shared, gate = container.shared_expert(layer) or (None, None)
    return LayerParts(container.router(layer), list(container.experts(layer)), shared, gate)


def layer_forward(parts: LayerParts, layer: int, fmt: str, rows: np.ndarray, device: str) -> dict:
    """Runs rows float32 [tokens, D] through a layer, and reports on results and paths."""
    settings, experts, shared, gate = parts.router, parts.experts, parts.shared, parts.gate
    router = pycoli.Router(**settings)
    with pycoli.MoELayer(experts, router, shared, devices=device, shared_gate=gate) as block:
        ids, weights = router(rows)
        y = block(rows, ids, weights)
        where, all_stats = block.where, block.stats()
        stats, why_failed = all_stats["last"], all_stats["why_failed"]
        reasons = sorted({block.why_cpu(i) or "" for i in range(len(where))} - {""})
        seconds = _median_seconds(lambda: block(rows, ids, weights))
    against_decoded = RelativeError()
    against_decoded.add(y, _layer_float64(rows, ids, weights, experts, shared, gate))
    off = routing_error(rows, ids, weights, settings)
    wrong = []
    if not against_decoded.value <= ERROR_LIMIT:
        wrong.append(f"the layer's error is {against_decoded.value:.2e}, above the limit of {ERROR_LIMIT:.0e}")
    if not off <= ROUTING_LIMIT:
        wrong.append(f"routing is off by {off:.2e}, above the limit of {ROUTING_LIMIT:.0e}")
    return {
        "layer": layer,
        "format": fmt,
        "rows": len(rows),
        "experts": len(experts),
        "top_k": router.top_k,
        "shared_expert": shared is not None,
        "device": device,
        "where": where,
        "why_cpu": reasons if device != "cpu" else [],
        "paths": {path: {"experts": n, "rows": stats["pairs"][path]} for path, n in stats["experts"].items()},
        "failed": stats["failed"],
        "why_failed": {step: why for step, why in why_failed.items() if stats["failed"][step]},
        "rotations": stats["rotations"],
        "seconds": {stage: stats[f"{stage}_seconds"] for stage in ("issue", "cpu", "take", "sum")},
        "seconds_per_call": seconds,
        "error_against_decoded": against_decoded.value,
        "error_limit": ERROR_LIMIT,
        "routing_error": off,
        "right": not wrong,
        "wrong": wrong,
    }


def layer_text(report: dict, name: str) -> str:
    """The report for a person."""
    shared = " and a shared one" if report["shared_expert"] else ""
    facts = [
        (
            "layer",
            [
                f"{report['layer']} of {name} ({report['model_type']}): {report['experts']} experts{shared}, "
                f"{report['top_k']} a row, format {report['format']}"
            ],
        ),
        ("activations", [f"{report['rows']} rows: {report['activations']}"]),
        ("device", [f"{report['device']}: {report['why']}"]),
        ("experts on", _places(report)),
        ("time", [f"{1e3 * report['seconds_per_call']:.2f} ms a call of all rows, median of {TIMING_CALLS}"]),
        ("error", [f"{report['error_against_decoded']:.2e} against float64 of the decoded weights"]),
        ("routing", [f"{report['routing_error']:.2e} off float64"]),
    ]
    lines = [[path, str(done["experts"]), str(done["rows"])] for path, done in report["paths"].items()]
    failed = [f"{step} failed on {report['failed'][step]} experts: {why}" for step, why in report["why_failed"].items()]
    verdict = [f"WRONG: {reason}" for reason in report["wrong"]] or [f"right: the limit is {report['error_limit']:.0e}"]
    paths = table(["path", "experts", "rows"], lines, total=False)
    return "\n\n".join([sections(facts), "\n".join([paths, *failed]), "\n".join(verdict)])


def routing_error(rows: np.ndarray, ids: np.ndarray, weights: np.ndarray, settings: dict) -> float:
    """How far a choice of experts is from float64: by weights, and by experts that others should have replaced."""
    logits = rows.astype(np.float64) @ settings["weight"].astype(np.float64).T
    if settings["kind"] == "softmax":
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = exponentials / exponentials.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    chosen = np.take_along_axis(scores, ids, axis=1)
    divisor = chosen.sum(axis=1, keepdims=True) if settings["renormalise"] else 1
    off = float(np.abs(chosen / divisor * settings["scale"] - weights).max())
    if settings["groups"]:
        return off  # what was left out may have been in a group that was
    choice = scores if settings["bias"] is None else scores + settings["bias"]
    left_out = choice.copy()
    np.put_along_axis(left_out, ids, -np.inf, axis=1)
    missed = left_out.max(axis=1) - np.take_along_axis(choice, ids, axis=1).min(axis=1)
    return max(off, float(missed.max(initial=0)))


def _places(report: dict) -> list[str]:
    names = report["where"]
    counts = [f"{names.count(name)} on {name}" for name in dict.fromkeys(names)]
    return [", ".join(counts), *(f"on the CPU: {reason}" for reason in report["why_cpu"])]


def _encoded_experts(checkpoint: Checkpoint, layer: int, fmt: str) -> list[Encoded]:
    count = checkpoint.expert_count(layer)
    numbers = tqdm(range(count), desc=f"encode {fmt}", unit="expert", disable=None, leave=False)
    return [_encoded(checkpoint.expert(layer, number), fmt, f"expert {number}") for number in numbers]


def _encoded(original: ExpertWeights, fmt: str, what: str) -> Encoded:
    try:
        return tuple(pycoli.encode(w, fmt) for w in (original.gate, original.up, original.down))
    except (NotFiniteError, ShapeError) as error:
        raise CheckpointError(f"{original.sources[0]}: {what}: {error}") from error


def _shared(checkpoint: Checkpoint, layer: int, fmt: str) -> tuple[Encoded | None, np.ndarray | None]:
    """The shared expert, encoded, and the vector of its gate."""
    found = checkpoint.shared_expert(layer)
    return (None, None) if found is None else (_encoded(found[0], fmt, "the shared expert"), found[1])


def _layer_float64(rows, ids, weights, experts: Sequence[Encoded], shared, gate) -> np.ndarray:
    y = np.zeros(rows.shape)
    for number, expert in enumerate(experts):
        tokens, places = np.nonzero(ids == number)
        if tokens.size:
            results = expert_float64(*(w.decode() for w in expert), rows[tokens])
            np.add.at(y, tokens, weights[tokens, places, None].astype(np.float64) * results)
    if shared:
        results = expert_float64(*(w.decode() for w in shared), rows)
        if gate is not None:
            results /= 1 + np.exp(-(rows.astype(np.float64) @ gate.astype(np.float64)))[:, None]
        y += results
    return y


def _median_seconds(call) -> float:
    times = []
    for _ in range(TIMING_CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
