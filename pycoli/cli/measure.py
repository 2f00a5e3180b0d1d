"""Measurements of one expert: its size, its errors against float64, its times on each device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

import pycoli

from ..checkpoint import ExpertWeights
from ..errors import CheckpointError, NotFiniteError, ShapeError

ROWS_PER_CALL = 16
"""Rows given to an expert at once; up to this number every device keeps `ERROR_LIMIT`."""

ERROR_LIMIT = 3e-6
"""Relative RMS error against float64 of the decoded weights above which a result is wrong."""

UNRELATED = 1.0
"""Relative RMS error against the original weights at which outputs are no better than zeros: the encoding is wrong.
"int2" may reach it when all is right and is not judged by it."""

TIMING_SECONDS = 0.05
TIMING_CALLS = 5
"""Calls are repeated for the median until both are reached."""


@dataclass
class RelativeError:
    """Relative RMS error, accumulated over several results."""

    error: float = 0.0
    reference: float = 0.0

    def add(self, result: np.ndarray, reference: np.ndarray) -> None:
        self.error += float(np.sum((result - reference) ** 2))
        self.reference += float(np.sum(reference**2))

    def merge(self, other: RelativeError) -> None:
        self.error += other.error
        self.reference += other.reference

    @property
    def value(self) -> float:
        if self.error == 0:
            return 0.0
        return float(np.sqrt(self.error / self.reference)) if self.reference > 0 else float("inf")


@dataclass
class Measurement:
    """What was measured of one expert, or of several together."""

    expert: int | None  # its number in the layer; None for several
    fmt: str
    nbytes: int = 0
    weights: int = 0
    against_original: RelativeError = field(default_factory=RelativeError)
    against_decoded: dict[str, RelativeError] = field(default_factory=dict)  # by device
    seconds: dict[str, float] = field(default_factory=dict)  # a call, by device

    @property
    def has_original(self) -> bool:
        """Whether the weights before encoding are known."""
        return self.against_original.reference > 0 or self.against_original.error > 0

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights

    @property
    def loses_everything(self) -> bool:
        """Whether the outputs are no better than zeros where the original's are wanted."""
        return not self.against_original.value < UNRELATED

    def wrong(self) -> list[str]:
        """What is wrong about the results, in words; empty when all is right."""
        reasons = [
            f"expert {self.expert} on {device}: error {error.value:.2e}, above the limit of {ERROR_LIMIT:.0e}"
            for device, error in self.against_decoded.items()
            if not error.value <= ERROR_LIMIT
        ]
        if self.fmt != "int2" and self.loses_everything:
            reasons.append(
                f"expert {self.expert}: {self.against_original.value:.2f} off the original, no better than zeros"
            )
        return reasons

    def merge(self, other: Measurement) -> None:
        self.nbytes += other.nbytes
        self.weights += other.weights
        self.against_original.merge(other.against_original)
        for device, error in other.against_decoded.items():
            self.against_decoded.setdefault(device, RelativeError()).merge(error)
            self.seconds[device] = self.seconds.get(device, 0.0) + other.seconds[device]


def encode_expert(
    number: int, original: ExpertWeights, fmt: str, encoded_one: Callable[[], object]
) -> list[pycoli.Weights]:
    """Encodes one expert. `encoded_one` is called after each of its three matrices."""
    encoded = []
    for name, source in zip(("gate", "up", "down"), original.sources, strict=True):
        try:
            encoded.append(pycoli.encode(getattr(original, name), fmt))
        except (NotFiniteError, ShapeError) as error:
            raise CheckpointError(f"{source}: expert {number}, {name} matrix: {error}") from error
        encoded_one()
    return encoded


def measure(
    number: int,
    encoded: Sequence[pycoli.Weights],
    original: ExpertWeights | None,
    rows: np.ndarray,
    devices: Sequence[str],
) -> Measurement:
    """Runs one expert on every device, the chosen one first; `original` is what it was encoded from, if known."""
    nbytes, weights = sum(w.nbytes for w in encoded), sum(w.shape[0] * w.shape[1] for w in encoded)
    result = Measurement(number, format_of(encoded), nbytes, weights)
    from_decoded = expert_float64(*(w.decode() for w in encoded), rows)
    from_original = original and expert_float64(original.gate, original.up, original.down, rows)
    for device in devices:
        outputs, result.seconds[device] = run_expert(encoded, rows, device)
        result.against_decoded[device] = RelativeError()
        result.against_decoded[device].add(outputs, from_decoded)
        if device == devices[0] and original:
            result.against_original.add(outputs, from_original)
    return result


def format_of(encoded: Sequence[pycoli.Weights]) -> str:
    """The format of an expert's matrices; where they differ all of them, gate first."""
    return "/".join(dict.fromkeys(w.fmt if w.fmt != "e8" or w.rotated else "unrotated e8" for w in encoded))


def run_expert(encoded: Sequence[pycoli.Weights], rows: np.ndarray, device: str) -> tuple[np.ndarray, float]:
    """Outputs of an expert for all rows, and the median time of a call in seconds, copies of the rows included.

    The calls for the outputs come first, so that those which are timed find everything warm.
    """
    with pycoli.Expert(*encoded, device=device) as expert:
        outputs = np.concatenate(
            [expert(rows[first : first + ROWS_PER_CALL]) for first in range(0, len(rows), ROWS_PER_CALL)]
        )
        times: list[float] = []
        while len(times) < TIMING_CALLS or sum(times) < TIMING_SECONDS:
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
