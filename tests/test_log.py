"""The log: silent unless COLI_LOG=1 sends it to stderr or a host takes it by a callback."""

import os
import subprocess
import sys

import pytest

# The CPU library warns of a COLI_ISA that does not exist when it first needs an instruction set.
CPU = """
import sys
from pycoli._lib import ffi, lib
if "callback" in sys.argv:
    callback = ffi.callback("coli_log_fn", lambda level, line, user: print(level, ffi.string(line).decode()))
    lib.coli_set_log(callback, ffi.NULL)
lib.coli_isa()
"""
# Every refusal of the GPU library is a line of its log.
GPU = """
import sys
from pycoli._bindings import ffi
lib = ffi.dlopen(sys.argv[1])
if "callback" in sys.argv:
    callback = ffi.callback("coli_log_fn", lambda level, line, user: print(level, ffi.string(line).decode()))
    lib.coli_cuda_set_log(callback, ffi.NULL)
assert lib.coli_cuda_init(ffi.new("int[]", [4711]), 1) == 0
"""


@pytest.fixture(params=["libcoli", "libcoli_cuda"])
def log_of(request):
    """A function (arguments, environment) -> lines on stdout and on stderr of a process where a library has one thing
    to log, a warning with the number 4711."""
    program = [CPU] if request.param == "libcoli" else [GPU, str(request.getfixturevalue("simt_lib"))]

    def run(*arguments, **environment):
        environment = {**os.environ, "COLI_ISA": "4711", **environment}
        command = [sys.executable, "-c", *program, *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return result.stdout.splitlines(), result.stderr.splitlines()

    return run


def test_silent_by_default(log_of, monkeypatch):
    monkeypatch.delenv("COLI_LOG", raising=False)
    assert log_of() == ([], [])
    for value in ("", "0"):
        assert log_of(COLI_LOG=value) == ([], [])


def test_switch_sends_lines_to_stderr(log_of):
    printed, logged = log_of(COLI_LOG="1")
    assert printed == []
    assert len(logged) == 1
    assert "coli" in logged[0]
    assert "4711" in logged[0]


def test_callback_takes_the_lines_instead(log_of):
    printed, logged = log_of("callback", COLI_LOG="1")
    assert logged == []
    assert len(printed) == 1
    assert printed[0].startswith("1 ")
    assert "4711" in printed[0]
