"""Outbox entries to rows, with the bad ones set apart: what lies between taking entries and writing them."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from ledger.audit_rows import COLUMNS, Known, Row, fold, to_row
from ledger.audit_writer import Refused
from ledger.letter_rows import LetterRow, to_letter_row
from scheduler.audit import Record, decode_entry, encode_records

RECORDS_A_TURN = 250
"""After so many records other tasks get a turn: the auditor lives in one process with those that others wait for."""

_CREATED_AT, _KEY_ID = (COLUMNS.index(name) for name in ("created_at", "api_key_id"))


class Batch:
    """What one take came to: rows to write, and outbox entries of what never can be a row."""

    def __init__(self, unreadable: Sequence[bytes] = ()) -> None:
        self.rows: list[Row | LetterRow] = []  # A dead letter stands behind its request's row, to be committed with it.
        self.later: list[Row | LetterRow] = []  # Second rows of a request, to be written when `rows` are.
        self.bad = list(unreadable)
        self.refusal: str | None = None  # Why the last of the bad ones is bad.
        self._sources: dict[int, list[Record]] = {}

    def add(self, request_id: str, known: Known) -> None:
        """Make the rows of one request; what cannot become one costs nothing but itself."""
        accepted, ended, letter, told = known
        if accepted or ended:
            self._make(self.rows, lambda: to_row(request_id, known), accepted, ended)
        if letter:
            self._make(self.rows, lambda: to_letter_row(letter, ended), letter)
        if told:
            self._make(self.later, lambda: to_row(request_id, Known(ended=told)), told)

    def refuse(self, refused: Sequence[Refused]) -> None:
        """Set rows aside that PostgreSQL did not take."""
        for row, why in refused:
            self._set_aside(why, self._sources.pop(id(row)))
        self.rows = [row for row in self.rows if id(row) in self._sources]
        self.later = [row for row in self.later if id(row) in self._sources]

    def request_rows(self) -> list[Row]:
        """One row for each request of the audit, without the dead letters."""
        return [row for row in self.rows if not isinstance(row, LetterRow)]

    def key_uses(self) -> Iterator[tuple[str, datetime]]:
        """Which keys were used, and when."""
        return ((row[_KEY_ID], row[_CREATED_AT]) for row in self.request_rows() if row[_KEY_ID])

    def _make(self, rows: list[Row | LetterRow], make: Callable[[], Row | LetterRow], *records: Record | None) -> None:
        sources = [record for record in records if record is not None]
        try:
            row = make()
        except (ValueError, OverflowError, OSError) as error:
            self._set_aside(str(error), sources)
        else:
            rows.append(row)
            self._sources[id(row)] = sources

    def _set_aside(self, why: str, records: list[Record]) -> None:
        """As an outbox entry again, so that it can be looked at and put back."""
        self.bad.append(encode_records(records))
        self.refusal = why


async def read_batch(entries: Sequence[bytes]) -> Batch:
    """Decode and fold a take."""
    records, unreadable = await _decoded(entries)
    requests = fold(records)
    batch = Batch(unreadable)
    for number, (request_id, known) in enumerate(requests.items()):
        if number % RECORDS_A_TURN == 0:
            await asyncio.sleep(0)
        batch.add(request_id, known)
    return batch


async def _decoded(entries: Sequence[bytes]) -> tuple[list[Record], list[bytes]]:
    records: list[Record] = []
    bad: list[bytes] = []
    turn = 0
    for entry in entries:
        read, unreadable = decode_entry(entry)
        records += read
        bad += unreadable
        if len(records) // RECORDS_A_TURN > turn:
            turn = len(records) // RECORDS_A_TURN
            await asyncio.sleep(0)
    return records, bad
