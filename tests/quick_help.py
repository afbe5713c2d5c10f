"""What a command prints in a process of its own, and which of the libraries that it needs for its work it loaded for that."""

import subprocess
import sys
from typing import NamedTuple

HEAVY = {"pydantic", "pydantic_settings", "redis", "aiohttp", "torch", "sqlalchemy", "asyncpg", "rich", "psutil"}
PROGRAM = """
import sys
from tierlane.cli import app
try:
    app(sys.argv[1:])
except SystemExit:
    pass
print("IMPORTED", *sorted({name.partition(".")[0] for name in sys.modules}))
"""


class Shown(NamedTuple):
    """Lines of stdout and of stderr, and what of HEAVY was loaded."""

    out: list[str]
    err: list[str]
    heavy: set[str]


def shown_by(*arguments: str) -> Shown:
    """Run `tierlane` with these arguments to its end."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True, timeout=30
    )
    *out, last = done.stdout.splitlines()
    word, *imported = last.split()
    assert word == "IMPORTED"
    assert "tierlane" in imported
    return Shown(out, done.stderr.splitlines(), HEAVY & set(imported))
