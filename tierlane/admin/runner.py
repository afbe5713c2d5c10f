"""How an admin verb runs: one connection, one transaction for a change, and its output."""

import asyncio
import getpass
import os
from collections.abc import Awaitable, Callable, Sequence

import typer

from ledger.admin.changes import Row, changing
from ledger.admin.errors import BadValue, ChangeRejected
from ledger.postgres import Connection
from tierlane.admin.change_result import ChangeResult, result_lines
from tierlane.admin.options import VerbCall, Work
from tierlane.connect import UsageError, VerbError, database
from tierlane.output import Column, print_json, print_rows, printable

APPLICATION = "tierlane-admin"
MOST_ACTOR_CHARS = 200


def run_verb(work: Work, call: VerbCall) -> int:
    """Run a verb; return the exit code. Raises UsageError and VerbError."""
    try:
        return asyncio.run(work(call))
    except BadValue as error:
        raise UsageError(printable(str(error))) from error
    except ChangeRejected as error:
        raise VerbError(printable(str(error))) from error


def show_rows(
    read: Callable[[Connection], Awaitable[tuple[list[Row], int]]], columns: Sequence[Column], noun: str
) -> Work:
    """Print rows; `read` also returns how many rows there are in all, 0 if it returned all of them."""

    async def work(call: VerbCall) -> int:
        async with database(call.settings, APPLICATION) as connection:
            rows, total = await read(connection)
        print_rows(call.output, columns, rows, noun, total)
        return 0

    return work


async def apply(call: VerbCall, change: Callable[[Connection], Awaitable[ChangeResult]]) -> int:
    """Make a change, or roll it back with --dry-run, and print it. Returns the exit code."""
    actor = actor_of(call)
    async with database(call.settings, APPLICATION) as connection, changing(connection, actor, dry_run=call.dry_run):
        done = await change(connection)
    if call.output == "json":
        document: dict[str, object] = {
            "dry_run": call.dry_run,
            "changes": [each._asdict() for each in done.changes],
        }
        if done.key is not None:
            document["key"] = None if call.dry_run else done.key.text
        print_json(document)
    else:
        typer.echo("\n".join(result_lines(done, dry_run=call.dry_run)))
    return 0


def actor_of(call: VerbCall) -> str:
    """The name for config_changes: --actor, or the user of this machine. Raises UsageError if it is not a name."""
    actor = call.actor
    if actor is None:
        try:
            actor = getpass.getuser()
        except (OSError, KeyError):  # A container may have no name for its user.
            actor = f"uid {os.getuid()}"
    actor = actor.strip()
    if not 0 < len(actor) <= MOST_ACTOR_CHARS or not actor.isprintable():
        raise UsageError(f"--actor: must be a name of 1 to {MOST_ACTOR_CHARS} printable characters, got {actor!r}")
    return actor
