"""Dead letters in an operator's hands: looked at, requeued, deleted. All functions raise what asyncpg raises.

The body is customer data: it is read only where it is asked for by name.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from ledger.postgres import Connection
from ledger.statements import statement


class DeadLetterRow(msgspec.Struct, frozen=True):
    """A row of `dead_letters` without its body; `customer` is the name, None where the customer is gone."""

    request_id: str
    dead_at: datetime
    customer_id: str | None
    customer: str | None
    tier: str | None
    model: str | None
    error_code: str
    attempts: int
    worker_ids: list[str]
    body_bytes: int | None
    requeued_as: str | None
    requeued_at: datetime | None


class RequeueTerms(NamedTuple):
    """How the customer of a dead letter stands now."""

    tier: str
    active: bool
    queue_ms: int
    model_served: bool


async def list_letters(
    database: Connection, limit: int, customer: str | None = None, code: str | None = None
) -> list[DeadLetterRow]:
    """The newest first; `customer` is a name or an id."""
    rows = await database.fetch(statement("list_dead_letters"), limit, customer, code)
    return [DeadLetterRow(*row) for row in rows]


async def find_letter(database: Connection, request_id: str) -> DeadLetterRow | None:
    """The dead letter of a request, or None."""
    row = await database.fetchrow(statement("find_dead_letter"), request_id)
    return None if row is None else DeadLetterRow(*row)


async def read_body(database: Connection, request_id: str) -> bytes | None:
    """The encoded payload; None where it was not kept, or there is no such letter."""
    body: bytes | None = await database.fetchval(statement("dead_letter_body"), request_id)
    return body


async def requeue_terms(database: Connection, request_id: str, pool: str) -> RequeueTerms | None:
    """On which terms its customer may run it again in this pool; None where the customer is gone."""
    row = await database.fetchrow(statement("requeue_terms"), request_id, pool)
    return None if row is None else RequeueTerms(*row)


async def mark_requeued(database: Connection, letter: DeadLetterRow, new_id: str) -> bool:
    """Note that it was requeued; False where somebody else did so since it was read."""
    status = await database.execute(statement("mark_requeued"), letter.request_id, new_id, letter.requeued_as)
    return status == "UPDATE 1"


async def unmark_requeued(database: Connection, letter: DeadLetterRow, new_id: str) -> None:
    """Take the note back: the new request was refused."""
    await database.execute(
        statement("unmark_requeued"), letter.request_id, new_id, letter.requeued_as, letter.requeued_at
    )


async def count_letters(database: Connection, ids: Sequence[str] | None = None, age_s: float | None = None) -> int:
    """How many there are of these ids and of at least this age; None stands for any."""
    count: int = await database.fetchval(statement("count_dead_letters"), ids, age_s)
    return count


async def purge_letters(
    database: Connection, ids: Sequence[str] | None = None, age_s: float | None = None
) -> list[str]:
    """Delete those of these ids and of at least this age, None for any; the ids of what was there."""
    return [row[0] for row in await database.fetch(statement("purge_dead_letters"), ids, age_s)]
