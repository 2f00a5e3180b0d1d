"""The examples of the README and of docs/moe.md, compiled and run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from containers import random_layer, write_container

ROOT = Path(__file__).resolve().parent.parent


def example(language: str, page: str = "README.md") -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1, f"expected one {language} example in {page}, found {len(blocks)}"
    return blocks[0]


@pytest.mark.parametrize("page", ["README.md", "docs/moe.md"])
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "simulated-gpu"])
def test_python_example(on_gpu, page, simt_lib, monkeypatch):
    monkeypatch.setenv("COLI_CUDA_LIB", str(simt_lib) if on_gpu else "/nowhere/libcoli_cuda.so")
    run = subprocess.run([sys.executable, "-c", example("python", page)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert ("cuda:0" if on_gpu else "cpu") in run.stdout


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "simulated-gpu"])
def test_container_example(on_gpu, simt_lib, tmp_path, monkeypatch, rng):
    """The one of docs/moe.md that reads MODEL-e8."""
    write_container(tmp_path / "MODEL-e8", random_layer(rng, "e8"))
    monkeypatch.setenv("COLI_CUDA_LIB", str(simt_lib) if on_gpu else "/nowhere/libcoli_cuda.so")
    command = [sys.executable, "-c", example("py", "docs/moe.md")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert ("on cuda:0" if on_gpu else "3 on cpu") in run.stdout


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "simulated-gpu"])
def test_c_example(on_gpu, build_dir, simt_lib, tmp_path, monkeypatch):
    monkeypatch.setenv("COLI_CUDA_LIB", str(simt_lib) if on_gpu else "/nowhere/libcoli_cuda.so")
    source, program, library = tmp_path / "host.c", tmp_path / "host", build_dir / "libcoli" / "core"
    source.write_text(example("c"))
    include = ROOT / "libcoli" / "include"
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", source, "-o", program, f"-I{include}", f"-L{library}"]
    subprocess.run([*command, "-lcoli", f"-Wl,-rpath,{library}"], check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"on device {0 if on_gpu else -1}" in run.stdout
    exact = sum((i % 13 - 6) ** 2 for i in range(512))  # row 0 of w is x
    assert float(re.search(r"y\[0\] = (\S+)", run.stdout)[1]) == pytest.approx(exact, rel=0.1)
