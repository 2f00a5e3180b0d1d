"""``pycoli convert``: make a container of a model."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from ..container import Container, is_container
from ..convert import Imatrix, Recording, Report, Settings, convert
from ..convert.calibration import CalibrationTotals, Knowledge
from ..convert.shard import Loss
from ..device import Device, e8_encoder, parse_device
from ..errors import ArgumentError, ColiError
from .report import RIGHT, add_options, check_output, reading, say, sections, table, write_report


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "convert",
        help="make a container of a model: routed experts in E8, the rest in int8 and float32",
        description="Converts a Hugging Face folder, a .safetensors or a .gguf file to a container that pycoli and "
        "existing hosts read, or such a container to a .gguf file. After a crash or a kill the same command goes on "
        "where it was.",
        epilog="Exit code: 0 when the container is complete (or planned, with --dry-run), 2 for input that cannot be "
        "used.",
    )
    parser.add_argument("source", metavar="SRC", help="Hugging Face folder, .safetensors or .gguf file")
    parser.add_argument(
        "destination",
        metavar="DST",
        help="new or empty folder, or that of a conversion to go on with; OUT.gguf exports a container",
    )
    defaults = Settings  # the class has them too, and asks libcoli nothing yet
    parser.add_argument(
        "--experts",
        default=defaults.experts,
        metavar="NAME",
        help="format of the routed experts, such as e8, int4-g64 or int8; source keeps what the source has "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--dense", default=defaults.dense, metavar="NAME", help="format of other matrices (default %(default)s)"
    )
    parser.add_argument(
        "--quality",
        choices=("search", "reference", "calibrated"),
        help="how E8 is encoded: search loses less than reference, which is bit-identical to existing converters; "
        "calibrated loses the least of a model, and needs --imatrix or --activations (default calibrated with one of "
        "them, else search)",
    )
    knowledge = parser.add_mutually_exclusive_group()
    knowledge.add_argument("--imatrix", metavar="FILE", help="importance matrix of ggml to calibrate with")
    knowledge.add_argument(
        "--activations",
        metavar="FILE",
        help="recorded inputs of the MoE blocks to calibrate with, which is better: a .safetensors file with tensors "
        "layerN.x [tokens, D]",
    )
    parser.add_argument("--keep", metavar="REGEX", help="tensors in whose names this is found stay float32")
    parser.add_argument(
        "--fallback",
        default=defaults.fallback,
        metavar="NAME",
        help="format of experts whose rows E8 would pad to more bytes than this one takes (default %(default)s)",
    )
    parser.add_argument(
        "--shard-size",
        type=_size,
        default=defaults.shard_bytes,
        metavar="BYTES",
        help="such as 500M or 4G (default 2G)",
    )
    parser.add_argument("--jobs", type=_jobs, default=1, metavar="N", help="parts to work on at once (default 1)")
    parser.add_argument(
        "--device",
        type=_device,
        default="cpu",
        metavar="NAME",
        help="where E8 is encoded, in the same bytes: cpu (default), cuda (cuda:0), cuda:N or N; calibrated E8 is "
        "encoded on the CPU alone",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be written")
    add_options(parser)


def command(options: argparse.Namespace) -> int:
    """The command itself; returns the exit code."""
    check_output(options)
    if options.destination.endswith(".gguf"):
        return _export(options)
    knowledge = _knowledge(options)
    quality = options.quality or ("search" if knowledge is None else "calibrated")
    settings = Settings(options.experts, options.dense, options.keep, options.fallback, quality, options.shard_size)
    device = _open_encoder(options.device)
    # disable=None: no bar where standard error is not a terminal.
    bar = tqdm(desc="convert", unit="weight", unit_scale=True, disable=None, leave=False)
    with bar, reading(options.source):

        def progress(done: int, total: int) -> None:
            if bar.total is None:
                bar.reset(total)
                bar.initial = bar.n = done  # what an earlier run did says nothing about the rate
            bar.update(done - bar.n)

        report = convert(
            options.source,
            options.destination,
            settings,
            knowledge=knowledge,
            jobs=options.jobs,
            dry_run=options.dry_run,
            progress=progress,
            device=device,
        )
    for warning in report.warnings:
        say(f"pycoli convert: warning: {warning}", sys.stderr)
    write_report(_as_json(report, options), _as_text(report, options), options)
    return RIGHT


def _knowledge(options: argparse.Namespace) -> Knowledge | None:
    """What the user knows of activations."""
    path = options.imatrix or options.activations
    if path is None:
        if options.quality == "calibrated":
            raise ArgumentError("--quality calibrated: --imatrix FILE or --activations FILE is needed")
        return None
    if options.quality not in (None, "calibrated"):
        raise ArgumentError(f"--quality {options.quality}: does not go with {path}, which is to calibrate with")
    with reading(path):
        return Imatrix(path) if options.imatrix else Recording(path)


def _open_encoder(device: str | int) -> Device | None:
    """What --device names. ArgumentError where it cannot encode."""
    try:
        return e8_encoder(device)
    except ColiError as error:
        raise ArgumentError(f"--device {device}: {error}") from error


_OF_CONVERSIONS = {
    "experts": Settings.experts,
    "dense": Settings.dense,
    "quality": None,
    "imatrix": None,
    "activations": None,
    "keep": Settings.keep,
    "fallback": Settings.fallback,
    "shard_size": Settings.shard_bytes,
    "jobs": 1,
    "device": "cpu",
    "dry_run": False,
}
"""Options that say how to make a container, and their defaults."""


def _export(options: argparse.Namespace) -> int:
    """Writes a container as a GGUF file."""
    if given := next((name for name, default in _OF_CONVERSIONS.items() if getattr(options, name) != default), None):
        option = f"--{given.replace('_', '-')}"
        raise ArgumentError(
            f"{option}: is for making a container, and {options.destination} is a GGUF file made of one"
        )
    from ..convert.gguf_source import export_gguf  # here, as it needs a package that is optional

    if not is_container(options.source):
        raise ArgumentError(f"{options.source}: a GGUF file is made of a container, which this is not")
    with reading(options.source), Container(options.source) as container:
        warnings = export_gguf(container, options.destination)
    for warning in warnings:
        say(f"pycoli convert: warning: {warning}", sys.stderr)
    nbytes = Path(options.destination).stat().st_size
    report = {"source": options.source, "destination": options.destination, "bytes": nbytes, "warnings": warnings}
    write_report(report, f"{options.destination}: {nbytes:,} bytes", options)
    return RIGHT


def _as_json(report: Report, options: argparse.Namespace) -> dict:
    return {
        "source": options.source,
        "destination": options.destination,
        "dry_run": options.dry_run,
        "shards": len(report.plan.shards),
        "resumed_shards": report.resumed,
        "bytes": report.plan.nbytes,
        "bytes_free": report.free,
        "seconds": report.seconds,
        "kinds": [
            {
                "kind": kind,
                "format": fmt,
                "tensors": loss.tensors,
                "weights": loss.weights,
                "bytes": loss.nbytes,
                "bits_per_weight": _bits(loss),
                "nmse": None if options.dry_run else loss.nmse,
            }
            for kind, fmt, loss in _by_kind(report)
        ],
        "calibration": asdict(report.calibration) if report.calibration.count else None,
        "warnings": report.warnings,
    }


def _as_text(report: Report, options: argparse.Namespace) -> str:
    lines, total = [], Loss()
    for kind, fmt, loss in _by_kind(report):
        lines.append(loss_line(kind, fmt, loss, options.dry_run))
        total.add(loss)
    lines.append(loss_line("total", "", total, options.dry_run))
    shards = f"{len(report.plan.shards)} files, {report.plan.nbytes:,} bytes"
    if options.dry_run:
        facts = [("would write", [f"{shards}; {report.free:,} bytes are free"])]
    else:
        resumed = f", {report.resumed} of them finished before" if report.resumed else ""
        facts = [("container", [f"{options.destination}: {shards}{resumed}, {report.seconds:.1f} s"])]
        if report.calibration.count:
            facts.append(("calibration", _calibration_lines(report.calibration)))
    header = ["kind", "format", "tensors", "weights", "bytes", "bits/weight", "NMSE"]
    return "\n\n".join([table(header, lines), sections(facts)])


def _calibration_lines(totals: CalibrationTotals) -> list[str]:
    lines = [f"{totals.matrices:,} of {totals.count:,} matrices"]
    if totals.matrices:
        error, searched = (sum_ / totals.matrices for sum_ in (totals.output_error, totals.search_output_error))
        lines.append(
            f"error of their outputs over the activations: {error:.3g} of the outputs' energy, "
            f"{searched:.3g} by searching"
        )
    lines += [f"{count:,} by searching: {reason}" for reason, count in sorted(totals.searched.items())]
    lines.append(
        f"{totals.collect_seconds:.0f} s summing activations, {totals.encode_seconds:.0f} s encoding, "
        f"at most about {totals.peak_bytes / 2**20:.0f} MiB for a matrix"
    )
    return lines


def loss_line(kind: str, fmt: str, loss: Loss, planned: bool = False) -> list[str]:
    """A line of the table: what matrices of a kind take and lose."""
    nmse = "" if planned or not loss.energy else f"{loss.nmse:.3g}"
    return [kind, fmt, f"{loss.tensors:,}", f"{loss.weights:,}", f"{loss.nbytes:,}", f"{_bits(loss):.4f}", nmse]


def _by_kind(report: Report) -> list[tuple[str, str, Loss]]:
    return [(*key.split("|"), loss) for key, loss in sorted(report.losses.items())]


def _bits(loss: Loss) -> float:
    return 8 * loss.nbytes / loss.weights if loss.weights else 0.0


def _size(text: str) -> int:
    factor = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not (digits.isascii() and digits.isdigit() and len(digits) < 16 and int(digits) > 0):
        raise argparse.ArgumentTypeError(f"expected a number of bytes such as 500M or 4G, got {text}")
    return int(digits) * factor


def _device(text: str) -> str | int:
    device = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text
    try:
        parse_device(device)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(f"expected cpu, cuda, cuda:N or N, got {text}") from error
    return device


def _jobs(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 256):
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 256, got {text}")
    return int(text)
