"""Run the tests and compute-sanitizer on a real GPU and write what came out as a Markdown report.

python tools/gpu_report.py docs/gpu-report.md --commit REVISION
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from pycoli._lib import packaged_library

ROOT = Path(__file__).resolve().parent.parent
SANITIZERS = ("memcheck", "synccheck", "initcheck", "racecheck")


def gpu_lines() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()


def source_hash() -> str:
    """SHA-256 over the names and contents of libcoli/."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "libcoli").rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def run_tests(arguments: list[str]) -> tuple[str, bool]:
    """A line of counts, and whether all is well."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}", *arguments]
        started = time.monotonic()
        result = subprocess.run(command, cwd=ROOT)
        seconds = time.monotonic() - started
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    reasons = sorted({case.get("message") for case in suite.iter("skipped")})
    failed = count["failures"] + count["errors"]
    line = f"{passed} passed, {failed} failed, {count['skipped']} skipped in {seconds:.0f} s"
    errors = [float(p.get("value")) for p in suite.iter("property") if p.get("name") == "relative_rms"]
    if errors:  # `--pytest` may leave those tests out
        line += f"\n  - largest relative RMS error of {len(errors)} products at I = 2048 and 6144: {max(errors):.2g}"
    return line + "".join(f"\n  - skipped: {reason}" for reason in reasons), result.returncode == 0


def sanitize(tool: str, library: Path, *arguments: str) -> subprocess.CompletedProcess:
    workload = ROOT / "tests" / "gpu" / "workload.py"
    options = ["--tool", tool, "--error-exitcode", "99"]
    if tool == "memcheck":
        options += ["--padding", "4096"]  # so that what follows an allocation is not another one
    command = ["compute-sanitizer", *options, sys.executable, workload, library, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_sanitizer(tool: str, library: Path) -> tuple[str, bool]:
    """A line of findings, and whether all is well."""
    started = time.monotonic()
    result = sanitize(tool, library)
    seconds = time.monotonic() - started
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", result.stdout)
    well = result.returncode == 0 and "all results are right" in result.stdout
    if not well:
        print(result.stdout[-4000:], file=sys.stderr)
    return f"{summary[-1] if summary else 'no summary'}, exit code {result.returncode}, {seconds:.0f} s", well


def sees_a_planted_bug(library: Path) -> tuple[str, bool]:
    result = sanitize("memcheck", library, "--out-of-bounds")
    seen = result.returncode == 99 and "Invalid __global__ read" in result.stdout
    return "reported by memcheck, as it must be" if seen else f"NOT reported: {result.stdout[-500:]}", seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", required=True, help="the revision that is tested")
    parser.add_argument("--pytest", default="", help="further arguments of pytest, as one string")
    options = parser.parse_args()

    library = Path(packaged_library("coli_cuda"))
    tests, well = run_tests(shlex.split(options.pytest))
    lines = [
        "# GPU report",
        "",
        "Written by `python tools/gpu_report.py`. The tests are those of `pytest -m gpu`; the sanitizers run every",
        "kernel on small odd shapes (`tests/gpu/workload.py`) and check the results.",
        "",
        *(f"- GPU {index}: {line}" for index, line in enumerate(gpu_lines())),
        f"- date: {datetime.date.today()}",
        f"- commit: {options.commit}",
        f"- SHA-256 of `libcoli/`: `{source_hash()}`",
        f"- tests: {tests}",
    ]
    for tool in SANITIZERS:
        line, tool_well = run_sanitizer(tool, library)
        lines.append(f"- compute-sanitizer {tool}: {line}")
        well = well and tool_well
    line, seen = sees_a_planted_bug(library)
    lines.append(f"- control, a planted read out of bounds: {line}")
    well = well and seen
    lines += [
        "",
        "racecheck looks at shared memory. It judges ordering by block and warp barriers, and says nothing about",
        "ordering by mbarriers, which the Hopper paths use, or between blocks: tests/test_kernels_sanitized.py takes",
        "barriers away on the simulator and sees that ThreadSanitizer or a wrong result tells.",
    ]
    options.output.write_text("\n".join(lines) + "\n")
    print(options.output.read_text())
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
