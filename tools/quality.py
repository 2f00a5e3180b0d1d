"""Measure what each format and quality of encoding costs a trained model, and write a Markdown report and a plot.

python tools/quality.py docs/quality.md --models ../shared/models

The models folder holds tiny-olmoe, its calibration and validation texts and the list of windows. The plot, loss against
bits, goes beside the report (.png); it needs matplotlib.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: windows run in threads of their own

import numpy as np

import pycoli

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import olmoe  # noqa: E402

FORMATS = {
    "int8": {"fmt": "int8"},
    "int4-g64": {"fmt": "int4-g64"},
    "mxfp4": {"fmt": "mxfp4"},
    "int4": {"fmt": "int4"},
    "int3-g64": {"fmt": "int3-g64"},
    "int2": {"fmt": "int2"},
    "e8 reference, unrotated": {"fmt": "e8", "quality": "reference", "rotate": False},
    "e8 reference": {"fmt": "e8", "quality": "reference"},
    "e8 search, unrotated": {"fmt": "e8", "quality": "search", "rotate": False},
    "e8 search": {"fmt": "e8", "quality": "search"},
}
CALIBRATED = "e8 calibrated"
THREADS = pycoli.cpu.threads()
WINDOWS_A_GROUP = 16
PROBE_WINDOWS = 16  # of the held-out ones, for the error of the blocks' outputs


@dataclass
class Result:
    name: str
    bits: float
    weight_nmse: float
    output_nmse: float  # of the MoE blocks' outputs for exact inputs, mean over the layers
    losses: np.ndarray  # of each window
    seconds: float


class Bench:
    """The model, its held-out windows and what it gives with its own weights."""

    def __init__(self, models: Path):
        self.models = models
        self.model = olmoe.Olmoe(models / "tiny-olmoe")
        self.windows = olmoe.evaluation_windows(models)
        self.losses = self.model.losses(self.windows, threads=THREADS)
        self.inputs = list(self._block_inputs(self.windows[:PROBE_WINDOWS, :-1]))
        self.outputs = [self.model.moe(layer, x) for layer, x in enumerate(self.inputs)]

    def _block_inputs(self, windows):
        hidden = self.model.embed(windows)
        for layer in range(self.model.layers):
            hidden = self.model.attend(layer, hidden)
            x = self.model.moe_input(layer, hidden)
            yield x
            hidden = hidden + self.model.moe(layer, x).reshape(hidden.shape)

    def measure(self, name: str, encode) -> Result:
        """`encode()` gives [layer][expert] of three Weights."""
        start = time.perf_counter()
        encoded = encode()
        seconds = time.perf_counter() - start
        matrices = [
            (w, weights)
            for layer, of_layer in zip(self.model.experts, encoded, strict=True)
            for expert, of_expert in zip(layer, of_layer, strict=True)
            for w, weights in zip(expert, of_expert, strict=True)
        ]
        decoded = [[tuple(w.decode() for w in expert) for expert in layer] for layer in encoded]
        lost, total = (
            sum(float(np.square(m, dtype=np.float64).sum()) for m in parts)
            for parts in ((weights.decode() - w for w, weights in matrices), (w for w, _ in matrices))
        )
        return Result(
            name,
            8 * sum(weights.nbytes for _, weights in matrices) / sum(w.size for w, _ in matrices),
            lost / total,
            self._output_nmse(decoded),
            self.model.losses(self.windows, self.model.with_experts(decoded), threads=THREADS),
            seconds,
        )

    def _output_nmse(self, decoded) -> float:
        ratios = []
        for layer, (x, exact) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            error = self.model.moe_of(layer, x, decoded[layer]) - exact
            ratios.append(float(np.square(error).sum() / np.square(exact).sum()))
        return float(np.mean(ratios))

    def encoded(self, **options):
        return [[[pycoli.encode(w, **options) for w in expert] for expert in layer] for layer in self.model.experts]

    def calibrated(self, tokens: int, reports: list):
        """Layer by layer, on what the layers that are encoded already make of the calibration text."""
        model = self.model
        windows = olmoe.calibration_windows(self.models, tokens)
        exact = [model.embed(part) for part in np.array_split(windows, max(1, len(windows) // 4))]
        coded = [part.copy() for part in exact]
        encoded = []
        for layer in range(model.layers):
            exact, coded = ([model.attend(layer, part) for part in parts] for parts in (exact, coded))
            exact_x, x = (np.concatenate([model.moe_input(layer, part) for part in parts]) for parts in (exact, coded))
            chosen, shares = model.route(layer, x)
            of_layer = []
            for number, expert in enumerate(model.experts[layer]):
                rows, places = np.nonzero(chosen == number)
                weights, of_expert = pycoli.encode_expert(
                    *expert, x[rows], exact=exact_x[rows], shares=shares[rows, places]
                )
                of_layer.append(weights)
                reports.extend(of_expert)
            encoded.append(of_layer)
            decoded = [tuple(w.decode() for w in expert) for expert in of_layer]
            for parts, experts in ((exact, model.experts[layer]), (coded, decoded)):
                for part in parts:
                    part += model.moe_of(layer, model.moe_input(layer, part), experts).reshape(part.shape)
        return encoded


def spread(differences: np.ndarray) -> float:
    """Standard deviation of the means of groups of 16 windows."""
    return float(differences.reshape(-1, WINDOWS_A_GROUP).mean(axis=1).std(ddof=1))


def table(results: list[Result], exact: np.ndarray) -> list[str]:
    lines = [
        "| format, quality | bits a weight | weight NMSE | output NMSE | loss | over f32 | spread |",
        "|---|---|---|---|---|---|---|",
        f"| f32 | 32 | 0 | 0 | {exact.mean():.5f} | | |",
    ]
    for result in results:
        lost = result.losses - exact
        lines.append(
            f"| {result.name} | {result.bits:.4g} | {result.weight_nmse:.5f} | {result.output_nmse:.5f} "
            f"| {result.losses.mean():.5f} | {lost.mean():+.5f} | {spread(lost):.5f} |"
        )
    return lines


def calibration_lines(result: Result, reports: list, tokens: int) -> list[str]:
    rows = [report.rows for report in reports[::3]]
    fallen = sum(1 for report in reports if report.reason)
    error, searched = (
        np.mean([getattr(report, name) for report in reports if not report.reason])
        for name in ("output_error", "search_output_error")
    )
    encoding = sum(report.encode_seconds for report in reports)
    summing = sum(report.collect_seconds for report in reports[::3] + reports[2::3])  # gate and up share theirs
    peak = max(report.peak_bytes for report in reports) / 2**20
    return [
        f"- {tokens} tokens of calibration text. An expert saw {min(rows)} to {max(rows)} of them, "
        f"the median is {np.median(rows):.0f}.",
        f"- {fallen} of {len(reports)} matrices had too few rows and were encoded by searching.",
        f"- Output error of single matrices over the calibration's rows: {error:.4f} of the outputs' energy on "
        f"average, {searched:.4f} by searching.",
        f"- {result.seconds:.0f} s in all, the model's own passes in numpy included: {encoding:.0f} s encoding, "
        f"{summing:.0f} s summing activations. At most {peak:.0f} MiB of memory for a matrix.",
        f"- {platform.machine()}, {pycoli.cpu.threads()} threads, {pycoli.cpu.isa()} kernels.",
    ]


REPORT = """# Quality of the encodings

A trained OLMoE of 30 M parameters (4 layers of 16 experts, hidden 512, expert 256, top 4) on held-out text: {count}
windows of {length} bytes, loss in nats a byte. Only the routed experts are encoded, all else is f32. Made by
`python tools/quality.py docs/quality.md --models FOLDER`.

{table}

- Weight NMSE: squared error of all expert weights in relation to their squares.
- Output NMSE: the same of the MoE blocks' outputs for exact inputs from {probe} of the windows, mean over the layers.
- Spread: standard deviation of the loss difference over {groups} groups of {group} windows.
- Scales a row weigh more here than in large matrices.

![loss against bits]({plot})

## Calibration
{calibration}

Layers are encoded from the first to the last. Gate and up see the rows that the router sends to their expert, as the
encoded layers before give them, each with its router share; down sees the hidden rows that the encoded gate and up make
of them. All are encoded for what the original model gives in their place:
`pycoli.encode_expert(gate, up, down, x, exact=..., shares=...)`.
"""


def report(bench: Bench, results: list[Result], reports: list, tokens: int, plot: Path) -> str:
    return REPORT.format(
        count=len(bench.windows),
        length=bench.windows.shape[1] - 1,
        table="\n".join(table(results, bench.losses)),
        probe=PROBE_WINDOWS,
        groups=len(bench.windows) // WINDOWS_A_GROUP,
        group=WINDOWS_A_GROUP,
        plot=plot.name,
        calibration="\n".join(calibration_lines(results[-1], reports, tokens)),
    )


def label(figure, axes, places: dict[str, tuple[float, float]]) -> None:
    """Writes each name beside its point, on the first side where it covers neither another name nor a point."""
    from matplotlib.transforms import Bbox

    sides = [("left", 8, 0), ("right", -8, 0), ("left", 6, 10), ("left", 6, -10), ("right", -6, 10), ("right", -6, -10)]
    figure.draw_without_rendering()  # places depend on the layout
    taken = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in axes.transData.transform([*places.values()])]
    for name, place in places.items():
        for align, across, up in sides:
            text = axes.annotate(
                name, place, (across, up), textcoords="offset points", fontsize=8, ha=align, va="center"
            )
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        else:
            raise RuntimeError(f"no room for the name {name} in the plot")
        taken.append(box)


def draw(results: list[Result], exact: np.ndarray, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    places = {}
    for result in results:
        if "unrotated" in result.name:  # would hide the rotated ones
            continue
        lost = result.losses - exact
        e8 = result.name.startswith("e8")
        axes.errorbar(
            result.bits,
            max(lost.mean(), 1e-5),
            yerr=spread(lost) / np.sqrt(len(lost) / WINDOWS_A_GROUP),
            fmt="o" if e8 else "s",
            color="tab:red" if e8 else "tab:blue",
            capsize=3,
        )
        places[result.name] = (result.bits, max(lost.mean(), 1e-5))
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bits a weight, scales included",
        ylabel="loss over f32, nats a byte",
        title="Experts of a trained OLMoE (30 M parameters)",
    )
    ticks = [2, 3, 4, 5, 6, 8]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlim(1.8, 10)
    axes.set_ylim(bottom=1e-5)
    label(figure, axes, places)
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="FILE.md")
    parser.add_argument("--models", type=Path, default=ROOT.parent / "shared" / "models")
    parser.add_argument("--tokens", type=int, default=65536, help="of calibration text")
    options = parser.parse_args(arguments)
    if not (options.models / "tiny-olmoe").is_dir():
        parser.error(f"no tiny-olmoe in {options.models}; give its folder with --models")
    bench = Bench(options.models)
    results, reports = [], []
    for name, encoding in FORMATS.items():
        results.append(bench.measure(name, lambda encoding=encoding: bench.encoded(**encoding)))
        print(*table(results[-1:], bench.losses)[-1:], flush=True)
    results.append(bench.measure(CALIBRATED, lambda: bench.calibrated(options.tokens, reports)))
    print(*table(results[-1:], bench.losses)[-1:], flush=True)
    plot = options.output.with_suffix(".png")
    draw(results, bench.losses, plot)
    options.output.write_text(report(bench, results, reports, options.tokens, plot), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
