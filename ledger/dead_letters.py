"""Dead letters: shown, requeued, deleted, one by one or in groups. All functions raise what asyncpg raises.

The body is customer data: it is read only where it is asked for by name. Groups are counted by tier, model and cause.
An operator names the newest number and the count that were seen; a letter that came since is beyond the number, and
where the count differs nothing is done. Each such change is a row of `config_changes`, written in its transaction.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from ledger.postgres import Connection, statement
from scheduler.errors import TierlaneError


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


MOST_GROUPS = 100


class LetterGroup(msgspec.Struct, frozen=True):
    """Dead letters of one tier, model and cause; "" where that is not known. `requeueable`: can be run again as things are."""

    tier: str
    model: str
    error_code: str
    count: int
    requeueable: int
    oldest: datetime


class LetterGroups(msgspec.Struct, frozen=True):
    """All of them at one moment. `up_to` is the number of the newest; groups beyond the hundred largest are only in the sums."""

    up_to: int
    count: int
    requeueable: int
    groups: list[LetterGroup]


class LetterSelection(NamedTuple):
    """Which letters are meant: of this tier, model and cause (None: any), up to the newest number that was seen."""

    tier: str | None
    model: str | None
    error_code: str | None
    up_to: int

    def words(self) -> str:
        """For the record."""
        named = [each or "unknown" for each in (self.tier, self.model, self.error_code) if each is not None]
        return f"{' '.join(named) or 'all'} up to {self.up_to}"


class Requeueable(NamedTuple):
    """A letter that can be run again, and in which pool its model is served."""

    number: int
    request_id: str
    pool: str


class CountDiffers(TierlaneError):
    """There are not as many as were seen; nothing was done. `found` is no larger than one more than was seen."""

    def __init__(self, found: int) -> None:
        super().__init__(f"there are {found}")
        self.found = found


async def letter_groups(connection: Connection, pools: Sequence[str]) -> LetterGroups:
    """How many there are; `pools` are those in which they could run again."""
    rows = await connection.fetch(statement("dead_letter_groups"), MOST_GROUPS, list(pools))
    if not rows:
        return LetterGroups(0, 0, 0, [])
    up_to, count, requeueable = tuple(rows[0])[6:]
    return LetterGroups(up_to, count, requeueable, [LetterGroup(*tuple(row)[:6]) for row in rows])


async def purge_seen(connection: Connection, seen: LetterSelection, count: int) -> list[str]:
    """Delete these `count` letters for good; their request ids. Within a transaction, which CountDiffers has to undo."""
    rows = await connection.fetch(statement("purge_seen_dead_letters"), *seen, count + 1)
    ids = sorted(row[0] for row in rows)
    if len(ids) != count:
        raise CountDiffers(len(ids))
    await note(connection, seen.words(), {"count": count, "request_ids": ids}, None)
    return ids


async def seen_to_requeue(
    connection: Connection, seen: LetterSelection, count: int, pools: Sequence[str], after: int
) -> list[Requeueable]:
    """The `count` letters behind number `after` that can be run again, oldest first. Raises CountDiffers."""
    rows = await connection.fetch(statement("seen_dead_letters_to_requeue"), *seen, after, list(pools), count + 1)
    if len(rows) != count:
        raise CountDiffers(len(rows))
    return [Requeueable(*row) for row in rows]


async def note(
    connection: Connection, which: str, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None
) -> None:
    """Write down what was done to letters, under the name that the transaction has; `which` says it in words."""
    told = [None if each is None else msgspec.json.encode(each).decode() for each in (old, new)]
    await connection.execute(statement("note_letter_change"), which, *told)
