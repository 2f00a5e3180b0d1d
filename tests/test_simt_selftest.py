"""The tool that runs kernels on the CPU (tests/simt): correct programs pass, the mistakes it is there for are noticed.

tests/simt/selftest.cu holds the programs; `selftest NAME bug` is one with its mistake put in."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SIMT = Path(__file__).resolve().parent / "simt"
CXX = os.environ.get("CXX", "g++")
CUDA = SIMT.parent.parent / "libcoli" / "cuda"  # has the headers whose twins are tested
FLAGS = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fno-strict-aliasing"]
FLAGS += ["-DCOLI_SIMT", "-I", SIMT, "-I", CUDA]
SANITIZERS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}
CASES = [
    "missing_barrier",
    "divergent_barrier",
    "divergent_shuffle",
    "shared_out_of_bounds",
    "dynamic_shared_out_of_bounds",
    "global_out_of_bounds",
    "misaligned_load",
    "bad_shift",
    "unwritten_shared",
    "trap",
    "warp_order",
    "async_missing_wait",
    "async_missing_barrier",
    "async_early_refill",
    "async_misaligned",
    "async_out_of_bounds",
    "async_not_shared",
    "bulk_missing_wait",
    "bulk_early_release",
    "bulk_overrun",
    "bulk_too_few_bytes",
    "bulk_too_many_bytes",
    "bulk_misaligned",
    "bulk_out_of_bounds",
    "bulk_unpublished",
    "bulk_left_behind",
    "barrier_not_initialised",
    "barrier_initialised_twice",
    "named_barrier_missing",
    "named_barrier_too_few",
    "named_barrier_split_warp",
    "named_barrier_counts",
    "mma_fragments",
    "mma_divergent",
    "mma_unordered",
    "too_much_shared",
    "launch_ex",
    "other_device",
    "other_device_hidden",
    "host_pointer",
    "host_access",
    "use_after_free",
    "wrong_stream",
    "legacy_stream",
    "early_reuse",
    "missing_wait",
]
CHECKS = [
    "check_collectives",
    "check_gathering",
    "check_halves",
    "check_grids",
    "check_symbols",
    "check_errors",
    "check_memory",
    "check_streams",
    "check_graphs",
    "check_fault_injection",
    "check_threads",
]


def run(command, timeout=60, **environment):
    """Run a command with extra environment variables; no other SIMT_ variable reaches it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SIMT_")}
    env["TSAN_OPTIONS"] = "atexit_sleep_ms=0"  # a second for each process otherwise
    return subprocess.run(
        [str(word) for word in command],
        env=env | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def compile_with(sanitizer, *arguments):
    result = run([CXX, *FLAGS, *SANITIZERS[sanitizer], "-pthread", *arguments], timeout=300)
    assert result.returncode == 0, result.stdout


def rewrite(source, output):
    """Put a CUDA source through cu2cpp.py; return (exit status, messages)."""
    result = run([sys.executable, SIMT / "cu2cpp.py", source, output])
    return result.returncode, result.stdout


@pytest.fixture(scope="session")
def selftest(tmp_path_factory):
    """A function (name of sanitizer, or "plain") -> command that runs selftest, built when it is first asked for."""
    if shutil.which(CXX) is None:
        pytest.skip(f"no C++ compiler {CXX}")
    built = {}

    def build(sanitizer):
        folder = tmp_path_factory.mktemp(f"selftest_{sanitizer}")
        (folder / "probe.cpp").write_text("int main() {}\n")
        probe = run([CXX, *SANITIZERS[sanitizer], folder / "probe.cpp", "-o", folder / "probe"])
        # ThreadSanitizer of older compilers does not start where the kernel randomises addresses widely.
        prefix = ["setarch", "-R"] if sanitizer == "thread" and shutil.which("setarch") else []
        if probe.returncode or run([*prefix, folder / "probe"]).returncode:
            return f"{CXX} cannot build or run programs with {' '.join(SANITIZERS[sanitizer])}"
        assert rewrite(SIMT / "selftest.cu", folder / "selftest.cpp") == (0, "")
        sources = [folder / "selftest.cpp", *sorted(SIMT.glob("simt_*.cpp"))]
        objects = [folder / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(2) as pool:
            list(
                pool.map(
                    lambda pair: compile_with(sanitizer, "-c", pair[0], "-o", pair[1]),
                    zip(sources, objects, strict=True),
                )
            )
        compile_with(sanitizer, *objects, "-o", folder / "selftest")
        return [*prefix, folder / "selftest"]

    def command(sanitizer):
        if sanitizer not in built:
            built[sanitizer] = build(sanitizer)
        if isinstance(built[sanitizer], str):
            pytest.skip(built[sanitizer])
        return built[sanitizer]

    return command


@pytest.mark.parametrize(
    ("sanitizer", "order"),
    [("plain", order) for order in ("fwd", "rev", "rand:1", "rand:2")]
    + [(sanitizer, order) for sanitizer in ("address", "thread") for order in ("fwd", "rand:1")],
)
def test_correct_programs_pass_in_any_order(selftest, sanitizer, order):
    for name in CASES + CHECKS:
        result = run([*selftest(sanitizer), name], SIMT_ORDER=order)
        assert (result.returncode, result.stdout) == (0, ""), name


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_environment_sets_up_the_devices(selftest, sanitizer):
    result = run([*selftest(sanitizer), "check_no_device"], SIMT_NO_DEVICE="1")
    assert (result.returncode, result.stdout) == (0, "")
    orders = {"SIMT_FAIL": "cudaMalloc:2,cudaFree:1", "SIMT_DEVICES": "3", "SIMT_DEVICE_MB": "1"}
    result = run([*selftest(sanitizer), "check_environment"], **orders)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_devices_of_another_capability(selftest, sanitizer):
    result = run([*selftest(sanitizer), "check_capability"], SIMT_CAPABILITY="80")
    assert (result.returncode, result.stdout) == (0, "")
    result = run([*selftest(sanitizer), "check_capability", "bug"], SIMT_CAPABILITY="80")
    assert result.returncode != 0
    assert re.search(r"barrier_init at .*selftest.cu:\d+ needs compute capability 9.0, .* has 8.0", result.stdout)


REPORT = r"simt: sum_rows, block \(\d, 0, 0\)"
ASYNC = r"simt: add_async, block \(0, 0, 0\)"
BULK = r"simt: add_bulk, block \(0, 0, 0\)"
RACE = r"ThreadSanitizer: data race"
MISTAKES = [
    # Threads and their memory.
    ("missing_barrier", "plain", "fwd", r"^wrong: "),
    ("missing_barrier", "plain", "rand:1", r"^wrong: "),
    ("missing_barrier", "thread", "fwd", r"ThreadSanitizer: data race"),
    ("missing_barrier", "thread", "rev", r"ThreadSanitizer: data race"),
    ("warp_order", "thread", "fwd", r"ThreadSanitizer: data race"),
    ("divergent_barrier", "plain", "fwd", REPORT + r", thread \(40, 0, 0\): the thread returns while 40 others wait"),
    (
        "divergent_barrier",
        "plain",
        "rev",
        REPORT + r", thread \(39, 0, 0\): the thread waits .* but 88 threads .* returned",
    ),
    (
        "divergent_shuffle",
        "plain",
        "fwd",
        REPORT + r": deadlock(.|\n)*thread 0 waits for __shfl_xor_sync at .*selftest.cu",
    ),
    ("unwritten_shared", "plain", "fwd", r"^wrong: "),
    ("unwritten_shared", "plain", "rev", r"^wrong: "),
    ("trap", "plain", "fwd", REPORT + r", thread \(5, 0, 0\): __trap\(\)"),
    # Copies that go on behind a thread.
    *[
        (f"async_{bug}", sanitizer, order, report)
        for bug in ("missing_wait", "missing_barrier", "early_refill")
        for sanitizer, order, report in (
            ("plain", "fwd", r"^wrong: "),
            ("plain", "rev", r"^wrong: "),
            ("thread", "fwd", RACE),
        )
    ],
    ("async_misaligned", "plain", "fwd", ASYNC + r".*copy_async_16 at .*selftest.cu:\d+: .* not all multiples of 16"),
    ("async_out_of_bounds", "address", "fwd", r"heap-buffer-overflow(.|\n)*add_async"),
    ("async_not_shared", "plain", "fwd", ASYNC + r".*copy_async_16 at .* not in the block's shared memory"),
    ("bulk_missing_wait", "plain", "rev", r"^wrong: "),
    ("bulk_missing_wait", "thread", "fwd", RACE + r"(.|\n)*consume"),
    ("bulk_early_release", "thread", "fwd", RACE + r"(.|\n)*produce"),
    ("bulk_overrun", "plain", "fwd", BULK + r".*barrier_expect at .*: all 1 arrivals of the phase have come"),
    ("bulk_too_few_bytes", "plain", "fwd", BULK + r": deadlock(.|\n)*waits for barrier_wait at .*selftest.cu:\d+"),
    ("bulk_too_many_bytes", "plain", "fwd", BULK + r".*: 16 bytes more than the phase expects have arrived"),
    ("bulk_misaligned", "plain", "fwd", BULK + r".*copy_bulk at .* not all multiples of 16"),
    ("bulk_out_of_bounds", "address", "fwd", r"heap-buffer-overflow(.|\n)*produce"),
    ("bulk_unpublished", "plain", "fwd", BULK + r".*copy_bulk at .*: no barrier_init_fence"),
    ("bulk_left_behind", "plain", "fwd", BULK + r".*the block ends while the copy of .*selftest.cu:\d+ is under way"),
    ("barrier_not_initialised", "plain", "rev", BULK + r".*barrier_wait at .*: the barrier is not initialised"),
    ("barrier_not_initialised", "thread", "fwd", RACE + r"(.|\n)*barrier_"),
    ("barrier_initialised_twice", "plain", "fwd", BULK + r".*barrier_init at .*: .* initialised already"),
    # Barriers of some warps.
    ("named_barrier_missing", "plain", "fwd", r"^wrong: "),
    ("named_barrier_missing", "thread", "rev", RACE),
    ("named_barrier_too_few", "plain", "fwd", BULK + r": deadlock(.|\n)*waits for named_barrier_sync at .*selftest.cu"),
    ("named_barrier_split_warp", "plain", "fwd", BULK + r".*: 32 threads meet .* of warp 1 only the lanes 0x0000ffff"),
    ("named_barrier_counts", "plain", "fwd", BULK + r".*: threads wait at one barrier for 64 and for 96 threads"),
    # Tensor cores.
    ("mma_fragments", "plain", "fwd", r"^wrong: "),
    ("mma_divergent", "plain", "fwd", r"deadlock(.|\n)*thread 0 waits for mma_m16n8k8 at .*selftest.cu"),
    ("mma_unordered", "thread", "fwd", RACE),
    # Launches.
    ("too_much_shared", "plain", "fwd", r"simt: much_shared, .*: 232464 bytes of shared memory, .* at most 232448"),
    ("launch_ex", "plain", "fwd", r"simt: trap_at<1, \(2 > 1\)>, block \(0, 0, 0\), thread \(3, 0, 0\): __trap"),
    # Accesses and arithmetic.
    ("shared_out_of_bounds", "address", "fwd", r"index \d out of bounds for type 'float \[4\]'"),
    ("dynamic_shared_out_of_bounds", "address", "fwd", r"heap-buffer-overflow"),
    ("global_out_of_bounds", "address", "fwd", r"heap-buffer-overflow"),
    ("misaligned_load", "address", "fwd", r"misaligned address .* requires 16 byte alignment"),
    ("bad_shift", "address", "fwd", r"shift exponent 320 is too large"),
    # Whose memory it is.
    (
        "other_device",
        "plain",
        "fwd",
        r"simt: argument 1 of scale is memory of device 0, but the kernel runs on device 1",
    ),
    ("other_device_hidden", "address", "fwd", r"use-after-poison(.|\n)*write_hidden"),
    (
        "host_pointer",
        "plain",
        "fwd",
        r"simt: argument 1 of scale is 0x\w+, which is neither device memory nor pinned memory",
    ),
    ("host_access", "address", "fwd", r"use-after-poison(.|\n)*host_access"),
    ("use_after_free", "address", "fwd", r"heap-use-after-free(.|\n)*write_hidden"),
    # Order on the host.
    ("wrong_stream", "plain", "fwd", r"^wrong: "),
    ("legacy_stream", "plain", "fwd", r"^wrong: "),
    ("early_reuse", "plain", "fwd", r"^wrong: "),
    ("missing_wait", "plain", "fwd", r"^wrong: "),
]


def test_every_mistake_has_a_test():
    assert {mistake[0] for mistake in MISTAKES} == set(CASES)


@pytest.mark.parametrize(("name", "sanitizer", "order", "report"), MISTAKES)
def test_mistake_is_noticed(selftest, name, sanitizer, order, report):
    result = run([*selftest(sanitizer), name, "bug"], SIMT_ORDER=order)
    assert result.returncode != 0
    assert re.search(report, result.stdout, re.MULTILINE), result.stdout


def test_reports_name_the_line_of_the_cuda_source(selftest):
    lines = (SIMT / "selftest.cu").read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "bug == divergent_barrier &&" in text)
    result = run([*selftest("plain"), "divergent_barrier", "bug"])
    assert f":{line}\n" in result.stdout


def test_lax_lets_threads_return_before_a_barrier(selftest):
    result = run([*selftest("plain"), "divergent_barrier", "bug"], SIMT_LAX="1")
    assert (result.returncode, result.stdout) == (0, "")


def test_eager_streams_hide_a_missing_wait(selftest):
    result = run([*selftest("plain"), "missing_wait", "bug"], SIMT_STREAMS="eager")
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize(
    ("cuda", "cpp"),
    [
        ("k<<<1, 2>>>(a, b);", 'simt::launch(simt::LaunchConfig(1, 2), "k", k)(a, b);'),
        (
            "k<A, (1 > 0)> <<<g, b, 0, s>>> ();",
            'simt::launch(simt::LaunchConfig(g, b, 0, s), "k<A, (1 > 0)>", k<A, (1 > 0)> ) ();',
        ),
        ("if (x) a::k<<<f(1, 2), 3>>>(y);", 'if (x) simt::launch(simt::LaunchConfig(f(1, 2), 3), "a::k", a::k)(y);'),
        ("t[i + 1].k<<<1, 1>>>(p);", 'simt::launch(simt::LaunchConfig(1, 1), "t[i + 1].k", t[i + 1].k)(p);'),
        ("p->k<<<1,\n 1>>>(\n a);", 'simt::launch(simt::LaunchConfig(1,\n 1), "p->k", p->k)(\n a);'),
        ("// k<<<1, 1>>>(a)\n", "// k<<<1, 1>>>(a)\n"),
        ('s = "k<<<1, 1>>>(a) \\" /*"; c = \'"\'; /* <<< */', 's = "k<<<1, 1>>>(a) \\" /*"; c = \'"\'; /* <<< */'),
        ("n = 1'000'000; k<<<1, 1>>>(n);", "n = 1'000'000; " + 'simt::launch(simt::LaunchConfig(1, 1), "k", k)(n);'),
        ("static __global__ void k();", " __global__ void k();"),
        ("extern __shared__ float x[];", "float *x = (float *)simt::block.dynamic_shared;"),
        (
            "extern __shared__ __align__(16) unsigned char x[];",
            "unsigned char *x = (unsigned char *)simt::block.dynamic_shared;",
        ),
        ("__shared__ float a[2 * (N + 1)], b;", "__shared__ float a[2 * (N + 1)], b; SIMT_SHARED(a); SIMT_SHARED(b);"),
        ("__shared__ alignas(16) Tile<A, 3> t;", "__shared__ alignas(16) Tile<A, 3> t; SIMT_SHARED(t);"),
    ],
)
def test_rewriting(tmp_path, cuda, cpp):
    (tmp_path / "source.cu").write_text(cuda)
    assert rewrite(tmp_path / "source.cu", tmp_path / "source.cpp") == (0, "")
    assert (tmp_path / "source.cpp").read_text() == f'#line 1 "{tmp_path / "source.cu"}"\n{cpp}'


@pytest.mark.parametrize(
    ("cuda", "message"),
    [
        ("\n\nk<<<1, 2;", "line 3: '<<<' without '>>>'"),
        ("\n<<<1, 2>>>(a);", "line 2: no kernel stands before '<<<'"),
        ("extern __shared__ float x[4];", "line 1: dynamic shared memory is declared as"),
    ],
)
def test_rewriting_says_what_it_cannot_do(tmp_path, cuda, message):
    (tmp_path / "source.cu").write_text(cuda)
    status, output = rewrite(tmp_path / "source.cu", tmp_path / "source.cpp")
    assert status != 0
    assert message in output
    assert not (tmp_path / "source.cpp").exists()
