"""The product's kernels, compiled for the CPU, under the sanitizers of g++.

AddressSanitizer and UndefinedBehaviorSanitizer see wrong indices and undefined arithmetic, LeakSanitizer what a host of
the library loses. ThreadSanitizer knows the simulated GPU threads and takes barriers alone as order between them, so a
missing one is a data race: each barrier of the kernels is left out in turn, and the sanitizer has to say so.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sanitizers import without_address_randomisation

TESTS = Path(__file__).parent
ROOT = TESTS.parent
KERNELS = ROOT / "libcoli" / "cuda" / "kernels"
SIMULATED_LIBRARY = "tests/simt/libcoli_cuda_simt.so"
RACE_FOUND = 66  # exit status that is asked of ThreadSanitizer
# All parts of the workload in which GPU threads share memory.
SHARING = [
    "matrices",
    "long_work",
    "experts",
    "few_rows",
    "some_rows",
    "many_rows",
    "mxfp4_from_host_memory",
    "device_pointers",
    "rotation",
    "encoding",
]


def runtime(name):
    """Path of a sanitizer's runtime, to be loaded before Python's own libraries."""
    path = subprocess.run(["g++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True)
    if not Path(path.stdout.strip()).is_absolute():
        pytest.skip(f"g++ has no lib{name}")
    return path.stdout.strip()


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

BARRIER = re.compile(r"\b(?:__syncthreads|__syncwarp|named_barrier_sync|barrier_wait)\(")

# The parts of the workload to run when a barrier of a source is left out.
EXERCISED_BY = {
    "batch_hopper.cu": ["some_rows"],
    "combine.cu": ["device_pointers"],
    "encode_e8.cu": ["encoding"],
    "expert.cu": ["experts"],
    "expert_kernels.cuh": ["few_rows", "long_work"],
    "prefill.cu": ["many_rows"],
    "prefill_hopper.cu": ["many_rows"],
    "prefill_tokens.cuh": ["many_rows"],
    "product.cuh": ["long_work"],
    "ring.cuh": ["long_work"],
    "rotate.cu": ["rotation", "encoding"],
    "rotate.cuh": ["rotation", "many_rows"],
}

# Functions of the simulator that GPU threads meet in, with what a caller gets that does not wait: the linker puts these
# in between (--wrap), so that a barrier can be left out without compiling its kernel anew.
LEAVE_OUT = r"""
#include "simt_execution.h"
#include <cstdlib>
#include <cstring>
using simt::Location;
static const char *const file = getenv("LEAVE_OUT_FILE");
static const int line = file ? atoi(getenv("LEAVE_OUT_LINE")) : 0;
SIMT_UNTRACED static bool left_out(Location where) {
    if (where.line != line) return false;
    const char *name = strrchr(where.file, '/');
    return strcmp(name ? name + 1 : where.file, file) == 0;
}
#define JOIN_EXPANDED(a, b) a##b
#define JOIN(a, b) JOIN_EXPANDED(a, b)
#define WRAP(result, symbol, parameters, arguments, without)                                                  \
    extern "C" result JOIN(__real_, symbol) parameters;                                                       \
    extern "C" SIMT_UNTRACED result JOIN(__wrap_, symbol) parameters {                                        \
        return left_out(where) ? without : JOIN(__real_, symbol) arguments;                                   \
    }
WRAP(unsigned, BARRIER, (bool predicate, Location where), (predicate, where), predicate)
WRAP(simt::Meeting, MEET, (unsigned mask, uint64_t value, const char *operation, bool orders, Location where),
     (mask, value, operation, orders, where), (simt::Meeting{nullptr, 0}))
WRAP(void, NAMED_BARRIER, (int id, int threads, Location where), (id, threads, where), void())
WRAP(void, BARRIER_WAIT, (uint64_t *barrier, unsigned parity, Location where), (barrier, parity, where), void())
"""
WRAPPED = {
    "BARRIER": "_ZN4simt7barrierEbNS_8LocationE",
    "MEET": "_ZN4simt4meetEjmPKcbNS_8LocationE",
    "NAMED_BARRIER": "_ZN4simt18named_barrier_syncEiiNS_8LocationE",
    "BARRIER_WAIT": "_ZN4simt12barrier_waitEPmjNS_8LocationE",
}


def barriers():
    """(source, line) for all barriers of the kernels."""
    sources = sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")])
    return [
        (path.name, number)
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if BARRIER.search(line)
    ]


class Workshop:
    """Links a build of libcoli_cuda_simt anew, with altered copies of some of its sources in it."""

    def __init__(self, build, folder):
        self.build, self.folder = build, folder
        commands = json.loads((build / "compile_commands.json").read_text())
        self.commands = {
            Path(entry["file"]).name.split(".")[0]: entry
            for entry in commands
            if f"{Path(SIMULATED_LIBRARY).name}.p" in entry["output"]
        }

    def library(self, name, edits, names):
        """A library with the sources `names` compiled anew from a copy to which `edits` {path below libcoli: function
        text -> text} were applied. What the sources share goes into the library as they have it."""
        folder = self.folder / name
        shutil.copytree(ROOT / "libcoli", folder / "libcoli")
        for path, edit in edits.items():
            text = (folder / "libcoli" / path).read_text()
            changed = edit(text)
            assert changed != text, f"nothing changed in {path}"
            (folder / "libcoli" / path).write_text(changed)
        altered = [self._compile(folder, name) for name in names]
        altered.append(self._compile_leave_out(folder))
        kept = [self.build / entry["output"] for name, entry in self.commands.items() if name not in names]
        library = folder / "libmutant.so"
        # In front, the altered objects win where an inline function is in several.
        flags = ["-Wl,-Bsymbolic-functions,-z,defs", *(f"-Wl,--wrap={symbol}" for symbol in WRAPPED.values())]
        command = ["g++", "-shared", "-pthread", "-fsanitize=thread", *flags, *altered, *kept, "-o", library]
        subprocess.run(command, check=True)
        return library

    def _compile(self, folder, name):
        entry, cuda = self.commands[name], folder / "libcoli" / "cuda"
        source, target = cuda / f"{name}.cpp", folder / f"{name}.o"
        if not source.exists():
            source = folder / f"{name}.simt.cpp"
            rewrite = [sys.executable, TESTS / "simt" / "cu2cpp.py", cuda / "kernels" / f"{name}.cu", source]
            subprocess.run(rewrite, check=True)
        replaced = {entry["output"]: target, entry["file"]: source}
        compiler, *arguments = (replaced.get(word, word) for word in shlex.split(entry["command"]))
        command = [compiler, f"-I{cuda / 'kernels'}", *arguments, "-w", "-O1"]
        subprocess.run(command, cwd=entry["directory"], check=True)
        return target

    def _compile_leave_out(self, folder):
        source, target = folder / "leave_out.cpp", folder / "leave_out.o"
        source.write_text(LEAVE_OUT)
        symbols = [f"-D{name}={symbol}" for name, symbol in WRAPPED.items()]
        flags = ["-std=c++17", "-fPIC", "-fsanitize=thread", f"-I{TESTS / 'simt'}", *symbols]
        subprocess.run(["g++", *flags, "-c", source, "-o", target], check=True)
        return target


@pytest.fixture(scope="module")
def workshop(sanitized_build, tmp_path_factory):
    without_address_randomisation()
    return Workshop(sanitized_build("thread"), tmp_path_factory.mktemp("mutants"))


def with_constant(name, value):
    """An edit that gives a constant another value, so that few rows are as many."""
    return lambda text: re.sub(rf"(\b{name} = )\d+;", rf"\g<1>{value};", text)


# Every kernel walks over its rows, as it does when there are more than a grid holds.
ONE_BLOCK_FOR_ALL_ROWS = {
    "cuda/plan.h": with_constant("kMaxGrid", 1),
    "cuda/kernels/prefill.cu": with_constant("kMostPrepareBlocks", 1),
}


@pytest.fixture(scope="module")
def library_of_one_block(workshop):
    return workshop.library("one-block", ONE_BLOCK_FOR_ALL_ROWS, ["plan", "combine", "prefill"])


def run_mutant(library, *parts, **environment):
    # A GPU of one multiprocessor gives each warp the more to do.
    environment["SIMT_MULTIPROCESSORS"] = "1"
    return run_under_thread_sanitizer(library, *parts, options="halt_on_error=1", **environment)


@pytest.mark.parametrize("part", ["device_pointers", "experts", "many_rows", "rotation", "encoding"])
def test_rows_beyond_the_largest_grid(library_of_one_block, part):
    check_clean(run_mutant(library_of_one_block, part))


@pytest.mark.parametrize(("source", "line"), barriers())
def test_missing_barrier_is_noticed(library_of_one_block, source, line):
    """By ThreadSanitizer, by the simulator itself, which watches the barriers that copies end, or by what comes out."""
    left_out = {"LEAVE_OUT_FILE": source, "LEAVE_OUT_LINE": str(line)}
    run = run_mutant(library_of_one_block, *EXERCISED_BY[source], **left_out)
    assert run.returncode != 0, "nothing needs this barrier, or the workload does not come to it"
    raced = run.returncode == RACE_FOUND and "WARNING: ThreadSanitizer: data race" in run.stderr
    assert raced or re.search("^(simt|AssertionError): ", run.stderr, re.M), run.stdout[-3000:] + run.stderr[-6000:]


@pytest.mark.parametrize(
    ("source", "right", "wrong", "kernel", "part", "report"),
    [
        ("formats/e8.h", "signs | (parity & 1u) << 7", "signs", "layout", "matrices", "matmul e8 "),
        (
            "cuda/kernels/outputs.cuh",
            "b2 * tanhf(up / b2)",
            "up",
            "batch_hopper",
            "mxfp4_from_host_memory",
            "mxfp4 exp",
        ),
        ("cuda/kernels/combine.cu", "p.row_weights[first + i]", "1.0f", "combine", "device_pointers", "expert_group_c"),
        ("cuda/kernels/rotate.cuh", "__popc(j & piece.index)", "0u", "rotate", "rotation", "rotation of 16645"),
        ("cuda/kernels/encode_e8.cu", "s.odd[g / 2] && here", "here", "encode_e8", "encoding", "encoding by search"),
    ],
    ids=["eighth-sign", "bound-of-up", "weights-of-rows", "signs-between-pieces", "flips-of-even-lanes"],
)
def test_wrong_arithmetic_is_noticed(workshop, request, source, right, wrong, kernel, part, report):
    edits = {source: lambda text: text.replace(right, wrong)}
    run = run_mutant(workshop.library(request.node.callspec.id, edits, [kernel]), part)
    assert run.returncode == 1, run.stdout[-3000:] + run.stderr[-6000:]
    assert f"AssertionError: {report}" in run.stderr
