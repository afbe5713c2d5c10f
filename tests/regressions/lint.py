"""Rules over syntax trees for code that must not exist in the product."""

import ast
from collections.abc import Callable, Iterator

from distributions import FOLDERS, ROOT

DESERIALIZERS = {"pickle", "cPickle", "cloudpickle", "dill", "jsonpickle", "marshal", "shelve", "yaml"}
LIST_COMMANDS = {"lpush", "rpush", "lpushx", "rpushx", "lpop", "rpop", "brpop", "lmove", "blmove", "rpoplpush"}
KEYSPACE_COMMANDS = {"scan", "scan_iter", "flushall", "flushdb", "randomkey", "dbsize"}

Rule = Callable[[ast.AST], bool]


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Every Python file of the product, except tools/tierlane_tools/chaos, which injects faults."""
    for folder in FOLDERS.values():
        for path in sorted(folder.rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith("tools/tierlane_tools/chaos/"):
                yield name, ast.parse(path.read_text("utf-8"))


def matches(rule: Rule) -> list[str]:
    """The places in the product that match the rule."""
    return [f"{name}:{getattr(node, 'lineno', 0)}" for name, tree in sources() for node in ast.walk(tree) if rule(node)]


def called(node: ast.AST) -> str:
    """The last two parts of the dotted name of a called function; "" if the node is no call."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Name):
        return node.func.id
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value
        left = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else "?"
        return f"{left}.{node.func.attr}"
    return ""


def method(node: ast.AST) -> str:
    """The name of a called function or method."""
    return called(node).rpartition(".")[2]


def deserializes_code(node: ast.AST) -> bool:
    """Modules that turn bytes into code, `torch.load`, `eval` and `exec`."""
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in DESERIALIZERS for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] in DESERIALIZERS
    return called(node) in {"torch.load", "eval", "exec", "numpy.load", "np.load"}


def uses_wait_for(node: ast.AST) -> bool:
    """`asyncio.wait_for`, which can lose a cancellation on Python 3.11."""
    if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
        return any(alias.name == "wait_for" for alias in node.names)
    return called(node) == "asyncio.wait_for"


def shields(node: ast.AST) -> bool:
    """`asyncio.shield` of something that is not an attribute, and so cannot be awaited again."""
    is_attribute = isinstance(node, ast.Call) and bool(node.args) and isinstance(node.args[0], ast.Attribute)
    return called(node) in {"asyncio.shield", "shield"} and not is_attribute


def scans_the_keyspace(node: ast.AST) -> bool:
    """KEYS, SCAN, FLUSHALL and similar commands. `keys()` without an argument is a mapping's."""
    name = method(node)
    if name == "keys":
        return isinstance(node, ast.Call) and bool(node.args or node.keywords)
    return name in KEYSPACE_COMMANDS


def changes_a_list(node: ast.AST) -> bool:
    """A list in Redis that is changed outside a script, so that two steps can be interrupted."""
    return method(node) in LIST_COMMANDS


def removes_by_value(node: ast.AST) -> bool:
    """LREM, which searches the list."""
    return method(node) == "lrem"


def reads_the_wall_clock(node: ast.AST) -> bool:
    """The wall clock of this host, which must not be compared with that of another one."""
    return called(node) in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}


def _starts_a_task(node: ast.AST) -> bool:
    # A task group keeps its tasks itself.
    return method(node) in {"create_task", "ensure_future"} and not called(node).startswith(("group.", "tasks."))


def unreferenced_tasks() -> list[str]:
    """The places in the product that start a task without keeping a reference to it."""
    lines: list[str] = []
    for name, tree in sources():
        for scope in ast.walk(tree):
            if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            used = {n.id for n in ast.walk(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            for node in ast.walk(scope):
                if isinstance(node, ast.Expr) and _starts_a_task(node.value):
                    lines.append(f"{name}:{node.lineno}")
                elif isinstance(node, ast.Assign) and _starts_a_task(node.value):
                    targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
                    lines += [f"{name}:{node.lineno}" for target in targets if target not in used]
    return lines
