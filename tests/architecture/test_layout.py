"""The layout of the code: import arrows, modules that import alone and without cycles, sizes, names."""

import ast
import gc
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from distributions import FOLDERS, PRODUCT, ROOT, module_name
from scheduler.redis_client import scripts

MAY_IMPORT = {
    "gateway": {"ratelimit", "scheduler", "ledger"},
    "ratelimit": set(),
    "scheduler": {"ratelimit"},
    "gpu_pool": {"scheduler"},
    "ledger": {"ratelimit", "scheduler"},
    "tierlane": {"gateway", "ratelimit", "scheduler", "gpu_pool", "ledger"},
    "tierlane_local": set(PRODUCT),
    "tierlane_tools": {*PRODUCT, "tierlane_local"},
}
LEAVES = {"circuit_breaker", "config", "host_lists", "served_models", "version"}
GATEWAY_MAY_IMPORT = {
    **{name: set[str]() for name in sorted(LEAVES)},  # Sorted: processes that share the tests need one order.
    "http": LEAVES,
    "metrics": {*LEAVES, "http"},
    "auth": {*LEAVES, "http"},
    "limits": {*LEAVES, "auth", "http", "inference"},  # The limits and outcomes of admission.
    "api": {*LEAVES, "auth", "http", "limits"},
    "inference": {*LEAVES, "api", "auth", "direct", "http", "limits", "metrics"},
    "direct": {*LEAVES, "heartbeat", "inference", "limits"},
    "account": {*LEAVES, "api", "http", "inference", "jobs"},
    "grpc": {*LEAVES, "api", "http", "inference"},
    "jobs": {*LEAVES, "api", "http", "inference", "limits"},
    "alerts": {*LEAVES, "http", "jobs", "limits", "metrics"},
    "batch_api": {*LEAVES, "api", "http", "inference", "jobs", "metrics", "translations"},
    "translations": {*LEAVES, "api", "auth", "http", "inference", "jobs"},
    "operations": {
        *LEAVES,
        *("auth", "autoscale", "direct", "heartbeat", "http", "jobs", "limits", "pool", "pools"),
    },
    "admin_api": {*LEAVES, "auth", "http", "jobs", "openapi"},
    "openapi": {
        *LEAVES,
        *(
            "account",
            "api",
            "auth",
            "autoscale",
            "batch_api",
            "http",
            "inference",
            "jobs",
            "metrics",
            "operations",
            "translations",
        ),
    },
}
"""Imports between the packages and leaf modules of `gateway`. Its other modules assemble them and may import all."""

SCHEDULER_MAY_IMPORT = {
    "redis_client": set[str](),
    "protocol": {"redis_client"},
    "batching": {"protocol", "redis_client"},
    "cells": {"protocol", "redis_client"},
}
"""Imports between the packages of `scheduler`; all of them may import the modules beside them."""

OWNERS = {
    "torch": {"gpu_pool"},
    "transformers": {"gpu_pool"},
    "aiohttp": {"gateway", "tierlane", "gpu_pool", "tierlane_local", "tierlane_tools"},
    "sqlalchemy": {"ledger", "gateway"},  # In `gateway` only the admin API, which no gateway imports.
    "alembic": {"ledger"},
    "grpc": {"gateway"},
    "google": {"gateway"},
    "psutil": {"tierlane_local", "tierlane_tools"},
    "matplotlib": {"tierlane_tools"},
}
"""Libraries that only these packages may import; only `gateway` uses aiohttp's server."""

WITH_TORCH = {
    f"gpu_pool.backends.{name}"
    for name in ("device", "hf.causal", "hf.decoding", "hf.embedding", "hf.loading", "hf.row")
}
"""Modules that import torch, beside those of `tiny`; they are imported when a model is loaded."""

BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "base", "manager"}

WORKER_HEARTBEAT = ROOT / "scheduler" / "protocol" / "worker_heartbeat.py"
"""Declares the arguments of a script that two modules call."""

BANNED_CALLS = {"pickle", "cPickle", "marshal", "jsonpickle", "shelve"}
GENERATED = "*_pb2.py"  # By the compiler of protobuf, from a file beside it: no module of ours.
LUA = sorted(ROOT.glob("*/lua/**/*.lua"))
MODULES = sorted(p for folder in FOLDERS.values() for p in folder.rglob("*.py") if not p.match(GENERATED))


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree. Garbage collection is off: CPython 3.11 fails here if a finalizer runs meanwhile (gh-106905)."""
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


@pytest.mark.parametrize("package", FOLDERS)
def test_import_arrows(package: str) -> None:
    """A top-level package imports only those that the architecture allows, and no library that another one owns."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in MODULES
        if path.is_relative_to(FOLDERS[package])
        for name, line in imported(path)
        if (name in FOLDERS and name != package and name not in MAY_IMPORT[package])
        or (name in OWNERS and package not in OWNERS[name])
        or name in BANNED_CALLS
    ]

    assert wrong == []


@pytest.mark.parametrize("part", GATEWAY_MAY_IMPORT)
def test_import_arrows_within_gateway(part: str) -> None:
    """A package of the gateway imports only those that the table allows, so that HTTP and authentication stay reusable."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} imports {node.module}"
        for path in MODULES
        if path.relative_to(ROOT).with_suffix("").parts[:2] == ("gateway", part)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gateway.")
        if (node.module or "").split(".")[1] not in {part, *GATEWAY_MAY_IMPORT[part]}
    ]

    assert wrong == []


@pytest.mark.parametrize("part", SCHEDULER_MAY_IMPORT)
def test_import_arrows_within_scheduler(part: str) -> None:
    """Policies and cells know the protocol, which knows the client of Redis, and not the reverse."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} imports {node.module}"
        for path in MODULES
        if path.relative_to(ROOT).with_suffix("").parts[:2] == ("scheduler", part)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scheduler.")
        if (node.module or "").split(".")[1] in SCHEDULER_MAY_IMPORT.keys() - {part, *SCHEDULER_MAY_IMPORT[part]}
    ]

    assert wrong == []


def test_every_module_imports_alone() -> None:
    """No module needs another to be imported before, none warns, and only modules of models import torch."""
    names = [module_name(path) for path in MODULES if path.name != "__main__.py"]
    probe = (
        "import sys, importlib, warnings\n"
        "warnings.simplefilter('error')\n"
        f"packages = {PRODUCT!r}\n"
        "for name in sys.stdin.read().split():\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        print(name, 'imports torch'); break\n"
        "    for loaded in [each for each in sys.modules if each.split('.')[0] in packages]:\n"
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
    """A module has a docstring, at most 500 lines, no function body over 60, and the name of its concept."""
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
    assert ast.get_docstring(tree), "the docstring must name the concept of the module"


def late_constants(tree: ast.Module) -> list[str]:
    """The constants and loggers after the first definition, except those that need one of the module's own definitions."""
    defined, late = set[str](), list[str]()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and defined:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
            used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - names
            if used & defined:
                defined |= names
            else:
                late += sorted(names)
    return late


def test_constants_are_at_the_top() -> None:
    """Constants and loggers are before the first definition, unless they need one of the module's own."""
    late = {str(path.relative_to(ROOT)): names for path in MODULES if (names := late_constants(parsed(path)))}

    assert late == {}


def test_class_names_are_unique() -> None:
    """A class name is defined in one module only."""
    where = defaultdict(set)
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                where[node.name].add(str(path.relative_to(ROOT)))

    assert {name: sorted(paths) for name, paths in where.items() if len(paths) > 1} == {}


def test_private_functions_are_used() -> None:
    """Every undecorated one is referenced in the product. A method that has overridden one that is gone would not be."""
    used: set[str] = set()
    private: dict[str, str] = {}
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif (
                isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and re.match("_(?!_)", node.name)
                and not node.decorator_list
            ):
                private[node.name] = f"{path.relative_to(ROOT)}:{node.lineno}"

    assert {name: place for name, place in private.items() if name not in used} == {}


def test_imports_have_no_cycle() -> None:
    """When modules are loaded; imports inside functions do not count."""
    known = {module_name(path): path for path in MODULES}
    graph = {name: set(_loaded_with(path, known)) - {name} for name, path in known.items()}

    list(TopologicalSorter(graph).static_order())  # Raises CycleError, which names the modules.


def _loaded_with(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Our modules that the module level of a file imports."""
    for node in parsed(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [name for name in modules if name in known] or [node.module]


def body_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", LUA, ids=lambda p: p.name)
def test_lua_files(path: Path) -> None:
    """One file a verb, at most 150 lines, with a header that names KEYS, ARGV and what it returns.

    Arguments are read by the generated preamble; only the prelude reads the prefix.
    """
    text = path.read_text("utf-8")
    code = lua_code(text)

    assert text.count("\n") <= 150
    assert re.findall(r"\b(?:ARGV|KEYS)\b", code.replace("ARGV[1]", "") if path.stem == "prelude" else code) == []
    if path.parent.name == "includes" or path.parts[-3] == "ratelimit":
        assert text.startswith((f"-- {path.stem}: ", f"-- {path.stem}("))
    else:
        assert text.startswith("#!lua")
        assert f"\n-- {path.stem}: " in text
        assert all(word in text for word in ("-- KEYS[1]", "ARGV: ", "Returns", "-- include: prelude"))


def lua_code(text: str) -> str:
    """A Lua text without its comments."""
    return re.sub(r"--[^\n]*", "", text)


def declared_arguments() -> dict[str, list[str]]:
    """The names of the arguments of each script, from the functions that declare them."""
    found = {}
    shared = {node.name: node.args for node in parsed(WORKER_HEARTBEAT).body if isinstance(node, ast.FunctionDef)}
    for path in sorted((ROOT / "scheduler" / "protocol").glob("*.py")):
        nodes = list(ast.walk(parsed(path)))
        functions = shared | {node.name: node.args for node in nodes if isinstance(node, ast.FunctionDef)}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Script":
                script, declaration, *_ = node.args
                assert isinstance(script, ast.Constant)
                assert isinstance(declaration, ast.Name)
                names = functions[declaration.id]
                found[str(script.value)] = [each.arg for each in (*names.args, *names.kwonlyargs)]
    return found


def test_arguments_of_scripts() -> None:
    """A header names the arguments that the wrapper declares, the code uses each, and no local of the whole script hides one."""
    declared, wrong = declared_arguments(), []
    for script, names in declared.items():
        header, _, _ = (ROOT / "scheduler" / "lua" / f"{script}.lua").read_text("utf-8").partition("-- include: ")
        code = lua_code(scripts.source(script))
        locals_ = re.findall(r"^local (?:function )?([\w, ]+)", code, re.MULTILINE)
        hidden = {name.strip() for line in locals_ for name in line.split(",")}
        wrong += [f"{script}: {name} is not in the header" for name in names if not re.search(rf"\b{name}\b", header)]
        wrong += [f"{script}: {name} is not used" for name in names if not re.search(rf"\b{name}\b", code)]
        wrong += [f"{script}: {name} is hidden by a local" for name in names if name in hidden]

    assert wrong == []
    assert set(declared) == {path.stem for path in LUA if path.parent == ROOT / "scheduler" / "lua"}


def test_no_file_contains_paths_of_a_machine() -> None:
    """In any text under version control."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    banned = ("/wo" + "rk/", "../sha" + "red", "/tmp/bash" + "_jobs")
    paths = [ROOT / name for name in listed if not name.endswith((".safetensors", ".png"))]
    texts = {path: path.read_text("utf-8", errors="replace") for path in paths if path.is_file()}

    assert [str(path) for path, text in texts.items() if any(word in text for word in banned)] == []
