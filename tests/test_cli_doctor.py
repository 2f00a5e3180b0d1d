"""``pycoli doctor``, with and without a GPU library."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pycoli
from pycoli.cli import main
from pycoli.cli.doctor import driver_report

NOT_IN_CHECKOUT = {"_bindings.py", "libcoli.so", "libcoli_cuda.so", "__pycache__"}


def doctor(capsys, *arguments):
    assert main(["doctor", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_without_a_gpu_library(capsys, monkeypatch, tmp_path):
    missing = str(tmp_path / "libcoli_cuda_absent.so")
    monkeypatch.setenv("COLI_CUDA_LIB", missing)
    report = json.loads(doctor(capsys, "--json"))
    assert report["pycoli"]["version"] == pycoli.__version__
    assert report["libcoli"]["version"] == pycoli.__version__
    assert report["processor"]["used"] in report["processor"]["instruction_sets"]
    assert "scalar" in report["processor"]["instruction_sets"]
    assert report["processor"]["threads"] >= 1
    assert report["system"]["packages"]["numpy"]
    assert report["system"]["environment"]["COLI_CUDA_LIB"] == missing
    assert report["libcoli_cuda"]["path"] is None
    assert missing in report["libcoli_cuda"]["why_not"]
    assert report["devices"] == []
    assert missing in report["why_no_device"]
    assert "coli_cuda_matmul" in report["entry_points"]
    assert not any(report["entry_points"].values())

    out = doctor(capsys)
    assert f"COLI_CUDA_LIB={missing}" in out
    assert f"0 of {len(report['entry_points'])} resolved" in out
    assert "no GPU is used: no GPU library is loaded" in out


def test_with_the_simulated_gpu(capsys, monkeypatch, simt_lib, tmp_path):
    monkeypatch.setenv("COLI_CUDA_LIB", str(simt_lib))
    file = tmp_path / "report.json"
    out = doctor(capsys, "--output", file)
    report = json.loads(file.read_text())
    assert doctor(capsys, "--json").startswith("{")
    assert report["libcoli_cuda"]["path"] == str(simt_lib)
    assert report["libcoli_cuda"]["version"] == pycoli.__version__
    assert all(report["entry_points"].values())
    assert report["features"]["e8"] is None
    assert "int3-g64" in report["features"]["int3-g64"]
    assert [device["name"] for device in report["devices"]] == ["cuda:0", "cuda:1"]
    assert all(device["model"] and device["model"] in out for device in report["devices"])
    assert all(0 < device["free_bytes"] <= device["total_bytes"] for device in report["devices"])
    assert report["why_no_device"] is None
    assert "GiB free" in out
    assert "no GPU is used" not in out


def test_with_a_gpu_library_from_before_e8(capsys, monkeypatch, build_dir):
    monkeypatch.setenv("COLI_CUDA_LIB", str(build_dir / "tests" / "stubs" / "stub_old.so"))
    report = json.loads(doctor(capsys, "--json"))
    assert report["libcoli_cuda"]["version"] is None
    assert report["entry_points"]["coli_cuda_matmul"] is True
    assert report["entry_points"]["coli_cuda_e8_set_grid"] is False
    assert report["features"]["int8"] is None
    assert "coli_cuda_e8_set_grid" in report["features"]["e8"]
    out = doctor(capsys)
    assert "version unknown: an older library" in out
    assert [device["model"] for device in report["devices"]] == [None]
    assert "cuda:0: a GPU of unknown name, 1.0 of 1.0 GiB free" in out
    missing = out.partition("missing: ")[2].partition("features")[0].replace(",", " ").split()
    assert missing == [name for name, resolved in report["entry_points"].items() if not resolved]


@pytest.mark.parametrize("name", ["stub_future", "stub_empty"])
def test_with_libraries_that_do_not_do(capsys, monkeypatch, build_dir, name):
    monkeypatch.setenv("COLI_CUDA_LIB", str(build_dir / "tests" / "stubs" / f"{name}.so"))
    out = doctor(capsys)
    assert "not loaded: " in out
    assert "no GPU is used: no GPU library is loaded" in out


def test_built_without_cuda(capsys, built_without_cuda):
    out = " ".join(doctor(capsys).split())
    assert "not loaded: no GPU library is installed (built without CUDA): no usable GPU library: " in out
    assert out.endswith("no GPU is used: no GPU library is installed (built without CUDA)")


def run_elsewhere(folder, tmp_path, **environment):
    """The report of a process of its own that starts in a folder."""
    environment = {**os.environ, "COLI_CUDA_LIB": str(tmp_path / "absent.so"), **environment}
    command = [sys.executable, "-m", "pycoli", "doctor", "--json"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=True)
    return json.loads(ended.stdout)


def broken_libcoli(build_dir, tmp_path):
    """Files for COLI_LIB, and why they cannot be used."""
    text = tmp_path / "text.so"
    text.write_text("not a library")
    yield tmp_path / "absent.so", "cannot open shared object file"
    yield text, "libcoli cannot be loaded from "
    yield build_dir / "tests" / "stubs" / "stub_empty.so", "is not libcoli: it lacks coli_abi_version"


def test_libcoli_that_cannot_be_loaded(build_dir, tmp_path):
    for library, reason in broken_libcoli(build_dir, tmp_path):
        report = run_elsewhere(tmp_path, tmp_path, COLI_LIB=str(library))
        assert report["pycoli"]["version"] == pycoli.__version__
        assert report["libcoli"]["path"] is None
        assert str(library) in report["libcoli"]["why_not"]
        assert reason in report["libcoli"]["why_not"]
        assert report["processor"]["model"]
        assert report["devices"] == []

        environment = {**os.environ, "COLI_LIB": str(library)}
        command = [sys.executable, "-m", "pycoli", "doctor"]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert (ended.returncode, ended.stderr) == (0, "")
        line = next(line for line in ended.stdout.splitlines() if line.startswith("libcoli "))
        assert line.split(maxsplit=1)[1].startswith("not loaded: ")

        ended = subprocess.run([*command[:-1], "run"], capture_output=True, text=True, env=environment)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr == f"pycoli run: {report['libcoli']['why_not']}\n"


def test_checkout_that_hides_the_installed_package(tmp_path):
    shutil.copytree(
        Path(pycoli.__file__).parent, tmp_path / "pycoli", ignore=lambda _, names: {*names} & NOT_IN_CHECKOUT
    )
    package = run_elsewhere(tmp_path, tmp_path)["pycoli"]
    if package["path"] != str(tmp_path / "pycoli"):
        pytest.skip("pycoli is installed in editable mode: nothing hides it")
    assert (Path(package["hidden_installation"]) / "_bindings.py").is_file()


def test_instruction_set_that_is_unknown(tmp_path):
    processor = run_elsewhere(tmp_path, tmp_path, COLI_ISA="foo")["processor"]
    assert processor["warning"].startswith("COLI_ISA=foo is ignored (known are avx512, avx2, scalar); ")
    processor = run_elsewhere(tmp_path, tmp_path, COLI_ISA="scalar")["processor"]
    assert (processor["used"], processor["warning"]) == ("scalar", None)


def test_instruction_set_of_choice_survives(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLI_CUDA_LIB", str(tmp_path / "absent.so"))
    before = pycoli.cpu.isa()
    doctor(capsys)
    assert pycoli.cpu.isa() == before


def test_nobody_reads_the_report(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "COLI_CUDA_LIB": str(tmp_path / "absent.so")}
    command = [sys.executable, "-m", "pycoli", "doctor"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_file_that_is_no_library(capsys, monkeypatch, tmp_path, content):
    file = tmp_path / "libcoli_cuda.so"
    file.write_bytes(content)
    monkeypatch.setenv("COLI_CUDA_LIB", str(file))
    assert "not loaded: " in doctor(capsys)


def test_kernel_drivers_of_both_vendors(tmp_path):
    assert driver_report(tmp_path) == {"nvidia": None, "boards": [], "amdgpu": None}
    for file, text in {
        "proc/driver/nvidia/version": "NVRM version: 580.1\nGCC version: 12\n",
        "proc/driver/nvidia/gpus/0000:01/information": "Model: \t NVIDIA H200\nIRQ: 5\n",
        "sys/module/amdgpu/refcnt": "1\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    found = driver_report(tmp_path)
    assert found == {"nvidia": "NVRM version: 580.1", "boards": ["NVIDIA H200"], "amdgpu": "loaded"}
    (tmp_path / "sys/module/amdgpu/version").write_text("6.7.0\n")
    assert driver_report(tmp_path)["amdgpu"] == "6.7.0"
