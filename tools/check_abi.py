"""Compare what a library exports with the list that is checked in, and with what the headers declare.

    check_abi.py LIBRARY SYMBOL_FILE [--headers HEADER ...] [--allow-others]

A symbol file has one name a line; lines that begin with # are comments. A name that leaves the list, or changes its
meaning, needs a new ABI major; a name that joins it a new ABI minor (coli_version.h). Prints every difference and exits
with 1 if there is one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def listed(symbol_file: Path) -> set[str]:
    """Names in a symbol file."""
    lines = (line.strip() for line in symbol_file.read_text().splitlines())
    return {line for line in lines if line and not line.startswith("#")}


def declared(headers: Iterable[Path]) -> list[str]:
    """Functions that headers declare with COLI_API, in order."""
    names = []
    for header in headers:
        text = re.sub(r"/\*.*?\*/", " ", header.read_text(), flags=re.S)
        text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
        names += re.findall(r"\bCOLI_API\b[^;(]*?\b(\w+)\s*\(", text)
    return names


def exported(library: Path) -> set[str]:
    """Names that a shared library defines for others."""
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", str(library)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[0].split("@")[0] for line in output.splitlines() if line.strip()}


def differences(library: Path, symbol_file: Path, headers: Iterable[Path], allow_others: bool = False) -> list[str]:
    """Sentences, one a difference. ``allow_others`` passes exports that do not begin with ``coli_``."""
    names, exports, headers = listed(symbol_file), exported(library), list(headers)
    found = [
        f"{library.name} does not export {name}, which {symbol_file.name} lists" for name in sorted(names - exports)
    ]
    for name in sorted(exports - names):
        if name.startswith("coli_") or not allow_others:
            found.append(f"{library.name} exports {name}, which {symbol_file.name} does not list")
    if headers:
        in_headers, where = set(declared(headers)), ", ".join(header.name for header in headers)
        found += [
            f"{where} declares {name}, which {symbol_file.name} does not list" for name in sorted(in_headers - names)
        ]
        found += [
            f"{symbol_file.name} lists {name}, which {where} does not declare" for name in sorted(names - in_headers)
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("symbol_file", type=Path)
    parser.add_argument("--headers", type=Path, nargs="+", default=[], help="headers that declare the same names")
    parser.add_argument("--allow-others", action="store_true", help="pass exports that do not begin with coli_")
    arguments = parser.parse_args()
    found = differences(arguments.library, arguments.symbol_file, arguments.headers, arguments.allow_others)
    print("\n".join(found) or f"{arguments.library.name}: as {arguments.symbol_file.name} says")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
