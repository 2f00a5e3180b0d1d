"""The loader on GPU libraries as they may be found: in a C host that took coli_loader.c over, in libcoli, in pycoli.

On Linux, and on Windows by wine where COLI_WINDOWS_BUILD names a build of tools/mingw-w64.ini.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pycoli
from pycoli import placement

ROOT = Path(__file__).resolve().parents[1]
LOADER = ROOT / "libcoli" / "loader"
NOBODY = 65534

sys.path.insert(0, str(ROOT / "tools"))
from check_abi import exported, listed  # noqa: E402

GPU_ABI = listed(ROOT / "tests" / "abi" / "libcoli_cuda.sym")
NEEDED = "init|shutdown|device_count|device_at|mem_info|tensor_upload|tensor_free|tensor_bytes|tensor_device|matmul"
MANDATORY = {f"coli_cuda_{name}" for name in NEEDED.split("|")}


class Report(defaultdict):
    """What t_loader printed: key -> values in order."""

    def __init__(self, output: str):
        super().__init__(list)
        for line in output.splitlines():
            key, _, value = line.partition("\t")
            self[key].append(None if value == "NULL" else value)

    def one(self, key: str) -> str | None:
        assert len(self[key]) == 1, f"{key}: {self[key]}"
        return self[key][0]

    def numbers(self, *keys: str) -> list[float]:
        return [float(self.one(key)) for key in keys]


class Linux:
    """Where the programs and stubs are, how they are called and how they are started."""

    name, suffix, program = "linux", ".so", "t_loader"
    gpu_library, plain_gpu_library = "libcoli_cuda.so.1", "libcoli_cuda.so"

    def __init__(self, build: Path):
        self.build = build
        self.libcoli = build / "libcoli" / "core" / "libcoli.so"

    def stub(self, name: str) -> Path:
        return self.build / "tests" / "stubs" / f"{name}{self.suffix}"

    def exports(self, stub: str) -> set[str]:
        return exported(self.stub(stub))

    def path(self, path: Path) -> str:
        return str(path)

    def host(self, folder: Path) -> Path:
        """A host program of its own in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(self.build / "tests" / "c" / self.program, folder))

    def command(self, program) -> list[str]:
        return [str(program)]

    def run(self, program, *arguments: Path, cwd: Path | None = None, user: int | None = None, **variables) -> Report:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("COLI_", "LD_"))}
        environment |= {"LC_ALL": "C.UTF-8"} | {
            name: self.path(value) if isinstance(value, Path) else value for name, value in variables.items()
        }
        result = subprocess.run(
            [*self.command(program), *map(self.path, arguments)],
            capture_output=True,
            timeout=120,
            env=environment,
            cwd=cwd,
            user=user,
        )
        assert result.returncode == 0, result.stderr.decode(errors="replace")
        return Report(result.stdout.decode())


class Windows(Linux):
    name, suffix, program = "windows", ".dll", "t_loader.exe"
    gpu_library, plain_gpu_library = "coli_cuda.dll", "libcoli_cuda.dll"

    def __init__(self, build: Path):
        super().__init__(build)
        self.libcoli = build / "libcoli" / "core" / "coli.dll"

    def exports(self, stub: str) -> set[str]:
        command = ["x86_64-w64-mingw32-objdump", "-p", self.stub(stub)]
        table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return set(re.findall(r"^\s*\[ *\d+\] (\w+)$", table, re.MULTILINE))

    def path(self, path: Path) -> str:
        return "Z:" + str(path).replace("/", "\\")

    def command(self, program) -> list[str]:
        return ["wine", str(program)]


@pytest.fixture
def linux(build_dir) -> Linux:
    return Linux(build_dir)


@pytest.fixture
def windows() -> Windows:
    if "COLI_WINDOWS_BUILD" not in os.environ:
        pytest.skip("no Windows build; COLI_WINDOWS_BUILD names one (docs/platforms.md)")
    return Windows(Path(os.environ["COLI_WINDOWS_BUILD"]))


@pytest.fixture(params=["linux", "windows"])
def system(request) -> Linux:
    return request.getfixturevalue(request.param)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


# ---- libraries that serve ----

SERVING = ["stub_old", "stub_old_e8", "stub_older", "stub_newer"]


@pytest.mark.parametrize("stub", SERVING)
def test_host_loses_what_is_missing_and_nothing_else(system, stub):
    library = system.stub(stub)
    has = system.exports(stub)
    report = system.run(system.build / "tests/c" / system.program, COLI_CUDA_LIB=library)
    assert report.one("path") == system.path(library)
    assert report.one("why") is None
    missing = [re.search(r"coli_cuda_\w+", miss.replace(system.path(library), ""))[0] for miss in report["miss"]]
    assert sorted(missing) == sorted(GPU_ABI - has), "each missing name once"
    assert all(system.path(library) in miss for miss in report["miss"])

    assert report.numbers("init", "upload", "matmul", "y0", "y1", "group") == [8, 1, 1, 21, 43, 1]
    issue = "coli_cuda_expert_group_issue" in has
    assert report.numbers("issue", "take") == [issue, issue]
    e8 = "coli_cuda_e8_set_grid" in has
    assert report.numbers("e8_set_grid") == [e8]
    assert report.one("why_not_e8") == (None if e8 else next(m for m in report["miss"] if "e8_set_grid" in m))
    assert report.numbers("abi_version") == [1007 if stub == "stub_newer" else 0]


def test_stand_ins_of_optional_functions(system):
    report = system.run(system.build / "tests/c" / system.program, COLI_CUDA_LIB=system.stub("stub_old"))
    assert report.numbers("available_device_count", "tensor_bytes", "tensor_vram", "alloc_footprint") == [
        1,
        16,
        16,
        100,
    ]
    assert report.numbers("group_unpinned", "group_pinned") == [1, 0]
    assert report.numbers("live_tensors", "group_calls", "group_ms", "chain_ops") == [0, 0, 0, 0]
    assert report.one("last_error") == "the GPU library does not say why"
    assert report.numbers("last_status") == [0]
    assert report.one("why_not_init") is None
    assert report.one("why_not_teleport") == "the GPU ABI has no such name"


@pytest.mark.parametrize("stub", [*SERVING, "stub_without_matmul"])
def test_libcoli_loses_what_is_missing_and_nothing_else(system, stub):
    library = system.stub(stub)
    has = system.exports(stub)
    report = system.run(system.build / "tests/c" / system.program, system.libcoli, library)
    assert report.numbers("status") == [0]
    assert report.one("path") == system.path(library)
    needs = {
        "int8": "coli_cuda_matmul",
        "int4-g64": "coli_cuda_matmul",
        "e8": "coli_cuda_e8_set_grid",
        "expert_group": "coli_cuda_expert_group",
        "issue_take": "coli_cuda_expert_group_take",
        "download": "coli_cuda_tensor_download",
        "encode_e8": "coli_cuda_encode_e8",
    }
    for feature, name in needs.items():
        if name in has and "coli_cuda_matmul" in has:
            assert report.one(feature) is None
        elif name not in has:
            assert name in report.one(feature)


@pytest.mark.parametrize("stub", SERVING)
def test_pycoli_loses_what_is_missing_and_nothing_else(build_dir, stub):
    library = Linux(build_dir).stub(stub)
    has = exported(library)
    backend = pycoli.open_backend(library)
    assert backend.path == str(library)
    assert not backend.has("init2")
    assert backend.has("teleport") == (stub == "stub_newer")
    for feature, name in {"e8": "coli_cuda_e8_set_grid", "issue_take": "coli_cuda_expert_group_issue"}.items():
        reason = backend.why_not(feature)
        assert reason is None if name in has else name in reason
    assert backend.why_not("int8") is None


# ---- libraries that do not ----


def copy(source: Path, target: Path, system) -> None:
    shutil.copy(source, target)


def words(linux: str, windows: str):
    return {"linux": linux, "windows": windows}


def truncated(target: Path, system) -> None:
    target.write_bytes(system.stub("stub_old").read_bytes()[:1000])


def patched(target: Path, system) -> None:
    """For another processor, by its header: machine number of ELF and PE files."""
    library = bytearray(system.stub("stub_old").read_bytes())
    at = 18 if system.name == "linux" else library.index(b"PE\0\0") + 4
    library[at : at + 2] = b"\xb7\x00" if system.name == "linux" else b"\x64\xaa"  # AArch64
    target.write_bytes(library)


def for_32_bits(target: Path, system) -> None:
    if system.name == "windows":
        library = bytearray(system.stub("stub_old").read_bytes())
        at = library.index(b"PE\0\0") + 4
        library[at : at + 2] = b"\x4c\x01"  # i386
        target.write_bytes(library)
    elif not system.stub("stub_32").exists():
        pytest.skip("this compiler makes no 32-bit libraries")
    else:
        shutil.copy(system.stub("stub_32"), target)


def pipe(target: Path, system) -> None:
    if system.name == "windows":
        pytest.skip("Windows has no pipes in folders")
    os.mkfifo(target)


def from_stub(name: str):
    return lambda target, system: shutil.copy(system.stub(name), target)


# How the file comes about; a part of the reason, where {} is its path.
BROKEN = {
    "other ABI": (from_stub("stub_future"), words(*2 * ["{} speaks the GPU ABI 99.3, and 1.x is needed"])),
    "no GPU library": (
        from_stub("stub_empty"),
        words("{}: undefined symbol: coli_cuda_init", "{}: coli_cuda_init: "),
    ),
    "text": (
        lambda target, system: target.write_text("not a library, just words\n" * 100),
        words("{}: invalid ELF header", "(error 193)"),
    ),
    "empty": (lambda target, system: target.touch(), words("{}: file too short", "{}: ")),
    "truncated": (truncated, words("{}: cut short, it has 1000 bytes of at least", "{}: ")),
    "32 bits": (for_32_bits, words("{}: wrong ELF class: ELFCLASS32", "{}: ")),
    "other processor": (patched, words("{}: ", "{}: ")),
    "a pipe": (pipe, words("{}: a pipe and not a file", "")),
    "a folder": (lambda target, system: target.mkdir(), words("{}: cannot read file data", "{}: ")),
    "missing dependency": (
        from_stub("stub_needy"),
        words(
            "{}: stub_needed.so: cannot open shared object file",
            "(error 126); the file is there, a library that it needs is not",
        ),
    ),
}


def broken(kind: str, target: Path, system) -> str:
    """Makes the file; returns the part of the reason."""
    make, said = BROKEN[kind]
    make(target, system)
    return said[system.name].format(system.path(target))


def check_off(report: Report, reason: str) -> None:
    """There is no GPU, the reason stands there once, and every function is off."""
    assert report.one("path") is None
    assert report.one("why").count(reason) == 1, report.one("why")
    assert report["miss"] == []
    off = ["init", "upload", "matmul", "issue", "take", "group", "group_unpinned", "abi_version", "e8_set_grid"]
    assert report.numbers(*off, "available_device_count", "tensor_bytes", "tensor_vram") == [0] * 12
    assert report.numbers("device_at", "tensor_device", "y0", "y1", "alloc_footprint") == [-1, -1, -7, -7, 100]
    assert report.numbers("live_tensors", "group_calls", "group_ms", "last_status") == [
        0,
        0,
        0,
        pycoli_status("NO_LIBRARY"),
    ]
    assert report.one("last_error") == report.one("why")
    assert report.one("why_not_e8") == report.one("why_not_init") == report.one("why")


def pycoli_status(name: str) -> int:
    return getattr(pycoli._lib.lib, f"COLI_E_{name}")


@pytest.mark.parametrize("kind", BROKEN)
def test_host_gets_the_reason_once(system, tmp_path, kind):
    program = system.host(tmp_path)
    reason = broken(kind, tmp_path / system.gpu_library, system)
    report = system.run(program)
    check_off(report, reason)
    assert system.plain_gpu_library not in re.sub(re.escape(system.gpu_library), "", report.one("why")), (
        "the search ends at a file that is there"
    )


@pytest.mark.parametrize("missing", ["stub_without_matmul"])
def test_host_needs_the_mandatory_names(system, missing):
    report = system.run(system.build / "tests/c" / system.program, COLI_CUDA_LIB=system.stub(missing))
    check_off(report, "coli_cuda_matmul")


def test_every_mandatory_name_is_said_at_once(system):
    report = system.run(system.build / "tests/c" / system.program, COLI_CUDA_LIB=system.stub("stub_empty"))
    assert set(re.findall(r"coli_cuda_\w+", report.one("why"))) == MANDATORY


@pytest.mark.parametrize("kind", BROKEN)
def test_libcoli_gets_the_reason_once(system, tmp_path, kind):
    target = tmp_path / f"gpu{system.suffix}"
    reason = broken(kind, target, system)
    report = system.run(system.build / "tests/c" / system.program, system.libcoli, target)
    assert report.numbers("status") == [pycoli_status("ABI" if kind == "other ABI" else "NO_LIBRARY")]
    assert report.one("why").startswith("no usable GPU library: ")
    assert report.one("why").count(reason) == 1, report.one("why")


@pytest.mark.parametrize("kind", BROKEN)
def test_pycoli_gets_the_reason_once(linux, tmp_path, monkeypatch, kind):
    target = tmp_path / "gpu.so"
    reason = broken(kind, target, linux)
    with pytest.raises(pycoli.BackendError) as opened:
        pycoli.open_backend(target)
    assert str(opened.value).count(reason) == 1

    # Where nobody opens it by hand, it is the reason for the CPU, and the CPU computes.
    monkeypatch.setenv("COLI_CUDA_LIB", str(target))
    placement.default_backend.cache_clear()
    w, x = np.eye(4, 64, dtype=np.float32), np.arange(64, dtype=np.float32)
    weights = pycoli.encode(w, "f32")
    for _ in range(2):
        device, why = pycoli.explain(weights)
        assert device == "cpu"
        assert why.count(reason) == 1
        np.testing.assert_array_equal(pycoli.matmul(x, weights), [0, 1, 2, 3])
    with pytest.raises(pycoli.DeviceError) as asked:
        pycoli.matmul(x, weights, "cuda:0")
    assert str(asked.value).count(reason) == 1
    placement.default_backend.cache_clear()


def other_user() -> int | None:
    """Root may read everything."""
    return NOBODY if os.geteuid() == 0 else None


def test_no_permission_to_read(linux, open_folder):
    program = linux.host(open_folder)
    libcoli = Path(shutil.copy(linux.libcoli, open_folder))
    target = open_folder / linux.gpu_library
    shutil.copy(linux.stub("stub_old"), target)
    target.chmod(0)
    reason = f"{target}: cannot open shared object file: Permission denied"
    check_off(linux.run(program, user=other_user()), reason)
    report = linux.run(program, libcoli, target, user=other_user())
    assert report.one("why") == f"no usable GPU library: {reason}"

    code = f"""
import os, pycoli
pycoli.formats()
if os.geteuid() == 0: os.setuid({NOBODY})
try:
    pycoli.open_backend({str(target)!r})
except pycoli.BackendError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f"no usable GPU library: {reason}"


def test_no_permission_to_enter_the_folder(linux, open_folder):
    """That is not "no such file"."""
    program = linux.host(open_folder)
    closed = open_folder / "closed"
    closed.mkdir()
    target = shutil.copy(linux.stub("stub_old"), closed / linux.gpu_library)
    closed.chmod(0o600)
    report = linux.run(program, COLI_CUDA_LIB=target, user=other_user())
    check_off(report, f"COLI_CUDA_LIB: {target}: cannot open shared object file: Permission denied")


# ---- where it is looked for ----


def test_nowhere(system, tmp_path):
    program = system.host(tmp_path)
    report = system.run(program)
    folder = system.path(tmp_path / "x")[:-1]
    check_off(report, f"{folder}{system.gpu_library}: no such file; {folder}{system.plain_gpu_library}: no such file; ")
    assert report.one("why").endswith("; COLI_CUDA_LIB can name another file")


def test_beside_the_program(system, tmp_path):
    """By absolute path, wherever the program was started from and however it was named."""
    program = system.host(tmp_path / "bin")
    library = shutil.copy(system.stub("stub_old"), program.parent / system.plain_gpu_library)
    for name, cwd in ((program, tmp_path), ("bin/" + program.name, tmp_path), ("./" + program.name, program.parent)):
        report = system.run(name, cwd=cwd)
        assert report.one("path") == system.path(library)
        assert report.numbers("init") == [8]


def test_program_found_by_path_and_behind_a_link(linux, tmp_path):
    program = linux.host(tmp_path / "bin")
    library = shutil.copy(linux.stub("stub_old"), program.parent / linux.gpu_library)
    (tmp_path / "link").symlink_to(program)
    assert linux.run(tmp_path / "link").one("path") == str(library)
    search = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["env", f"PATH={search}", "t_loader"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert Report(result.stdout).one("path") == str(library)


def test_spaces_and_unicode(system, tmp_path):
    program = system.host(tmp_path / "ein Ordner für 重み 😀")
    library = Path(shutil.copy(system.stub("stub_old"), program.parent / system.gpu_library))
    assert system.run(program).one("path") == system.path(library)
    other = tmp_path / "wäg" / f"größe 1{system.suffix}"
    other.parent.mkdir()
    shutil.copy(system.stub("stub_older"), other)
    assert system.run(program, COLI_CUDA_LIB=other).one("path") == system.path(other)
    assert system.run(program, system.libcoli, other).one("path") == system.path(other)


def test_never_in_the_current_folder(system, tmp_path):
    program = system.host(tmp_path / "bin")
    trap = tmp_path / "downloads"
    trap.mkdir()
    for name in (system.gpu_library, system.plain_gpu_library):
        shutil.copy(system.stub("stub_old"), trap / name)
    for report in (
        system.run(program, cwd=trap),
        system.run(program, cwd=trap, COLI_CUDA_LIB=""),
        system.run(program, system.libcoli, cwd=trap),
    ):
        assert report.one("path") is None
        assert str(trap) not in report.one("why").replace("\\", "/")
    assert system.run(program, cwd=trap, COLI_CUDA_LIB=system.gpu_library).one("path") is None, "a name is no path"
    assert system.run(program, cwd=trap, COLI_CUDA_LIB=trap / system.gpu_library).one("path")


def test_windows_leaves_path_out_too(windows, tmp_path):
    program = windows.host(tmp_path / "bin")
    trap = tmp_path / "tools"
    trap.mkdir()
    shutil.copy(windows.stub("stub_old"), trap / windows.gpu_library)
    assert windows.run(program, WINEPATH=trap).one("path") is None
    # nor for what a library needs: here from the current folder and PATH at once
    shutil.copy(windows.stub("stub_needed"), trap)
    shutil.copy(windows.stub("stub_needy"), program.parent / windows.gpu_library)
    assert "a library that it needs is not" in windows.run(program, cwd=trap, WINEPATH=trap).one("why")


def test_beside_libcoli_before_beside_the_program(system, tmp_path):
    program = system.host(tmp_path / "bin")
    libcoli = Path(shutil.copy(system.libcoli, tmp_path))
    beside_program = shutil.copy(system.stub("stub_old"), program.parent / system.gpu_library)
    assert system.run(program, libcoli).one("path") == system.path(beside_program)
    beside_libcoli = shutil.copy(system.stub("stub_older"), tmp_path / system.gpu_library)
    assert system.run(program, libcoli).one("path") == system.path(beside_libcoli)


def test_named_by_the_environment_alone(system, tmp_path):
    program = system.host(tmp_path)
    shutil.copy(system.stub("stub_old"), tmp_path / system.gpu_library)
    named = system.stub("stub_newer")
    assert system.run(program, COLI_CUDA_LIB=named).one("path") == system.path(named)
    absent = tmp_path / f"absent{system.suffix}"
    check_off(system.run(program, COLI_CUDA_LIB=absent), f"COLI_CUDA_LIB: {system.path(absent)}: no such file")


def test_longer_than_a_path_can_be(system, tmp_path):
    """Not as if nothing were named: another library would take its place."""
    program = system.host(tmp_path)
    shutil.copy(system.stub("stub_old"), tmp_path / system.gpu_library)
    report = system.run(program, COLI_CUDA_LIB=system.path(tmp_path) + "x" * 5000)
    check_off(report, "COLI_CUDA_LIB: longer than the 4095 bytes of a path")


def test_windows_name_with_a_drive_is_a_path(windows, tmp_path):
    r"""As is a name with \ in it; both lead to the current folder because they were written so."""
    program = windows.host(tmp_path / "bin")
    library = shutil.copy(windows.stub("stub_old"), tmp_path / "gpu.dll")
    assert windows.run(program, cwd=tmp_path, COLI_CUDA_LIB="Z:gpu.dll").one("path") == windows.path(Path(library))
    report = windows.run(program, cwd=tmp_path, COLI_CUDA_LIB="Z:absent.dll")
    assert report.one("why") == "COLI_CUDA_LIB: Z:absent.dll: no such file"


def test_no_other_library_takes_the_place_of_a_broken_one(linux, tmp_path):
    program = linux.host(tmp_path / "bin")
    reason = broken("text", program.parent / linux.gpu_library, linux)
    other = tmp_path / "lib"
    other.mkdir()
    for folder in (program.parent, other):
        shutil.copy(linux.stub("stub_old"), folder / linux.plain_gpu_library)
    check_off(linux.run(program, LD_LIBRARY_PATH=other), reason)
    (program.parent / linux.gpu_library).unlink()
    (program.parent / linux.plain_gpu_library).unlink()
    assert linux.run(program, LD_LIBRARY_PATH=other).one("path") == str(other / linux.plain_gpu_library)


@pytest.mark.parametrize("kind", ["text", "missing dependency"])
def test_broken_library_of_the_system_is_said_once(linux, tmp_path, kind):
    program = linux.host(tmp_path / "bin")
    other = tmp_path / "lib"
    other.mkdir()
    reason = broken(kind, other / linux.gpu_library, linux)
    (other / linux.plain_gpu_library).symlink_to(linux.gpu_library)
    if kind == "missing dependency":  # the system does not say where it found the file, only what that needs
        reason = reason.replace(str(other / linux.gpu_library), linux.gpu_library)
    check_off(linux.run(program, LD_LIBRARY_PATH=other), reason)


def test_one_attempt_a_process(system, tmp_path):
    program = system.host(tmp_path)
    good, bad = system.stub("stub_old"), broken("text", tmp_path / f"bad{system.suffix}", system)
    report = system.run(program, COLI_CUDA_LIB=tmp_path / f"bad{system.suffix}", T_LOADER_LATER=good)
    check_off(report, bad)
    assert report.numbers("later_init") == [0]
    assert report.one("later_path") is None
    assert report.one("later_why") == report.one("why")
    report = system.run(program, COLI_CUDA_LIB=good, T_LOADER_LATER=tmp_path / "absent")
    assert report.numbers("later_init") == [1]
    assert report.one("later_path") == report.one("path") == system.path(good)
    assert report["later_miss"] == report["miss"]


# ---- the pair by itself ----

HOST = """
#include "coli_loader.h"
#include <stdio.h>
#ifdef __cplusplus
extern "C"
#endif
int coli_cuda_init(const int *devices, int count);
int main(void) {
    int device = 0;
    printf("init\\t%d\\n", coli_cuda_init(&device, 1));
    if (coli_loader_path()) printf("path\\t%s\\n", coli_loader_path());
    return 0;
}
"""


@pytest.mark.parametrize(("language", "compiler"), [("c", "cc"), ("cpp", "c++")])
@pytest.mark.parametrize("standard", ["c11", "gnu17"])
def test_pair_needs_no_other_file(linux, tmp_path, language, compiler, standard):
    for name in ("coli_loader.c", "coli_loader.h"):
        shutil.copy(LOADER / name, tmp_path)
    (tmp_path / f"host.{language}").write_text(HOST)
    flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread"]
    build = [
        ["cc", f"-std={standard}", *flags, "-O2", "-c", "coli_loader.c"],
        [compiler, *flags, f"host.{language}", "coli_loader.o", "-ldl", "-o", "host"],
    ]
    for command in build:
        subprocess.run(command, cwd=tmp_path, check=True)
    library = shutil.copy(linux.stub("stub_old"), tmp_path / "libcoli_cuda.so.1")
    report = linux.run(tmp_path / "host")
    assert report.numbers("init") == [1]
    assert report.one("path") == str(library)


def test_pair_looks_for_another_name(linux, tmp_path):
    program = tmp_path / "host"
    (tmp_path / "host.c").write_text(HOST)
    command = ["cc", "-std=c11", f"-I{LOADER}", '-DCOLI_LOADER_NAME="coli_hip"', LOADER / "coli_loader.c", "host.c"]
    subprocess.run([*command, "-pthread", "-ldl", "-o", program], cwd=tmp_path, check=True)
    shutil.copy(linux.stub("stub_old"), tmp_path / "libcoli_cuda.so.1")
    assert linux.run(program).numbers("init") == [0]
    library = shutil.copy(linux.stub("stub_old"), tmp_path / "libcoli_hip.so.1")
    assert linux.run(program).one("path") == str(library)


def test_pair_defines_the_whole_gpu_abi(build_dir):
    """With the prototypes of coli_cuda.h: tests/c/h_loader.c compiles them together."""
    program = build_dir / "tests" / "c" / "h_loader"
    output = subprocess.run(
        ["nm", "--defined-only", "--format=posix", program], capture_output=True, text=True, check=True
    )
    defined = {line.split()[0] for line in output.stdout.splitlines()}
    assert {name for name in defined if name.startswith("coli_cuda_")} == GPU_ABI


def test_libcoli_holds_no_gpu_function(build_dir):
    output = subprocess.run(
        ["nm", "--defined-only", build_dir / "libcoli/core/libcoli.so"], capture_output=True, text=True, check=True
    )
    assert "coli_cuda_" not in output.stdout
