"""The build: with and without nvcc, how nvcc is found, what gets installed, one version everywhere."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from builds import check, meson, run

import pycoli

ROOT = Path(__file__).resolve().parents[1]
HEADERS = ROOT / "libcoli" / "include" / "coli"
NO_NVCC = "/nonexistent/nvcc"


def version_numbers():
    """The numbers that coli_version.h defines."""
    header = (HEADERS / "coli_version.h").read_text()
    return {name: int(value) for name, value in re.findall(r"#define (\w+) (\d+)$", header, re.MULTILINE)}


# ---- with and without nvcc ----


def test_enabled_without_nvcc_is_an_error_that_says_what_is_missing(tmp_path):
    result = meson("setup", tmp_path / "build", ROOT, "-Dcuda=enabled", NVCC=NO_NVCC)
    assert result.returncode != 0
    assert "-Dcuda=enabled needs a usable nvcc" in result.stdout
    assert f"{NO_NVCC}: no such file" in result.stdout


@pytest.fixture(scope="module")
def build_without_nvcc(tmp_path_factory):
    """-Dcuda=auto on a machine that has no nvcc: (build folder, prefix where it is installed)."""
    folder = tmp_path_factory.mktemp("cpu_only")
    build, prefix = folder / "build", folder / "prefix"
    options = ["-Dcuda=auto", "-Dwerror=true", "--libdir=lib", f"--prefix={prefix}"]
    check(meson("setup", build, ROOT, *options, NVCC=NO_NVCC))
    check(meson("compile", "-C", build, NVCC=NO_NVCC))
    check(meson("install", "-C", build, "--no-rebuild", NVCC=NO_NVCC))
    return build, prefix


def test_auto_without_nvcc_builds_libcoli_alone(build_without_nvcc):
    build, _ = build_without_nvcc
    targets = json.loads(check(meson("introspect", "--targets", build)))
    assert {target["name"] for target in targets if target["type"] == "shared library"} == {"coli"}


def test_installed_files(build_without_nvcc):
    _, prefix = build_without_nvcc
    installed = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if not path.is_dir()}
    major = version_numbers()["COLI_ABI_MAJOR"]
    assert installed == {
        *(f"include/coli/{path.name}" for path in HEADERS.glob("*.h")),
        "lib/libcoli.so",
        f"lib/libcoli.so.{major}",
        f"lib/libcoli.so.{pycoli.__version__}",
        "lib/pkgconfig/coli.pc",
    }


HOST = """
#include <coli/coli.h>
#include <stdio.h>
int main(void) {
    coli_backend *backend = NULL;
    if (coli_backend_open(NULL, &backend) != COLI_E_NO_LIBRARY) return 1;
    printf("%s\\n%s\\n", coli_version_string(), coli_last_error());
    return 0;
}
"""


def test_host_builds_with_pkg_config(build_without_nvcc, tmp_path):
    if shutil.which("pkg-config") is None:
        pytest.skip("no pkg-config")
    _, prefix = build_without_nvcc
    search = {"PKG_CONFIG_PATH": prefix / "lib" / "pkgconfig"}
    assert check(run("pkg-config", "--modversion", "coli", **search)).strip() == pycoli.__version__
    flags = check(run("pkg-config", "--cflags", "--libs", "coli", **search)).split()
    source, program = tmp_path / "host.c", tmp_path / "host"
    source.write_text(HOST)
    compiler = [*os.environ.get("CC", "cc").split(), "-std=c11", "-Wall", "-Wextra", "-Werror"]
    check(run(*compiler, source, "-o", program, *flags, f"-Wl,-rpath,{prefix / 'lib'}"))
    version, why_no_backend = check(run(program, COLI_CUDA_LIB="/nonexistent/libcoli_cuda.so")).splitlines()
    assert version == pycoli.__version__
    assert "/nonexistent/libcoli_cuda.so" in why_no_backend


# ---- tools/find_nvcc.py ----

NVCC = """#!/bin/sh
case "$1" in
--version) {version} ;;
*) echo '#$ TOP={top}' >&2 ;;
esac
"""


def fake_nvcc(folder, version="echo release 13.0, V13.0.48", runtime=True, headers=True):
    """A script that answers as nvcc does, in front of a toolkit folder with what find_nvcc.py looks for."""
    top = folder / "toolkit"
    (top / "lib64").mkdir(parents=True)
    (top / "include" / "cccl" / "nv").mkdir(parents=True)
    if runtime:
        (top / "lib64" / "libcudart_static.a").touch()
    if headers:
        (top / "include" / "cccl" / "nv" / "target").touch()
    nvcc = folder / "nvcc"
    nvcc.write_text(NVCC.format(version=version, top=top))
    nvcc.chmod(0o755)
    return nvcc


def find_nvcc(**environment):
    return run(sys.executable, ROOT / "tools" / "find_nvcc.py", **environment)


def test_usable_nvcc_is_printed_with_its_toolkit(tmp_path):
    nvcc = fake_nvcc(tmp_path)
    top = tmp_path / "toolkit"
    expected = [nvcc, "13.0.48", top / "include", top / "lib64"]
    assert check(find_nvcc(NVCC=nvcc)).splitlines() == [str(line) for line in expected]


@pytest.mark.parametrize(
    ("toolkit", "reason"),
    [
        ({"version": "true"}, "prints no version"),
        ({"version": "exit 3"}, "does not run: .*exit status 3"),
        ({"version": "echo release 11.8, V11.8.89"}, r"version 11\.8\.89, need \d+(\.\d+)? or newer"),
        ({"runtime": False}, "no static CUDA runtime below .*/toolkit"),
        ({"headers": False}, "no CCCL headers below .*/toolkit/include"),
    ],
    ids=["no-version", "fails", "old", "no-runtime", "no-headers"],
)
def test_unusable_nvcc_is_named_with_the_reason(tmp_path, toolkit, reason):
    nvcc = fake_nvcc(tmp_path, **toolkit)
    result = find_nvcc(NVCC=nvcc)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.search(rf"^  {re.escape(str(nvcc))}: {reason}", result.stderr, re.MULTILINE), result.stderr


@pytest.fixture
def candidates(tmp_path):
    """Three unusable ones, in the order in which they are looked for: {place: (folder, what it says)}."""
    found = {
        "CUDA_HOME": (tmp_path / "home" / "bin", "true"),
        "CUDA_PATH": (tmp_path / "other" / "bin", "echo V9.0"),
        "PATH": (tmp_path / "path", "exit 1"),
    }
    for folder, version in found.values():
        folder.mkdir(parents=True)
        fake_nvcc(folder, version=version)
    return {place: folder / "nvcc" for place, (folder, _) in found.items()}


def find_nvcc_among(candidates):
    """find_nvcc.py without NVCC, and without the CUDA wheels that this Python may have (-S)."""
    environment = {name: value for name, value in os.environ.items() if name != "NVCC"}
    environment |= {name: str(candidates[name].parents[1]) for name in ("CUDA_HOME", "CUDA_PATH")}
    environment["PATH"] = f"{candidates['PATH'].parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-S", ROOT / "tools" / "find_nvcc.py"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("usable", ["CUDA_HOME", "CUDA_PATH", "PATH"])
def test_first_usable_candidate_is_taken(candidates, usable):
    nvcc = candidates[usable]
    nvcc.write_text(NVCC.format(version="echo V13.9.1", top=nvcc.parent / "toolkit"))
    assert check(find_nvcc_among(candidates)).splitlines()[:2] == [str(nvcc), "13.9.1"]


@pytest.mark.skipif(
    Path("/usr/local/cuda/bin/nvcc").exists(), reason="/usr/local/cuda, the last candidate, has an nvcc"
)
def test_every_candidate_is_named_with_its_reason(candidates):
    result = find_nvcc_among(candidates)
    assert (result.returncode, result.stdout) == (1, "")
    reasons = ["prints no version", "version 9.0", "does not run", "no such file"]
    looked_at = [*candidates.values(), "/usr/local/cuda/bin/nvcc"]
    lines = result.stderr.splitlines()[1:]
    assert len(lines) == len(looked_at)
    for line, nvcc, reason in zip(lines, looked_at, reasons, strict=True):
        assert line.startswith(f"  {nvcc}: {reason}")


# ---- versions ----


def test_one_version_everywhere():
    numbers = version_numbers()
    of_header = ".".join(str(numbers[f"COLI_VERSION_{part}"]) for part in ("MAJOR", "MINOR", "PATCH"))
    project = json.loads(check(meson("introspect", "--projectinfo", ROOT / "meson.build")))
    assert project["version"] == of_header
    assert pycoli.__version__ == of_header
    assert importlib.metadata.version("pycoli") == of_header


# ---- tools/build_cuda_dll.py, as far as it can be looked at without Windows ----


def test_cuda_dll_is_made_of_every_source(tmp_path):
    printed = check(run(sys.executable, ROOT / "tools" / "build_cuda_dll.py", tmp_path / "out", "--print")).splitlines()
    *compiles, link = [line.split() for line in printed]
    cuda = ROOT / "libcoli" / "cuda"
    compiled = {Path(line[line.index("-c") + 1]) for line in compiles}
    assert compiled == {*cuda.glob("*.cpp"), *cuda.glob("api/*.cpp"), *cuda.glob("kernels/*.cu")}
    assert [line[-1] for line in compiles] == [word for word in link if word.endswith(".obj")]
    assert link[-1] == str(tmp_path / "out" / "coli_cuda.dll")
    assert not (tmp_path / "out").exists()


def test_cuda_dll_is_refused_elsewhere(tmp_path):
    result = run(sys.executable, ROOT / "tools" / "build_cuda_dll.py", tmp_path / "out")
    assert result.returncode == 2
    assert "this is for Windows" in result.stderr
    assert not (tmp_path / "out").exists()
