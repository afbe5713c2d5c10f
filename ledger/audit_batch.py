"""Folded requests to rows, with the bad ones set apart: what lies between reading entries and writing them."""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import datetime
from struct import error as StructError  # noqa: N812 - its own name is no class's

from ledger.audit.rows import Folded, Row, id_of, to_row
from ledger.audit.writer import Refused
from ledger.letter_rows import LetterRow, to_letter_row
from scheduler.protocol.audit_outbox import DeadLetter, Ended, Record, encode_records
from scheduler.request_id import created_at

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

    def refuse(self, refused: Sequence[Refused]) -> None:
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

    def _add_letter(self, letter: DeadLetter, ended: Ended | None) -> None:
        try:
            self.known.append(to_letter_row(letter, ended))
        except _NO_ROW as error:
            self._set_aside(str(error), [letter])

    def _add_told(self, told: Ended) -> None:
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
