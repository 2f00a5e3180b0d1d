"""``pycoli convert``, ``inspect`` and ``verify`` from the command line."""

import fcntl
import json
import os
import struct
import subprocess
import sys
import termios
import threading

import ml_dtypes
import numpy as np
import pytest
from containers import random_layer, write_container, write_imatrix
from safetensors.numpy import load_file, save_file

from pycoli.cli import main
from pycoli.convert import shard

HIDDEN, INNER = 256, 128


@pytest.fixture
def model(tmp_path):
    rng = np.random.default_rng(1)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    tensors = {
        f"model.layers.0.mlp.experts.{number}.{matrix}.weight": rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for number in range(2)
        for matrix, shape in shapes.items()
    }
    tensors["model.norm.weight"] = np.ones(HIDDEN, ml_dtypes.bfloat16)
    tensors["model.layers.0.self_attn.q_proj.weight"] = rng.standard_normal((HIDDEN, HIDDEN)).astype(np.float32)
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "qwen3_moe", "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pycoli(capsys, *arguments):
    """Exit code, output and errors of a command."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_convert_reports_what_it_did(capsys, tmp_path, model):
    code, out, err = pycoli(capsys, "convert", model, tmp_path / "out", "--jobs", "2")
    assert code == 0
    assert err.count("warning") == 1
    assert "stored as int4-g64 in place of e8" in err
    lines = [line.split() for line in out.splitlines()]
    assert ["expert", "gate", "e8", "2", "65,536", "25,088", "3.0625"] in [line[:-1] for line in lines]
    assert ["vector", "f32", "1", "256", "1,024", "32.0000"] in lines
    nmse = next(float(line[-1]) for line in lines if line[:2] == ["expert", "gate"])
    assert 0.02 < nmse < 0.05
    assert "1 files" in out
    code, out, _ = pycoli(capsys, "convert", model, tmp_path / "out")
    assert (code, "1 of them finished before" in out) == (0, True)


def test_convert_calibrates(capsys, tmp_path, model):
    rng = np.random.default_rng(2)
    names = [f"blk.0.ffn_{role}_exps.weight" for role in ("gate", "up")]
    file = write_imatrix(tmp_path / "imatrix", {name: np.exp(2 * rng.standard_normal((2, HIDDEN))) for name in names})
    code, out, _ = pycoli(capsys, "convert", model, tmp_path / "out", "--imatrix", file)
    assert code == 0
    text = " ".join(out.split())
    assert "calibration 4 of 4 matrices" in text
    assert "of the outputs' energy" in text
    assert "MiB for a matrix" in text
    code, out, _ = pycoli(capsys, "convert", model, tmp_path / "out", "--imatrix", file, "--json")
    report = json.loads(out)["calibration"]
    assert (code, report["matrices"], report["searched"]) == (0, 4, {})
    assert report["output_error"] < report["search_output_error"]
    assert pycoli(capsys, "verify", tmp_path / "out", "--against", model)[0] == 0


@pytest.mark.parametrize("device", ["0", "cuda:0"])
def test_convert_on_a_gpu(backend, capsys, tmp_path, model, device):
    options = ["--quality", "reference"]
    assert pycoli(capsys, "convert", model, tmp_path / "cpu", *options)[0] == 0
    assert pycoli(capsys, "convert", model, tmp_path / "gpu", *options, "--device", device)[0] == 0
    files = sorted(file.name for file in (tmp_path / "cpu").glob("*.safetensors"))
    assert files
    for name in files:
        assert (tmp_path / "gpu" / name).read_bytes() == (tmp_path / "cpu" / name).read_bytes()


def test_convert_goes_on_on_another_device(backend, capsys, tmp_path, model):
    assert pycoli(capsys, "convert", model, tmp_path / "out", "--device", "cpu")[0] == 0
    assert pycoli(capsys, "convert", model, tmp_path / "out", "--device", "cuda")[0] == 0


def test_convert_calibrates_on_the_cpu_alone(backend, capsys, tmp_path, model):
    file = write_imatrix(tmp_path / "imatrix", {"blk.0.ffn_gate_exps.weight": np.ones((2, HIDDEN))})
    code, _, err = pycoli(capsys, "convert", model, tmp_path / "out", "--imatrix", file, "--device", "0")
    assert code == 2
    assert "quality calibrated encodes on the CPU alone, got device cuda:0" in err
    assert not (tmp_path / "out").exists()


def test_convert_on_a_gpu_that_is_not_there(backend, capsys, tmp_path, model):
    code, _, err = pycoli(capsys, "convert", model, tmp_path / "out", "--device", "77")
    assert code == 2
    assert "--device 77" in err
    assert not (tmp_path / "out").exists()


def test_dry_run(capsys, tmp_path, model):
    code, out, _ = pycoli(capsys, "convert", model, tmp_path / "out", "--dry-run", "--json")
    assert code == 0
    assert not (tmp_path / "out").exists()
    planned = json.loads(out)
    assert planned["bytes_free"] > 0
    _, out, _ = pycoli(capsys, "convert", model, tmp_path / "out", "--json")
    done = json.loads(out)
    assert planned["bytes"] == done["bytes"] == (tmp_path / "out" / "out-00000.safetensors").stat().st_size
    for before, after in zip(planned["kinds"], done["kinds"], strict=True):
        assert before.pop("nmse") is None
        assert after.pop("nmse") is not None
        assert before == after


def test_progress_bar_on_a_terminal(tmp_path, model):
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    shown = b""

    def read():  # all the time, as a terminal that nobody reads fills up
        nonlocal shown
        while b"END" not in shown:
            shown += os.read(leader, 4096)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    command = [sys.executable, "-m", "pycoli", "convert", model, tmp_path / "out", "--experts", "int8"]
    environment = os.environ | {"TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, env=environment, timeout=120)
    os.write(follower, b"END")
    reader.join(60)
    os.close(follower)
    os.close(leader)
    assert done.returncode == 0
    assert b"convert:" in shown
    assert b"weight/s" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experts", "e9"], "e9"),
        (["--dense", "e8"], "dense: e8 is for experts alone"),
        (["--keep", "("], "is no regular expression"),
        (["--quality", "calibrated"], "--quality calibrated: --imatrix FILE or --activations FILE is needed"),
        (["--quality", "search", "--imatrix", "x"], "--quality search: does not go with x"),
        (["--imatrix", "missing.dat"], "missing.dat: cannot be read"),
        (["--activations", "missing.safetensors"], "missing.safetensors"),
    ],
)
def test_settings_that_do_not_do(capsys, tmp_path, model, arguments, message):
    code, out, err = pycoli(capsys, "convert", model, tmp_path / "out", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [["--shard-size", "4X"], ["--shard-size", "0"], ["--jobs", "0"], ["--jobs", "x"]])
def test_arguments_that_do_not_do(tmp_path, model, option):
    with pytest.raises(SystemExit, match="2"):
        main(["convert", str(model), str(tmp_path / "out"), *option])


def test_verify(capsys, tmp_path, model):
    out = tmp_path / "out"
    pycoli(capsys, "convert", model, out)
    code, text, _ = pycoli(capsys, "verify", out, "--against", model)
    assert code == 0
    assert text.splitlines()[-1] == "right: 8 tensors are there and within their limits"
    code, text, _ = pycoli(capsys, "verify", out, "--against", model, "--limit", "1e-9", "--json")
    assert code == 1
    report = json.loads(text)
    assert report["right"] is False
    wrong = [tensor["name"] for tensor in report["tensors"] if tensor["problem"]]
    assert len(wrong) == 7  # all but the norm
    file = out / "out-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    code, text, _ = pycoli(capsys, "verify", out, "--against", model)
    assert code == 1
    assert "is not what its checksum says" in " ".join(text.split())


def test_verify_of_files_that_do_not_do(capsys, tmp_path, model):
    code, out, err = pycoli(capsys, "verify", tmp_path / "absent", "--against", model)
    assert (code, out) == (2, "")
    assert "absent: no such file or folder" in err
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "x", "--against", "y", "--limit", "-1"])


def test_inspect(capsys, tmp_path, rng):
    matrices = random_layer(rng, "e8") | random_layer(rng, "int4-g64", 1)
    folder = write_container(tmp_path / "model", matrices)
    code, out, _ = pycoli(capsys, "inspect", folder)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    row = next(line for line in lines if line[:1] == ["model.layers.0.mlp.experts.*.up"])
    assert row[1:6] == ["e8", "256x512", "3", "150,528", "3.0625"]
    assert "sub-scale codes of e8" in out
    code, out, _ = pycoli(capsys, "inspect", folder, "--json", "--all", "--layer", "0")
    report = json.loads(out)
    assert len(report["tensors"]) == 9
    blocks = np.concatenate([m.data.reshape(-1, 98) for m in matrices.values() if m.fmt == "e8"])
    words = blocks[:, 64:96].copy().view("<u4") >> 28
    assert report["e8_sub_scale_codes"] == np.bincount(words.reshape(-1), minlength=16).tolist()
    assert report["e8_codebook_entries"] == np.bincount(blocks[:, :64].reshape(-1), minlength=256).tolist()
    for tensor in report["tensors"]:
        scales = np.abs(matrices[tensor["name"]].data.reshape(-1, 98)[:, 96:].copy().view("<f2").astype(float))
        assert (tensor["least_scale"], tensor["greatest_scale"]) == (scales.min(), scales.max())


def test_inspect_headers_alone(capsys, tmp_path, rng):
    folder = write_container(tmp_path / "model", random_layer(rng, "e8"))
    code, out, _ = pycoli(capsys, "inspect", folder, "--headers", "--json")
    report = json.loads(out)
    assert code == 0
    assert all(tensor["least_scale"] is None for tensor in report["tensors"])
    assert sum(report["e8_codebook_entries"]) == 0


def test_inspect_a_file_without_experts(capsys, tmp_path):
    save_file({"x": np.zeros((2, 3), np.float32), "y": np.zeros(5, np.uint8)}, tmp_path / "plain.safetensors")
    code, out, _ = pycoli(capsys, "inspect", tmp_path / "plain.safetensors")
    assert code == 0
    assert [line.split() for line in out.splitlines()[2:4]] == [
        ["x", "f32", "2x3", "1", "24", "32.0000"],
        ["y", "u8", "5", "1", "5", "8.0000"],
    ]


def test_inspect_plot(capsys, tmp_path, rng):
    pytest.importorskip("matplotlib", reason="it draws")
    folder = write_container(tmp_path / "model", random_layer(rng, "e8"))
    code, _, _ = pycoli(capsys, "inspect", folder, "--plot", tmp_path / "codes.png")
    assert code == 0
    assert (tmp_path / "codes.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("plot", "message"), [("codes.gif", "expected a name that ends in"), ("absent/codes.png", "no folder|matplotlib")]
)
def test_inspect_plots_that_do_not_do(capsys, tmp_path, rng, plot, message):
    folder = write_container(tmp_path / "model", random_layer(rng, "e8"))
    code, out, err = pycoli(capsys, "inspect", folder, "--plot", tmp_path / plot)
    assert (code, out) == (2, "")
    assert any(part in err for part in message.split("|"))


def test_inspect_a_layer_that_is_not_there(capsys, tmp_path, rng):
    folder = write_container(tmp_path / "model", random_layer(rng, "e8", 1))
    for path in (folder, folder / "out-00000.safetensors"):
        code, out, err = pycoli(capsys, "inspect", path, "--layer", "4")
        assert (code, out) == (2, "")
        assert "layers are 1, got layer 4" in err
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "plain.safetensors")
    assert (
        "layers are not there, got layer 0"
        in pycoli(capsys, "inspect", tmp_path / "plain.safetensors", "--layer", "0")[2]
    )
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", str(folder), "--layer", "-1"])


def test_names_of_a_hostile_file_do_not_reach_the_terminal(capsys, tmp_path):
    """Neither as commands to it, nor as lines that the program would have written."""
    name = "a\x1b[2J\nright: 5 tensors\x9b\u202e"
    save_file({name: np.zeros(3, np.float32)}, tmp_path / "plain.safetensors")
    _, out, _ = pycoli(capsys, "inspect", tmp_path / "plain.safetensors")
    assert out.splitlines()[2].split("  ")[0] == r"a\x1b[2J\nright: 5 tensors\x9b\u202e"
    _, _, err = pycoli(capsys, "inspect", tmp_path / "\x1b[2J")
    assert r"\x1b[2J: no such file" in err


def test_a_container_is_no_model(capsys, tmp_path, model):
    pycoli(capsys, "convert", model, tmp_path / "out")
    for command in (
        ["convert", tmp_path / "out", tmp_path / "again"],
        ["verify", tmp_path / "out", "--against", tmp_path / "out"],
    ):
        code, _, err = pycoli(capsys, *command)
        assert code == 2
        assert "found neither, but a container; give the model that it was made from" in err


def test_interrupted(capsys, tmp_path, model, monkeypatch):
    """By Ctrl-C: a line in place of a traceback, and a conversion that goes on later."""
    written = shard._write_chunk

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(shard, "_write_chunk", interrupt)
    code, out, err = pycoli(capsys, "convert", model, tmp_path / "out")
    assert (code, out, err.splitlines()[-1]) == (130, "", "pycoli convert: interrupted")
    monkeypatch.setattr(shard, "_write_chunk", written)
    assert pycoli(capsys, "convert", model, tmp_path / "out")[0] == 0


def test_inspect_a_damaged_tensor(capsys, tmp_path, rng):
    folder = write_container(tmp_path / "model", random_layer(rng, "e8"))
    file = folder / "out-00000.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors[name] = tensors[name][:-1]
    save_file(tensors, file)
    code, out, err = pycoli(capsys, "inspect", folder)
    assert (code, out) == (2, "")
    assert name in err
    assert err.count("\n") == 1
