"""The cffi bindings against the headers they are made from, and how pycoli finds libcoli."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pycoli import _lib

ROOT = Path(__file__).parent.parent
HEADERS = [
    ROOT / "libcoli/include/coli" / name for name in ("coli_version.h", "coli_common.h", "coli.h", "coli_cuda.h")
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
        except AttributeError:  # not declared; one that this library merely lacks gives ffi.error
            missing.append(name)
        except _lib.ffi.error:
            assert name.startswith("coli_cuda_")
    assert not missing


def test_constants_and_structs_are_those_of_the_compiler(tmp_path):
    """Enumerators, integer macros, and sizes and offsets in structs, as a C compiler sees them and as cffi does."""
    text = "".join(header.read_text() for header in HEADERS)
    bound = {name: getattr(_lib.lib, name) for name in re.findall(r"^\s+(COLI_\w+) = \d+", text, re.MULTILINE)}
    bound |= {name: getattr(_lib.lib, name) for name in re.findall(r"^#define (COLI_\w+) \d+\b", text, re.MULTILINE)}
    assert {"COLI_E8", "COLI_CUDA_MAX_EXPERTS", "COLI_E_ABI", "COLI_UNROTATED"} <= set(bound)
    for struct in ("coli_matrix", "coli_format_info"):
        bound[f"sizeof({struct})"] = _lib.ffi.sizeof(struct)
        for field, _ in _lib.ffi.typeof(struct).fields:
            bound[f"offsetof({struct},{field})"] = _lib.ffi.offsetof(struct, field)

    prints = "".join(f'printf("%d\\n", (int){expression});' for expression in bound)
    includes = "".join(f"#include <{name}>\n" for name in ("stdio.h", "stddef.h", "coli/coli_cuda.h", "coli/coli.h"))
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


def import_with(library):
    environment = {**os.environ, "COLI_LIB": str(library)}
    command = [sys.executable, "-c", "import pycoli"]
    return subprocess.run(command, env=environment, capture_output=True, text=True).stderr.strip().splitlines()[-1]


def test_libcoli_that_is_not_there(tmp_path):
    said = import_with(tmp_path / "none.so")
    assert said.startswith("pycoli.errors.BackendError: libcoli cannot be loaded from ")
    assert str(tmp_path / "none.so") in said
    assert "COLI_LIB" in said


def test_library_that_is_not_libcoli(build_dir):
    said = import_with(build_dir / "tests" / "stubs" / "stub_empty.so")
    assert "stub_empty.so is not libcoli: it lacks coli_abi_version" in said


@pytest.mark.parametrize("major", [_lib.lib.COLI_ABI_MAJOR + 1, 99])
def test_libcoli_of_another_abi(tmp_path, major):
    (tmp_path / "other.c").write_text(f"int coli_abi_version(void) {{ return {major * 1000 + 7}; }}")
    subprocess.run(["cc", "-shared", "-fPIC", "other.c", "-o", "other.so"], cwd=tmp_path, check=True)
    said = import_with(tmp_path / "other.so")
    assert f"other.so has ABI {major}.7, pycoli was built for {_lib.lib.COLI_ABI_MAJOR}.x" in said


def test_checkout_that_is_not_installed():
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import pycoli"
    command = [sys.executable, "-I", "-S", "-c", program]  # -S: without the installed packages
    said = subprocess.run(command, capture_output=True, text=True).stderr.strip().splitlines()[-1]
    assert said == "ImportError: pycoli is not installed in this Python; in the checkout: pip install ."
