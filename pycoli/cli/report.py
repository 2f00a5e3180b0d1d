"""How a command reports: exit codes, JSON and text, aligned tables, errors of hostile files."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..errors import ArgumentError, CheckpointError, ColiError

RIGHT, WRONG_RESULT, BAD_INPUT = 0, 1, 2
NOBODY_READS, INTERRUPTED = 128 + 13, 128 + 2
"""Exit codes. The last two are what shells report of programs that SIGPIPE and SIGINT end."""

WIDTH = 100
"""Columns that text is wrapped to."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `write_report` obeys."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON in place of the text")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="also write the report as JSON to FILE; an existing file is replaced only if its name ends in .json",
    )


def check_output(options: argparse.Namespace) -> None:
    """Raises unless the file of ``--output`` can be written; changes none. To be called before the work."""
    if options.output is None:
        return
    file = Path(options.output)
    if file.is_file() and file.suffix != ".json":
        raise ArgumentError(f"--output: expected a new file or one named *.json, got {file}, which is not overwritten")
    if file.exists():
        file.open("ab").close()
    else:
        file.open("xb").close()
        file.unlink()


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Makes a CheckpointError that names the file of whatever Python and numpy raise at hostile contents."""
    try:
        yield
    except (ColiError, OSError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def natural(text: str) -> int:
    """The type of arguments that are whole numbers."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 999999999, got {text}")
    return int(text)


def say(text: str, file: TextIO | None = None) -> None:
    """Prints text, by default to standard output. What the file's encoding lacks, or a terminal would obey, comes as
    escapes, whatever a checkpoint's names hold."""
    file = file or sys.stdout
    encoding = file.encoding or "utf-8"
    print(_printable(text, "\n").encode(encoding, "backslashreplace").decode(encoding), file=file)


def _printable(text: str, kept: str = "") -> str:
    """The text with escapes in place of control characters and others that show nothing, but those that are kept."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def write_report(report: dict, text: str, options: argparse.Namespace) -> None:
    """Prints the report as text or JSON, and writes it to a file, as the options say."""
    encoded = json.dumps(report, indent=2, allow_nan=False)
    if options.output is not None:
        Path(options.output).write_text(encoded + "\n")
    say(encoded if options.json else text)


def sections(entries: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Titles to the left, the lines of each to the right of it; long lines are wrapped."""
    indent = 2 + max(len(title) for title, _ in entries)
    text = []
    for title, lines in entries:
        wrapped = [part for line in lines for part in _wrap(line, WIDTH - indent)]
        text += [f"{title if number == 0 else '':{indent}}{part}" for number, part in enumerate(wrapped)]
    return "\n".join(text)


def _wrap(line: str, width: int) -> list[str]:
    """Continuation lines are indented; words such as paths stay whole."""
    return textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], lines: Sequence[Sequence[str]], total: bool = True) -> str:
    """Columns aligned to the right under their headings; with `total`, the last line is one, set apart by a rule."""
    lines = [[_printable(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    rule = "  ".join("-" * width for width in widths)
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *lines]]
    body = [*text[1:-1], rule, text[-1]] if total else text[1:]
    return "\n".join([text[0], rule, *body])
