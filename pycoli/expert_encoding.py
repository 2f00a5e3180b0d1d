"""Encoding the three matrices of an expert one after another, each for the activations that the ones before give it."""

from __future__ import annotations

import numpy as np

from ._arrays import as_float32, as_matrix, as_rows
from .calibrate import Calibration, CalibrationReport
from .errors import ShapeError
from .weights import Weights, encode_calibrated

__all__ = ["encode_expert"]

_BATCH = 4096
"""Rows that go through an expert together: bounds the memory for hidden rows."""


def encode_expert(
    gate, up, down, x, *, exact=None, shares=None, rotate: bool = True, damping: float = 0.02
) -> tuple[tuple[Weights, Weights, Weights], tuple[CalibrationReport, CalibrationReport, CalibrationReport]]:
    """Encodes ``down(silu(gate x) * (up x))`` as "e8" for the rows that an expert meets.

    Gate and up are calibrated with `x`, down with the hidden rows that the encoded gate and up make of it, so that it
    also makes up for a part of their errors. Matrices with too few rows are encoded by searching; the reports say so.

    Parameters
    ----------
    gate, up : float32 [I, D]
    down : float32 [D, I]
    x : float32 [rows, D]
        What the router sends to this expert; with the layers before encoded already where they will be.
    exact : float32 [rows, D], optional
        The same rows where nothing is encoded. By default `x`.
    shares : float32 [rows], optional
        What each row counts for: the router's share. By default all alike.
    rotate, damping
        As in encode().

    Returns
    -------
    (gate, up, down) : Weights
    reports : three CalibrationReport

    Raises
    ------
    DtypeError, ShapeError, NotFiniteError, ArgumentError
    """
    gate, up, down = as_matrix(gate, "gate"), as_matrix(up, "up"), as_matrix(down, "down")
    if up.shape != gate.shape or down.shape != gate.shape[::-1]:
        shapes = ", ".join(str(list(w.shape)) for w in (gate, up, down))
        raise ShapeError(f"gate and up must be [I, D] and down [D, I], got {shapes}")
    x, _ = as_rows(x, gate.shape[1], "x")
    exact = x if exact is None else as_rows(exact, gate.shape[1], "exact")[0]
    shares = np.ones(len(x), np.float32) if shares is None else as_float32(shares, "shares")
    if len(exact) != len(x) or shares.shape != (len(x),):
        raise ShapeError(f"x has {len(x)} rows, exact {len(exact)}, shares the shape {list(shares.shape)}")
    batches = [slice(start, start + _BATCH) for start in range(0, len(x), _BATCH)]
    options = {"rotate": rotate, "damping": damping}

    inputs = Calibration(gate.shape[1])
    for rows in batches:
        share = shares[rows, None]
        inputs.add(x[rows] * share, None if exact is x else exact[rows] * share)
    encoded_gate, gate_report = encode_calibrated(gate, inputs, **options)
    encoded_up, up_report = encode_calibrated(up, inputs, **options)

    decoded_gate, decoded_up = encoded_gate.decode(), encoded_up.decode()
    hidden = Calibration(down.shape[1])
    for rows in batches:
        share = shares[rows, None]
        hidden.add(_hidden(decoded_gate, decoded_up, x[rows]) * share, _hidden(gate, up, exact[rows]) * share)
    encoded_down, down_report = encode_calibrated(down, hidden, **options)
    return (encoded_gate, encoded_up, encoded_down), (gate_report, up_report, down_report)


def _hidden(gate: np.ndarray, up: np.ndarray, x: np.ndarray) -> np.ndarray:
    """silu(gate x) * (up x): float32 [rows, I]."""
    pre = x @ gate.T
    with np.errstate(over="ignore"):  # exp(-pre) may be infinite; then silu is 0
        return pre / (1 + np.exp(-pre)) * (x @ up.T)
