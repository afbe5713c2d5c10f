"""Dead letters: list, requeue and purge, one by one or in groups. All functions raise what asyncpg raises.

The body is customer data and is read by `read_body` only. Groups have a tier, a model and an error code. To change a group,
the operator sends the newest id and the count that were displayed: later dead letters have a larger id, and if the count
differs, nothing is changed. Each change of a group is recorded in `config_changes`, in the same transaction.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from ledger.postgres import Connection, statement
from scheduler.errors import TierlaneError

MAX_GROUPS = 100


class DeadLetterRow(msgspec.Struct, frozen=True):
    """A row of `dead_letters` without its body. `customer` is the name, None if the customer was deleted."""

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
    """The present limits and status of a dead letter's customer, and whether its model is served."""

    tier: str
    active: bool
    queue_ms: int | None  # None: by the backend of the pool.
    model_served: bool


async def list_letters(
    database: Connection, limit: int, customer: str | None = None, code: str | None = None
) -> list[DeadLetterRow]:
    """The newest dead letters, of one customer (name or id) and error code if given."""
    rows = await database.fetch(statement("list_dead_letters"), limit, customer, code)
    return [DeadLetterRow(*row) for row in rows]


async def find_letter(database: Connection, request_id: str) -> DeadLetterRow | None:
    row = await database.fetchrow(statement("find_dead_letter"), request_id)
    return None if row is None else DeadLetterRow(*row)


async def read_body(database: Connection, request_id: str) -> bytes | None:
    """The encoded payload; None if it was not kept or there is no such dead letter."""
    body: bytes | None = await database.fetchval(statement("dead_letter_body"), request_id)
    return body


async def requeue_terms(database: Connection, request_id: str, pool: str) -> RequeueTerms | None:
    """The terms for running the request again in `pool`; None if the customer was deleted."""
    row = await database.fetchrow(statement("requeue_terms"), request_id, pool)
    return None if row is None else RequeueTerms(*row)


async def mark_requeued(database: Connection, letter: DeadLetterRow, new_id: str) -> bool:
    """Record that it is requeued; False if it was requeued since it was read."""
    status = await database.execute(statement("mark_requeued"), letter.request_id, new_id, letter.requeued_as)
    return status == "UPDATE 1"


async def unmark_requeued(database: Connection, letter: DeadLetterRow, new_id: str) -> None:
    """Undo `mark_requeued`, because the new request was rejected."""
    await database.execute(
        statement("unmark_requeued"), letter.request_id, new_id, letter.requeued_as, letter.requeued_at
    )


async def count_letters(database: Connection, ids: Sequence[str] | None = None, age_s: float | None = None) -> int:
    """Count the dead letters with these ids and at least this age; None: any."""
    count: int = await database.fetchval(statement("count_dead_letters"), ids, age_s)
    return count


async def purge_letters(
    database: Connection, ids: Sequence[str] | None = None, age_s: float | None = None
) -> list[str]:
    """Delete the dead letters with these ids and at least this age; None: any. Returns the ids that existed."""
    return [row[0] for row in await database.fetch(statement("purge_dead_letters"), ids, age_s)]


class LetterGroup(msgspec.Struct, frozen=True):
    """Dead letters of one tier, model and error code; "" if unknown. `requeueable`: how many can be run again now."""

    tier: str
    model: str
    error_code: str
    count: int
    requeueable: int
    oldest: datetime
    newest_request: str


class LetterGroups(msgspec.Struct, frozen=True):
    """All dead letters at one moment. `up_to` is the newest id. Groups after the `MAX_GROUPS` largest are only in the sums."""

    up_to: int
    count: int
    requeueable: int
    groups: list[LetterGroup]


class LetterSelection(NamedTuple):
    """Dead letters of this tier, model and error code (None: any), up to the newest id that was displayed."""

    tier: str | None
    model: str | None
    error_code: str | None
    up_to: int

    def words(self) -> str:
        """The row key in `config_changes`."""
        named = [each or "unknown" for each in (self.tier, self.model, self.error_code) if each is not None]
        return f"{' '.join(named) or 'all'} up to {self.up_to}"


class Requeueable(NamedTuple):
    """A dead letter that can be run again, and the pool that serves its model."""

    number: int
    request_id: str
    pool: str


class CountDiffers(TierlaneError):
    """The selection has another count than was displayed. `found` is at most one more than was displayed."""

    def __init__(self, found: int) -> None:
        super().__init__(f"there are {found}")
        self.found = found


async def letter_groups(connection: Connection, pools: Sequence[str]) -> LetterGroups:
    """The groups of dead letters. `pools` are those in which requests could run again."""
    rows = await connection.fetch(statement("dead_letter_groups"), MAX_GROUPS, list(pools))
    if not rows:
        return LetterGroups(0, 0, 0, [])
    up_to, count, requeueable = tuple(rows[0])[7:]
    return LetterGroups(up_to, count, requeueable, [LetterGroup(*tuple(row)[:7]) for row in rows])


async def purge_seen(connection: Connection, seen: LetterSelection, count: int) -> list[str]:
    """Delete the `count` selected dead letters and return their request ids.

    Must run in a transaction, which CountDiffers rolls back.
    """
    rows = await connection.fetch(statement("purge_selected_dead_letters"), *seen, count + 1)
    ids = sorted(row[0] for row in rows)
    if len(ids) != count:
        raise CountDiffers(len(ids))
    await note(connection, seen.words(), {"count": count, "request_ids": ids}, None)
    return ids


async def seen_to_requeue(
    connection: Connection, seen: LetterSelection, count: int, pools: Sequence[str], after: int
) -> list[Requeueable]:
    """The `count` dead letters after id `after` that can be run again, oldest first. Raises CountDiffers."""
    rows = await connection.fetch(statement("requeueable_dead_letters"), *seen, after, list(pools), count + 1)
    if len(rows) != count:
        raise CountDiffers(len(rows))
    return [Requeueable(*row) for row in rows]


async def note(
    connection: Connection, which: str, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None
) -> None:
    """Record a change in `config_changes` under the actor of the transaction; `which` describes the dead letters."""
    states = [None if each is None else msgspec.json.encode(each).decode() for each in (old, new)]
    await connection.execute(statement("record_dead_letter_change"), which, *states)
