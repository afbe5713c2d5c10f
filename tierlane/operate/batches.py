"""`tierlane batch list`, `show` and `cancel`: the batches of /v1/batches. Inputs and outputs are not shown."""

from typing import Any

import msgspec
import typer

from ledger.batches import BatchRow, cancel_batch, find_batch, list_batches
from tierlane.admin.options import VerbCall
from tierlane.connect import VerbError, database
from tierlane.output import Column, aligned, named, print_json, print_rows, printable, readable

APPLICATION = "tierlane-batch"
COLUMNS = (
    Column("id", "ID", whole=True),
    Column("created_at", "CREATED"),
    *named("customer", "endpoint", "status"),
    Column("total", "LINES"),
    *named("completed", "failed"),
    Column("deadline", "EXPIRES"),
    Column("owner", "GATEWAY"),
)


async def show_list(call: VerbCall, limit: int, customer: str | None, *, open_only: bool) -> int:
    """Print the newest batches, those that run too."""
    async with database(call.settings, APPLICATION) as connection:
        batches = await list_batches(connection, None, limit=limit, open_only=open_only, customer=customer)
    rows = [_fields(batch) for batch in batches]
    if call.output == "table":
        for row, batch in zip(rows, batches, strict=True):
            row |= {"created_at": batch.created_at, "deadline": batch.deadline}
    print_rows(call.output, COLUMNS, rows, "batches")
    return 0


async def show_one(call: VerbCall, batch_id: str) -> int:
    """Print a batch. Raises VerbError if there is none."""
    async with database(call.settings, APPLICATION) as connection:
        batch = await find_batch(connection, batch_id)
    if batch is None:
        raise VerbError(no_such(batch_id))
    if call.output == "json":
        print_json(_fields(batch))
    else:
        fields = {name: getattr(batch, name) for name in BatchRow.__struct_fields__ if name != "left_s"}
        shown = ((name.replace("_", " "), readable(value)) for name, value in fields.items() if value is not None)
        typer.echo("\n".join(aligned(shown)))
    return 0


async def cancel(call: VerbCall, batch_id: str) -> int:
    """Cancel a batch. Raises VerbError if it is not open."""
    async with database(call.settings, APPLICATION) as connection:
        cancelled = await cancel_batch(connection, batch_id)
        batch = await find_batch(connection, batch_id)
    if batch is None:
        raise VerbError(no_such(batch_id))
    if not cancelled and batch.status not in ("cancelling", "cancelled"):
        raise VerbError(f"{batch_id} is {batch.status}, so it cannot be cancelled.")
    if call.output == "json":
        print_json(_fields(batch))
    else:
        typer.echo(f"{batch_id} is {batch.status}. Lines that have ended are in its output file.")
    return 0


def no_such(batch_id: str) -> str:
    return f"There is no batch {printable(batch_id)}."


def _fields(batch: BatchRow) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(batch)
    del fields["left_s"]
    for name in ("errors", "metadata"):
        fields[name] = None if fields[name] is None else msgspec.json.decode(fields[name])
    return fields
