"""Processes that a killed `tierlane up` left: they are listed, and ended if the user confirms it.

There are some only if the orphan guard was killed too. A process is recognised by the mark in its environment, which is
random for each start, or as a server in the directory of the stack. Pids may be reused, so stack.json is only used for
names.
"""

import sys
from collections.abc import Callable

import psutil

from tierlane.connect import STACK_FILE
from tierlane_local.up.data_dir import DataDir, LogLines, StackError
from tierlane_local.up.orphan_guard import LEASH_FILE, Held

Ask = Callable[[str], bool]


def end_leftovers(data_dir: DataDir, lines: LogLines, *, replace: bool, ask: Ask | None = None) -> None:
    """End the processes of an earlier stack in this directory, with `replace` or after a confirmation.

    Raises StackError with their names otherwise.
    """
    kept = data_dir.read_json(LEASH_FILE)
    held = Held(str(kept.get("mark", "")))
    for line in kept.get("lines", []):
        held.note(str(line))
    left = held.left()
    if left:
        message = f"{_named(data_dir, left)} of an earlier `tierlane up` on {data_dir.path} still run"
        if not (replace or (ask or _confirm)(f"{message}. End them? [y/N] ")):
            raise StackError(f"{message}: end them with `tierlane up --replace`, or choose another --data-dir.")
        lines.say(f"{message}; ending them")
    held.clear()
    if left := held.left():
        raise StackError(f"{_named(data_dir, left)} cannot be ended: end them, or choose another --data-dir.")


def _named(data_dir: DataDir, left: list[psutil.Process]) -> str:
    """The names of the processes in stack.json, and the number of others."""
    pids = {process.pid for process in left}
    entries = data_dir.read_json(STACK_FILE).get("processes", [])
    named = [f"{entry['name']} (pid {entry['pid']})" for entry in entries if entry.get("pid") in pids]
    if others := len(left) - len(named):
        named.append(f"{others} more" if named else f"{others} processes")
    return ", ".join(named)


def _confirm(question: str) -> bool:
    """Whether the user confirms; False without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
