"""What may not stand in the product at all, as rules over syntax trees: each bug here is one that a line can bring back."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("gateway", "ratelimit", "scheduler", "gpu_pool", "ledger", "tierlane")

RUNS_WHAT_IT_READS = {"pickle", "cPickle", "cloudpickle", "dill", "jsonpickle", "marshal", "shelve", "yaml"}
LISTS_BY_HAND = {"lpush", "rpush", "lpushx", "rpushx", "lpop", "rpop", "brpop", "lmove", "blmove", "rpoplpush"}
WHOLE_KEYSPACE = {"scan", "scan_iter", "flushall", "flushdb", "randomkey", "dbsize"}

Rule = Callable[[ast.AST], bool]


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Every Python file of the product; faults are injected on purpose in tierlane/chaos, which is no part of serving."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith("tierlane/chaos/"):
                yield name, ast.parse(path.read_text("utf-8"))


def found(tree: ast.Module, rule: Rule) -> list[int]:
    """The lines that break the rule."""
    return [getattr(node, "lineno", 0) for node in ast.walk(tree) if rule(node)]


def called(node: ast.AST) -> str:
    """The dotted name of what a call calls, its last two parts; "" for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Name):
        return node.func.id
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value
        left = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else "?"
        return f"{left}.{node.func.attr}"
    return ""


def last(node: ast.AST) -> str:
    """The name of the function or method that a call calls."""
    return called(node).rpartition(".")[2]


def unpickles(node: ast.AST) -> bool:
    """Reads bytes into code: modules that do, `torch.load`, `eval` and `exec` themselves."""
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in RUNS_WHAT_IT_READS for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] in RUNS_WHAT_IT_READS
    return called(node) in {"torch.load", "eval", "exec", "numpy.load", "np.load"}


def waits_for(node: ast.AST) -> bool:
    """`asyncio.wait_for`, which can swallow a cancel on Python 3.11."""
    if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
        return any(alias.name == "wait_for" for alias in node.names)
    return called(node) == "asyncio.wait_for"


def shields(node: ast.AST) -> bool:
    """`asyncio.shield` around what nobody else holds: an attribute is held, and can be waited for again."""
    held = isinstance(node, ast.Call) and bool(node.args) and isinstance(node.args[0], ast.Attribute)
    return called(node) in {"asyncio.shield", "shield"} and not held


def walks_the_keyspace(node: ast.AST) -> bool:
    """KEYS, SCAN, FLUSHALL and the like. `keys()` without an argument is a mapping's."""
    name = last(node)
    if name == "keys":
        return isinstance(node, ast.Call) and bool(node.args or node.keywords)
    return name in WHOLE_KEYSPACE


def moves_by_hand(node: ast.AST) -> bool:
    """A list of Redis that is changed outside of a script, so that two steps can be split."""
    return last(node) in LISTS_BY_HAND


def removes_by_value(node: ast.AST) -> bool:
    """LREM walks its list."""
    return last(node) == "lrem"


def tells_the_time(node: ast.AST) -> bool:
    """The wall clock of this host, which must not meet that of another one."""
    return called(node) in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}


def _starts_a_task(node: ast.AST) -> bool:
    # A task group keeps its tasks itself.
    return last(node) in {"create_task", "ensure_future"} and not called(node).startswith(("group.", "tasks."))


def forgets_a_task(tree: ast.Module) -> list[int]:
    """Lines that start a task and keep nothing of it, or a name that nobody looks at again."""
    lines: list[int] = []
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        used = {n.id for n in ast.walk(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        for node in ast.walk(scope):
            if isinstance(node, ast.Expr) and _starts_a_task(node.value):
                lines.append(node.lineno)
            elif isinstance(node, ast.Assign) and _starts_a_task(node.value):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                lines += [node.lineno for name in names if name not in used]
    return lines
