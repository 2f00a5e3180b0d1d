"""Turns the public C headers into the cffi bindings of pycoli.

usage: make_bindings.py HEADER... OUTPUT

The headers are the only place where the C interface is declared. This script removes what cffi's parser cannot read
(preprocessor lines, C++ guards, visibility macros), keeps integer constants, and writes a Python module in cffi's
out-of-line ABI mode: it needs no compiler, and a library that lacks some functions can still be opened. Headers are
given in the order of their #include lines.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cffi

BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
CPLUSPLUS_GUARD = re.compile(r"^#ifdef __cplusplus$.*?^#endif$", re.DOTALL | re.MULTILINE)
INTEGER_CONSTANT = re.compile(r"#define\s+\w+\s+-?(0[xX][0-9a-fA-F]+|\d+)\s*$")


def declarations(header: str) -> str:
    """The declarations of a header's text, in the C subset that cffi reads."""
    text = CPLUSPLUS_GUARD.sub("", BLOCK_COMMENT.sub("", header))
    text = text.replace("\\\n", " ")
    kept = (line for line in text.splitlines() if not line.startswith("#") or INTEGER_CONSTANT.match(line))
    return "\n".join(kept).replace("COLI_API ", "")


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    *headers, output = map(Path, arguments)
    ffi = cffi.FFI()
    for header in headers:
        ffi.cdef(declarations(header.read_text(encoding="utf-8")))
    ffi.set_source("pycoli._bindings", None)
    ffi.emit_python_code(str(output))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
