"""The text of a script as it is sent: what a call does not need costs it nothing.

Each call of a script runs its whole text, and so creates each function in it, which takes more time for each local that
the function captures. So comments and unused functions are left out, and constants are literals.

A function is recognized by its place: at the start of a line, until a line that is `end` or ends with it. No string of a
script contains `--`, and a constant of the whole script is in capitals.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

_FUNCTION = re.compile(r"(?:local )?function ([\w.]+)\(")
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_LOCALS = re.compile(r"local (\w+(?:, \w+)*) = (.*)")
_CONSTANT = re.compile(r"[A-Z][A-Z\d_]*")
_LITERAL = re.compile(r"\d+(?:\.\d+)?|'[^',]*'")
_STRING_OR_CONSTANT = re.compile(r"'(?:\\.|[^'\\])*'|(?<!\w)(?<!\w\.)[A-Z][A-Z\d_]*\b(?!\s*=[^=])")


class _Block(NamedTuple):
    """A function, or the lines between two functions, whose name is ""."""

    name: str
    lines: list[str]

    def names(self) -> set[str]:
        """Every name in it, even a word of a string."""
        return set(_NAME.findall("\n".join(self.lines)))


@cache
def compact(text: str) -> str:
    """The shorter text of a script that does the same."""
    shebang, *lines = text.split("\n")
    blocks = _used(_with_literals(_blocks(lines)))
    return "\n".join([shebang, *(line for block in blocks for line in block.lines)])


def _blocks(lines: Sequence[str]) -> list[_Block]:
    blocks = [_Block("", [])]
    for line in lines:
        code = line.partition("--")[0].rstrip()
        if not blocks[-1].name and (start := _FUNCTION.match(code)):
            blocks.append(_Block(start.group(1), []))
        if code:
            blocks[-1].lines.append(code)
        if blocks[-1].name and (code == "end" or (len(blocks[-1].lines) == 1 and code.endswith(" end"))):
            blocks.append(_Block("", []))
    return blocks


def _used(blocks: Sequence[_Block]) -> list[_Block]:
    """The blocks without the functions whose names occur in none of the others."""
    used: set[str] = set()
    added = [block for block in blocks if not block.name]
    while added:
        used.update(*(block.names() for block in added))
        added = [block for block in blocks if block.name in used and not block.names() <= used]
    return [block for block in blocks if not block.name or block.name in used]


def _with_literals(blocks: Sequence[_Block]) -> list[_Block]:
    """The blocks with the values of the constants of the whole script: locals in capitals that are a number or a short string."""
    lines = [line for block in blocks for line in block.lines if line.startswith(" ")]
    inner = {name for line in lines for names, _ in _LOCALS.findall(line) for name in names.split(", ")}
    values: dict[str, str] = {}
    return [block._replace(lines=_literal_lines(block.lines, values, inner)) for block in blocks]


def _literal_lines(lines: Sequence[str], values: dict[str, str], inner: set[str]) -> list[str]:
    """These lines with the values of the constants that were declared before; `inner`: the names of locals of functions."""
    found = []
    for line in lines:
        declared = _LOCALS.match(line)
        names, literals = (part.split(", ") for part in declared.groups()) if declared else ([], [])
        are_literals = len(names) == len(literals) and all(map(_LITERAL.fullmatch, literals))
        if declared and are_literals and all(map(_CONSTANT.fullmatch, names)) and not inner & {*names}:
            values.update(zip(names, literals, strict=True))
            continue
        found.append(_STRING_OR_CONSTANT.sub(lambda name: values.get(name.group(), name.group()), line))
        for name in names:
            values.pop(name, None)
    return found
