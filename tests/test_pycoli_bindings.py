"""The cffi bindings against the headers they are made from, and how pycoli finds libcoli."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pycoli
from pycoli import _lib

ROOT = Path(__file__).parent.parent
HEADERS = [
    ROOT / "libcoli/include/coli" / name
    for name in ("coli_version.h", "coli_common.h", "coli.h", "coli_cuda.h", "coli_moe.h")
]


def public_names():
    """Every function that the headers declare."""
    return {name for header in HEADERS for name in re.findall(r"COLI_API[^;(]*?\b(coli_\w+)\(", header.read_text())}


def test_every_function_is_bound():
    names = public_names()
    assert len(names) > 100
    missing = []
    for name in sorted(names):
        try:
            getattr(_lib.lib, name)
        except AttributeError:  # not declared; one that this library merely lacks gives BackendError
            missing.append(name)
        except pycoli.BackendError:
            assert name.startswith("coli_cuda_")
    assert not missing


def test_constants_and_structs_are_those_of_the_compiler(tmp_path):
    """Enumerators, integer macros, and sizes and offsets in structs, as a C compiler sees them and as cffi does."""
    text = "".join(header.read_text() for header in HEADERS)
    bound = {name: getattr(_lib.lib, name) for name in re.findall(r"^\s+(COLI_\w+) = \d+", text, re.MULTILINE)}
    bound |= {name: getattr(_lib.lib, name) for name in re.findall(r"^#define (COLI_\w+) \d+\b", text, re.MULTILINE)}
    assert {"COLI_E8", "COLI_CUDA_MAX_EXPERTS", "COLI_E_ABI", "COLI_UNROTATED"} <= set(bound)
    for struct in ("coli_matrix", "coli_format_info", "coli_router", "coli_moe_stats", "coli_rows"):
        bound[f"sizeof({struct})"] = _lib.ffi.sizeof(struct)
        for field, _ in _lib.ffi.typeof(struct).fields:
            bound[f"offsetof({struct},{field})"] = _lib.ffi.offsetof(struct, field)

    prints = "".join(f'printf("%d\\n", (int){expression});' for expression in bound)
    includes = "".join(f"#include <{name}>\n" for name in ("stdio.h", "stddef.h", "coli/coli_moe.h"))
    (tmp_path / "facts.c").write_text(f"{includes}int main(void) {{ {prints} }}")
    command = ["cc", "-I", str(ROOT / "libcoli/include"), "facts.c", "-o", "facts"]
    subprocess.run(command, cwd=tmp_path, check=True)
    facts = subprocess.run([tmp_path / "facts"], capture_output=True, text=True, check=True).stdout.split()
    assert {name: int(value) for name, value in zip(bound, facts, strict=True)} == bound


def test_generator_needs_no_library(tmp_path):
    header = tmp_path / "some.h"
    header.write_text(
        "/* comment\n#define INSIDE 1 */\n#ifndef SOME_H\n#define SOME_H\n#define ONE 1\n#define MORE (ONE + 1)\n"
        '#ifdef __cplusplus\nextern "C" {\n#endif\nCOLI_API int f(int a);\n#ifdef __cplusplus\n}\n#endif\n#endif\n'
    )
    output = tmp_path / "_bindings.py"
    subprocess.run([sys.executable, ROOT / "tools/make_bindings.py", header, output], check=True, capture_output=True)
    scope = {}
    exec(output.read_text(), scope)
    assert isinstance(scope["ffi"], type(_lib.ffi))
    assert "ONE" in output.read_text()
    assert "MORE" not in output.read_text()
    assert "INSIDE" not in output.read_text()


def test_generator_says_how_it_is_used():
    result = subprocess.run([sys.executable, ROOT / "tools/make_bindings.py"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "usage: make_bindings.py HEADER... OUTPUT" in result.stderr


def use_with(library):
    """The last line that Python says of the first use of pycoli with another libcoli; importing it is none."""
    environment = {**os.environ, "COLI_LIB": str(library)}
    command = [sys.executable, "-c", "import pycoli; print(pycoli.__version__, flush=True); pycoli.formats()"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout == f"{pycoli.__version__}\n"
    return result.stderr.strip().splitlines()[-1]


def test_libcoli_that_is_not_there(tmp_path):
    said = use_with(tmp_path / "none.so")
    assert said.startswith("pycoli.errors.BackendError: libcoli cannot be loaded from ")
    assert str(tmp_path / "none.so") in said
    assert "COLI_LIB" in said


def test_library_that_is_not_libcoli(build_dir):
    said = use_with(build_dir / "tests" / "stubs" / "stub_empty.so")
    assert "stub_empty.so is not libcoli: it lacks coli_abi_version" in said


def test_file_that_is_no_library():
    said = use_with(Path(__file__))
    assert said.startswith(f"pycoli.errors.BackendError: libcoli cannot be loaded from {__file__}: ")


@pytest.mark.parametrize("major", [_lib.lib.COLI_ABI_MAJOR + 1, 99])
def test_libcoli_of_another_abi(tmp_path, major):
    (tmp_path / "other.c").write_text(f"int coli_abi_version(void) {{ return {major * 1000 + 7}; }}")
    subprocess.run(["cc", "-shared", "-fPIC", "other.c", "-o", "other.so"], cwd=tmp_path, check=True)
    said = use_with(tmp_path / "other.so")
    assert f"other.so has ABI {major}.7, pycoli was built for {_lib.lib.COLI_ABI_MAJOR}.x" in said


def test_libcoli_that_lacks_a_function(tmp_path):
    version = _lib.lib.COLI_ABI_MAJOR * 1000
    (tmp_path / "part.c").write_text(f"int coli_abi_version(void) {{ return {version}; }}")
    subprocess.run(["cc", "-shared", "-fPIC", "part.c", "-o", "part.so"], cwd=tmp_path, check=True)
    assert "part.so is not a whole libcoli: it lacks coli_format_count" in use_with(tmp_path / "part.so")


def test_settings_that_are_none():
    for isa in ("avx9", "scalar\0", "\ud800"):
        with pytest.raises(pycoli.ColiError, match="scalar"):
            pycoli.cpu.set_isa(isa)
    with pytest.raises(pycoli.DtypeError, match="name must be a str or None, got int 5"):
        pycoli.cpu.set_isa(5)
    for threads in (-1, 10**5, 2**31, 10**30):
        with pytest.raises(pycoli.ArgumentError, match=f"got {threads}$"):
            pycoli.cpu.set_threads(threads)
    with pytest.raises(pycoli.DtypeError, match="count must be a whole number, got str '2'"):
        pycoli.cpu.set_threads("2")


def test_checkout_that_is_not_installed():
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import pycoli"
    command = [sys.executable, "-I", "-S", "-c", program]  # -S: without the installed packages
    said = subprocess.run(command, capture_output=True, text=True).stderr.strip().splitlines()[-1]
    assert said == "ImportError: pycoli is not installed in this Python; in the checkout: pip install ."


# ---- Windows, whose paths and flags can be looked at anywhere ----


@pytest.mark.parametrize(
    ("library", "opened", "flags"),
    [
        (r"C:\Program Files\pycoli\coli.dll", r"C:\Program Files\pycoli\coli.dll", 0x1100),
        ("C:/Users/Jörg 重/coli_cuda.dll", r"C:\Users\Jörg 重\coli_cuda.dll", 0x1100),
        (r"\\server\share\bin\..\coli.dll", r"\\server\share\coli.dll", 0x1100),
        ("coli_cuda.dll", "coli_cuda.dll", 0x1000),
        (r"C:\Users\me\lib with spaces\coli_cuda.dll", r"C:\Users\me\lib with spaces\coli_cuda.dll", 0x1100),
    ],
)
def test_windows_library_is_opened_by_its_absolute_path(library, opened, flags):
    """With flags that leave the current folder and PATH out; a name without a folder is left to the system."""
    calls = []
    assert _lib.open_library(library, "win32", lambda *arguments: calls.append(arguments) or "library") == "library"
    assert calls == [(opened, flags)]


@pytest.mark.parametrize("library", [r"build\coli.dll", "build/coli.dll", r".\build\coli.dll"])
def test_windows_never_gets_a_relative_path(library):
    calls = []
    _lib.open_library(library, "win32", lambda *arguments: calls.append(arguments))
    [(opened, flags)] = calls
    assert opened.endswith(r"\build\coli.dll")
    assert opened != library
    assert flags == 0x1100


@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize("library", ["/usr/lib/libcoli.so", "build/libcoli.so", "libcoli.so"])
def test_elsewhere_the_path_stays_as_it_is(library, platform):
    calls = []
    _lib.open_library(library, platform, lambda *arguments: calls.append(arguments))
    assert calls == [(library,)]


@pytest.mark.parametrize(
    ("platform", "file"),
    [("win32", "{}.dll"), ("linux", "lib{}.so"), ("darwin", "lib{}.dylib")],
)
@pytest.mark.parametrize("name", ["coli", "coli_cuda"])
def test_names_of_the_installed_libraries(tmp_path, monkeypatch, platform, file, name):
    """In a folder of the package; where none has it, the first is named."""
    monkeypatch.setattr(_lib.resources, "files", lambda package: tmp_path / "first")
    monkeypatch.setattr(pycoli, "__path__", [str(tmp_path / "second")])
    file = file.format(name)
    assert _lib.packaged_library(name, platform) == str(tmp_path / "first" / file)
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / file).touch()
    assert _lib.packaged_library(name, platform) == str(tmp_path / "second" / file)


@pytest.mark.parametrize("library", [r"C:\Jörg\coli_cuda.dll", "C:\\重み\\😀.dll", Path("x.dll")])
def test_windows_paths_are_utf_8_whatever_python_thinks(library, monkeypatch):
    monkeypatch.setattr(os, "fsencode", lambda path: pytest.fail("the file system's encoding was used"))
    encoded = _lib.path_bytes(library, "win32")
    assert encoded == str(library).encode("utf-8")
    assert _lib.path_text(encoded, "win32") == str(library)


def test_paths_that_are_none():
    with pytest.raises(TypeError):
        _lib.path_bytes(5, "win32")
    with pytest.raises(UnicodeEncodeError):
        _lib.path_bytes("\ud800.dll", "win32")
    assert _lib.path_text(_lib.path_bytes("\udcff.so", "linux"), "linux") == "\udcff.so"
