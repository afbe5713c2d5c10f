"""Writes audit rows and dead letters to PostgreSQL, in transactions of bounded size.

Rows that are expected to be new are copied into `requests`, which fails as a whole if one of them exists. In that case, and
for rows that may exist, they are copied into a staging table and merged. A row that PostgreSQL rejects is found by halving
the rows, so that the other rows are written.
"""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import datetime
from struct import error as StructError  # noqa: N812 - `error` is not a name for a class
from typing import NamedTuple

import asyncpg

from ledger.audit.copy_format import stream
from ledger.audit.folding import Folded
from ledger.audit.letter_rows import LetterRow, to_letter_row
from ledger.audit.rows import COLUMNS, Row, id_of, to_row
from ledger.postgres import Connection, reason, statement
from scheduler.failpoints import failpoint
from scheduler.protocol.audit_records import Record, encode_records
from scheduler.request_id import created_at

ROWS_A_TRANSACTION = 1000
"""Encoding takes about 3 ms, in which nothing else in the process runs."""

BYTES_A_TRANSACTION = 8 << 20
"""For dead letters with large bodies: written well within the statement timeout."""

STAGING_SETTINGS = {"temp_buffers": "1MB"}
"""Settings of the session. The rows of a transaction fit; PostgreSQL would fill its default of 8 MB and never release it."""

# A value that the server cannot store, or that asyncpg cannot encode.
VALUE_ERRORS = (asyncpg.DataError, ValueError, TypeError, OverflowError)

# A table with other columns or types than the migrations create.
COLUMN_ERRORS = (asyncpg.InvalidBinaryRepresentationError, asyncpg.BadCopyFileFormatError)

ROWS_PER_TURN = 250
"""Other tasks run after this many rows (a millisecond), since requests share the process."""

_BAD_RECORD = (ValueError, OverflowError, OSError, StructError)


class RejectedRow(NamedTuple):
    """A row that PostgreSQL rejects, and the reason."""

    row: Row | LetterRow
    why: str


async def prepare(connection: Connection) -> None:
    """Create the staging table of the session."""
    await connection.execute(statement("create_staging_table"))


async def write_rows(
    connection: Connection, rows: Sequence[Row | LetterRow], timeout_s: float, *, new: bool = False
) -> list[RejectedRow]:
    """Write and commit all rows except those that PostgreSQL rejects, which are returned.

    Ids must be unique within each table. `new`: no row is expected to exist; rows that do exist only cost time. Raises what
    asyncpg raises, or TimeoutError if a transaction takes longer than `timeout_s`; the same rows can then be written again.
    """
    rejected: list[RejectedRow] = []
    parts = [(part, new) for part in _parts(rows, new=new)]
    while parts:
        part, new = parts.pop()
        letters = [row for row in part if isinstance(row, LetterRow)] if not new else []
        requests = [row for row in part if not isinstance(row, LetterRow)]
        try:
            async with asyncio.timeout(timeout_s), connection.transaction():
                if requests:
                    table = "requests" if new else "audit_staging"
                    await connection.copy_to_table(table, source=stream(requests), columns=COLUMNS, format="binary")
                if requests and not new:
                    await connection.execute(statement("merge_requests"))
                if letters:
                    await connection.executemany(statement("insert_dead_letters"), letters)
                failpoint("audit_uncommitted")
        except (*VALUE_ERRORS, asyncpg.IntegrityConstraintViolationError) as error:
            # Otherwise PostgreSQL would reject any row. A missing partition is a check violation without a constraint's name.
            if isinstance(error, COLUMN_ERRORS):
                raise
            if isinstance(error, asyncpg.CheckViolationError) and not error.constraint_name:
                raise
            if new:
                parts.append((part, False))
            elif len(part) == 1:
                rejected.append(RejectedRow(part[0], reason(error)))
            else:
                middle = len(part) // 2
                parts += [(part[middle:], False), (part[:middle], False)]
    return rejected


def _parts(rows: Sequence[Row | LetterRow], *, new: bool) -> Iterator[Sequence[Row | LetterRow]]:
    """The rows of each transaction. `new` ones have no bodies."""
    if new:
        for begin in range(0, len(rows), ROWS_A_TRANSACTION):
            yield rows[begin : begin + ROWS_A_TRANSACTION]
        return
    begin = size = 0
    for at, row in enumerate(rows):
        own = len(row.body or b"") if isinstance(row, LetterRow) else 0
        if at > begin and (at - begin >= ROWS_A_TRANSACTION or size + own > BYTES_A_TRANSACTION):
            yield rows[begin:at]
            begin, size = at, 0
        size += own
    if rows:
        yield rows[begin:]


class Batch:
    """The rows of one take, and the outbox entries of records that cannot be written."""

    def __init__(self, folded: Folded) -> None:
        self.new: list[Row] = []  # With an accepted record: the table has these only if entries are repeated.
        self.known: list[
            Row | LetterRow
        ] = []  # The table may have these. A dead letter follows the row of its request.
        self.later: list[Row] = []  # Second rows of a request, to be written after the others.
        self.bad: list[bytes] = []
        self.rejection: str | None = None  # Why the last of `bad` cannot be written.
        self._folded = folded
        self._invalid: set[str] = set()
        self._rejected: set[str] = set()

    async def build(self) -> None:
        """Encode the rows. Records that cannot be encoded are set aside."""
        accepted, ended, letters = self._folded.accepted, self._folded.ended, self._folded.letters
        for number, (request_id, beginning) in enumerate(accepted.items()):
            if number % ROWS_PER_TURN == 0:
                await asyncio.sleep(0)
            if request_id in letters:
                continue
            try:  # Inline, since nearly all rows are encoded here.
                self.new.append(to_row(request_id, beginning, ended.get(request_id)))
            except _BAD_RECORD as error:
                self._set_aside_request(request_id, str(error))
        for request_id in ended.keys() - accepted.keys() - letters.keys():
            self._add_request(request_id)
        for letter in letters.values():
            if letter.id in accepted or letter.id in ended:
                self._add_request(letter.id)
            try:
                self.known.append(to_letter_row(letter, ended.get(letter.id)))
            except _BAD_RECORD as error:
                self._set_aside(str(error), [letter])
        for delivered in self._folded.delivered.values():
            try:
                self.later.append(to_row(delivered.id, None, delivered))
            except _BAD_RECORD as error:
                self._set_aside(str(error), [delivered])

    def refuse(self, rejected: Sequence[RejectedRow]) -> None:
        """Set aside the records of rows that PostgreSQL rejected."""
        for row, why in rejected:
            if isinstance(row, LetterRow):
                self._set_aside(why, [self._folded.letters[row.request_id]])
            elif id_of(row) not in self._rejected:
                self._rejected.add(id_of(row))
                self._set_aside(why, self._records(id_of(row)))

    def requests(self) -> int:
        """The number of audit rows that were written."""
        known = sum(not isinstance(row, LetterRow) for row in self.known)
        return len(self.new) + known - len(self._rejected)

    def key_uses(self) -> Iterator[tuple[str, datetime]]:
        """The keys that were used, and when last, by the times of the request ids, which sort by time."""
        last: dict[str, str] = {}
        bad = self._invalid | self._rejected
        for request_id, record in self._folded.accepted.items():
            if request_id > last.get(record.api_key_id, "") and request_id not in bad:
                last[record.api_key_id] = request_id
        return ((key_id, created_at(request_id)) for key_id, request_id in last.items() if key_id)

    def _add_request(self, request_id: str) -> None:
        try:
            row = to_row(request_id, self._folded.accepted.get(request_id), self._folded.ended.get(request_id))
        except _BAD_RECORD as error:
            self._set_aside_request(request_id, str(error))
        else:
            self.known.append(row)

    def _set_aside_request(self, request_id: str, why: str) -> None:
        self._invalid.add(request_id)
        self._set_aside(why, self._records(request_id))

    def _records(self, request_id: str) -> list[Record]:
        folded = self._folded
        found = (known.get(request_id) for known in (folded.accepted, folded.ended, folded.delivered))
        return [record for record in found if record is not None]

    def _set_aside(self, why: str, records: Sequence[Record]) -> None:
        """Encode the records as an outbox entry again, so that they can be inspected and put back."""
        self.bad.append(encode_records(records))
        self.rejection = why


async def make_batch(folded: Folded) -> Batch:
    batch = Batch(folded)
    await batch.build()
    return batch
