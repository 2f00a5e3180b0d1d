"""``pycoli bench`` and ``pycoli doctor --plans``: arguments, reports, comparisons, and what is refused."""

import builtins
import json
import math

import numpy as np
import pytest

import pycoli
from pycoli import products
from pycoli._lib import ffi
from pycoli.cli import main, plans
from pycoli.cli.bench import cpu, timing
from pycoli.cli.bench.cases import DEFAULT_ROWS, SHAPES, Shape, parse_formats, parse_rows, parse_shapes
from pycoli.cli.bench.driver import Driver
from pycoli.cli.bench.resident import layers_needed
from pycoli.cli.bench.results import Result, as_json, ratios, tables
from pycoli.cli.bench.samples import DISTINCT_ROWS, Sample, limit, random_weights

SMALL = ["--cpu", "--shapes", "64x48", "--formats", "e8,int4", "--rows", "1,17", "--reps", "8"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("COLI_CUDA_LIB", str(tmp_path / "libcoli_cuda_absent.so"))


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Cold enough for tests of what is printed."""
    monkeypatch.setattr(cpu, "largest_cache", lambda: 2**18)


def bench(capsys, *arguments):
    """Exit code, output and errors of ``pycoli bench``."""
    code = main(["bench", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "glm,64"], "--shapes: expected glm, deepseek, qwen, olmoe, all, or DIMxHIDDEN, got '64'"),
        (["--shapes", "0x64"], "got '0x64'"),
        (["--rows", "1,0"], "--rows: expected numbers from 1 to 65536 such as 1,4,16, got '0'"),
        (["--rows", "1,,2"], "got ''"),
        (["--formats", "e9"], "--formats: "),
        (["--formats", "int3-g64"], "--formats: expected formats with GPU kernels (f32, int8, "),
        (["--reps", "7"], "--reps: expected at least 8 for a median, got 7"),
        (["--cpu", "--device", "0"], "--device has no meaning with --cpu"),
        (["--cpu", "--layers", "2"], "--layers has no meaning with --cpu"),
        (["--cpu", "--experts", "2"], "--experts has no meaning with --cpu"),
        (["--host", "--rows", "2"], "--rows has no meaning with --host"),
        (["--cpu", "--compare", "absent.json"], "absent.json: No such file"),
        (["--cpu", "--plot", "roofline.txt"], "--plot: expected a file named *.png, *.svg, *.pdf, got roofline.txt"),
        (["--cpu", "--plot", "absent/roofline.png"], "--plot: there is no folder for absent/roofline.png"),
        (["--cpu", "--output", "absent/report.json"], "absent/report.json: No such file"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    code, out, err = bench(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("pycoli bench: ")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--cpu", "--host"], ["--experts", "0"], ["--layers", "x"], ["file"]])
def test_usage(capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        bench(capsys, *arguments)
    assert exit_.value.code == 2
    assert "usage: pycoli" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--host"], ["--device", "3"]])
def test_without_a_gpu(capsys, arguments):
    code, out, err = bench(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("pycoli bench: no GPU to measure: ")
    assert "libcoli_cuda_absent.so" in err
    assert err.endswith("; --cpu measures the CPU\n")


def test_without_a_driver(monkeypatch):
    monkeypatch.setattr("pycoli.cli.bench.driver.LIBRARY", "libcuda_absent.so.1")
    with pytest.raises(pycoli.DeviceError, match=r"needs the NVIDIA driver: .*libcuda_absent"):
        Driver(0)


def test_lists():
    assert parse_shapes("glm, 96x64,6144x2048") == [Shape(6144, 2048), Shape(96, 64)]
    assert parse_shapes("all") == list(SHAPES.values())
    assert [shape.label for shape in parse_shapes("qwen,96x64")] == ["qwen 2048x768", "96x64"]
    assert parse_rows("4,1,4") == [4, 1]
    assert max(DEFAULT_ROWS) == 32
    assert parse_formats("int4-g32,e8", on_gpu=True) == ["int4-g32", "e8"]
    assert "int3-g64" in parse_formats("all", on_gpu=False)
    assert "int3-g64" not in parse_formats("all", on_gpu=True)


# Reports


def test_report_goes_round(capsys, tmp_path):
    file = tmp_path / "run.json"
    code, out, err = bench(capsys, *SMALL, "--output", file)
    assert (code, err) == (0, "")
    assert "64x48" in out
    report = json.loads(file.read_text())
    assert (report["kind"], report["schema"], report["mode"]) == ("pycoli bench", 1, "cpu")
    assert report["machine"]["name"].split(",")[0] in out
    calls = {(r["what"], r["format"], r["rows"]) for r in report["results"]}
    computed = {(what, fmt, rows) for what in ("product", "expert") for fmt in ("e8", "int4") for rows in (1, 17)}
    assert calls == computed | {(what, fmt, None) for what in ("read", "copy") for fmt in ("e8", "int4")}
    for result in report["results"]:
        assert result["repetitions"] == 8
        assert 0 < result["fastest"] <= result["seconds"] <= result["slowest"]
        assert result["bytes_per_second"] == pytest.approx(result["bytes"] / result["seconds"])
        assert result["wrong"] is None
        if result["weights"]:
            assert result["flops_per_second"] == pytest.approx(2 * result["rows"] * result["weights_per_second"])
            assert 0 < result["error"] <= limit(result["rows"])
        assert (result["of_ceiling"] is None) == (result["what"] == "read")

    code, out, _ = bench(capsys, *SMALL, "--compare", file, "--json")
    again = json.loads(out)
    assert (code, again["compared_with"]["file"]) == (0, str(file))
    assert len(again["comparison"]) == len(report["results"])
    before = {(r["what"], r["format"], r["rows"]): r["seconds"] for r in report["results"]}
    for ratio in again["comparison"]:
        assert ratio["seconds_before"] == before[ratio["what"], ratio["format"], ratio["rows"]]
        assert ratio["ratio"] == pytest.approx(ratio["seconds_before"] / ratio["seconds"])
    out = " ".join(bench(capsys, *SMALL, "--compare", file)[1].split())
    assert "ratio: above 1 is faster now" in out
    assert "another machine" not in out


def test_comparison_with_another_machine(capsys, tmp_path):
    file = tmp_path / "run.json"
    bench(capsys, *SMALL, "--output", file)
    report = json.loads(file.read_text())
    report["machine"]["name"], report["mode"] = "an abacus", "layers"
    file.write_text(json.dumps(report))
    out = bench(capsys, *SMALL, "--compare", file)[1]
    assert "warning: the earlier run was on another machine: an abacus" in out
    assert "warning: the earlier run measured something else: layers" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "got "),
        ("[]", "which is something else"),
        ('{"kind": "pycoli run"}', "which is something else"),
        ('{"kind": "pycoli bench", "schema": 2}', "of schema 2"),
        ('{"kind": "pycoli bench", "schema": 1}', "which is damaged: KeyError('results')"),
        ('{"kind": "pycoli bench", "schema": 1, "results": [{"seconds": 1}]}', "which is damaged: KeyError('what')"),
        ('{"kind": "pycoli bench", "schema": 1, "results": 5}', "which is damaged: TypeError"),
        ("\xff", "got "),
    ],
)
def test_comparison_with_something_else(capsys, tmp_path, content, message):
    file = tmp_path / "run.json"
    file.write_bytes(content.encode("latin-1"))
    code, out, err = bench(capsys, *SMALL, "--compare", file)
    assert (code, out) == (2, "")
    assert err.startswith("pycoli bench: --compare: expected a report of pycoli bench --json (schema 1), got ")
    assert message in err


def test_ratios_of_what_both_runs_have():
    def result(rows, seconds):
        return Result("layer", "e8", Shape(64, 48), 100, [seconds], experts=8, rows=rows, weights=10, error=1e-7)

    earlier = {"results": [as_json(result(1, 2.0)), as_json(result(2, 1.0))]}
    assert [(r["rows"], r["ratio"]) for r in ratios([result(1, 1.0), result(4, 1.0)], earlier)] == [(1, 2.0)]
    lines = tables([result(1, 1.0), result(4, 1.0)], earlier).splitlines()
    assert lines[-2].split()[-3:] == ["2000.000", "ms", "2.000"]
    assert lines[-1].split()[-2:] == ["-", "-"]


def test_less_memory_than_it_takes(capsys, monkeypatch):
    monkeypatch.setattr(cpu, "_free_memory", lambda: 2**16)
    out = bench(capsys, *SMALL)[1]
    assert "warning: free memory allows 0 MiB of weights in turn, less than 4 x the largest cache" in out


def test_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "roofline.png"
    code, out, _ = bench(capsys, *SMALL, "--plot", file)
    assert (code, bool(out)) == (0, True)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib(capsys, monkeypatch, tmp_path):
    import_ = builtins.__import__

    def without(name, *arguments, **named):
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return import_(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    code, out, err = bench(capsys, *SMALL, "--plot", tmp_path / "roofline.png")
    assert (code, out) == (2, "")
    assert "--plot needs matplotlib: pip install 'pycoli[plot]'" in err


# Results that are wrong


@pytest.mark.parametrize("offset", [1e-3, np.nan, np.inf])
def test_wrong_result(capsys, monkeypatch, offset):
    right = products.product
    monkeypatch.setattr(cpu, "product", lambda x, matrix: right(x, matrix) * np.float32(1 + offset))
    code, out, _ = bench(capsys, *SMALL, "--json")
    report = json.loads(out)
    assert (code, report["right"], len(report["wrong"])) == (1, False, 4)
    for result in report["results"]:
        assert ("seconds" in result) == (result["what"] != "product")
    code, out, _ = bench(capsys, *SMALL)
    assert code == 1
    assert "WRONG: product e8 64x48, 1 x 17 rows: relative RMS error " in out


def test_limits():
    assert (limit(1), limit(16), limit(17)) == (3e-6, 3e-6, 3e-4)
    for error, rows, wrong in ((3e-6, 16, False), (4e-6, 16, True), (4e-6, 17, False), (math.nan, 1, True)):
        result = Result("layer", "e8", Shape(64, 48), 100, experts=8, rows=rows, error=error)
        assert bool(result.wrong) == wrong
        json.dumps(as_json(result), allow_nan=False)


# How it measures


def test_repetitions_are_interleaved():
    order = []

    def work(name, seconds):
        return lambda calls: order.append((name, calls)) or calls * seconds

    seconds = timing.interleave({"a": work("a", 1.0), "b": work("b", 1e-4)}, 8)
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 8, "b": 8}
    assert seconds["b"] == pytest.approx([1e-4] * 8)
    assert order[4:] == [("a", 1), ("b", 10)] * 9, "a warm-up, and a and b in turn, short work repeated"


def test_ratios_are_those_within_a_repetition():
    assert timing.paired_ratio([1, 20, 3], [2, 40, 6]) == 0.5


def test_share_of_the_ceiling_is_of_bytes_a_second():
    read = Result("read", "e8", Shape(64, 48), 200, [1.0, 2.0])
    layer = Result("layer", "e8", Shape(64, 48), 100, [1.0, 2.0]).against(read)
    assert layer.of_ceiling == 0.5


def test_layers_leave_nothing_in_the_cache():
    assert layers_needed(2**20, 50 * 2**20) == 512
    assert layers_needed(2**20, 200 * 2**20) == 800
    assert layers_needed(2**32, 50 * 2**20) == 1


@pytest.mark.parametrize("fmt", [fmt.name for fmt in pycoli.formats()] + ["int4-g32"])
def test_random_weights(rng, fmt):
    w = random_weights(rng, fmt, 64, 512).decode()
    assert np.isfinite(w).all()
    assert 0.2 < np.sqrt(512) * np.sqrt((w.astype(np.float64) ** 2).mean()) < 5


def test_sample_tells_experts_and_rows_apart():
    sample = Sample("e8", Shape(64, 48))
    y = np.concatenate([products.expert(sample.rows(20)[:10], *sample.experts[0]), np.zeros((10, 64), np.float32)])
    y[10:] = products.expert(sample.rows(20)[10:], *sample.experts[1])
    assert sample.error(y, [0, 1]) < 3e-6
    assert sample.error(y, [1, 0]) > 0.1
    assert sample.error(np.roll(y, 1, axis=0), [0, 1]) > 0.1
    assert np.array_equal(sample.rows(DISTINCT_ROWS + 1)[0], sample.rows(DISTINCT_ROWS + 1)[-1])


# Plans


class Planner:
    """A GPU library that plans; `own` tells of the capability of its device."""

    def __init__(self, own="90", words=1):
        self.own, self.words = own, words

    def has(self, name):
        return name == "coli_cuda_plan_text"

    def devices(self):
        return ["cuda:0"]

    def _error(self, name):
        return pycoli.ArgumentError("no plans for capability 86")

    def _entry(self, name):
        def plan(device, capability, formats, D, H, experts, rows, written, capacity):
            if capability == 86:
                return 0
            name = self.own if capability == 0 else "new" if capability >= 90 else "old"
            lines = f"hidden {name} {formats[2]} {rows}\ndown {D}x{H} {experts}" + " more" * self.words
            ffi.memmove(written, lines.encode()[: capacity - 1] + b"\0", min(len(lines) + 1, capacity))
            return len(lines)

        return plan


def test_plans_share_lines():
    report = plans.plans(Planner(own="new", words=1500))  # longer than the first buffer
    assert len(report["plans"]) == 8 * len(plans.ROWS) * 7
    assert report["plans"][0]["launches"][0] == "hidden old 0 1"
    assert report["plans"][0]["launches"][1].endswith("more")
    assert len(report["plans"][0]["launches"][1]) > 7000
    lines = plans.plans_as_text(plans.plans(Planner(own="new"))).splitlines()
    assert lines[0] == "plans for 8 experts 6144x2048, each with so many rows"
    assert lines[1].split() == ["format", "rows", "GPUs", "launches"]
    assert lines[2].split() == ["f32", "1", "80", "89", "hidden", "old", "0", "1"]
    assert lines[3].strip() == "down 6144x2048 8 more"
    assert lines[4].split(maxsplit=3)[2:] == ["86", "none: no plans for capability 86"]
    assert lines[5].split()[2:6] == ["90", "100", "120", "cuda:0"]


def test_doctor_without_plans(capsys, simt_lib, monkeypatch):
    assert main(["doctor", "--plans"]) == 0
    assert "libcoli_cuda_absent.so" in capsys.readouterr().out.partition("no plans: ")[2]
    assert main(["doctor", "--json"]) == 0
    assert "plans" not in json.loads(capsys.readouterr().out)
    monkeypatch.setattr(plans, "PLAN_TEXT", "coli_cuda_absent")
    monkeypatch.setenv("COLI_CUDA_LIB", str(simt_lib))
    assert main(["doctor", "--plans", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]["why_not"] == "the library lacks coli_cuda_absent"
