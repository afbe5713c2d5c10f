"""How an admin verb runs: one connection, for a change one transaction under the actor's name, and what is told of it."""

import getpass
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import typer

from ledger.admin.changes import Change, changing
from ledger.admin.errors import BadValue, ChangeRejected
from ledger.catalog.api_key import NewKey
from ledger.postgres import Connection
from tierlane.admin.options import VerbCall, Work
from tierlane.connect import UsageError, VerbError, database, run
from tierlane.output import aligned, print_json, printable, readable

T = TypeVar("T")
APPLICATION = "tierlane-admin"
MOST_ACTOR_CHARS = 200
OBEYED = "Gateways obey within a second."
TRIED = "Dry run: nothing was changed."


class ChangeResult(NamedTuple):
    """What a verb changed; `key` is a new one, to be shown once, `notes` are further sentences for people."""

    changes: Sequence[Change]
    key: NewKey | None = None
    notes: Sequence[str] = ()


def conducted(work: Work, call: VerbCall) -> int:
    """Run a verb to its exit code. Raises UsageError and VerbError, which are one sentence."""

    async def whole() -> int:
        return await work(call)

    try:
        return run(whole)
    except BadValue as error:
        raise UsageError(printable(str(error))) from error
    except ChangeRejected as error:
        raise VerbError(printable(str(error))) from error


async def looked(call: VerbCall, read: Callable[[Connection], Awaitable[T]]) -> T:
    """What is read over one connection."""
    async with database(call.settings, APPLICATION) as connection:
        return await read(connection)


async def changed(call: VerbCall, make: Callable[[Connection], Awaitable[ChangeResult]]) -> int:
    """Make a change, or try it; tell it. The exit code."""
    actor = actor_of(call)
    async with database(call.settings, APPLICATION) as connection, changing(connection, actor, dry_run=call.dry_run):
        done = await make(connection)
    if call.output == "json":
        _tell_programs(call, done)
    else:
        typer.echo("\n".join(lines_of(done, dry_run=call.dry_run)))
    return 0


def actor_of(call: VerbCall) -> str:
    """Whom config_changes is to name. Raises UsageError for what is no name."""
    return actor_named(call.actor)


def actor_named(given: str | None) -> str:
    """Whom config_changes is to name: who was given, else the user of this machine. Raises UsageError for what is no name."""
    actor = (given if given is not None else _os_user()).strip()
    if not 0 < len(actor) <= MOST_ACTOR_CHARS or not actor.isprintable():
        raise UsageError(f"--actor: must be a name of 1 to {MOST_ACTOR_CHARS} printable characters, got {actor!r}")
    return actor


def lines_of(done: ChangeResult, *, dry_run: bool) -> list[str]:
    """What was changed, for people."""
    lines = [line for change in done.changes for line in _lines_of(change)] + list(done.notes)
    if done.key is not None:
        lines += ["", "The key, shown this once:" if not dry_run else "The key would be shown here, once."]
        lines += [done.key.text, ""] if not dry_run else [""]
    if dry_run:
        return [*lines, TRIED]
    return [*lines, OBEYED] if any(change.old != change.new for change in done.changes) else lines


def _lines_of(change: Change) -> list[str]:
    old, new = change.old, change.new
    head = f"{change.thing} {printable(change.name)}"
    if old is None:
        new = new or {}
        return [f"{head}: created", *aligned(((k, readable(v)) for k, v in new.items() if v is not None), "  ")]
    if new is None:
        return [f"{head}: deleted"]
    if old == new:
        return [f"{head}: nothing to change"]
    steps = ((k, f"{readable(old[k])} -> {readable(v)}") for k, v in new.items() if v != old[k])
    return [f"{head}: changed", *aligned(steps, "  ")]


def _tell_programs(call: VerbCall, done: ChangeResult) -> None:
    told: dict[str, object] = {"dry_run": call.dry_run, "changes": [change._asdict() for change in done.changes]}
    if done.key is not None:
        told["key"] = None if call.dry_run else done.key.text
    print_json(told)


def _os_user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # A container may have no name for its user.
        return f"uid {os.getuid()}"
