"""The product's kernels, compiled for the CPU, under the sanitizers of g++.

AddressSanitizer and UndefinedBehaviorSanitizer see wrong indices and undefined arithmetic, LeakSanitizer what a host of
the library loses. ThreadSanitizer knows the simulated GPU threads and takes barriers alone as order between them, so a
missing one is a data race: each barrier of the kernels is taken out in turn, and the sanitizer has to say so.
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
KERNELS = ROOT / "libcoli" / "cuda" / "kernels"
SIMULATED_LIBRARY = "tests/simt/libcoli_cuda_simt.so"
RACE_FOUND = 66  # exit status that is asked of ThreadSanitizer
# All parts of the workload in which GPU threads share memory.
SHARING = ["matrices", "experts", "mxfp4_from_host_memory", "device_pointers", "rotation"]


def runtime(name):
    """Path of a sanitizer's runtime, to be loaded before Python's own libraries."""
    path = subprocess.run(["g++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True)
    if not Path(path.stdout.strip()).is_absolute():
        pytest.skip(f"g++ has no lib{name}")
    return path.stdout.strip()


@functools.cache
def without_address_randomisation():
    """The command prefix that ThreadSanitizer's memory map needs; skips where the system forbids it."""
    prefix = ["setarch", "-R"]
    if shutil.which(prefix[0]) is None:
        pytest.skip("no setarch, which ThreadSanitizer needs to run without address randomisation")
    probe = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"`setarch -R true` is refused here: {probe.stderr.strip()}")
    return prefix


def run_workload(library, *parts, preload, prefix=(), **environment):
    """Runs tests/gpu/workload.py on a library under sanitizers."""
    environment = {**os.environ, **environment, "LD_PRELOAD": " ".join(runtime(name) for name in preload)}
    command = [*prefix, sys.executable, TESTS / "gpu" / "workload.py", library, *parts]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def run_under_thread_sanitizer(library, *parts, options="", **environment):
    environment["TSAN_OPTIONS"] = f"exitcode={RACE_FOUND} atexit_sleep_ms=0 {options}"
    environment["OMP_NUM_THREADS"] = "1"
    prefix = without_address_randomisation()
    return run_workload(library, *parts, preload=["tsan"], prefix=prefix, **environment)


def check_clean(run):
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    assert "all results are right" in run.stdout
    assert "runtime error" not in run.stderr
    assert "WARNING: ThreadSanitizer" not in run.stderr


@pytest.mark.parametrize("order", ["fwd", "rev", "rand:1"])
def test_addresses_and_arithmetic(sanitized_build, order):
    library = sanitized_build("address,undefined") / SIMULATED_LIBRARY
    check_clean(run_workload(library, preload=["asan", "stdc++"], SIMT_ORDER=order, ASAN_OPTIONS="detect_leaks=0"))


@pytest.mark.parametrize("order", ["fwd", "rev", "rand:1"])
def test_races(sanitized_build, order):
    without_address_randomisation()
    check_clean(run_under_thread_sanitizer(sanitized_build("thread") / SIMULATED_LIBRARY, *SHARING, SIMT_ORDER=order))


# ---- leaks ----


def run_with_leak_detection(*command):
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def leaks_are_reported(tmp_path):
    """Skips where LeakSanitizer does not work, as under a debugger or where ptrace is forbidden."""
    source, program = tmp_path / "leak.cpp", tmp_path / "leak"
    source.write_text("char *volatile p;\nint main() { p = new char[7]; p = nullptr; }\n")
    subprocess.run(["g++", "-fsanitize=address", source, "-o", program], check=True)
    run = run_with_leak_detection(program)
    if "7 byte(s) leaked" not in run.stderr:
        pytest.skip(f"LeakSanitizer does not report a leak here: {run.stderr.strip()[:200]}")


def test_a_host_leaks_nothing(sanitized_build, leaks_are_reported):
    run = run_with_leak_detection(sanitized_build("address,undefined") / "tests/c/t_host_simt")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]


# ---- mutants: what is wrong on purpose must be noticed ----

BARRIER = re.compile(r"__sync(?:threads|warp)\(\);")

# The kernel file to compile and the part of the workload to run when a barrier of a source is taken out.
EXERCISED_BY = {
    "dot.cuh": ("matmul", "matrices"),
    "rotate.cuh": ("rotate", "rotation"),
}


def barriers():
    """(source, number of the barrier in it) for all kernels."""
    sources = sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")])
    return [(path.name, i) for path in sources for i in range(len(BARRIER.findall(path.read_text())))]


class Workshop:
    """Compiles altered copies of the kernels and links them with the rest of a build of libcoli_cuda_simt."""

    def __init__(self, build, folder):
        self.build, self.folder = build, folder
        commands = json.loads((build / "compile_commands.json").read_text())
        self.commands = {
            Path(entry["file"]).name.split(".")[0]: entry
            for entry in commands
            if f"{Path(SIMULATED_LIBRARY).name}.p" in entry["output"]
        }

    def library(self, edits, names):
        """A library with the sources `names` compiled anew from a copy to which `edits` {path below libcoli: function
        text -> text} were applied. What the sources share goes into the library as they have it."""
        tree = self.folder / "libcoli"
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(ROOT / "libcoli", tree)
        for path, edit in edits.items():
            text = (tree / path).read_text()
            changed = edit(text)
            assert changed != text, f"nothing changed in {path}"
            (tree / path).write_text(changed)
        altered = [self._compile(name) for name in names]
        kept = [self.build / entry["output"] for name, entry in self.commands.items() if name not in names]
        library = self.folder / "libmutant.so"
        # In front, the altered objects win where an inline function is in several.
        command = ["g++", "-shared", "-pthread", "-fsanitize=thread", "-Wl,-Bsymbolic-functions", *altered, *kept]
        subprocess.run([*command, "-o", library], check=True)
        return library

    def _compile(self, name):
        entry, cuda = self.commands[name], self.folder / "libcoli" / "cuda"
        source, target = cuda / f"{name}.cpp", self.folder / f"{name}.o"
        if not source.exists():
            source = self.folder / f"{name}.simt.cpp"
            rewrite = [sys.executable, TESTS / "simt" / "cu2cpp.py", cuda / "kernels" / f"{name}.cu", source]
            subprocess.run(rewrite, check=True)
        replaced = {entry["output"]: target, entry["file"]: source}
        compiler, *arguments = (replaced.get(word, word) for word in shlex.split(entry["command"]))
        command = [compiler, f"-I{cuda / 'kernels'}", *arguments, "-w", "-O1"]
        subprocess.run(command, cwd=entry["directory"], check=True)
        return target


@pytest.fixture(scope="module")
def workshop(sanitized_build, tmp_path_factory):
    without_address_randomisation()
    return Workshop(sanitized_build("thread"), tmp_path_factory.mktemp("mutants"))


def one_block_for_all_rows(text):
    """Makes every kernel walk over its rows, as it does when there are more than a grid holds."""
    return re.sub(r"(kMaxGrid = )\d+;", r"\g<1>1;", text)


def run_mutant(workshop, source, edit, kernel, part):
    """Runs a part of the workload with a source below libcoli edited for one kernel."""
    library = workshop.library({"cuda/plan.h": one_block_for_all_rows, source: edit}, [kernel, "plan"])
    return run_under_thread_sanitizer(library, part, options="halt_on_error=1")


def test_rows_beyond_the_largest_grid(workshop):
    library = workshop.library({"cuda/plan.h": one_block_for_all_rows}, ["matmul", "expert", "rotate", "plan"])
    check_clean(run_under_thread_sanitizer(library, "matrices", "device_pointers", "rotation"))


@pytest.mark.parametrize(("source", "number"), barriers())
def test_missing_barrier_is_noticed(workshop, source, number):
    def without_it(text):
        barrier = list(BARRIER.finditer(text))[number]
        return text[: barrier.start()] + text[barrier.end() :]

    run = run_mutant(workshop, f"cuda/kernels/{source}", without_it, *EXERCISED_BY[source])
    assert run.returncode == RACE_FOUND, run.stdout[-3000:] + run.stderr[-6000:]
    assert "WARNING: ThreadSanitizer: data race" in run.stderr


@pytest.mark.parametrize(
    ("source", "right", "wrong", "kernel", "part", "report"),
    [
        ("formats/e8.h", "signs | (parity & 1u) << 7", "signs", "matmul", "matrices", "matmul e8: "),
        ("cuda/kernels/expert.cu", "b2 * tanhf(up / b2)", "up", "expert", "mxfp4_from_host_memory", "mxfp4 expert: "),
        ("cuda/kernels/rotate.cuh", "__popc(j & piece.index)", "0u", "rotate", "rotation", "rotation of 16645"),
    ],
    ids=["eighth-sign", "bound-of-up", "signs-between-pieces"],
)
def test_wrong_arithmetic_is_noticed(workshop, source, right, wrong, kernel, part, report):
    run = run_mutant(workshop, source, lambda text: text.replace(right, wrong), kernel, part)
    assert run.returncode == 1, run.stdout[-3000:] + run.stderr[-6000:]
    assert f"AssertionError: {report}" in run.stderr
