"""Results: as records, in JSON, as tables, and against those of an earlier run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import ArgumentError
from ..report import table
from .cases import Shape
from .samples import limit
from .timing import paired_ratio

KIND = "pycoli bench"
SCHEMA = 1

READ, COPY = "read", "copy"
"""The ceilings: what memory gives when nothing is computed."""

_NAMES = ("what", "format", "dim", "hidden", "experts", "rows")  # of Result.key in JSON


@dataclass(frozen=True)
class Result:
    """What was measured of one kind of call.

    Attributes
    ----------
    what : str
        "layer", "product", "expert_mlp", "upload", "encode search", ...; "read" and "copy" are ceilings.
    fmt : str
    shape : Shape
    nbytes : int
        That a call moves: of weights, float32 where it encodes them; of a copy, in both directions. 0 for a call that
        does not wait for them.
    seconds : sequence of float
        Of a call, one for each repetition. Empty where the result is wrong.
    experts : int
        That a call computes.
    rows : int or None
        Of each expert; None where nothing is computed.
    weights : int
        That a call multiplies with, or encodes.
    error : float or None
        Relative RMS error of the results against float64.
    of_ceiling : float or None
        The share of the ceiling's bytes a second that the call reaches; None where no ceiling was measured.
    """

    what: str
    fmt: str
    shape: Shape
    nbytes: int
    seconds: Sequence[float] = ()
    experts: int = 1
    rows: int | None = None
    weights: int = 0
    error: float | None = None
    of_ceiling: float | None = None

    @property
    def wrong(self) -> str | None:
        """Why there is no time: the result is not right. None where it is."""
        most = limit(self.rows or 1)
        if self.error is None or self.error <= most:
            return None
        return f"{self.name}: relative RMS error {self.error:.2e}, the limit is {most:.0e}"

    @property
    def name(self) -> str:
        """In words."""
        rows = "" if self.rows is None else f", {self.experts} x {_count(self.rows, 'row')}"
        return f"{self.what} {self.fmt} {self.shape.label}{rows}"

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest less fastest repetition, as a part of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    @property
    def key(self) -> tuple:
        """The same in two runs for what can be compared."""
        return self.what, self.fmt, *self.shape, self.experts, self.rows

    @property
    def flops(self) -> int:
        """Floating-point operations of a call."""
        return 2 * self.weights * (self.rows or 0)

    def against(self, ceiling: Result) -> Result:
        """The same with its share of the ceiling."""
        if not self.seconds:
            return self
        share = paired_ratio(ceiling.seconds, self.seconds) * self.nbytes / ceiling.nbytes
        return replace(self, of_ceiling=share)


def as_json(result: Result) -> dict:
    """In values that JSON can hold. A wrong result has no times."""
    rates = {}
    if result.seconds:
        rates = {
            "seconds": result.median,
            "fastest": min(result.seconds),
            "slowest": max(result.seconds),
            "repetitions": len(result.seconds),
            "bytes_per_second": result.nbytes / result.median if result.nbytes else None,
            "of_ceiling": result.of_ceiling,
            "weights_per_second": result.weights / result.median if result.weights else None,
            "flops_per_second": result.flops / result.median if result.flops else None,
        }
    error = result.error
    return {
        "what": result.what,
        "format": result.fmt,
        "dim": result.shape.dim,
        "hidden": result.shape.hidden,
        "experts": result.experts,
        "rows": result.rows,
        "bytes": result.nbytes,
        "weights": result.weights,
        **rates,
        "error": error if error is None or error < float("inf") else None,
        "wrong": result.wrong,
    }


def read_report(file: str) -> dict:
    """A report that --json or --output wrote. ArgumentError for anything else."""
    wanted = f"--compare: expected a report of {KIND} --json (schema {SCHEMA})"
    try:
        report = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArgumentError(f"{wanted}, got {file}: {error}") from error
    if not isinstance(report, dict) or report.get("kind") != KIND:
        raise ArgumentError(f"{wanted}, got {file}, which is something else")
    if report.get("schema") != SCHEMA:
        raise ArgumentError(f"{wanted}, got {file} of schema {report.get('schema')}")
    try:
        earlier_seconds(report)
        machine_name(report)
    except (KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{wanted}, got {file}, which is damaged: {error!r}") from error
    return report


def earlier_seconds(report: dict) -> dict[tuple, float]:
    """Seconds of a call by Result.key."""
    return {tuple(m[name] for name in _NAMES): float(m["seconds"]) for m in report["results"] if "seconds" in m}


def machine_name(report: dict) -> str:
    """What a run was measured on."""
    return report["machine"]["name"]


def ratios(results: Iterable[Result], earlier: dict) -> list[dict]:
    """Earlier time over this one for everything that both runs measured: above 1 is faster now."""
    before = earlier_seconds(earlier)
    return [
        {**{name: value for name, value in as_json(r).items() if name in _NAMES}, **_ratio(r, before[r.key])}
        for r in results
        if r.seconds and r.key in before
    ]


def _ratio(result: Result, before: float) -> dict:
    return {"seconds_before": before, "seconds": result.median, "ratio": before / result.median}


def tables(results: Sequence[Result], earlier: dict | None = None) -> str:
    """One table a shape."""
    before = earlier_seconds(earlier) if earlier else None
    header = ["format", "call", "rows", "time", "spread", "GB/s", "ceiling", "Gweight/s", "TFLOP/s", "error"]
    if before is not None:
        header += ["before", "ratio"]
    parts = []
    for shape in dict.fromkeys(result.shape for result in results):
        lines = [_cells(result, before) for result in results if result.shape == shape]
        parts.append(f"{shape.label}\n{table(header, lines, total=False)}")
    return "\n\n".join(parts)


def _cells(result: Result, before: dict | None) -> list[str]:
    rows = "-" if result.rows is None else f"{result.experts} x {result.rows}"
    cells = [result.fmt, result.what, rows]
    if result.seconds:
        per_second = 1 / result.median
        cells += [
            duration(result.median),
            f"{100 * result.spread:.1f}%",
            _billions(result.nbytes * per_second),
            "-" if result.of_ceiling is None else f"{100 * result.of_ceiling:.1f}%",
            _billions(result.weights * per_second),
            f"{1e-12 * result.flops * per_second:.3f}" if result.flops else "-",
        ]
    else:
        cells += ["WRONG", *"-----"]
    cells.append("-" if result.error is None else f"{result.error:.1e}")
    if before is not None:
        known = result.seconds and result.key in before
        cells += [duration(before[result.key]), f"{before[result.key] / result.median:.3f}"] if known else ["-", "-"]
    return cells


def _billions(rate: float) -> str:
    """Three digits of a slow rate."""
    billions = 1e-9 * rate
    return "-" if rate == 0 else f"{billions:.1f}" if billions >= 1 else f"{billions:.3f}"


def duration(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.3f} ms"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
