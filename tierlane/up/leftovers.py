"""What a killed `up` left behind: its processes, named, and ended when the user wants it.

Only where its leash was killed with it, and the kernel could not end them. A process is known by the mark in its
environment, which is random and new with every start, or as a server that works in the directory of the stack. A pid
alone proves nothing: stack.json gives the names, never the reason to end a process.
"""

import sys
from collections.abc import Callable

import psutil

from tierlane.connect import STACK_FILE
from tierlane.up.data_dir import DataDir, LogLines, StackError
from tierlane.up.orphan_guard import LEASH_FILE, Held

Ask = Callable[[str], bool]


def end_leftovers(data_dir: DataDir, lines: LogLines, *, replace: bool, ask: Ask | None = None) -> None:
    """End what an earlier stack on this directory left, if `replace` or the user says so; nothing where nothing is left.

    Raises StackError, which names the processes, where they are not to be ended.
    """
    held = _held(data_dir)
    left = held.left()
    if left:
        told = f"{_named(data_dir, left)} of an earlier `tierlane up` on {data_dir.path} still run"
        if not (replace or (ask or _asked)(f"{told}. End them? [y/N] ")):
            raise StackError(f"{told}: end them with `tierlane up --replace`, or choose another --data-dir.")
        lines.say(f"{told}; ending them")
    held.clear_away()
    if left := held.left():
        raise StackError(f"{_named(data_dir, left)} cannot be ended: end them, or choose another --data-dir.")


def _held(data_dir: DataDir) -> Held:
    kept = data_dir.read_json(LEASH_FILE)
    held = Held(str(kept.get("mark", "")))
    for line in kept.get("lines", []):
        held.note(str(line))
    return held


def _named(data_dir: DataDir, left: list[psutil.Process]) -> str:
    """The processes by their names in the stack file, and how many it does not name."""
    pids = {process.pid for process in left}
    entries = data_dir.read_json(STACK_FILE).get("processes", [])
    named = [f"{entry['name']} (pid {entry['pid']})" for entry in entries if entry.get("pid") in pids]
    if others := len(left) - len(named):
        named.append(f"{others} more" if named else f"{others} processes")
    return ", ".join(named)


def _asked(question: str) -> bool:
    """What the user says; no where nobody can be asked."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
