"""The C programs of tests/c: hosts of the libraries, run on the test build."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from libraries import installed_gpu_library
from sanitizers import without_address_randomisation

C_TESTS = Path(__file__).parent / "c"
HEADERS = Path(__file__).parents[1] / "libcoli" / "include" / "coli"
SKIPPED = 77


def run(program: Path, *arguments: Path, prefix: Sequence[str] = ()) -> None:
    """Run a test program; fail with what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COLI_")}
    command = [*prefix, program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    if result.returncode == SKIPPED:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, f"{program.name} ended with {result.returncode}\n{result.stdout}{result.stderr}"


def test_core(build_dir):
    run(build_dir / "tests/c/t_core")


def test_loader_on_libraries_as_they_are_found(build_dir):
    run(build_dir / "tests/c/t_old_library", build_dir / "tests/stubs")


def test_placed_matrices(build_dir, simt_lib):
    run(build_dir / "tests/c/t_placed", simt_lib)


@pytest.mark.parametrize("name", ["t_host_loop", "t_moe_host", "t_moe_threads"])
def test_moe_layers(build_dir, simt_lib, name):
    run(build_dir / "tests/c" / name, simt_lib)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_moe_layers_sanitized(sanitized_build, sanitizer):
    """Layers and library, both under the sanitizer: races; leaks, and accesses out of bounds."""
    build = sanitized_build(sanitizer)
    prefix = without_address_randomisation() if sanitizer == "thread" else []
    run(build / "tests/c/t_moe_threads_sanitized", build / "tests/simt/libcoli_cuda_simt.so", prefix=prefix)


@pytest.mark.parametrize("name", ["t_symbols", "t_host", "t_not_provided"])
def test_linked_host(build_dir, name):
    run(build_dir / f"tests/c/{name}_simt")


@pytest.mark.parametrize("header", sorted(path.name for path in HEADERS.glob("*.h")))
@pytest.mark.parametrize("language", ["c", "cpp"])
def test_header_compiles_alone(build_dir, header, language):
    run(build_dir / f"tests/c/h_{header.replace('.', '_')}_{language}")


def test_every_name_that_is_not_provided_is_called():
    section = (HEADERS / "coli_cuda.h").read_text().split("/*------   Not provided   ------*/")[1]
    names = re.findall(r"COLI_API [^;(]*?(coli_cuda_\w+)\(", section)
    assert len(names) == 33
    called = set(re.findall(r"\bcoli_cuda_\w+", (C_TESTS / "t_not_provided.c").read_text()))
    assert set(names) <= called


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["t_host", "t_not_provided"])
def test_linked_host_on_gpu(tmp_path, name):
    library = installed_gpu_library()
    compiler = [*os.environ.get("CC", "cc").split(), "-std=c11", "-I", HEADERS.parent, f"-Wl,-rpath,{library.parent}"]
    command = [*compiler, C_TESTS / f"{name}.c", library, "-lm", "-o", tmp_path / name]
    subprocess.run(command, check=True)
    run(tmp_path / name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["t_placed", "t_host_loop", "t_moe_host", "t_moe_threads"])
def test_loaded_library_on_gpu(build_dir, name):
    run(build_dir / f"tests/c/{name}", installed_gpu_library())
