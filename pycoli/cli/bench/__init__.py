"""``pycoli bench``: times of experts on GPU and CPU, checked before they are printed, beside what memory allows."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial

from tqdm import tqdm

import pycoli

from ...device import Device
from ...errors import ArgumentError, ColiError
from ..doctor import driver_report, processor_model
from ..report import RIGHT, WRONG_RESULT, check_output, sections, write_report
from . import cpu, host, layers
from .cases import DEFAULT_ROWS, Settings, parse_formats, parse_rows, parse_shapes
from .driver import Driver
from .resident import CACHES
from .results import KIND, SCHEMA, Result, as_json, machine_name, ratios, read_report, tables
from .roofline import check_plot, plot
from .timing import DEFAULT_REPETITIONS, LEAST_REPETITIONS

CPU_ROWS = (1, 4, 16)
CPU_SHAPES = "glm"
DEFAULT_EXPERTS = 8

Measure = Callable[..., list[Result]]
"""Of a format, a shape and settings."""


def command(options: argparse.Namespace) -> int:
    """The command itself; returns the exit code."""
    check_output(options)
    if options.plot:
        check_plot(options.plot)
    earlier = read_report(options.compare) if options.compare else None
    settings = _settings(options)
    with _cpu() if options.cpu else _gpu(options, settings) as (machine, warnings, measure):
        results = _measure_all(settings, measure)
        warnings = [*warnings, *_warnings_afterwards(options, settings, machine, results, earlier)]
    wrong = [result.wrong for result in results if result.wrong]
    report = {
        "kind": KIND,
        "schema": SCHEMA,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "pycoli": pycoli.__version__,
        "mode": _mode(options),
        "machine": machine,
        "settings": _settings_as_json(settings),
        "results": [as_json(result) for result in results],
        "warnings": warnings,
        "right": not wrong,
        "wrong": wrong,
    }
    if earlier:
        report["compared_with"] = {"file": options.compare, "time": earlier.get("time"), "machine": earlier["machine"]}
        report["comparison"] = ratios(results, earlier)
    if options.plot:
        plot(results, machine_name(report), options.plot)
    write_report(report, _as_text(report, results, earlier), options)
    return WRONG_RESULT if wrong else RIGHT


def _settings(options: argparse.Namespace) -> Settings:
    """What the command line asks for. ArgumentError where it makes no sense."""
    if options.reps is not None and options.reps < LEAST_REPETITIONS:
        raise ArgumentError(f"--reps: expected at least {LEAST_REPETITIONS} for a median, got {options.reps}")
    for name, value, modes in (
        ("--device", options.device, ("layers", "host")),
        ("--layers", options.layers, ("layers", "host")),
        ("--experts", options.experts, ("layers", "host")),
        ("--rows", options.rows, ("layers", "cpu")),
    ):
        if value is not None and _mode(options) not in modes:
            raise ArgumentError(f"{name} has no meaning with --{_mode(options)}")
    rows = {"layers": DEFAULT_ROWS, "host": (1,), "cpu": CPU_ROWS}[_mode(options)]
    return Settings(
        formats=parse_formats(options.formats, on_gpu=not options.cpu),
        shapes=parse_shapes(options.shapes or (CPU_SHAPES if options.cpu else "all")),
        rows=rows if options.rows is None else parse_rows(options.rows),
        experts=1 if options.cpu else options.experts or DEFAULT_EXPERTS,
        layers=options.layers,
        repetitions=options.reps or DEFAULT_REPETITIONS,
    )


def _mode(options: argparse.Namespace) -> str:
    return "cpu" if options.cpu else "host" if options.host else "layers"


def _settings_as_json(settings: Settings) -> dict:
    return {**settings._asdict(), "shapes": [shape.label for shape in settings.shapes]}


@contextmanager
def _cpu() -> Iterator[tuple[dict, list[str], Measure]]:
    """The processor: what it is, warnings, and the way to measure there."""
    model = processor_model()
    machine = {
        "name": f"{model}, {pycoli.cpu.threads()} threads, {pycoli.cpu.isa()}",
        "processor": model,
        "threads": pycoli.cpu.threads(),
        "instruction_set": pycoli.cpu.isa(),
        "cache_bytes": cpu.largest_cache(),
        "libcoli": pycoli.cpu.build_info(),
    }
    with cpu.Memory() as memory:
        warnings = []
        if not memory.cold:
            warnings.append(
                f"free memory allows {memory.nbytes / 2**20:.0f} MiB of weights in turn, less than {CACHES} x the "
                "largest cache: part of them came from the cache"
            )
        yield machine, warnings, lambda fmt, shape, settings: cpu.measure(fmt, shape, settings, memory)


@contextmanager
def _gpu(options: argparse.Namespace, settings: Settings) -> Iterator[tuple[dict, list[str], Measure]]:
    """A GPU: what it is, warnings, and the way to measure there. ArgumentError where there is none."""
    device = _open_device(options.device or 0)
    nvidia = driver_report()["nvidia"]
    numbers = re.search(r"\b[0-9]+(\.[0-9]+)+\b", nvidia or "")
    with Driver(device.ordinal) as driver:
        machine = {
            "name": f"{device.model}, driver {numbers[0] if numbers else 'unknown'}",
            "gpu": device.model,
            "driver": nvidia,
            "cuda": driver.version,
            "capability": driver.capability,
            "multiprocessors": driver.multiprocessors,
            "l2_bytes": driver.l2_bytes,
            "memory_bytes": device.memory().total,
            "libcoli_cuda": device.backend.build_info,
            "processor": processor_model(),
        }
        part = host if options.host else layers
        warnings = [] if options.host or device.backend.has(layers.PROBE) else [layers.NO_PROBE]
        yield machine, warnings, partial(part.measure, device=device, driver=driver)


def _open_device(ordinal: int) -> Device:
    try:
        return Device(ordinal)
    except ColiError as error:
        raise ArgumentError(f"no GPU to measure: {error}; --cpu measures the CPU") from error


def _measure_all(settings: Settings, measure: Measure) -> list[Result]:
    cases = [(shape, fmt) for shape in settings.shapes for fmt in settings.formats]
    results = []
    # disable=None: no bar where standard error is not a terminal.
    with tqdm(cases, desc="measure", unit="case", disable=None, leave=False) as bar:
        for shape, fmt in bar:
            bar.set_postfix_str(f"{fmt} {shape.label}")
            results += measure(fmt, shape, settings=settings)
    return results


def _warnings_afterwards(
    options: argparse.Namespace, settings: Settings, machine: dict, results: list[Result], earlier: dict | None
) -> list[str]:
    """What takes meaning from the figures."""
    warnings = []
    if settings.layers:
        few = [
            f"{result.fmt} {result.shape.label}"
            for result in results
            if result.what in ("layer", "expert_group")
            and settings.layers * result.nbytes < CACHES * machine["l2_bytes"]
        ]
        if few:
            warnings.append(
                f"--layers {settings.layers} is less than {CACHES} x the L2 cache: part of the weights came from it, "
                f"of {', '.join(dict.fromkeys(few))}"
            )
    if earlier and machine_name(earlier) != machine["name"]:
        warnings.append(f"the earlier run was on another machine: {machine_name(earlier)}")
    if earlier and earlier.get("mode") != _mode(options):
        warnings.append(f"the earlier run measured something else: {earlier.get('mode')}")
    return warnings


_ABOUT = {
    "layers": [
        "layer: experts of a layer, each with so many rows, in a CUDA graph of layers in turn; the weights come from "
        "memory, not from the L2 cache",
        "read, copy: a kernel that only reads as many bytes as the weights of a layer, or copies half of them to the "
        "other half",
    ],
    "host": [
        "expert_mlp, expert_group, issue: calls with host pointers, one row an expert, layers in turn",
        "upload, update: an expert from pageable memory; pinned copy: the same bytes from page-locked memory",
    ],
    "cpu": [
        "product: the gate matrix; expert: all three; weights in turn, so that they come from memory",
        "read, copy: memory read, or copied, by as many threads",
    ],
}


def _as_text(report: dict, results: list[Result], earlier: dict | None) -> str:
    machine = report["machine"]
    lines = [machine["name"]]
    if "gpu" in machine:
        lines.append(
            f"compute capability {machine['capability']}, {machine['multiprocessors']} multiprocessors, "
            f"{machine['l2_bytes'] / 2**20:.0f} MiB of L2 cache, CUDA {machine['cuda']}"
        )
    lines.append(machine.get("libcoli_cuda") or machine.get("libcoli") or "an older library")
    meanings = [
        f"median of {report['settings']['repetitions']} interleaved repetitions; spread: slowest less fastest",
        *_ABOUT[report["mode"]],
        "GB/s: of weights; ceiling: share of the GB/s of read, or pinned copy, in the same repetitions",
        "error: relative RMS against float64 of the decoded weights; a result that is wrong has no time",
    ]
    facts = [("machine", lines), ("meaning", meanings)]
    if earlier:
        facts.append(("before", [f"{machine_name(earlier)}, {earlier.get('time')}; ratio: above 1 is faster now"]))
    verdict = [f"warning: {warning}" for warning in report["warnings"]]
    verdict += [f"WRONG: {reason}" for reason in report["wrong"]]
    return "\n\n".join(filter(None, [sections(facts), tables(results, earlier), "\n".join(verdict)]))
