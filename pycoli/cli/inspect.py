"""``pycoli inspect``: what a container holds, tensor by tensor, and how its encodings use their codes."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..container import Container, StoredMatrix
from ..convert.shard import row_chunks
from ..errors import ArgumentError, CheckpointError
from ..layout import SCALES_SUFFIX
from ..naming import expert_role, layer_number, natural_order, number_ranges
from ..tensorfile import TensorFile
from .report import RIGHT, add_options, check_output, natural, reading, sections, table, write_report

_BAR = 40
"""Characters of the longest bar of a histogram."""

_PLOTS = (".png", ".svg", ".pdf")


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "inspect",
        help="list the tensors of a container or .safetensors file, with formats, scales and use of codes",
        description="Lists what a container holds. Experts of a layer come as one line for gate, up and down each.",
        epilog="Exit code: 0, or 2 for files that cannot be used.",
    )
    parser.add_argument("file", metavar="FILE", help="container folder, or a .safetensors file")
    parser.add_argument("--all", action="store_true", help="a line for every tensor, experts too")
    parser.add_argument("--layer", type=natural, metavar="N", help="only this layer")
    parser.add_argument(
        "--headers", action="store_true", help="do not read the data: no ranges of scales and no histogram"
    )
    parser.add_argument("--plot", metavar="FILE", help="also draw the histograms to a .png, .svg or .pdf")
    add_options(parser)


@dataclass
class CodeUse:
    """How often E8 super-blocks use their 16 sub-scale codes and 256 codebook entries."""

    sub_scales: np.ndarray = field(default_factory=lambda: np.zeros(16, np.int64))
    entries: np.ndarray = field(default_factory=lambda: np.zeros(256, np.int64))

    def add(self, blocks: np.ndarray) -> None:
        """Counts the codes of super-blocks, uint8 [n, 98]."""
        words = np.ascontiguousarray(blocks[:, 64:96]).view("<u4")
        self.sub_scales += np.bincount((words >> 28).reshape(-1), minlength=16)
        self.entries += np.bincount(blocks[:, :64].reshape(-1), minlength=256)


@dataclass
class Line:
    """A line of the table: a tensor, or those of a layer's experts that are alike."""

    name: str
    fmt: str
    shape: tuple[int, ...]
    count: int = 0
    nbytes: int = 0
    scales: tuple[float, float] | None = None  # least and greatest magnitude

    def add(self, nbytes: int, scales: tuple[float, float] | None) -> None:
        self.count += 1
        self.nbytes += nbytes
        if scales:
            low, high = self.scales or scales
            self.scales = min(low, scales[0]), max(high, scales[1])

    @property
    def bits(self) -> float | None:
        weights = self.count * math.prod(self.shape)
        return 8 * self.nbytes / weights if weights else None


def command(options: argparse.Namespace) -> int:
    """The command itself; returns the exit code."""
    check_output(options)
    if options.plot:
        _check_plot(options)
    use = CodeUse()
    with reading(options.file):
        lines = _lines(options, use)
    report = {
        "file": options.file,
        "tensors": [
            {
                "name": line.name,
                "format": line.fmt,
                "shape": list(line.shape),
                "count": line.count,
                "bytes": line.nbytes,
                "bits_per_weight": line.bits,
                "least_scale": line.scales and _finite(line.scales[0]),
                "greatest_scale": line.scales and _finite(line.scales[1]),
            }
            for line in lines
        ],
        "bytes": sum(line.nbytes for line in lines),
        "e8_sub_scale_codes": use.sub_scales.tolist(),
        "e8_codebook_entries": use.entries.tolist(),
    }
    if options.plot:
        _plot(use, options.plot)
    write_report(report, _as_text(lines, use), options)
    return RIGHT


def _lines(options: argparse.Namespace, use: CodeUse) -> list[Line]:
    path = Path(options.file)
    container = _container(path)
    if container is None:
        return _lines_of_file(TensorFile(path), options.layer)
    lines: dict[tuple, Line] = {}
    names = _of_layer(container.names(), options.layer, path)
    for name in tqdm(sorted(names, key=natural_order), desc="inspect", unit="tensor", disable=None, leave=False):
        fmt, shape, nbytes, scales = _examine(container, name, None if options.headers else use)
        role = None if options.all else expert_role(name)
        shown = f"{name.split('.experts.')[0]}.experts.*.{role}" if role else name
        lines.setdefault((shown, fmt, shape), Line(shown, fmt, shape)).add(nbytes, scales)
    return list(lines.values())


def _container(path: Path) -> Container | None:
    """The container, or None for a .safetensors file that holds no encoded experts."""
    if path.is_file():
        file = TensorFile(path)
        names = file.names()
        if not any(name.endswith(SCALES_SUFFIX) and name.removesuffix(SCALES_SUFFIX) in file for name in names):
            return None
    return Container(path)


def _lines_of_file(file: TensorFile, layer: int | None) -> list[Line]:
    names = _of_layer(file.names(), layer, file.path)
    lines = [Line(name, file.dtype(name).lower(), file.shape(name)) for name in names]
    for line in lines:
        line.add(file.nbytes(line.name), None)
    return lines


def _of_layer(names: list[str], layer: int | None, path: Path) -> list[str]:
    """Names of the tensors of a layer, or all. CheckpointError where there is no such layer."""
    numbers = {layer_number(name) for name in names} - {None}
    if layer is not None and layer not in numbers:
        raise CheckpointError(f"{path}: layers are {number_ranges(sorted(numbers)) or 'not there'}, got layer {layer}")
    return [name for name in names if layer in (None, layer_number(name))]


def _examine(
    container: Container, name: str, use: CodeUse | None
) -> tuple[str, tuple[int, ...], int, tuple[float, float] | None]:
    """Format, shape, bytes and range of scales of a tensor; `use` gains its codes."""
    file = container.file(name)
    if file.dtype(name) != "U8" or name + SCALES_SUFFIX not in container:
        return file.dtype(name).lower(), file.shape(name), file.nbytes(name), None
    try:
        stored = container.stored(name)
    except CheckpointError:
        if expert_role(name) or container.shape_is_known(name):
            raise
        return "?", file.shape(name), file.nbytes(name), None  # hosts' containers do not say shapes of dense matrices
    unrotated = " (unrotated)" if stored.encoding.fmt == "e8" and not stored.encoding.rotated else ""
    return stored.encoding.fmt + unrotated, stored.shape, stored.nbytes, _scales(stored, use) if use else None


def _scales(stored: StoredMatrix, use: CodeUse) -> tuple[float, float] | None:
    """The least and the greatest magnitude of a matrix's scales, of E8 its super-scales."""
    ranges = list(_scale_ranges(stored, use))
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def _scale_ranges(stored: StoredMatrix, use: CodeUse) -> Iterator[tuple[float, float]]:
    for first, last in row_chunks(*stored.shape):
        weights = stored.weights(first, last)
        if stored.encoding.fmt == "e8":
            blocks = weights.data.reshape(-1, 98)
            use.add(blocks)
            scales = np.ascontiguousarray(blocks[:, 96:]).view("<f2").astype(np.float32)
        elif weights.scales is None:
            return
        else:
            scales = (
                np.ldexp(1.0, weights.scales.astype(int) - 127) if weights.scales.dtype == np.uint8 else weights.scales
            )
        magnitudes = np.abs(scales)
        yield float(magnitudes.min()), float(magnitudes.max())


def _as_text(lines: list[Line], use: CodeUse) -> str:
    rows = [
        [
            line.name,
            line.fmt,
            "x".join(map(str, line.shape)) or "scalar",
            f"{line.count:,}",
            f"{line.nbytes:,}",
            "" if line.bits is None else f"{line.bits:.4f}",
            "" if line.scales is None else f"{line.scales[0]:.3g} to {line.scales[1]:.3g}",
        ]
        for line in lines
    ]
    count, nbytes = sum(line.count for line in lines), sum(line.nbytes for line in lines)
    rows.append(["total", "", "", f"{count:,}", f"{nbytes:,}", "", ""])
    text = [table(["tensor", "format", "shape", "count", "bytes", "bits/weight", "scales"], rows)]
    if use.entries.any():
        text += ["sub-scale codes of e8\n" + _histogram(use.sub_scales), _entries_text(use.entries)]
    return "\n\n".join(text)


def _histogram(counts: np.ndarray) -> str:
    share = counts / counts.sum()
    bars = ["#" * round(_BAR * part / share.max()) for part in share]
    return "\n".join(
        f"{code:2} {100 * part:5.1f} %  {bar}".rstrip()
        for code, (part, bar) in enumerate(zip(share, bars, strict=True))
    )


def _entries_text(counts: np.ndarray) -> str:
    share = counts[counts > 0] / counts.sum()
    entropy = float(-(share * np.log2(share)).sum())
    common = ", ".join(f"{entry} ({100 * counts[entry] / counts.sum():.1f} %)" for entry in np.argsort(-counts)[:4])
    facts = [f"{len(share)} of 256 used, {entropy:.2f} bits of 8; most often {common}"]
    return sections([("codebook entries", facts)])


def _check_plot(options: argparse.Namespace) -> None:
    if Path(options.plot).suffix not in _PLOTS:
        raise ArgumentError(f"--plot: expected a name that ends in {', '.join(_PLOTS)}, got {options.plot}")
    if options.headers:
        raise ArgumentError("--plot: needs the data, which --headers leaves out")
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--plot needs matplotlib: pip install 'pycoli[plot]'")
    if not Path(options.plot).absolute().parent.is_dir():
        raise ArgumentError(f"--plot: there is no folder for {options.plot}")


def _plot(use: CodeUse, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1)
    for axes, counts, title in ((above, use.sub_scales, "sub-scale codes"), (below, use.entries, "codebook entries")):
        axes.bar(np.arange(counts.size), 100 * counts / max(1, counts.sum()), width=0.9)
        axes.set(title=f"E8 {title}", ylabel="% of uses", xlim=(-0.6, counts.size - 0.4))
    figure.savefig(path, dpi=120)


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if np.isfinite(value) else None
