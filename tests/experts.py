"""Experts for the tests of pycoli, what they must give, and errors as these tests expect them."""

import re

import numpy as np
import oracle
import pytest

import pycoli


def gaussian(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def expert_weights(formats=("e8", "e8", "e8"), dim=128, hidden=64, seed=0, rotate=(True, True, True)):
    shapes = [(hidden, dim), (hidden, dim), (dim, hidden)]
    return [
        pycoli.encode(gaussian(*shape, seed=10 * seed + i, scale=0.1), fmt, rotate=rotated)
        for i, (shape, fmt, rotated) in enumerate(zip(shapes, formats, rotate, strict=True))
    ]


def expected_expert(x, gate, up, down):
    gate, up, down = (m.decode().astype(np.float64) for m in (gate, up, down))
    return (oracle.silu(x @ gate.T) * (x @ up.T)) @ down.T


def limit(rows):
    """The relative error that a product may have."""
    return 3e-6 if rows <= 16 else 3e-4


def refused(error, *parts):
    """pytest.raises for an error whose text has these parts."""
    return pytest.raises(error, match=".*".join(re.escape(str(part)) for part in parts))
