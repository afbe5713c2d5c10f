"""Stored responses of /v1/responses in PostgreSQL: insert, find, delete.

Each function is one statement, and raises what asyncpg raises. The end of a background response is stored by `end_jobs`
(ledger/jobs.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ledger.postgres import Connection, statement
from scheduler.request_id import created_at

MAX_CONVERSATION = 1000


class NewResponse(NamedTuple):
    """A response to insert. `open`: it is a job, whose output follows."""

    request_id: str
    id: str
    customer_id: str
    previous_id: str | None
    document: bytes
    input_items: bytes
    open: bool


class StoreLimits(NamedTuple):
    """Limits of the stored responses of one customer, and the seconds that each is stored."""

    max_count: int
    max_bytes: int
    kept_s: float


class ResponseRow(msgspec.Struct, frozen=True, gc=False):
    """A stored response. `open`: its job has not ended; `lost`: it has no open job. Then the output is null, as without a job.

    The document is empty if the response was deleted.
    """

    id: str
    customer_id: str
    document: bytes
    input_items: bytes
    open: bool
    output: bytes | None
    error_code: str | None
    finish_reason: str | None
    tokens_used: int | None
    output_tokens: int | None
    lost: bool


class Conversation(NamedTuple):
    """A response and those before it, the oldest first. `whole`: none is missing; `too_long`: over a limit, and not read."""

    rows: list[ResponseRow]
    whole: bool
    too_long: bool


async def insert_responses(connection: Connection, responses: Sequence[NewResponse], limits: StoreLimits) -> None:
    """Insert and commit all responses; delete the oldest of their customers over the limits."""
    rows = [
        (each.id, created_at(each.request_id), each.customer_id, each.previous_id, each.document, each.input_items)
        for each in responses
    ]
    await connection.execute(
        statement("insert_responses"),
        *zip(*rows, strict=True),
        limits.kept_s,
        limits.max_count,
        limits.max_bytes,
        [each.open for each in responses],
    )


async def find_responses(connection: Connection, ids: Sequence[str]) -> dict[str, ResponseRow]:
    """The responses that exist or were deleted, by id."""
    rows = await connection.fetch(statement("find_responses"), ids)
    return {row["id"]: ResponseRow(*row) for row in rows}


async def running_responses(connection: Connection, ids: Sequence[str]) -> set[str]:
    """Those of the ids whose jobs have not ended."""
    return {row["id"] for row in await connection.fetch(statement("running_responses"), ids)}


async def find_conversation(
    connection: Connection, response_id: str, customer_id: str, max_bytes: int
) -> Conversation | None:
    """The customer's response and those before it, up to `max_bytes`; None if the response is unknown."""
    rows = await connection.fetch(statement("find_conversation"), response_id, customer_id, MAX_CONVERSATION, max_bytes)
    if not rows:
        return None
    if rows[0]["too_long"]:
        return Conversation([], whole=False, too_long=True)
    whole = rows[0]["previous_id"] is None
    return Conversation([ResponseRow(*tuple(row)[:11]) for row in rows], whole, too_long=False)


async def delete_response(connection: Connection, response_id: str, customer_id: str) -> None:
    """Delete the content of the customer's response, if it exists. An empty row is left."""
    await connection.execute(statement("delete_response"), response_id, customer_id)


async def purge_responses(connection: Connection, limit: int) -> None:
    """Delete expired responses."""
    await connection.execute(statement("purge_responses"), limit)
