"""The manifest of a conversion: what was asked for, of which files, and what is done. A killed conversion goes on from
it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .._json import read_json
from .._lib import version
from ..container import MANIFEST
from ..errors import CheckpointError
from .calibration import CalibrationTotals
from .plan import Settings, ShardPlan
from .shard import Loss, ShardResult, digest, replace_file

__all__ = ["Manifest"]


@dataclass
class Manifest:
    """What a container's manifest says. `shards` are those that are finished."""

    path: Path
    settings: dict
    source: list[str]
    shards: dict[str, ShardResult] = field(default_factory=dict)
    complete: bool = False

    @classmethod
    def open(cls, folder: Path, settings: Settings, source: list[str], calibration: str | None = None) -> Manifest:
        """The manifest in a folder, or a fresh one for a folder without files. `calibration` is the checksum of what a
        conversion is calibrated with.

        Raises
        ------
        CheckpointError
            The folder holds something else, or a conversion with other settings or of other files.
        """
        fresh = cls(folder / MANIFEST, {"pycoli": version, **asdict(settings)}, source)
        if calibration is not None:
            fresh.settings["calibration"] = calibration
        if not fresh.path.exists():
            if folder.exists() and (strange := sorted(file.name for file in folder.iterdir() if not _is_ours(file))):
                raise CheckpointError(f"{folder}: expected a new or empty folder, found {strange[0]}")
            return fresh
        content = read_json(fresh.path)
        if content.get("program") != "pycoli":
            raise CheckpointError(f"{fresh.path}: not a manifest of pycoli; give a new folder")
        fresh._check_same(content)
        fresh.complete = content.get("complete") is True
        try:
            fresh.shards = {name: _result(entry) for name, entry in content["shards"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{fresh.path}: damaged ({error!r}); give a new folder") from error
        return fresh

    def _check_same(self, content: dict) -> None:
        before = content.get("settings")
        if before != self.settings:
            before = before if isinstance(before, dict) else {}
            keys = sorted({**before, **self.settings})
            differ = [key for key in keys if before.get(key) != self.settings.get(key)]
            text = ", ".join(f"{key} {before.get(key)!r}, now {self.settings.get(key)!r}" for key in differ)
            raise CheckpointError(f"{self.path}: the conversion there has other settings: {text}; give a new folder")
        if content.get("source") != self.source:
            raise CheckpointError(f"{self.path}: the conversion there is of other files; give a new folder")

    def is_done(self, shard: ShardPlan, folder: Path) -> bool:
        """Whether a file is finished, and still what it was."""
        result, file = self.shards.get(shard.name), folder / shard.name
        if result is None or not file.is_file() or file.stat().st_size != result.nbytes != -1:
            return False
        return result.nbytes == shard.file_bytes and digest(file) == result.sha256

    def save(self) -> None:
        """Writes the manifest, all at once."""
        content = {
            "program": "pycoli",
            "complete": self.complete,
            "settings": self.settings,
            "source": self.source,
            "shards": {
                name: {
                    "bytes": result.nbytes,
                    "sha256": result.sha256,
                    "losses": {key: asdict(loss) for key, loss in sorted(result.losses.items())},
                    "calibration": asdict(result.calibration),
                    "wrong": result.wrong,
                }
                for name, result in sorted(self.shards.items())
            },
        }
        replace_file(self.path, (json.dumps(content, indent=1) + "\n").encode())


def _result(entry: dict) -> ShardResult:
    losses = {key: Loss(**loss) for key, loss in entry["losses"].items()}
    if not all(key.count("|") == 1 and all(map(_is_number, asdict(loss).values())) for key, loss in losses.items()):
        raise ValueError("losses that are no numbers by kind and format")
    totals = CalibrationTotals(**entry.get("calibration", {}))
    if not all(map(_is_number, _numbers(totals))):
        raise ValueError("a calibration that is no numbers")
    wrong = entry.get("wrong", [])
    if not (isinstance(wrong, list) and all(isinstance(name, str) for name in wrong)):
        raise ValueError("wrong matrices that are no names")
    return ShardResult(int(entry["bytes"]), str(entry["sha256"]), losses, totals, wrong)


def _is_number(value: object) -> bool:
    """Whether a value can be summed up and reported: JSON as Python reads it has NaN and infinity, too."""
    return type(value) in (int, float) and math.isfinite(value)


def _numbers(totals: CalibrationTotals) -> list:
    content = asdict(totals)
    return [*content.pop("searched").values(), *content.values()]


def _is_ours(file: Path) -> bool:
    """What a conversion leaves that was killed before it had a manifest."""
    return file.name in (f"{MANIFEST}.partial", LOCK)


LOCK = ".out-progress.lock"
"""Held by a running conversion; only who holds it may remove it, with the folder that it leaves empty."""
