#!/usr/bin/env python3
"""Rewrite what is CUDA and not C++ in a source, so that a C++ compiler reads it together with simt.h.

    kernel<T><<<grid, block, shared, stream>>>(a, b)   becomes simt::launch(..., kernel<T>)(a, b)
    extern __shared__ T name[];                        becomes a pointer to the block's dynamic shared memory
    __shared__ T name[N];                              is followed by SIMT_SHARED(name): each block gets a fresh one

Comments and literals stay as they are, and so do the numbers of lines: reports and debuggers name the original source.

Usage: cu2cpp.py INPUT OUTPUT
"""

import os
import re
import sys

COMMENT_OR_LITERAL = re.compile(
    r"""//(?:\\\n|[^\n])*
      | /\*.*?\*/
      | R"(?P<delimiter>[^\s()\\]*)\(.*?\)(?P=delimiter)"
      | "(?:\\.|[^"\\\n])*"
      | (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*'""",
    re.DOTALL | re.VERBOSE,
)
DYNAMIC_SHARED = re.compile(r"\s*(?:(?:__align__|alignas)\s*\(.*?\)\s*)?(.+?)\b(\w+)\s*\[\s*\]\s*", re.DOTALL)
BRACKETS = ("()", "[]", "{}", "<>")


class SourceError(Exception):
    """A construct that cannot be rewritten, with the line it stands on."""

    def __init__(self, source, position, message):
        line = source.count("\n", 0, position) + 1
        super().__init__(f"line {line}: {message}")


def blank(source):
    """Replace comments and the inside of literals by spaces, so that positions and lines stay as they are."""
    return COMMENT_OR_LITERAL.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), source)


def matching(code, position):
    """Return the position of the bracket that belongs to the one at `position`. Between angle brackets, what stands in
    other brackets does not count: it may compare."""
    pair = next(pair for pair in BRACKETS if code[position] in pair)
    others = "([{)]}" if pair == "<>" else ""
    depth = within_others = 0
    for at in range(position, len(code)) if code[position] == pair[0] else range(position, -1, -1):
        if code[at] in others:
            within_others += 1 if code[at] in "([{" else -1
        if within_others:
            continue
        depth += (code[at] == pair[0]) - (code[at] == pair[1])
        if depth == 0:
            return at
    raise SourceError(code, position, f"the bracket {code[position]!r} has no counterpart")


def skip_space_back(code, end):
    while end > 0 and code[end - 1].isspace():
        end -= 1
    return end


def kernel_start(code, end):
    """Return where the kernel that ends before `end` begins: space::name<T, N>, table[i].kernel, p->k."""
    start = end
    while True:
        start = skip_space_back(code, start)
        if code[start - 1 : start] in (">", "]", ")"):
            start = skip_space_back(code, matching(code, start - 1))
        name = re.search(r"\w+$", code[:start])
        if name:
            start = name.start()
        before = skip_space_back(code, start)
        joint = re.search(r"(::|\.|->)$", code[:before])
        if not joint:
            return start
        start = joint.start()


def launches(code):
    """Yield an edit for each kernel launch: (start, end, parts); a part is text, or (start, end) of the source."""
    position = 0
    while (opening := code.find("<<<", position)) >= 0:
        closing = code.find(">>>", opening)
        if closing < 0:
            raise SourceError(code, opening, "'<<<' without '>>>'")
        end = skip_space_back(code, opening)
        start = kernel_start(code, end)
        if start == end:
            raise SourceError(code, opening, "no kernel stands before '<<<'")
        name = " ".join(code[start:end].split()).replace("\\", "\\\\").replace('"', '\\"')
        config = (opening + 3, closing)
        yield start, closing + 3, ["simt::launch(simt::LaunchConfig(", config, f'), "{name}", ', (start, opening), ")"]
        position = closing


def declared_names(code, position, declaration):
    """Return the names that a declaration such as `float a[N], b[2 * N]` or `Tile<A, B> tile` declares."""
    flat = declaration
    for opening in "[({<":
        while (start := flat.find(opening)) >= 0:
            end = matching(flat, start) + 1
            flat = flat[:start] + " " * (end - start) + flat[end:]
    names = [re.search(r"\w+(?=\s*$)", declarator) for declarator in flat.split(",")]
    if not all(names):
        raise SourceError(code, position, f"no variable is declared in `__shared__{declaration};`")
    return [name[0] for name in names]


def shared_variables(code):
    """Yield an edit for each __shared__ declaration."""
    for match in re.finditer(r"(\bextern\s+)?\b__shared__\b([^;]*);", code):
        declaration = match[2]
        if not match[1]:
            checks = "".join(f" SIMT_SHARED({name});" for name in declared_names(code, match.start(), declaration))
            yield match.start(), match.end(), [(match.start(), match.end()), checks]
            continue
        dynamic = DYNAMIC_SHARED.fullmatch(declaration)
        if not dynamic:
            raise SourceError(code, match.start(), "dynamic shared memory is declared as `extern __shared__ T name[];`")
        kind, name = " ".join(dynamic[1].split()), dynamic[2]
        lines = "\n" * code.count("\n", match.start(), match.end())
        yield match.start(), match.end(), [f"{kind} *{name} = ({kind} *)simt::block.dynamic_shared;{lines}"]


def internal_kernels(code):
    """Yield an edit for each `static __global__`: simt.h makes every kernel static."""
    for match in re.finditer(r"\bstatic(?=\s+__global__\b)", code):
        yield match.start(), match.end(), []


def rewrite(source):
    """Return the source as C++."""
    code = blank(source)
    out, position = [], 0
    for start, end, parts in sorted([*launches(code), *shared_variables(code), *internal_kernels(code)]):
        out.append(source[position:start])
        out.extend(part if isinstance(part, str) else source[slice(*part)] for part in parts)
        position = end
    return "".join(out) + source[position:]


def main(arguments):
    if len(arguments) != 2:
        sys.exit(__doc__)
    path, output = arguments
    with open(path, encoding="utf-8") as file:
        source = file.read()
    try:
        text = rewrite(source)
    except SourceError as error:
        sys.exit(f"{path}: {error}")
    name = os.path.abspath(path).replace("\\", "\\\\").replace('"', '\\"')
    with open(output, "w", encoding="utf-8") as file:
        file.write(f'#line 1 "{name}"\n{text}')


if __name__ == "__main__":
    main(sys.argv[1:])
