"""Interleaved repetitions: everything that shall be compared is timed in turn, again and again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

LEAST_REPETITIONS = 8
DEFAULT_REPETITIONS = 10

MEASURED_SECONDS = 1e-3
"""Short work is repeated within a measurement until it takes as long, so that clocks and launches do not matter."""

MOST_CALLS = 1000

Key = TypeVar("Key", bound=Hashable)


def interleave(works: Mapping[Key, Callable[[int], float]], repetitions: int) -> dict[Key, list[float]]:
    """Seconds of a call of each work, one for each repetition.

    A work is given a number of calls to make, and returns the seconds that all of them took together. A first round,
    which warms up, is not kept.
    """
    calls = {key: _calls(work) for key, work in works.items()}
    seconds: dict[Key, list[float]] = {key: [] for key in works}
    for repetition in range(repetitions + 1):
        for key, work in works.items():
            taken = work(calls[key]) / calls[key]
            if repetition > 0:
                seconds[key].append(taken)
    return seconds


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the ratios within each repetition: what slows down a whole round does not change them."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def _calls(work: Callable[[int], float]) -> int:
    work(1)  # the first one loads code
    return min(max(math.ceil(MEASURED_SECONDS / max(work(1), 1e-9)), 1), MOST_CALLS)
