"""`tierlane dlq`: its verbs and options."""

from typing import Annotated

import typer

from tierlane.admin.options import PLACE, Actor, Work, Yes, add_verb, limit_option, read_options
from tierlane.command import Pool, option, verb_group
from tierlane.lazy import dead_letters, requeue

app = verb_group("Dead letters: requests that failed permanently. List, show, requeue, purge.", "dlq list")

_READS = read_options("TIERLANE_DLQ_OUTPUT")
_WRITES = {"actor": (Actor, None), **PLACE, "pool": (Pool, None)}


def dlq_list(
    *,
    limit: Annotated[int, limit_option("TIERLANE_DLQ_LIMIT", 20, 10_000)] = 20,
    customer: Annotated[str | None, option("--customer", "Only of this customer, by name or id.")] = None,
    code: Annotated[str | None, option("--code", "Only with this error code.")] = None,
) -> Work:
    """Show the newest dead letters, without their inputs."""
    return lambda call: dead_letters.show_list(call, limit, customer, code)


def dlq_show(
    *,
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Request id.")],
    body: Annotated[bool, option("--body", "Also print the input of the customer.", "off")] = False,
) -> Work:
    """Show a dead letter."""
    return lambda call: dead_letters.show_one(call, request_id, with_input=body)


def dlq_requeue(
    *,
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="Request ids.")],
    again: Annotated[bool, option("--again", "Also dead letters that were requeued before.", "off")] = False,
    cell: Annotated[
        str | None, option("--cell", "Run them there.", "the first with a healthy worker", metavar="NAME")
    ] = None,
) -> Work:
    """Run dead letters again under new ids, and show each result. Customers are not charged and get no response."""
    return lambda call: requeue.requeue(call, ids, cell, again=again)


def dlq_purge(
    *,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Request ids.")] = None,
    older_than: Annotated[
        str | None, option("--older-than", "All dead letters of at least this age, such as 12h or 7d.", metavar="AGE")
    ] = None,
    all_: Annotated[bool, option("--all", "All dead letters.", "off")] = False,
    yes: Yes = False,
) -> Work:
    """Delete dead letters and their inputs permanently."""
    selection = dead_letters.Selection.of(ids or [], older_than, everything=all_)
    return lambda call: dead_letters.purge(call, selection, sure=yes)


add_verb(app, "list", dlq_list, _READS, "dlq list --customer acme --code worker_lost")
add_verb(app, "show", dlq_show, _READS, "dlq show req_01a1fe0124e5742f8c4b28b2a107510e")
add_verb(app, "requeue", dlq_requeue, _WRITES, "dlq requeue req_01a1fe0124e5742f8c4b28b2a107510e")
add_verb(app, "purge", dlq_purge, _WRITES, "dlq purge --older-than 30d")
