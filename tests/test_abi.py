"""What the libraries export is what the checked-in lists and the headers say, under the soname of their ABI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from libraries import installed_gpu_library

ROOT = Path(__file__).resolve().parents[1]
HEADERS = ROOT / "libcoli" / "include" / "coli"
LISTS = ROOT / "tests" / "abi"
CORE_HEADERS = [HEADERS / "coli.h", HEADERS / "coli_moe.h"]


def check_abi(library: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools/check_abi.py", library, LISTS / f"{name}.sym", *options]
    return subprocess.run(command, capture_output=True, text=True)


def names(symbol_file: Path) -> list[str]:
    return [line for line in symbol_file.read_text().splitlines() if not line.startswith("#")]


def soname(library: Path) -> str:
    output = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    return re.search(r"\(SONAME\).*\[(.*)\]", output)[1]


def version(name: str) -> str:
    return re.search(rf"#define {name} (\d+)", (HEADERS / "coli_version.h").read_text())[1]


def test_libcoli(build_dir):
    result = check_abi(build_dir / "libcoli/core/libcoli.so", "libcoli", "--headers", *CORE_HEADERS)
    assert result.returncode == 0, result.stdout + result.stderr


def test_libcoli_cuda_simt(simt_lib):
    result = check_abi(simt_lib, "libcoli_cuda", "--headers", HEADERS / "coli_cuda.h", "--allow-others")
    assert result.returncode == 0, result.stdout + result.stderr


def test_installed_libcoli_cuda():
    result = check_abi(installed_gpu_library(), "libcoli_cuda", "--headers", HEADERS / "coli_cuda.h")
    assert result.returncode == 0, result.stdout + result.stderr


def test_soname(build_dir):
    assert soname(build_dir / "libcoli/core/libcoli.so") == f"libcoli.so.{version('COLI_ABI_MAJOR')}"


@pytest.mark.parametrize("name", ["libcoli", "libcoli_cuda"])
def test_lists_are_sorted(name):
    listed = names(LISTS / f"{name}.sym")
    assert listed == sorted(set(listed))


def test_hosts_find_what_they_need():
    mandatory, optional = names(LISTS / "host_mandatory.sym"), names(LISTS / "host_optional.sym")
    assert (len(mandatory), len(optional)) == (47, 16)
    assert {*mandatory, *optional} <= set(names(LISTS / "libcoli_cuda.sym"))


def test_old_stub_exports_what_hosts_demanded_before_e8(build_dir, tmp_path):
    expected = set(names(LISTS / "host_mandatory.sym")) - {"coli_cuda_group_stats_device"}
    (tmp_path / "old.sym").write_text("\n".join(expected))
    command = [sys.executable, ROOT / "tools/check_abi.py", build_dir / "tests/stubs/stub_old.so", tmp_path / "old.sym"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_differences_are_found(build_dir, tmp_path):
    """The check itself: a name too many and a name too few in the list, an export without the prefix."""
    library = build_dir / "libcoli/core/libcoli.so"
    listed = names(LISTS / "libcoli.sym")
    (tmp_path / "changed.sym").write_text("\n".join([*listed[1:], "coli_new"]))
    command = [sys.executable, ROOT / "tools/check_abi.py", library, tmp_path / "changed.sym"]
    result = subprocess.run([*command, "--headers", *CORE_HEADERS], capture_output=True, text=True)
    assert result.returncode == 1
    assert f"exports {listed[0]}, which changed.sym does not list" in result.stdout
    assert "does not export coli_new, which changed.sym lists" in result.stdout
    assert f"coli.h, coli_moe.h declares {listed[0]}, which changed.sym does not list" in result.stdout
    assert "changed.sym lists coli_new, which coli.h, coli_moe.h does not declare" in result.stdout
    assert len(result.stdout.splitlines()) == 4

    result = check_abi(build_dir / "tests/stubs/stub_empty.so", "libcoli")
    assert "exports answer, which libcoli.sym does not list" in result.stdout


def test_libcoli_stays_mapped_after_dlclose(build_dir):
    """Its OpenMP threads are still there after a dlclose, waiting for work in code that must not go away."""
    program = """
import _ctypes, ctypes, sys
coli = ctypes.CDLL(sys.argv[1])
coli.coli_set_threads(2)
rows, dim = 4096, 1024
x = (ctypes.c_float * (rows * dim))()
assert coli.coli_rotate_rows(x, x, ctypes.c_size_t(rows), dim) == 0
_ctypes.dlclose(coli._handle)
maps = open("/proc/self/maps").read()
assert "libcoli.so" in maps and ("libgomp" in maps or "libomp" in maps), maps
"""
    environment = {**os.environ, "OMP_WAIT_POLICY": "active"}
    library = build_dir / "libcoli" / "core" / "libcoli.so"
    run = subprocess.run([sys.executable, "-c", program, library], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
