"""Dead letters dealt with many at once: what an operator saw of them, and what is done to exactly those and no others.

They are counted by tier, model and cause. Whoever acts names the newest number and the count that were seen; a letter that
came since is beyond the number, and where the count is another one nothing is done. Each deed is a row of `config_changes`,
written in the transaction of the deed. All functions raise what asyncpg raises.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from ledger.postgres import Connection
from ledger.statements import statement
from scheduler.errors import TierlaneError

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


class Seen(NamedTuple):
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


async def purge_seen(connection: Connection, seen: Seen, count: int) -> list[str]:
    """Delete these `count` letters for good; their request ids. Within a transaction, which CountDiffers has to undo."""
    rows = await connection.fetch(statement("purge_seen_dead_letters"), *seen, count + 1)
    ids = sorted(row[0] for row in rows)
    if len(ids) != count:
        raise CountDiffers(len(ids))
    await note(connection, seen.words(), {"count": count, "request_ids": ids}, None)
    return ids


async def seen_to_requeue(
    connection: Connection, seen: Seen, count: int, pools: Sequence[str], after: int
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
