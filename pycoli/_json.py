"""JSON files that nobody vouches for: configurations, indices, manifests."""

from __future__ import annotations

import json
from pathlib import Path

from ._arrays import MAX_DIM
from .errors import CheckpointError


def parse_json(text: str | bytes, source: str | Path) -> dict:
    """A JSON object. CheckpointError, which names `source`, for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: expected a JSON object, got {type(value).__name__}")
    return value


def read_json(path: Path) -> dict:
    """The JSON object in a file. CheckpointError where it cannot be read."""
    try:
        return parse_json(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def positive_integer(config: dict, source: str | Path, *keys: str) -> int | None:
    """The first of the entries that a configuration has; None where it has none. CheckpointError where that is not a
    positive integer that C can hold."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_DIM:
            raise CheckpointError(f"{source}: {key}: expected a positive integer, got {value!r:.60}")
        return value
    return None
