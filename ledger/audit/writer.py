"""Writing audit rows and dead letters into PostgreSQL, some at a time, each time in one transaction.

Rows that should be new go by COPY straight into `requests`, which fails whole by one row that is there already; then,
and where rows may well be there, it is COPY into a staging table and one guarded upsert. A row that its table refuses
is found by halving, so it never takes others with it.
"""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import datetime
from struct import error as StructError  # noqa: N812 - its own name is no class's
from typing import NamedTuple, cast

import asyncpg

from ledger.audit.rows import COLUMNS, Folded, LetterRow, Row, id_of, stream, to_letter_row, to_row
from ledger.postgres import Connection, reason, statement
from scheduler.failpoints import failpoint
from scheduler.protocol.audit_outbox import DeadLetterRecord, EndedRecord, Record, encode_records
from scheduler.request_id import created_at

ROWS_A_TRANSACTION = 1000
"""Encoding so many takes about 3 ms, in which nothing else in the process runs."""

BYTES_A_TRANSACTION = 8 << 20
"""Bodies of dead letters are large where inputs are; so much is written well within a statement's time."""

STAGING = "audit_staging"
STAGING_ROOM = {"temp_buffers": "1MB"}
"""For the session: a transaction's rows fit. PostgreSQL's own 8 MB would fill page by page, and never be given back."""

# What the server says of a value that it cannot store, and what asyncpg says of one that it cannot even encode.
REFUSALS = (asyncpg.DataError, ValueError, TypeError, OverflowError)

# What the server says where a column has another type than the migrations gave it, or there are others.
OTHER_COLUMNS = (asyncpg.InvalidBinaryRepresentationError, asyncpg.BadCopyFileFormatError)


class RejectedRow(NamedTuple):
    """A row that PostgreSQL will never take, and why."""

    row: Row | LetterRow
    why: str


async def prepare(connection: Connection) -> None:
    """Make the session's staging table."""
    await connection.execute(statement("audit_staging"))


async def write_rows(
    connection: Connection, rows: Sequence[Row | LetterRow], timeout_s: float, *, new: bool = False
) -> list[RejectedRow]:
    """Write all rows but those refused, which come back. When this returns, the others are committed.

    Ids must not repeat within the rows of one table. `new`: none is expected to be there; it costs time where that is
    wrong, and nothing else. Raises what asyncpg raises, or TimeoutError after `timeout_s` for a transaction; writing
    the same rows again is then right and changes nothing that was committed.
    """
    refused: list[RejectedRow] = []
    parts = [(part, new) for part in (_slices(rows) if new else _parts(rows))]
    while parts:
        part, new = parts.pop()
        try:
            async with asyncio.timeout(timeout_s):
                await _write(connection, part, new=new)
        except (*REFUSALS, asyncpg.IntegrityConstraintViolationError) as error:
            if not _is_the_rows_fault(error):
                raise
            if new:
                parts.append((part, False))
            elif len(part) == 1:
                refused.append(RejectedRow(part[0], reason(error)))
            else:
                middle = len(part) // 2
                parts += [(part[middle:], False), (part[:middle], False)]
    return refused


def _slices(rows: Sequence[Row | LetterRow]) -> Iterator[Sequence[Row | LetterRow]]:
    return (rows[at : at + ROWS_A_TRANSACTION] for at in range(0, len(rows), ROWS_A_TRANSACTION))


def _parts(rows: Sequence[Row | LetterRow]) -> Iterator[Sequence[Row | LetterRow]]:
    """What each transaction writes."""
    begin = size = 0
    for at, row in enumerate(rows):
        own = len(row.body or b"") if isinstance(row, LetterRow) else 0
        if at > begin and (at - begin >= ROWS_A_TRANSACTION or size + own > BYTES_A_TRANSACTION):
            yield rows[begin:at]
            begin, size = at, 0
        size += own
    if rows:
        yield rows[begin:]


async def _write(connection: Connection, rows: Sequence[Row | LetterRow], *, new: bool) -> None:
    async with connection.transaction():
        if new:
            await _copy(connection, "requests", cast("Sequence[Row]", rows))
        else:
            await _merge(connection, rows)
        failpoint("audit_uncommitted")


async def _merge(connection: Connection, rows: Sequence[Row | LetterRow]) -> None:
    letters = [row for row in rows if isinstance(row, LetterRow)]
    requests = [row for row in rows if not isinstance(row, LetterRow)]
    if requests:
        await _copy(connection, STAGING, requests)
        await connection.execute(statement("merge_requests"))
    if letters:
        await connection.executemany(statement("insert_dead_letters"), letters)


async def _copy(connection: Connection, table: str, rows: Sequence[Row]) -> None:
    await connection.copy_to_table(table, source=stream(rows), columns=COLUMNS, format="binary")


def _is_the_rows_fault(error: Exception) -> bool:
    """Whether another row in its place could be stored; if not, setting it aside would set all aside.

    A missing partition, too, is called a check violation, but one without a constraint.
    """
    if isinstance(error, OTHER_COLUMNS):
        return False
    return not isinstance(error, asyncpg.CheckViolationError) or bool(error.constraint_name)


ROWS_A_TURN = 250
"""After so many rows, a millisecond, other tasks get a turn: they share the process, and requests wait for them."""

_NO_ROW = (ValueError, OverflowError, OSError, StructError)


class Batch:
    """What one take came to: rows to write, and outbox entries of what never can be a row."""

    def __init__(self, folded: Folded) -> None:
        self.new: list[Row] = []  # With their beginning: but for repeats, the table does not have them.
        self.known: list[Row | LetterRow] = []  # It may have these; a dead letter stands behind its request's row.
        self.later: list[Row] = []  # Second rows of a request, to be written when the others are.
        self.bad: list[bytes] = []
        self.refusal: str | None = None  # Why the last of the bad ones is bad.
        self._folded = folded
        self._unmade: set[str] = set()
        self._refused: set[str] = set()

    async def build(self) -> None:
        """Make the rows; what cannot become one costs nothing but itself."""
        accepted, ended, letters = self._folded.accepted, self._folded.ended, self._folded.letters
        for number, (request_id, beginning) in enumerate(accepted.items()):
            if number % ROWS_A_TURN == 0:
                await asyncio.sleep(0)
            if request_id in letters:
                continue
            try:  # Not by a function of its own: nearly all rows are made here.
                self.new.append(to_row(request_id, beginning, ended.get(request_id)))
            except _NO_ROW as error:
                self._refuse_request(request_id, str(error))
        for request_id in ended.keys() - accepted.keys() - letters.keys():
            self._add_request(request_id)
        for letter in letters.values():
            if letter.id in accepted or letter.id in ended:
                self._add_request(letter.id)
            self._add_letter(letter, ended.get(letter.id))
        for told in self._folded.told.values():
            self._add_told(told)

    def refuse(self, refused: Sequence[RejectedRow]) -> None:
        """Set rows aside that PostgreSQL did not take."""
        for row, why in refused:
            if isinstance(row, LetterRow):
                self._set_aside(why, [self._folded.letters[row.request_id]])
            elif id_of(row) not in self._refused:
                self._refused.add(id_of(row))
                self._set_aside(why, self._records(id_of(row)))

    def requests(self) -> int:
        """How many rows of the audit were written, when all was."""
        known = sum(not isinstance(row, LetterRow) for row in self.known)
        return len(self.new) + known - len(self._refused)

    def key_uses(self) -> Iterator[tuple[str, datetime]]:
        """Which keys were used, and when last: an id tells its time, and sorts by it."""
        last: dict[str, str] = {}
        bad = self._unmade | self._refused
        for request_id, record in self._folded.accepted.items():
            if request_id > last.get(record.api_key_id, "") and request_id not in bad:
                last[record.api_key_id] = request_id
        return ((key_id, created_at(request_id)) for key_id, request_id in last.items() if key_id)

    def _add_request(self, request_id: str) -> None:
        try:
            row = to_row(request_id, self._folded.accepted.get(request_id), self._folded.ended.get(request_id))
        except _NO_ROW as error:
            self._refuse_request(request_id, str(error))
        else:
            self.known.append(row)

    def _refuse_request(self, request_id: str, why: str) -> None:
        self._unmade.add(request_id)
        self._set_aside(why, self._records(request_id))

    def _add_letter(self, letter: DeadLetterRecord, ended: EndedRecord | None) -> None:
        try:
            self.known.append(to_letter_row(letter, ended))
        except _NO_ROW as error:
            self._set_aside(str(error), [letter])

    def _add_told(self, told: EndedRecord) -> None:
        try:
            self.later.append(to_row(told.id, None, told))
        except _NO_ROW as error:
            self._set_aside(str(error), [told])

    def _records(self, request_id: str) -> list[Record]:
        folded = self._folded
        found = (known.get(request_id) for known in (folded.accepted, folded.ended, folded.told))
        return [record for record in found if record is not None]

    def _set_aside(self, why: str, records: Sequence[Record]) -> None:
        """As an outbox entry again, so that it can be looked at and put back."""
        self.bad.append(encode_records(records))
        self.refusal = why


async def make_batch(folded: Folded) -> Batch:
    """The rows of what was folded."""
    batch = Batch(folded)
    await batch.build()
    return batch
