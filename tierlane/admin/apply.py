"""The verbs `tierlane apply` and `tierlane export`: the catalog as a file."""

import sys
from importlib.metadata import version
from pathlib import Path

import typer

from ledger.admin.catalog_plan import RowsByTable, TablePlan, faults_of, plan_catalog
from ledger.admin.catalog_writes import count_live_keys, lock_catalog, read_catalog, rule_faults, write_plan
from ledger.admin.errors import THINGS, BadValue, ChangeRejected
from ledger.postgres import Connection
from tierlane.admin.catalog_file import CatalogFile, read_file, write_file
from tierlane.admin.change_result import ChangeResult
from tierlane.admin.options import VerbCall
from tierlane.admin.remote import APPLICATION
from tierlane.admin.runner import apply
from tierlane.connect import VerbError, database
from tierlane.output import counted

WOULD_CHANGE = 2
"""The exit code of a dry run that would change something."""

MOST_BYTES = 100 * 1024 * 1024


async def apply_file(call: VerbCall, source: str, *, prune: bool) -> int:
    """Make the catalog that of a file, `-` for standard input: as a whole, or not at all. Raises VerbError."""
    file = read_file("standard input" if source == "-" else source, _bytes_of(source))
    found: list[ChangeResult] = []

    async def change(connection: Connection) -> ChangeResult:
        try:
            found.append(await _change(connection, file, prune=prune))
        except BadValue as error:  # Exit code 2 means that a dry run would change something.
            raise ChangeRejected(str(error)) from error
        return found[0]

    await apply(call, change)
    return WOULD_CHANGE if call.dry_run and found[0].changes else 0


async def _change(connection: Connection, file: CatalogFile, *, prune: bool) -> ChangeResult:
    await lock_catalog(connection)
    catalog = await read_catalog(connection)
    plans = plan_catalog(catalog, file.wanted, prune=prune)
    file.check([*await rule_faults(connection, catalog, plans), *faults_of(catalog, plans)])
    notes = await _notes(connection, catalog, plans)
    return ChangeResult(await write_plan(connection, catalog, plans), notes=notes)


async def _notes(connection: Connection, catalog: RowsByTable, plans: dict[str, TablePlan]) -> list[str]:
    notes = []
    if not any(plan.created or plan.changed or plan.deleted for plan in plans.values()):
        notes.append("The catalog is that of the file: nothing to change.")
    kept = [counted(len(plan.kept), THINGS[name]) for name, plan in plans.items() if plan.kept and name != "cells"]
    if kept:
        notes.append(f"Not in the file, and kept: {', '.join(kept)}; --prune deletes them.")
    if cells := [row["name"] for row in plans["cells"].kept]:
        notes.append(f"Not in the file, and kept: cell {', '.join(cells)}; `tierlane cell close` closes a cell.")
    if keys := await count_live_keys(connection, plans["customers"].deleted):
        notes.append(f"Deleted with their customers: {counted(keys, 'key')}.")
    models = {row["name"] for row in (*catalog["models"], *plans["models"].created)}
    priced = {row["model"] for row in plans["prices"].created} - models
    return notes + [
        f"The price of {model} is of earlier requests only: there is no such model." for model in sorted(priced)
    ]


def _bytes_of(source: str) -> bytes:
    try:
        with sys.stdin.buffer if source == "-" else Path(source).open("rb") as file:
            document = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise VerbError(f"{source} cannot be read: {error.strerror}.") from error
    if len(document) > MOST_BYTES:
        raise VerbError(f"{source} is larger than {MOST_BYTES:,} bytes.")
    return document


async def export_file(call: VerbCall) -> int:
    """Print the catalog as a file."""
    # One transaction, so that rows fit each other; it changes nothing.
    async with database(call.settings, APPLICATION) as connection, connection.transaction(isolation="repeatable_read"):
        catalog = await read_catalog(connection)
    typer.echo(write_file(catalog, version("tierlane")), nl=False)
    return 0
