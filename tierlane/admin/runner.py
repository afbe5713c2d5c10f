"""How an admin verb runs: one connection, one transaction for a change, and its output."""

import asyncio
import getpass
import os
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

import typer

from gateway.host_lists import host_list
from gateway.jobs.callback_url import alert_url_problem, private_hosts
from ledger.admin.changes import Change, Row, changing
from ledger.admin.effects import COLUMNS, MONEY, UNNAMED, Deployment, Finding, rows_without_effect
from ledger.admin.errors import TABLES, BadValue, ChangeRejected
from ledger.admin.rows import rows_to_judge
from ledger.postgres import Connection
from tierlane.admin.change_result import ChangeResult, result_lines
from tierlane.admin.options import VerbCall, Work
from tierlane.admin.remote import catalog
from tierlane.connect import NeedsServersError, UsageError, VerbError
from tierlane.output import Column, print_json, print_rows, printable
from tierlane.settings.model import Settings

MOST_ACTOR_CHARS = 200
MOST_NOTES = 5
"""Of findings about the rows of one change."""

JUDGED = frozenset({"tiers", "customers", "api_keys", "quotas", "models", "prices"})


def run_verb(work: Work, call: VerbCall) -> int:
    """Run a verb; return the exit code. Raises UsageError and VerbError."""
    try:
        return asyncio.run(work(call))
    except NeedsServersError as error:
        raise VerbError(f"`tierlane {call.verb}` needs PostgreSQL or Redis: it cannot be used with --url.") from error
    except BadValue as error:
        raise UsageError(printable(str(error))) from error
    except ChangeRejected as error:
        raise VerbError(printable(str(error))) from error


def show_rows(
    read: Callable[[Connection], Awaitable[tuple[list[Row], int | None]]], columns: Sequence[Column], noun: str
) -> Work:
    """Print rows; `read` also returns how many rows there are in all: 0 if it returned all of them, None if unknown."""

    async def work(call: VerbCall) -> int:
        async with catalog(call) as connection:
            rows, total = await read(connection)
        print_rows(call.output, columns, rows, noun, total)
        return 0

    return work


async def apply(call: VerbCall, change: Callable[[Connection], Awaitable[ChangeResult]]) -> int:
    """Make a change, or roll it back with --dry-run, and print it. Returns the exit code."""
    actor = actor_of(call)
    async with catalog(call) as connection:
        if call.url is not None:  # The admin API has a transaction of its own, and records the operator.
            done = await change(connection)
        else:
            async with changing(connection, actor, dry_run=call.dry_run):
                done = await change(connection)
                done = done._replace(notes=[*done.notes, *await effect_notes(connection, call.settings, done.changes)])
    if call.output == "json":
        document: dict[str, object] = {
            "dry_run": call.dry_run,
            "changes": [each._asdict() for each in done.changes],
            "notes": done.notes,
        }
        if done.secret is not None:
            document[done.secret_name] = None if call.dry_run else done.secret
        print_json(document)
    else:
        typer.echo("\n".join(result_lines(done, dry_run=call.dry_run)))
    return 0


def deployment_of(settings: Settings) -> Deployment:
    """What the effect of rows depends on in the settings of this command, which should be those of the gateways."""

    def alert_problem(url: str, own_hosts: str | None) -> str | None:
        hosts = settings.callback_host_list if own_hosts is None else host_list(own_hosts)
        return alert_url_problem(url, hosts, private=settings.callback_private_addresses)

    def private(hosts: str) -> list[str]:
        return [] if settings.callback_private_addresses else private_hosts(host_list(hosts))

    return Deployment(bool(settings.callback_key), settings.pool, settings.default_model, alert_problem, private)


async def effect_notes(connection: Connection, settings: Settings, changes: Sequence[Change]) -> list[str]:
    """Sentences about changed rows that have no effect, read in the transaction of the change."""
    changed = [
        (TABLES[each.thing], each.new or {}, _changed_columns(each))
        for each in changes
        if each.old != each.new and each.thing in TABLES
    ]
    if not JUDGED & {table for table, _, _ in changed}:
        return []
    owners = {row["id"] if table == "customers" else row.get("customer_id") for table, row, _ in changed if row}
    ids = {owner for owner in owners if isinstance(owner, UUID)}
    columns = {(table, row.get("id", row.get("name"))): names for table, row, names in changed}
    of_models = set().union(*(names for table, _, names in changed if table in {"models", "prices"}))
    found = rows_without_effect(await rows_to_judge(connection, ids), deployment_of(settings))
    noted = []
    for each in found:
        names = columns.get((each.table, each.key), set()) | (of_models if each.kind in {MONEY, UNNAMED} else set())
        if COLUMNS[each.kind] & names:
            noted.append(each)
    return notes_of(noted)


def _changed_columns(change: Change) -> set[str]:
    """The columns whose value differs; of a new or a deleted row all."""
    old, new = change.old or {}, change.new or {}
    return {name for name in old | new if not (old and new) or old.get(name) != new.get(name)}


def notes_of(findings: Sequence[Finding]) -> list[str]:
    """The first findings as notes, equal ones once."""
    notes = list(dict.fromkeys(finding.note for finding in findings))
    more = (
        [f"{len(notes) - MOST_NOTES:,} more such rows: `tierlane check` has them."] if len(notes) > MOST_NOTES else []
    )
    return notes[:MOST_NOTES] + more


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
