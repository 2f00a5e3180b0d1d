"""Conversion of models to containers: convert().

The layout of what is written is described in docs/containers.md.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from .._json import parse_json, positive_integer
from ..device import Device, e8_encoder
from ..errors import ArgumentError, CheckpointError, StateError
from .calibration import CalibrationTotals, Calibrator, Imatrix, Knowledge, Recording
from .manifest import LOCK, Manifest
from .plan import CALIBRATED, Plan, Settings, make_plan
from .shard import Loss, digest, replace_file, write_shard
from .source import CheckpointSource, Source

__all__ = ["Imatrix", "Recording", "Report", "Settings", "convert", "open_source"]

_MANIFEST_ROOM = 2**20
"""Bytes that are left for the manifest and small files."""


@dataclass
class Report:
    """What a conversion did, or would do.

    Attributes
    ----------
    plan : Plan
    losses : dict
        Loss by "kind|format"; of a dry run without errors.
    needed, free : int
        Bytes that were still to be written at the start, and free on the disk then.
    calibration : CalibrationTotals
        How calibrating went, shards that were finished before included.
    resumed : int
        Shards that were finished already.
    seconds : float
    warnings : list of str
    """

    plan: Plan
    losses: dict[str, Loss] = field(default_factory=dict)
    calibration: CalibrationTotals = field(default_factory=CalibrationTotals)
    needed: int = 0
    free: int = 0
    resumed: int = 0
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)


def open_source(path: str | os.PathLike) -> Source:
    """What convert() reads from: a Hugging Face folder, a .safetensors or a .gguf file. CheckpointError for others;
    NotProvidedError for .gguf without the package gguf."""
    path = Path(path)
    if path.suffix == ".gguf" and not path.is_dir():
        from .gguf_source import GgufSource  # here, as it needs a package that is optional

        return GgufSource(path)
    return CheckpointSource(path)


def convert(
    source: str | os.PathLike | Source,
    destination: str | os.PathLike,
    settings: Settings | None = None,
    *,
    knowledge: Knowledge | None = None,
    jobs: int = 1,
    dry_run: bool = False,
    progress: Callable[[int, int], object] | None = None,
    device: str | int | Device | None = None,
) -> Report:
    """Makes a container of a model.

    Every file appears whole or not at all, and a manifest says which are finished: after a crash the same call goes on.
    Memory does not grow with the model: a few megabytes of each matrix are worked on at a time.

    Parameters
    ----------
    source : path or Source
        See open_source().
    destination : str or Path
        A new or empty folder, or that of a conversion with the same settings.
    settings : Settings
        The formats.
    knowledge : Imatrix or Recording
        For quality "calibrated", and for no other: what activations experts meet. Each expert is then held as a whole,
        with Hessians of its columns; where too little is known of one, it is encoded by searching, and counted.
    jobs : int
        Parts of matrices that are worked on at once, in threads.
    dry_run : bool
        Only plan; nothing is written.
    progress : callable, optional
        Called with the numbers of weights that are done and that there are.
    device : None, "cpu", "cuda:0", int or Device
        Where E8 is encoded, as in encode(). The bytes are the same, so that a conversion may go on elsewhere. Quality
        "calibrated" encodes on the CPU alone.

    Returns
    -------
    Report

    Raises
    ------
    CheckpointError
        The source cannot be used (the text names the tensor), the destination holds something else, or has not enough
        room.
    ArgumentError
        jobs is below 1, quality and knowledge or device do not go together, or the destination lies in the source.
    DeviceError, NotProvidedError
        The device that was named cannot encode.
    StateError
        Another conversion is writing to the destination.
    """
    if type(jobs) is not int or jobs < 1:
        raise ArgumentError(f"jobs: expected a number above 0, got {jobs!r}")
    settings = settings or Settings()
    gpu = e8_encoder(device)
    if gpu and settings.quality == CALIBRATED:
        raise ArgumentError(f"quality calibrated encodes on the CPU alone, got device {gpu.name}")
    if (settings.quality == CALIBRATED) != (knowledge is not None):
        raise ArgumentError("quality calibrated, and no other, needs an imatrix or recorded activations")
    source = source if isinstance(source, Source) else open_source(source)
    destination = Path(destination)
    _check_apart(source.path, destination)
    started = time.monotonic()
    companions = source.companions()
    plan = make_plan(source, settings, _layer_count(companions.get("config.json")))
    calibrator = None if knowledge is None else _calibrator(knowledge, plan, source, companions.get("config.json"))
    manifest = Manifest.open(
        destination, settings, source.fingerprint(), None if knowledge is None else digest(knowledge.path)
    )
    report = Report(plan, warnings=list(plan.warnings))
    if dry_run:
        report.needed, report.free = plan.nbytes, _free_bytes(destination)
        report.losses = _planned_losses(plan)
        return report
    created = not destination.exists()
    destination.mkdir(parents=True, exist_ok=True)
    with _locked(destination):
        try:
            # as it is now that nobody else writes
            manifest = Manifest.open(destination, settings, manifest.source, manifest.settings.get("calibration"))
            _run(
                plan,
                manifest,
                companions,
                report,
                destination,
                jobs,
                progress or (lambda done, total: None),
                calibrator,
                gpu,
            )
        except BaseException:
            if created and not manifest.path.exists():
                _remove_empty(destination)
            raise
    report.seconds = time.monotonic() - started
    return report


def _run(
    plan: Plan,
    manifest: Manifest,
    companions: dict[str, bytes | Path],
    report: Report,
    folder: Path,
    jobs: int,
    progress: Callable[[int, int], object],
    calibrator: Calibrator | None,
    gpu: Device | None,
) -> None:
    """Writes what is not finished yet."""
    done = {shard.name for shard in plan.shards if manifest.is_done(shard, folder)}
    damaged = sorted(manifest.shards.keys() - done)
    if damaged:
        report.warnings.append(f"{', '.join(damaged)}: not what the manifest says, and written again")
    manifest.shards = {name: manifest.shards[name] for name in done}
    to_do = [shard for shard in plan.shards if shard.name not in done]
    report.resumed, report.needed, report.free = len(done), sum(s.file_bytes for s in to_do), _free_bytes(folder)
    if to_do and report.needed + _MANIFEST_ROOM > report.free:
        raise CheckpointError(f"{folder}: {report.needed:,} bytes are needed, but only {report.free:,} are free")
    for leftover in folder.glob("*.partial"):
        leftover.unlink()
    if to_do or not manifest.complete:
        manifest.complete = False
        manifest.save()
    total = sum(_weights(shard) for shard in plan.shards)
    finished = total - sum(_weights(shard) for shard in to_do)
    progress(finished, total)

    def advance(weights: int) -> None:
        nonlocal finished
        finished += weights
        progress(finished, total)

    if calibrator:
        calibrator.wanted = {one.tensor.name for shard in to_do for one in shard.tensors if one.quality == CALIBRATED}
    with ThreadPoolExecutor(jobs, "convert") as pool:
        for shard in to_do:
            manifest.shards[shard.name] = write_shard(shard, folder, pool, jobs, advance, calibrator, gpu)
            manifest.save()
    for _, result in sorted(manifest.shards.items()):  # always the same order, so that sums have the same bits
        report.calibration.add(result.calibration)
        for key, loss in result.losses.items():
            report.losses.setdefault(key, Loss()).add(loss)
    if wrong := [name for _, result in sorted(manifest.shards.items()) for name in result.wrong]:
        others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        report.warnings.append(
            f"{wrong[0]}{others}: lost more than a matrix should in its format, as where weights are larger or smaller "
            "than it can hold; pycoli verify lists them"
        )
    for name, content in companions.items():
        replace_file(folder / name, content if isinstance(content, bytes) else content.read_bytes())
    if not manifest.complete:
        manifest.complete = True
        manifest.save()


def _calibrator(knowledge: Knowledge, plan: Plan, source: Source, config: bytes | Path | None) -> Calibrator:
    if not any(one.quality == CALIBRATED for shard in plan.shards for one in shard.tensors):
        raise ArgumentError(f"{knowledge.path}: no matrix is encoded as e8, so that nothing is to be calibrated")
    tensors = [one.tensor for shard in plan.shards for one in shard.tensors]
    return Calibrator(knowledge, tensors, _model_config(config), str(source.path))


def _weights(shard) -> int:
    return sum(one.tensor.row_count * one.tensor.columns for one in shard.tensors)


def _planned_losses(plan: Plan) -> dict[str, Loss]:
    losses: dict[str, Loss] = {}
    for shard in plan.shards:
        for one in shard.tensors:
            nbytes = one.nbytes[0] + (one.nbytes[1] if one.fmt != "e8" else 0)
            loss = Loss(1, one.tensor.row_count * one.tensor.columns, nbytes)
            losses.setdefault(f"{one.kind}|{one.fmt}", Loss()).add(loss)
    return losses


def _layer_count(config: bytes | Path | None) -> int | None:
    """Layers of the model proper, as its configuration says."""
    return positive_integer(_model_config(config), "config.json", "num_hidden_layers")


def _model_config(config: bytes | Path | None) -> dict:
    """The configuration with that of its text model on top; empty without one."""
    if config is None:
        return {}
    content = parse_json(config if isinstance(config, bytes) else config.read_bytes(), "config.json")
    text_config = content.get("text_config")
    return (
        {**content, **text_config, "model_type": content.get("model_type")}
        if isinstance(text_config, dict)
        else content
    )


def _check_apart(source: Path, destination: Path) -> None:
    source, destination = source.resolve(), destination.resolve()
    if destination == source or source in destination.parents or destination in source.parents:
        raise ArgumentError(f"{destination}: expected a folder that neither holds the source nor lies in it")
    if destination.exists() and not destination.is_dir():
        raise ArgumentError(f"{destination}: expected a folder, got a file")


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.absolute().parent
    return shutil.disk_usage(folder).free


def _remove_empty(folder: Path) -> None:
    """Removes a folder that holds nothing but the lock, which the caller has."""
    with suppress(OSError):
        if [file.name for file in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            folder.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other conversions out of a folder; the system ends that with the process, however it ends."""
    with open(folder / LOCK, "a+b") as file:
        if not _lock(file) or not _is_there(file, folder / LOCK):
            raise StateError(f"{folder}: another conversion is writing there")
        yield


def _lock(file: BinaryIO) -> bool:
    """Locks a file, unless somebody else has it."""
    try:
        if os.name == "posix":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except OSError as error:
        if os.name == "posix" and not isinstance(error, BlockingIOError):  # file systems that have no locks
            error.filename = file.name
            raise
        return False
    return True


def _is_there(file: BinaryIO, path: Path) -> bool:
    """Whether a path still leads to an open file: who removed an empty folder has removed its lock."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
