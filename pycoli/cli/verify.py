"""``pycoli verify``: compare a container with the model that it was made from."""

from __future__ import annotations

import argparse
import math

from tqdm import tqdm

from ..container import Container
from ..convert import open_source
from ..convert.shard import Loss
from ..convert.verify import TensorResult, verify
from .convert import loss_line
from .report import RIGHT, WRONG_RESULT, add_options, check_output, reading, sections, table, write_report

_WORST = 8
"""Tensors that the text lists by their error."""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="decode a container and compare it with the model that it was made from",
        description="Checks checksums, decodes every tensor and compares it with the source's.",
        epilog="Exit code: 0 when every tensor is there and within its limit, 1 when one is not, 2 for input that "
        "cannot be used.",
    )
    parser.add_argument("container", metavar="DST", help="the container")
    parser.add_argument("--against", required=True, metavar="SRC", help="what it was made from")
    parser.add_argument(
        "--limit",
        type=_limit,
        metavar="NMSE",
        help="error energy over weight energy that an encoded matrix may have (default: by format, e8 0.08)",
    )
    parser.add_argument("--all", action="store_true", help="list every tensor, not only the worst")
    add_options(parser)


def command(options: argparse.Namespace) -> int:
    """The command itself; returns the exit code."""
    check_output(options)
    with reading(options.against):
        source = open_source(options.against)
    with reading(options.container), Container(options.container) as container:
        total = len(container.names())
        with tqdm(total=total, desc="verify", unit="tensor", disable=None, leave=False) as bar:
            found = list(verify(container, source, limit=options.limit, progress=lambda name: bar.update()))
    wrong = [result for result in found if result.problem]
    report = {
        "container": options.container,
        "against": options.against,
        "tensors": [_as_json(result) for result in found],
        "right": not wrong,
    }
    write_report(report, _as_text(found, wrong, options.all), options)
    return WRONG_RESULT if wrong else RIGHT


def _as_json(result: TensorResult) -> dict:
    nmse = result.loss.nmse
    return {
        "name": result.name,
        "kind": result.kind,
        "format": result.fmt,
        "bytes": result.loss.nbytes,
        "nmse": nmse if math.isfinite(nmse) else None,
        "largest_error": result.largest if math.isfinite(result.largest) else None,
        "problem": result.problem,
    }


def _as_text(found: list[TensorResult], wrong: list[TensorResult], everything: bool) -> str:
    by_kind: dict[tuple[str, str], Loss] = {}
    for result in found:
        by_kind.setdefault((result.kind, result.fmt), Loss()).add(result.loss)
    kinds = [loss_line(*key, loss) for key, loss in sorted(by_kind.items())]
    listed = found if everything else sorted(found, key=lambda result: -result.loss.nmse)[:_WORST]
    worst = [[r.name, r.fmt, f"{r.loss.nmse:.4g}", f"{r.largest:.3g}"] for r in listed]
    text = [
        table(["kind", "format", "tensors", "weights", "bytes", "bits/weight", "NMSE"], kinds, total=False),
        table(["tensor" if everything else "worst", "format", "NMSE", "largest error"], worst, total=False),
    ]
    if wrong:
        text.append(sections([("WRONG", [f"{result.name}: {result.problem}" for result in wrong])]))
    else:
        text.append(f"right: {len(found)} tensors are there and within their limits")
    return "\n\n".join(text)


def _limit(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text}")
    return value
