"""How groups of experts would run on GPUs of each compute capability, as the GPU library plans it. Needs no GPU."""

from __future__ import annotations

from itertools import zip_longest

from .._lib import ffi, text
from ..backend import Backend
from ..errors import ColiError
from ..weights import formats, parse_format

PLAN_TEXT = "coli_cuda_plan_text"

CAPABILITIES = (80, 86, 89, 90, 100, 120)
ROWS = (1, 2, 4, 8, 16, 32)
DIM, HIDDEN, EXPERTS = 6144, 2048, 8

_OWN = 0  # the capability of the device at hand


def plans(backend: Backend) -> dict:
    """What is planned for, and for every format, number of rows and GPU the launches, each in words."""
    report = {"dim": DIM, "hidden": HIDDEN, "experts": EXPERTS, "why_not": None, "plans": []}
    if not backend.has(PLAN_TEXT):
        return report | {"why_not": f"the library lacks {PLAN_TEXT}"}
    gpus = [(str(capability), 0, capability) for capability in CAPABILITIES]
    gpus += [(name, ordinal, _OWN) for ordinal, name in enumerate(backend.devices())]
    for fmt in (fmt.name for fmt in formats() if fmt.on_gpu):
        for rows in ROWS:
            for gpu, device, capability in gpus:
                plan = {"format": fmt, "rows": rows, "gpu": gpu}
                try:
                    plan["launches"] = _plan(backend, device, capability, fmt, rows).splitlines()
                except ColiError as error:
                    plan |= {"launches": [], "error": str(error)}
                report["plans"].append(plan)
    return report


def plans_as_text(report: dict) -> str:
    """A table, in which GPUs that share a plan share a line."""
    if report["why_not"]:
        return f"no plans: {report['why_not']}"
    shared: dict[tuple, list[str]] = {}
    for plan in report["plans"]:
        launches = plan["launches"] or [f"none: {plan['error']}"]
        shared.setdefault((plan["format"], plan["rows"], tuple(launches)), []).append(plan["gpu"])
    lines = [("format", "rows", "GPUs", "launches")]
    for (fmt, rows, launches), gpus in shared.items():
        lines += zip_longest([fmt], [str(rows)], [" ".join(gpus)], launches, fillvalue="")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    title = f"plans for {report['experts']} experts {report['dim']}x{report['hidden']}, each with so many rows"
    return "\n".join([title, *(line.rstrip() for line in aligned)])


def _plan(backend: Backend, device: int, capability: int, fmt: str, rows: int) -> str:
    matrices = ffi.new("int[3]", [parse_format(fmt)[0]] * 3)
    capacity = 4096
    while True:
        written = ffi.new("char[]", capacity)
        place = (written, capacity)
        needed = backend._entry(PLAN_TEXT)(device, capability, matrices, DIM, HIDDEN, EXPERTS, rows, *place)
        if needed == 0:
            raise backend._error(PLAN_TEXT)
        if needed < capacity:
            return text(written)
        capacity = needed + 1
