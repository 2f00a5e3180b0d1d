"""Formats, activations and experts that the GPU tests share, and how exact results must be."""

import numpy as np
import oracle

ON_GPU = [name for name in oracle.FORMATS if name != "int3-g64"] + ["int4-g1", "int4-g5", "int4-g16", "int4-g48"]

# Formats of gate, up and down.
MIXED = [
    ("e8", "e8", "int4"),
    ("int4", "int4", "e8"),
    ("e8", "int8", "mxfp4"),
    ("fp8-e4m3-b128", "int4-g16", "f32"),
    ("int2", "f32", "e8"),
    ("mxfp4", "e8", "fp8-e4m3-b128"),
]

EXACT = 3e-6  # relative RMS up to 16 rows
MANY_ROWS = 3e-4  # beyond
MOST_EXACT_ROWS = 16


def limit(rows):
    return EXACT if rows <= MOST_EXACT_ROWS else MANY_ROWS


def gaussian(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def random_expert(rng, D, H, formats):
    """(gate, up, down); its results are about as large as its inputs."""
    gate, up, down = formats
    return (
        oracle.random_encoded(rng, gate, (H, D), magnitude=1 / np.sqrt(D)),
        oracle.random_encoded(rng, up, (H, D), magnitude=1 / np.sqrt(D)),
        oracle.random_encoded(rng, down, (D, H), magnitude=1 / np.sqrt(H)),
    )
