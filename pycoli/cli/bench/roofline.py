"""The picture of a run: what the kernels reach, under the roof that memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import ArgumentError
from .results import READ, Result

ENDINGS = (".png", ".svg", ".pdf")

_STYLES = ("-", "--", ":", "-.")


def check_plot(file: str) -> None:
    """ArgumentError unless a picture can be drawn and its name is one. To be called before the work."""
    if Path(file).suffix not in ENDINGS:
        raise ArgumentError(f"--plot: expected a file named *{', *'.join(ENDINGS)}, got {file}")
    if not Path(file).absolute().parent.is_dir():
        raise ArgumentError(f"--plot: there is no folder for {file}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ArgumentError(f"--plot needs matplotlib: pip install 'pycoli[plot]' ({error})") from error


def plot(results: Sequence[Result], title: str, file: str) -> None:
    """Draws one diagram a shape: TFLOP/s over the operations that each byte of weights is good for.

    The roof is the measured read of memory. There is none for arithmetic: nothing measures it.
    """
    from matplotlib.figure import Figure

    computed = [result for result in results if result.seconds and result.flops]
    shapes = list(dict.fromkeys(result.shape for result in computed))
    columns = max(min(len(shapes), 2), 1)
    figure = Figure(figsize=(9 * columns, 5 * max(-(-len(shapes) // columns), 1)), layout="constrained")
    figure.suptitle(title)
    for number, shape in enumerate(shapes):
        axes = figure.add_subplot(-(-len(shapes) // columns), columns, number + 1)
        here = [result for result in computed if result.shape == shape]
        roofs = [result for result in results if result.what == READ and result.shape == shape and result.seconds]
        _draw(axes, here, max((r.nbytes / r.median for r in roofs), default=None))
        axes.set_title(shape.label)
    figure.savefig(file, dpi=150)


def _draw(axes, results: list[Result], bytes_per_second: float | None) -> None:
    """A colour a format, a line style a call."""
    formats, calls = (list(dict.fromkeys(getattr(r, name) for r in results)) for name in ("fmt", "what"))
    for what, fmt in dict.fromkeys((result.what, result.fmt) for result in results):
        points = sorted((_intensity(r), 1e-12 * r.flops / r.median) for r in results if (r.what, r.fmt) == (what, fmt))
        style = {"color": f"C{formats.index(fmt)}", "linestyle": _STYLES[calls.index(what) % len(_STYLES)]}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=f"{fmt} {what}", **style)
    if bytes_per_second is not None:
        ends = [edge(map(_intensity, results)) for edge in (min, max)]
        roof = [1e-12 * bytes_per_second * end for end in ends]
        axes.plot(ends, roof, color="black", label=f"memory, {1e-9 * bytes_per_second:.0f} GB/s read")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of weights", ylabel="TFLOP/s")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _intensity(result: Result) -> float:
    return result.flops / result.nbytes
