"""``pycoli run``: on the sample, on other checkpoints, on the simulated GPU, and with input that cannot be used."""

import fcntl
import importlib.resources
import json
import os
import struct
import subprocess
import sys
import termios

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import pycoli
from pycoli.cli import main

HIDDEN, INNER = 32, 24
FORMATS = [fmt.name for fmt in pycoli.formats() if fmt.can_encode]


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("COLI_CUDA_LIB", str(tmp_path / "libcoli_cuda_absent.so"))


@pytest.fixture
def simulated_gpu(monkeypatch, simt_lib):
    monkeypatch.setenv("COLI_CUDA_LIB", str(simt_lib))


def layer_tensors(count, layer=3):
    """A layer of small random experts in bfloat16, under Qwen-MoE's names."""
    generator = np.random.default_rng(5)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return {
        f"model.layers.{layer}.mlp.experts.{number}.{matrix}.weight": (
            generator.standard_normal(shape) / np.sqrt(shape[1])
        ).astype(ml_dtypes.bfloat16)
        for number in range(count)
        for matrix, shape in shapes.items()
    }


def write_checkpoint(folder, tensors, **config):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": HIDDEN} | config
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "model", layer_tensors(4))


def run(capsys, *arguments):
    """Exit code, output and errors of ``pycoli run``."""
    code = main(["run", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *arguments):
    """Exit code and report of ``pycoli run ... --json``."""
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


# The sample


def test_sample_on_the_cpu(capsys, no_gpu):
    code, out, err = run(capsys)
    assert code == 0
    assert err == ""
    assert "layer 1 of the sample (olmoe), experts 0-3, each 512 -> 256 -> 512, format e8" in out
    assert "64 rows: recorded inputs of layer 1" in out
    assert "libcoli_cuda_absent.so" in out  # why no GPU is used
    assert "median of at least 5 calls of 16 rows, after a warm-up" in " ".join(out.split())
    assert out.splitlines()[-1].startswith("right: the largest error is ")
    assert max(map(len, out.splitlines()[4:])) <= 100


def test_sample_reports_the_measured_values(capsys, no_gpu):
    code, report = run_json(capsys)
    assert code == 0
    assert report["right"] is True
    assert report["device"] == "cpu"
    assert (report["rows"], report["rows_per_call"]) == (64, 16)
    assert [expert["expert"] for expert in report["experts"]] == [0, 1, 2, 3]
    # Rows are padded to whole super-blocks of 98 bytes for 256 weights; 512 and 256 columns need none.
    nbytes = 3 * 512 * 256 * 98 // 256
    for expert in report["experts"]:
        assert expert["bytes"] == nbytes
        assert expert["bits_per_weight"] == 3.0625
        assert 0 < expert["error_against_decoded"]["cpu"] < 3e-6
        assert 0.1 < expert["error_against_original"] < 0.5
        assert expert["seconds_per_call"]["cpu"] > 0
    assert report["total"]["bytes"] == 4 * nbytes
    assert report["total"]["seconds_per_call"]["cpu"] == pytest.approx(
        sum(expert["seconds_per_call"]["cpu"] for expert in report["experts"])
    )


def test_sample_from_the_shell(tmp_path):
    environment = os.environ | {"COLI_CUDA_LIB": str(tmp_path / "absent.so")}
    command = [sys.executable, "-m", "pycoli", "run", "--experts", "2", "--tokens", "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress bar where there is no terminal
    assert "experts 2, each" in done.stdout
    assert "5 rows" in done.stdout


def test_progress_bar_on_a_terminal(tmp_path):
    environment = os.environ | {"COLI_CUDA_LIB": str(tmp_path / "absent.so"), "TERM": "xterm"}
    try:
        terminal, end = os.openpty()
    except OSError as error:
        pytest.skip(f"no terminal can be opened: {error}")
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "pycoli", "run", "--experts", "2", "--tokens", "1"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=end, timeout=120)
    os.close(end)
    shown = os.read(terminal, 4096).decode()
    os.close(terminal)
    assert done.returncode == 0
    assert "encode e8:   0%" in shown
    assert b"encode" not in done.stdout


def test_sample_on_the_simulated_gpu(capsys, simulated_gpu):
    code, report = run_json(capsys, "--experts", "1", "--tokens", "2")
    assert code == 0
    assert report["device"] == "cuda:0"
    expert = report["experts"][0]
    assert set(expert["error_against_decoded"]) == set(expert["seconds_per_call"]) == {"cuda:0", "cpu"}
    assert all(0 < error < 3e-6 for error in expert["error_against_decoded"].values())


# Checkpoints


@pytest.mark.parametrize("fmt", [*FORMATS, "int4-g16"])
def test_formats_on_the_cpu(capsys, no_gpu, checkpoint, fmt):
    code, report = run_json(capsys, checkpoint, "--format", fmt)
    assert code == 0
    assert report["layer"] == 3
    assert report["format"] == fmt
    assert report["activations"] == "Gaussian random rows (seed 0), not real activations"
    assert len(report["experts"]) == 4
    if fmt == "f32":
        assert report["total"]["error_against_original"] < 3e-6


@pytest.mark.parametrize("fmt", FORMATS)
def test_formats_on_the_simulated_gpu(capsys, simulated_gpu, checkpoint, fmt):
    code, report = run_json(capsys, checkpoint, "--format", fmt, "--experts", "0-1", "--tokens", "3")
    assert code == 0
    if fmt == "int3-g64":
        assert report["device"] == "cpu"
        assert "int3-g64" in report["why"]
    else:
        assert report["device"] == "cuda:0"


def test_a_gpu_library_from_before_e8(capsys, monkeypatch, build_dir, checkpoint):
    monkeypatch.setenv("COLI_CUDA_LIB", str(build_dir / "tests" / "stubs" / "stub_old.so"))
    code, report = run_json(capsys, checkpoint, "--format", "int8")
    assert (code, report["device"]) == (0, "cuda:0")
    code, report = run_json(capsys, checkpoint, "--format", "e8")
    assert (code, report["device"]) == (0, "cpu")
    assert "coli_cuda_e8_set_grid" in report["why"]


def test_device_of_choice(capsys, simulated_gpu, checkpoint):
    for device, name in (("cpu", "cpu"), ("cuda:1", "cuda:1"), ("cuda", "cuda:0")):
        code, report = run_json(capsys, checkpoint, "--device", device, "--experts", "0", "--tokens", "1")
        assert code == 0
        assert report["device"] == name


def test_a_gpu_without_room(tmp_path, simt_lib):
    """The device must be a small one from the start, so in a process of its own."""
    environment = os.environ | {"COLI_CUDA_LIB": str(simt_lib), "SIMT_DEVICE_MB": "1"}
    command = [sys.executable, "-m", "pycoli", "run", "--format", "f32", "--experts", "0", "--tokens", "1", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["device"] == "cpu"
    assert "cudaErrorMemoryAllocation" in report["why"]
    assert list(report["total"]["seconds_per_call"]) == ["cpu"]
    done = subprocess.run([*command, "--device", "cuda"], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cudaErrorMemoryAllocation" in done.stderr


def test_experts_layers_and_seeds(capsys, no_gpu, tmp_path):
    folder = write_checkpoint(tmp_path / "model", layer_tensors(8) | layer_tensors(8, layer=5))
    code, report = run_json(capsys, folder, "--experts", "6,0-2,1")
    assert code == 0
    assert (report["layer"], [expert["expert"] for expert in report["experts"]]) == (3, [0, 1, 2, 6])
    errors = []
    for seed in (0, 0, 1):
        code, report = run_json(capsys, folder, "--layer", "5", "--experts", "0", "--seed", seed)
        assert (code, report["layer"]) == (0, 5)
        errors.append(report["total"]["error_against_original"])
    assert errors[0] == errors[1] != errors[2]


def test_json_leaves_the_checkpoint_alone(capsys, no_gpu, checkpoint):
    file = checkpoint / "model.safetensors"
    before = file.read_bytes()
    code = main(["run", "--json", str(file)])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["checkpoint"]) == (0, str(file))
    assert file.read_bytes() == before


def test_output_file_beside_the_text(capsys, no_gpu, checkpoint, tmp_path):
    file = tmp_path / "report.json"
    for _ in range(2):  # the second time it replaces the file
        code, out, _ = run(capsys, checkpoint, "--output", file)
        assert code == 0
        assert "right: the largest error" in out
        assert json.loads(file.read_text())["right"] is True
    code, report = run_json(capsys, checkpoint, "--output", file)
    assert json.loads(file.read_text()) == report
    code, out, _ = run(capsys, checkpoint, "--output", tmp_path / "report")
    assert code == 0
    assert json.loads((tmp_path / "report").read_text())["right"] is True


def test_output_that_cannot_be_written(capsys, no_gpu, monkeypatch, checkpoint, tmp_path):
    monkeypatch.setattr(pycoli, "encode", None)  # the work must not begin
    weights = checkpoint / "model.safetensors"
    before = weights.read_bytes()
    for file, message in (
        (weights, f"--output: expected a new file or one named *.json, got {weights}, which is not overwritten"),
        (tmp_path, f"{tmp_path}: Is a directory"),
        (tmp_path / "absent" / "report.json", "report.json: No such file or directory"),
    ):
        code, out, err = run(capsys, checkpoint, "--output", file)
        assert (code, out) == (2, "")
        assert message in err
    assert weights.read_bytes() == before


def test_output_is_not_touched_by_a_run_that_fails(capsys, no_gpu, tmp_path):
    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text("{}")
    for file in (kept, new):
        assert run(capsys, "--format", "e9", "--output", file)[0] == 2
    assert kept.read_text() == "{}"
    assert not new.exists()


def test_the_checkpoint_that_the_sample_is_from(capsys, no_gpu, shared):
    folder = shared / "models" / "tiny-olmoe"
    arguments = [folder, "--layer", "1", "--experts", "0-3", "--activations", folder / "moe_io.safetensors"]
    reports = [run_json(capsys, *arguments)[1], run_json(capsys)[1]]
    errors = [[expert["error_against_original"] for expert in report["experts"]] for report in reports]
    assert errors[0] == errors[1]
    code, report = run_json(capsys, folder, "--layer", "3", "--experts", "15", "--format", "int8")
    assert code == 0
    assert report["experts"][0]["error_against_original"] < 0.02


def test_built_without_cuda(capsys, built_without_cuda, checkpoint):
    code, out, _ = run(capsys, checkpoint, "--experts", "0")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("device"))
    assert line.split(maxsplit=1)[1] == "cpu: no GPU library is installed (built without CUDA)"
    assert pycoli.explain(pycoli.encode(np.ones((1, 1), np.float32), "e8")).reason.endswith("no such file")


def test_instruction_set_that_is_unknown(tmp_path):
    environment = os.environ | {"COLI_CUDA_LIB": str(tmp_path / "absent.so"), "COLI_ISA": "foo"}
    command = [sys.executable, "-m", "pycoli", "run", "--experts", "2", "--tokens", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        f"pycoli run: COLI_ISA=foo is ignored (known are avx512, avx2, scalar); {pycoli.cpu.isa()} is used"
    ]


def test_nobody_reads_the_report(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"COLI_CUDA_LIB": str(tmp_path / "absent.so")}
    command = [sys.executable, "-m", "pycoli", "run", "--experts", "2", "--tokens", "1"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"pycoli {pycoli.__version__}\n"


# Activations


def test_activations_from_files(capsys, no_gpu, checkpoint, tmp_path):
    rows = np.random.default_rng(2).standard_normal((5, HIDDEN)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows.astype(np.float64))
    save_file({"layer3.x": rows, "layer4.x": rows[:1]}, tmp_path / "recorded.safetensors")
    save_file({"rows": rows.astype(ml_dtypes.bfloat16), "other": rows[0]}, tmp_path / "one.safetensors")
    save_file({"a": rows, "b": rows[:2]}, tmp_path / "two.safetensors")
    reports = {}
    for argument in ("rows.npy", "recorded.safetensors", "one.safetensors", "two.safetensors:a"):
        code, report = run_json(capsys, checkpoint, "--experts", "0", "--activations", tmp_path / argument)
        assert (code, report["rows"]) == (0, 5)
        assert argument.partition(":")[0] in report["activations"]
        reports[argument] = report["total"]["error_against_original"]
    assert reports["rows.npy"] == reports["recorded.safetensors"] == reports["two.safetensors:a"]
    assert reports["rows.npy"] != reports["one.safetensors"]  # rounded to bfloat16
    code, _, err = run(capsys, checkpoint, "--activations", tmp_path / "two.safetensors")
    assert code == 2
    assert "expected layer3.x or one tensor of shape [tokens, 32], got 2 such tensors among a, b" in err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, HIDDEN + 1), np.float32), "rows.npy: expected activations of shape [tokens, 32], got [2, 33]"),
        (np.zeros((0, HIDDEN), np.float32), "expected activations of shape [tokens, 32], got [0, 32]"),
        (np.zeros(HIDDEN, np.float32), "expected activations of shape [tokens, 32], got [32]"),
        (np.zeros((2, HIDDEN), np.int32), "expected a .npy file of floating-point rows, got int32"),
        (np.full((2, HIDDEN), np.nan, np.float32), "rows.npy: expected finite activations"),
        (np.full((2, HIDDEN), 1e300), "expected finite activations"),
        (np.array([{"a": 1}], object), "expected a .npy file of plain numbers"),
    ],
)
def test_activations_that_do_not_fit(capsys, no_gpu, checkpoint, tmp_path, rows, message):
    np.save(tmp_path / "rows.npy", rows, allow_pickle=True)
    code, out, err = run(capsys, checkpoint, "--activations", tmp_path / "rows.npy")
    assert (code, out) == (2, "")
    assert message in err


def write_npy(file, header):
    """A .npy file of 4 KiB of zeros with any header."""
    text = header.encode("latin-1").ljust(len(header) + (-len(header) - 11) % 64) + b"\n"
    file.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(4096))


HOSTILE_SHAPES = [
    "(-1, 32)",
    "(-1, 64)",
    "(-2, -32)",
    "(9223372036854775807, 64)",
    "(9223372036854775807, 32)",
    "(9223372036854775807,)",
    "(1099511627776, 32)",
    "('a', 32)",
]


@pytest.mark.parametrize(
    "header",
    [
        "(" * 9000,
        "[" * 9000 + "]" * 9000,
        "-" * 9000 + "1",
        "\xff" * 100,
        *(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}" for shape in HOSTILE_SHAPES),
    ],
    ids=lambda header: header[:80],
)
def test_activations_with_hostile_headers(capsys, recwarn, no_gpu, checkpoint, tmp_path, header):
    file = tmp_path / "rows.npy"
    write_npy(file, header)
    code, out, err = run(capsys, checkpoint, "--activations", file)
    assert (code, out) == (2, "")
    assert err == f"pycoli run: {file}: expected a .npy file of plain numbers, or a .safetensors file\n"
    assert not recwarn.list


def test_activations_in_a_damaged_archive(capsys, no_gpu, checkpoint, tmp_path):
    file = tmp_path / "rows.npz"
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    code, out, err = run(capsys, checkpoint, "--activations", file)
    assert (code, out) == (2, "")
    assert f"{file}: expected a .npy file of plain numbers" in err


# Input that cannot be used


def test_more_rows_than_there_is_memory_for(capsys, no_gpu, checkpoint):
    code, out, err = run(capsys, checkpoint, "--tokens", "999999999")
    assert (code, out) == (2, "")
    assert err == "pycoli run: --tokens: expected at most 8388608, 1 GiB of rows of 32 float32, got 999999999\n"


def test_layer_without_experts(capsys, no_gpu, tmp_path):
    stem = "model.layers.0.mlp.experts."
    tensors = {f"{stem}gate_up_proj": np.zeros((0, 12, 10), "f4"), f"{stem}down_proj": np.zeros((0, 10, 6), "f4")}
    folder = write_checkpoint(tmp_path / "model", tensors, hidden_size=10)
    code, out, err = run(capsys, folder)
    assert (code, out) == (2, "")
    assert f"{stem}gate_up_proj in {folder / 'model.safetensors'}: expected at least 1 expert" in err
    assert len(err.splitlines()) == 1


def test_configuration_with_half_a_character(capsys, no_gpu, tmp_path):
    folder = write_checkpoint(tmp_path / "model", layer_tensors(1), model_type="\ud800")
    assert "\\ud800" in (folder / "config.json").read_text()
    code, out, _ = run(capsys, folder, "--tokens", "1")
    assert code == 0
    assert f"{folder} (\\ud800)" in " ".join(out.split())
    code, report = run_json(capsys, folder, "--tokens", "1")
    assert (code, report["model_type"]) == (0, "\ud800")
    folder = write_checkpoint(tmp_path / "other", layer_tensors(1), hidden_act="\ud800")
    code, _, err = run(capsys, folder)
    assert (code, err) == (2, f"pycoli run: {folder}: expected experts with the activation silu, got \\ud800\n")


def test_whatever_reading_raises_names_the_file(capsys, no_gpu, monkeypatch, checkpoint):
    def read(self, layer, expert):
        raise OverflowError("too large\nfor this")

    monkeypatch.setattr("pycoli.checkpoint.Checkpoint.expert", read)
    code, out, err = run(capsys, checkpoint)
    assert (code, out) == (2, "")
    assert err == f"pycoli run: {checkpoint}: cannot be read: OverflowError: too large for this\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "e9"], "e9"),
        (["--experts", "4"], "--experts: expected experts from 0 to 3, got 4"),
        (["--experts", "2-1"], "--experts: expected experts from 0 to 3, got 2-1"),
        (["--experts", "\u0661"], "--experts: expected numbers and ranges such as 0,3,5-7 or all, got '\u0661'"),
        (["--device", "cuda:\u0660"], "--device: expected auto, cpu, cuda or cuda:N, got 'cuda:\u0660'"),
        (["--experts", "one"], "--experts: expected numbers and ranges such as 0,3,5-7 or all, got 'one'"),
        (["--layer", "2"], "layers with routed experts are 1, got layer 2"),
        (["--device", "gpu"], "--device: expected auto, cpu, cuda or cuda:N, got 'gpu'"),
        (["--device", "cuda:0"], "--device cuda:0: "),
        (["--tokens", "65"], "--tokens: expected at most 64, the rows of recorded inputs of layer 1, got 65"),
        (["--activations", "absent.npy"], "absent.npy: No such file"),
        (["absent"], "absent: no such file or folder"),
    ],
)
def test_bad_arguments(capsys, no_gpu, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("pycoli run: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [[], ["walk"], ["run", "--tokens", "0"], ["run", "--seed", "-1"], ["run", "a", "b"]]
)
def test_usage(capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: pycoli" in capsys.readouterr().err


def test_devices_that_are_not_there(capsys, simulated_gpu, checkpoint):
    code, out, err = run(capsys, checkpoint, "--device", "cuda:9")
    assert (code, out) == (2, "")
    assert "cuda:9" in err
    code, out, err = run(capsys, checkpoint, "--device", "cuda:0", "--format", "int3-g64")
    assert (code, out) == (2, "")
    assert "int3-g64" in err


def test_damaged_checkpoint(capsys, no_gpu, checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    code, out, err = run(capsys, checkpoint)
    assert (code, out) == (2, "")
    assert "model.safetensors: not a readable safetensors file" in err


def test_weights_that_are_not_finite(capsys, no_gpu, tmp_path):
    tensors = layer_tensors(2)
    tensors["model.layers.3.mlp.experts.1.up_proj.weight"][4, 7] = np.nan
    code, out, err = run(capsys, write_checkpoint(tmp_path / "model", tensors))
    assert (code, out) == (2, "")
    assert "model.layers.3.mlp.experts.1.up_proj.weight in " in err
    assert "model.safetensors: expert 1, up matrix: w[4, 7] must be finite, got nan" in err


def test_experts_with_another_activation(capsys, no_gpu, tmp_path):
    folder = write_checkpoint(tmp_path / "model", layer_tensors(2), hidden_act="gelu")
    code, _, err = run(capsys, folder)
    assert code == 2
    assert "activation silu, got gelu" in err


# Results that are wrong


@pytest.mark.parametrize("offset", [1e-5, np.nan, np.inf])
def test_wrong_result(capsys, no_gpu, monkeypatch, checkpoint, offset):
    right = pycoli.Expert.__call__
    monkeypatch.setattr(pycoli.Expert, "__call__", lambda self, x: right(self, x) * np.float32(1 + offset))
    code, report = run_json(capsys, checkpoint)
    assert code == 1
    assert report["right"] is False
    assert len(report["wrong"]) >= 4
    code, out, _ = run(capsys, checkpoint)
    assert code == 1
    assert "WRONG: expert 3 on cpu: error" in out
    assert "right:" not in out


def test_encoding_that_has_nothing_to_do_with_the_weights(capsys, no_gpu, monkeypatch, checkpoint):
    encode = pycoli.encode
    monkeypatch.setattr(pycoli, "encode", lambda w, fmt: encode(-w if w.shape == (HIDDEN, INNER) else w, fmt))
    code, out, _ = run(capsys, checkpoint)
    assert code == 1
    assert "no better than zeros" in out


def test_format_that_loses_everything(capsys, no_gpu, tmp_path):
    """int2 has an element of 0.6 times the row's largest for that one: three such matrices make outputs 4.6-fold."""
    tensors = {name: np.where(w > 0, 0.125, -0.125).astype(np.float32) for name, w in layer_tensors(3).items()}
    for name, w in tensors.items():
        if ".experts.1." not in name:
            w[:, 1:] *= 0.6
    folder = write_checkpoint(tmp_path / "model", tensors)
    code, report = run_json(capsys, folder, "--format", "int2")
    assert (code, report["right"]) == (0, True)
    lost = [e["expert"] for e in report["experts"] if e["error_against_original"] >= 1]
    assert lost == [0, 2]
    assert [w.partition(" (")[0] for w in report["warnings"]] == [
        "experts 0, 2: the format loses more than the weights hold"
    ]
    code, out, _ = run(capsys, folder, "--format", "int2")
    assert out.splitlines()[-2].startswith("warning: experts 0, 2: the format loses")
    assert run_json(capsys, folder, "--format", "int8")[1]["warnings"] == []


def test_activations_of_zero(capsys, no_gpu, checkpoint, tmp_path):
    np.save(tmp_path / "rows.npy", np.zeros((3, HIDDEN), np.float32))
    code, out, _ = run(capsys, checkpoint, "--activations", tmp_path / "rows.npy")
    assert code == 0
    assert "warning: the activations are all zero" in out


def test_device_that_fails(capsys, simulated_gpu, monkeypatch, checkpoint):
    monkeypatch.setenv("COLI_GPU_FAIL_AFTER", "0")
    code, out, err = run(capsys, checkpoint)
    assert (code, out) == (1, "")
    assert "COLI_GPU_FAIL_AFTER" in err


def test_the_sample_is_small():
    sample = importlib.resources.files("pycoli") / "data" / "sample.safetensors"
    assert len(sample.read_bytes()) < 3_500_000


# Containers


def test_a_container(capsys, no_gpu, tmp_path, checkpoint):
    """The experts of a container are those that encoding in memory gives: the same errors, bit for bit."""
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--experts", "int4-g16"]) == 0
    capsys.readouterr()
    code, report = run_json(capsys, tmp_path / "out", "--tokens", "5")
    assert code == 0
    _, in_memory = run_json(capsys, checkpoint, "--format", "int4-g16", "--tokens", "5")
    assert report["format"] == in_memory["format"] == "int4-g16"
    assert (report["layer"], report["model_type"]) == (3, "qwen3_moe")
    for key in ("bytes", "bits_per_weight", "error_against_decoded"):
        assert [e[key] for e in report["experts"]] == [e[key] for e in in_memory["experts"]]
    assert report["experts"][0]["error_against_original"] is None
    code, out, _ = run(capsys, tmp_path / "out", "--experts", "1")
    assert code == 0
    assert "not known" in out


def test_a_container_on_the_simulated_gpu(capsys, simulated_gpu, tmp_path, checkpoint):
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--experts", "int8"]) == 0
    capsys.readouterr()
    code, report = run_json(capsys, tmp_path / "out", "--experts", "0")
    assert code == 0
    assert report["device"] == "cuda:0"


def test_a_container_that_does_not_do(capsys, no_gpu, tmp_path, checkpoint):
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--experts", "int8"]) == 0
    capsys.readouterr()
    code, _, err = run(capsys, tmp_path / "out", "--format", "e8")
    assert (code, "is a container, whose experts are encoded already" in err) == (2, True)
    shard = tmp_path / "out" / "out-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    code, out, err = run(capsys, tmp_path / "out")
    assert (code, out) == (2, "")
    assert "out-00000.safetensors: expected" in err
