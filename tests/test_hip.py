"""The build for AMD GPUs: nothing that the backend uses lacks a mapping, the library that hipcc makes exports what the
NVIDIA one does, and its code computes the same on the CPU with waves of 64 lanes.

`COLI_HIP_BUILD` names a Meson build folder with libcoli_hip, `COLI_WAVE64_BUILD` one that was set up with
-Dsimt_wave=64.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builds import check, meson, run

ROOT = Path(__file__).resolve().parents[1]
CUDA = ROOT / "libcoli" / "cuda"
HIP = ROOT / "libcoli" / "hip"

# What CUDA and HIP both have, under one name and with one meaning.
SAME_IN_HIP = {
    "__global__",
    "__device__",
    "__host__",
    "__shared__",
    "__constant__",
    "__align__",
    "__forceinline__",
    "__launch_bounds__",
    "__syncthreads",
    "__popc",
    "__clz",
    "__ldg",
    "__expf",
    "__fdividef",
    "__float2int_rn",
    "__half2",
    "__hadd2",
    "__hmul2",
    "__hfma2",
    "__half22float2",
    "__floats2half2_rn",
    "__half2half2",
    "__low2half",
    "__high2half",
}
# Of C++ and its compilers.
NO_GPU_MATTER = {"__attribute__", "__builtin_ia32_pause", "__m128i"}


def without_comments(source: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", " ", source, flags=re.DOTALL)


def without_foreign_ptx(source: str) -> str:
    """What is left of a source when COLI_HIP is defined, `#if` by `#if`, and no macro of CUDA or of the simulator."""
    kept, active = [], [[True, True]]  # [this branch is taken, none before it was]
    for line in source.splitlines():
        directive = re.match(r"#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)", line)
        if not directive:
            if all(taken for taken, _ in active):
                kept.append(line)
            continue
        word, condition = directive.groups()
        if word == "endif":
            active.pop()
            continue
        if word in ("ifndef", "else"):  # the former are include guards
            holds = True
        else:
            terms = re.sub(r"defined\((\w+)\)", lambda m: str(m[1] in ("COLI_HIP", "__HIPCC__")), condition)
            terms = re.sub(r"__CUDA_ARCH__", "0", terms)
            terms = terms.replace("&&", " and ").replace("||", " or ").replace("!", " not ")
            holds = bool(eval(terms.strip(), {"__x86_64__": 1}))
        if word in ("elif", "else"):
            _, none_before = active.pop()
            active.append([none_before and holds, none_before and not holds])
        else:
            active.append([holds, not holds])
    return "\n".join(kept)


def sources(folder: Path) -> dict[Path, str]:
    return {
        path: without_comments(path.read_text())
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".h", ".cuh", ".cpp", ".cu")
    }


def defined_names(text: str) -> set[str]:
    """Macros, functions, types and enumerators that a header brings. What it calls itself counts too."""
    return set(re.findall(r"#define (\w+)|\b(?:struct|enum) (\w+)|\b(\w+)\(|^\s+(cuda\w+),?\s*(?:=|$|,)", text, re.M))


def mapped_names() -> set[str]:
    text = "\n".join(sources(HIP).values())
    enumerators = re.findall(r"\b(cuda\w+)\b(?=\s*(?:=[^;=]*)?[,}])", text)
    return {name for group in defined_names(text) for name in group if name} | set(enumerators)


def unmapped_runtime_names(text: str) -> set[str]:
    return set(re.findall(r"\bcuda[A-Z]\w*", re.sub(r"#include[^\n]*", "", text))) - mapped_names()


def unmapped_intrinsics(text: str) -> set[str]:
    used = set(re.findall(r"\b__[a-z]\w*", without_foreign_ptx(text)))
    return used - mapped_names() - SAME_IN_HIP - NO_GPU_MATTER


def test_what_has_no_mapping_is_found():
    assert unmapped_runtime_names("cudaMemsetAsync(p, 0, n, s); cudaFree(p);") == {"cudaMemsetAsync"}
    guarded = "#if defined(COLI_HIP)\n__vadd4(a, b);\n#elif defined(COLI_SIMT)\n__a(1);\n#else\n__b(1);\n#endif\n"
    assert unmapped_intrinsics(guarded + "__syncwarp();") == {"__vadd4"}


@pytest.mark.parametrize("path", sources(CUDA), ids=lambda path: str(path.relative_to(CUDA)))
def test_every_runtime_name_has_a_mapping(path):
    missing = unmapped_runtime_names(sources(CUDA)[path])
    assert not missing, f"libcoli/hip/runtime.h lacks {sorted(missing)}"


@pytest.mark.parametrize("path", sources(CUDA), ids=lambda path: str(path.relative_to(CUDA)))
def test_every_intrinsic_has_a_mapping(path):
    missing = unmapped_intrinsics(sources(CUDA)[path])
    assert not missing, f"libcoli/hip/device.h lacks {sorted(missing)}"


@pytest.mark.parametrize("path", sources(CUDA), ids=lambda path: str(path.relative_to(CUDA)))
def test_no_assembly_is_left(path):
    assert not re.search(r"\basm\b", without_foreign_ptx(sources(CUDA)[path]))


@pytest.mark.parametrize("name", ["barrier", "bits", "copy", "mma", "wgmma"])
def test_every_ptx_wrapper_has_a_twin(name):
    """Functions that disappear from a header of ptx/ where COLI_HIP is defined are in hip/ptx.h."""
    function = r"__device__ __forceinline__ [\w ]+?[\s*&]+(\w+)\("
    text = sources(CUDA)[CUDA / "ptx" / f"{name}.cuh"]
    gone = set(re.findall(function, text)) - set(re.findall(function, without_foreign_ptx(text)))
    twins = set(re.findall(function, sources(HIP)[HIP / "ptx.h"]))
    assert gone - {"shared_address"} <= twins
    assert gone, "nothing was compared"


def test_warps_are_halves_of_waves():
    """Nothing speaks of a wave: no ballot, vote or warpSize, and shuffles have no width of their own."""
    for path, text in sources(CUDA).items():
        assert not re.search(r"\bwarpSize\b|__(ballot|any|all|activemask|match|reduce)\w*", text), path
        for call in re.findall(r"__shfl_\w+\((?:[^()]|\([^()]*\))*\)", text):
            assert re.match(r"__shfl_\w+\((kFullWarp|kAllLanes),", call), f"{path}: {call}"


# ---- -Dhip, with and without hipcc ----

NO_HIPCC = "/nonexistent/hipcc"
CROSS = """
[binaries]
c = 'cc'
cpp = 'c++'
[host_machine]
system = 'linux'
cpu_family = 'x86_64'
cpu = 'x86_64'
endian = 'little'
"""


@pytest.fixture
def set_up(tmp_path):
    """A function that sets a build up: (the command's result, names of its shared libraries)."""

    def set_up(*options, **environment):
        build = tmp_path / "build"
        result = meson("setup", build, ROOT, "-Dcuda=disabled", *options, **environment)
        if result.returncode:
            return result, set()
        targets = json.loads(check(meson("introspect", "--targets", build)))
        return result, {target["name"] for target in targets if target["type"] == "shared library"}

    return set_up


def said_of_hip(result) -> str:
    """What the summary says of libcoli_hip."""
    return re.search(r"^ *libcoli_hip *: (.*)$", result.stdout, re.MULTILINE)[1]


@pytest.fixture(scope="session")
def hipcc() -> str:
    """That of this machine."""
    found = run(sys.executable, ROOT / "tools" / "find_hipcc.py", "gfx906", "gfx1030")
    if found.returncode:
        pytest.skip(found.stderr.replace("\n", " "))
    return found.stdout.splitlines()[0]


def test_enabled_without_hipcc_is_an_error_that_says_what_is_missing(set_up):
    result, _ = set_up("-Dhip=enabled", HIPCC=NO_HIPCC)
    assert result.returncode != 0
    assert "-Dhip=enabled needs a usable hipcc" in result.stdout
    assert f"{NO_HIPCC}: no such file" in result.stdout


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("auto", f"NO: no usable hipcc; looked at: {NO_HIPCC}: no such file"),
        ("disabled", "NO: disabled"),
    ],
)
def test_left_out_with_the_reason(set_up, option, said):
    result, libraries = set_up(f"-Dhip={option}", HIPCC=NO_HIPCC)
    check(result)
    assert libraries == {"coli"}
    assert said_of_hip(result) == said


@pytest.mark.parametrize("option", ["auto", "enabled"])
def test_built_where_hipcc_is(set_up, hipcc, option, tmp_path):
    result, libraries = set_up(f"-Dhip={option}")
    check(result)
    assert libraries == {"coli", "coli_hip"}
    assert said_of_hip(result) == "YES"
    assert (tmp_path / "build" / "meson-private" / "coli_hip.pc").exists()


def test_not_built_unless_asked_for(set_up):
    result, libraries = set_up()
    check(result)
    assert libraries == {"coli"}
    assert said_of_hip(result) == "NO: disabled"


@pytest.mark.parametrize("option", ["auto", "enabled"])
def test_architecture_that_hipcc_does_not_know(set_up, hipcc, option):
    result, libraries = set_up(f"-Dhip={option}", "-Dhip_archs=gfx906,gfx1")
    assert "coli_hip" not in libraries
    assert (result.returncode == 0) == (option == "auto")
    assert f"{hipcc}: builds no kernel for gfx906 gfx1: " in result.stdout


@pytest.mark.parametrize("option", ["auto", "enabled"])
def test_not_in_a_cross_build(set_up, option, tmp_path):
    (tmp_path / "cross.ini").write_text(CROSS)
    result, libraries = set_up(f"-Dhip={option}", "--cross-file", tmp_path / "cross.ini")
    if option == "enabled":
        assert result.returncode != 0
        assert "libcoli_hip is not cross-built" in result.stdout
    else:
        check(result)
        assert libraries == {"coli"}
        assert said_of_hip(result) == "NO: not in a cross build"


FAKE_HIPCC = """#!/bin/sh
case "$1" in
--version) {version} ;;
*) {compile} ;;
esac
"""


@pytest.mark.parametrize(
    ("version", "compile", "reason"),
    [
        ("true", "true", "prints no version"),
        ("exit 3", "true", "does not run: .*exit status 3"),
        ("echo HIP version: 4.4.1", "true", r"version 4\.4\.1, need \d+\.\d+ or newer"),
        (
            "echo HIP version: 6.1.0",
            "echo note; echo clang: error: no device library >&2; exit 1",
            "builds no kernel for gfx906: clang: error: no device library",
        ),
        ("echo HIP version: 6.1.0", "true", "no HIP headers below .*/rocm/include"),
    ],
    ids=["no-version", "fails", "old", "no-kernel", "no-headers"],
)
def test_unusable_hipcc_is_named_with_the_reason(tmp_path, version, compile, reason):
    hipcc, hipconfig = tmp_path / "hipcc", tmp_path / "hipconfig"
    hipcc.write_text(FAKE_HIPCC.format(version=version, compile=compile))
    hipconfig.write_text(f"#!/bin/sh\necho {tmp_path}/rocm\n")
    for program in (hipcc, hipconfig):
        program.chmod(0o755)
    command = [sys.executable, ROOT / "tools" / "find_hipcc.py", "gfx906"]
    result = run(*command, HIPCC=hipcc)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.search(rf"^  {re.escape(str(hipcc))}: {reason}", result.stderr, re.MULTILINE), result.stderr

    header = tmp_path / "rocm" / "include" / "hip" / "hip_runtime_api.h"
    header.parent.mkdir(parents=True)
    header.touch()
    hipcc.write_text(FAKE_HIPCC.format(version="echo HIP version: 6.1.0", compile="true"))
    assert check(run(*command, HIPCC=hipcc)).splitlines() == [str(hipcc), "6.1.0", str(tmp_path / "rocm")]


# ---- the library that hipcc makes ----


@pytest.fixture(scope="module")
def hip_library() -> Path:
    build = os.environ.get("COLI_HIP_BUILD")
    if not build:
        pytest.skip("COLI_HIP_BUILD names no build with -Dhip=enabled")
    return Path(build) / "libcoli" / "hip" / "libcoli_hip.so"


def test_exported_names_are_those_of_libcoli_cuda(hip_library):
    command = [sys.executable, ROOT / "tools/check_abi.py", hip_library, ROOT / "tests/abi/libcoli_cuda.sym"]
    headers = ["--headers", ROOT / "libcoli/include/coli/coli_cuda.h"]
    result = subprocess.run([*command, *headers], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_it_has_code_for_waves_of_64_and_of_32(hip_library):
    data = hip_library.read_bytes()
    for arch in (b"gfx906", b"gfx1030"):
        assert b"amdgcn-amd-amdhsa--" + arch in data


def test_it_loads_without_an_amd_gpu_and_says_so(hip_library):
    library = ctypes.CDLL(str(hip_library))
    for name in ("coli_cuda_build_info", "coli_cuda_last_error"):
        getattr(library, name).restype = ctypes.c_char_p
    assert b"libcoli_hip" in library.coli_cuda_build_info()
    if library.coli_cuda_available_device_count() > 0:
        pytest.skip("there is an AMD GPU")
    devices = (ctypes.c_int * 1)(0)
    assert library.coli_cuda_init(devices, 1) == 0
    assert b"no device" in library.coli_cuda_last_error()


# ---- waves of 64 on the CPU ----


@pytest.fixture(scope="module")
def wave64_library() -> Path:
    build = os.environ.get("COLI_WAVE64_BUILD")
    if not build:
        pytest.skip("COLI_WAVE64_BUILD names no build with -Dtests=true -Dsimt_wave=64")
    return Path(build) / "tests" / "simt" / "libcoli_cuda_simt.so"


def test_plans_of_an_amd_gpu_take_the_plain_path(wave64_library):
    library = ctypes.CDLL(str(wave64_library))
    library.coli_cuda_plan_text.restype = ctypes.c_size_t
    assert library.coli_cuda_init((ctypes.c_int * 1)(0), 1) == 1
    try:
        text, formats = ctypes.create_string_buffer(2000), (ctypes.c_int * 3)(6, 6, 6)
        assert library.coli_cuda_plan_text(0, 0, formats, 512, 256, 8, 64, text, ctypes.c_size_t(2000)) > 0
    finally:
        library.coli_cuda_shutdown()
    assert b"plain" in text.value
    assert b"ampere" not in text.value
    assert b"hopper" not in text.value
    sizes = [int(size) for size in re.findall(rb"(\d+) bytes shared", text.value)]
    assert sizes
    assert max(sizes) <= 65536


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SIMT_NO_DEVICE", "1", "HIP sees no AMD GPU: the amdgpu driver must be loaded and /dev/kfd open to this user"),
        ("SIMT_DRIVER", "0", "no AMD driver is installed"),
        ("SIMT_DRIVER", "50131062", "the AMD driver offers HIP 5.1, this library needs 5.2; update the driver"),
    ],
)
def test_texts_name_what_is_of_amd(wave64_library, monkeypatch, variable, value, said):
    library = ctypes.CDLL(str(wave64_library))
    for name in ("coli_cuda_build_info", "coli_cuda_last_error"):
        getattr(library, name).restype = ctypes.c_char_p
    assert library.coli_cuda_build_info().startswith(b"libcoli_hip ")
    monkeypatch.setenv(variable, value)
    assert library.coli_cuda_init((ctypes.c_int * 1)(0), 1) == 0
    assert library.coli_cuda_last_error().decode() == f"no device: {said}"


@pytest.mark.parametrize(
    "path", sorted({*sources(CUDA)} - {CUDA / "vendor.h"}), ids=lambda path: str(path.relative_to(CUDA))
)
def test_texts_take_names_from_one_place(path):
    """NVIDIA, CUDA and libcoli_cuda stand in vendor.h alone; names of functions are the same in both libraries."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*|#include[^\n]*", " ", path.read_text(), flags=re.DOTALL)
    for literal in re.findall(r'"(?:\\.|[^"\\\n])*"', text):
        assert not re.search(r"NVIDIA|CUDA\b|libcoli_cuda", literal), literal
