"""The house is tested: who may import whom, that every module stands alone, and that nothing outgrows its room."""

import ast
import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("gateway", "ratelimit", "scheduler", "gpu_pool", "ledger", "tierlane")
MAY_IMPORT = {
    "gateway": {"ratelimit", "scheduler", "ledger"},
    "ratelimit": set(),
    "scheduler": {"ratelimit"},
    "gpu_pool": {"scheduler"},
    "ledger": {"scheduler"},
    "tierlane": {"gateway", "ratelimit", "scheduler", "gpu_pool", "ledger"},
}
OWNERS = {
    "torch": {"gpu_pool"},
    "transformers": {"gpu_pool"},
    "aiohttp": {"gateway", "tierlane", "gpu_pool"},
    "sqlalchemy": {"ledger"},
    "alembic": {"ledger"},
}
"""Libraries that one room alone may import; `tierlane` and `gpu_pool` may use aiohttp's client."""

WITH_TORCH = {f"gpu_pool.backends.hf.{name}" for name in ("causal", "embedding", "loading", "row")}
"""Modules that bring torch, beside those of `tiny`: imported when a model is loaded, and not before."""

BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "base", "manager"}
MOST_MODULES = 12
BANNED_CALLS = {"pickle", "cPickle", "marshal", "jsonpickle", "shelve"}
MODULES = sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree. Collection is held off: CPython 3.11 fails here when a finalizer runs meanwhile (gh-106905)."""
    gc.disable()
    try:
        return ast.parse(path.read_text("utf-8"))
    finally:
        gc.enable()


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """The top-level packages that a file imports, with the line."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0], node.lineno


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("room", ROOMS)
def test_import_arrows(room: str) -> None:
    """A room imports only the rooms that the architecture allows, and no library that belongs to another room."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in MODULES
        if path.relative_to(ROOT).parts[0] == room
        for name, line in imported(path)
        if (name in ROOMS and name != room and name not in MAY_IMPORT[room])
        or (name in OWNERS and room not in OWNERS[name])
        or name in BANNED_CALLS
    ]

    assert wrong == []


def test_every_module_imports_alone() -> None:
    """No module needs another to have been imported first, none warns, and only the model's own modules bring torch."""
    names = [module_name(path) for path in MODULES if path.name != "__main__.py"]
    probe = (
        "import sys, importlib, warnings\n"
        "warnings.simplefilter('error')\n"
        "base = set(sys.modules)\n"
        "for name in sys.stdin.read().split():\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        print(name, 'imports torch'); break\n"
        "    for loaded in set(sys.modules) - base:\n"
        "        del sys.modules[loaded]\n"
    )
    alone = [n for n in names if n.split(".")[0] in {"ratelimit", "scheduler", "gpu_pool"}]
    alone = [n for n in alone if not n.startswith("gpu_pool.backends.tiny.") and n not in WITH_TORCH]

    result = subprocess.run(
        [sys.executable, "-c", probe],
        input="\n".join(alone),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
        check=False,
    )

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_size_and_name(path: Path) -> None:
    """A file says what it owns, has at most 500 lines, holds no function over 60, and is named for its concept."""
    text = path.read_text("utf-8")
    tree = parsed(path)
    long = [
        f"{node.name} has {length} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (length := body_length(node)) > 60
    ]

    assert long == []
    assert text.count("\n") <= 500
    assert path.stem not in BANNED_NAMES
    assert ast.get_docstring(tree), "the first lines must say which idea the file owns"


def test_packages_are_small() -> None:
    """A package holds at most 12 modules, without its __init__."""
    count = Counter(path.parent for path in MODULES if path.name != "__init__.py")

    assert {str(package.relative_to(ROOT)): n for package, n in count.items() if n > MOST_MODULES} == {}


def body_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/lua/**/*.lua")), ids=lambda p: p.name)
def test_lua_files(path: Path) -> None:
    """One file a verb, at most 150 lines, with a header that names KEYS, ARGV and what it returns."""
    text = path.read_text("utf-8")

    assert text.count("\n") <= 150
    if path.parent.name == "includes" or path.parts[-3] == "ratelimit":
        assert text.startswith((f"-- {path.stem}: ", f"-- {path.stem}("))
    else:
        assert text.startswith("#!lua")
        assert f"\n-- {path.stem}: " in text
        assert all(word in text for word in ("-- KEYS[1]", "ARGV", "Returns", "-- include: prelude"))
        assert "'KEYS'" not in text


def test_the_project_speaks_of_itself_alone() -> None:
    """No path of a machine, no steering folder, in any text that is kept."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    banned = ("/wo" + "rk/", "../sha" + "red", "/tmp/bash" + "_jobs")
    wrong = [
        name
        for name in listed
        if not name.endswith((".safetensors", ".png"))
        and (ROOT / name).is_file()
        and any(text in (ROOT / name).read_text("utf-8", errors="replace") for text in banned)
    ]

    assert wrong == []
