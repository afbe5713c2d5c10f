"""`tierlane batch`: its verbs and options."""

from typing import Annotated, TypeAlias

import typer

from tierlane.admin.options import Limit, Work, reads
from tierlane.command import option, verb_group
from tierlane.lazy import batches

app = verb_group("Batches of /v1/batches: list, show, cancel.", "batch list")
BatchId: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="Id of the batch.")]


@reads(app, "list", "batch list --customer acme --open")
def batch_list(
    *,
    limit: Limit = 100,
    customer: Annotated[str | None, option("--customer", "Only of this customer, by name or id.")] = None,
    open_: Annotated[bool, option("--open", "Only batches that have not ended.", "off")] = False,
) -> Work:
    """Show the newest batches, with the numbers of their lines."""
    return lambda call: batches.show_list(call, limit, customer, open_only=open_)


@reads(app, "show", "batch show batch_01a1fe0124e5742f8c4b28b2a107510e")
def batch_show(batch_id: BatchId) -> Work:
    """Show a batch, with its times and files."""
    return lambda call: batches.show_one(call, batch_id)


@reads(app, "cancel", "batch cancel batch_01a1fe0124e5742f8c4b28b2a107510e")
def batch_cancel(batch_id: BatchId) -> Work:
    """Cancel a batch. Its customer can read the results of lines that have ended."""
    return lambda call: batches.cancel(call, batch_id)
