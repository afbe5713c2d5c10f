"""Verification of a run against the audit: exactly one row, in the right state, for each request that was accepted.

Ids are compared one by one: equal counts could hide one row too many beside one too few. Rows are written a little
later than answers are given, so the comparison waits for them, but not for ever. Ids are kept as 32 hex digits each in
one byte array, since a set of a million texts would cost 100 MB. The database is read in short, read-only queries.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum

import asyncpg

from ledger.postgres import AWAY, Connection, closing, connect, reason
from scheduler.errors import ErrorCode
from tierlane_tools.bench.http_client import BenchResponse, header

PREFIX = b"req_"
HEX_CHARACTERS = 32
_BODY_START = b'{"request_id":"req_'
_HEX_AT = len(_BODY_START)
_HEX_END = _HEX_AT + HEX_CHARACTERS


class Fate(Enum):
    """What an answer says about the request's audit row."""

    COMPLETED = "completed"
    """200: one row, completed."""
    FAILED = "failed"
    """Failed after it was accepted: one row, failed."""
    UNCLEAR = "unclear"
    """The code does not tell whether it had been accepted: one row or none."""
    REFUSED = "refused"
    """Refused at the door: no row."""


# Codes that only an accepted request can get, and codes that one may get before as well as after.
_AFTER_ACCEPTANCE = frozenset(
    {
        ErrorCode.QUEUE_TIMEOUT,
        ErrorCode.GPU_TIMEOUT,
        ErrorCode.POISON_REQUEST,
        ErrorCode.INVALID_OUTPUT,
        ErrorCode.WORKER_LOST,
    }
)
_EITHER = frozenset(
    {
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.GATEWAY_LOST,
        ErrorCode.NO_CAPACITY,
        ErrorCode.MODEL_TOO_SLOW,
        ErrorCode.DRAINING,
        ErrorCode.CANCELLED,
        ErrorCode.ABANDONED,
        ErrorCode.INTERNAL_ERROR,
    }
)


def fate_of(status: int, code: str) -> Fate:
    """What an answer with this status and error code ("" = none) says."""
    if status == 200:
        return Fate.COMPLETED
    if code in _AFTER_ACCEPTANCE:
        return Fate.FAILED
    # An error without a code of ours comes from something in between, which knows nothing of acceptance.
    return Fate.UNCLEAR if code in _EITHER or not code else Fate.REFUSED


def request_id_hex(response: BenchResponse) -> bytes:
    """The 32 hex digits of the answer's request id, from the body of a 200 or the header; empty where it has none."""
    body = response.body
    if body.startswith(_BODY_START):
        digits = body[_HEX_AT:_HEX_END]
    else:
        value = header(response.head, b"x-request-id") or b""
        digits = value[len(PREFIX) :] if value.startswith(PREFIX) else b""
    return digits if len(digits) == HEX_CHARACTERS else b""


class AnswerIds:
    """All ids of a run, warm-up included, by fate."""

    def __init__(self) -> None:
        self._digits = {fate: bytearray() for fate in Fate}
        self._completed = self._digits[Fate.COMPLETED]
        self.without_id = 0  # Answers whose id could not be read.

    def add_completed(self, digits: bytes) -> None:
        """As `add`, for the fate of nearly all: a look-up by an enum's member costs as much as the rest of this."""
        if digits:
            self._completed += digits
        else:
            self.without_id += 1

    def add(self, fate: Fate, digits: bytes) -> None:
        """Note the id of one answer, as `request_id_hex` gave it."""
        if digits:
            self._digits[fate] += digits
        else:
            self.without_id += 1

    def count(self, fate: Fate) -> int:
        """How many answers had this fate and an id."""
        return len(self._digits[fate]) // HEX_CHARACTERS

    def of(self, fate: Fate) -> list[str]:
        """The ids of this fate as `req_...`, in the order of the answers."""
        digits = self._digits[fate].decode("latin-1")
        return ["req_" + digits[at : at + HEX_CHARACTERS] for at in range(0, len(digits), HEX_CHARACTERS)]

    def repeated(self) -> int:
        """Answers whose id another answer had before: the mark of one result given out twice."""
        everything = [name for fate in Fate for name in self.of(fate)]
        return len(everything) - len(set(everything))


CONNECT_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_MS = 30_000


@asynccontextmanager
async def audit_connection(database_url: str) -> AsyncIterator[Connection]:
    """A connection for one look. Raises what `ledger.postgres.AWAY` names, and ValueError for a URL that is none."""
    connection = await connect(
        database_url,
        name="tierlane bench",
        connect_timeout_s=CONNECT_TIMEOUT_S,
        statement_timeout_ms=STATEMENT_TIMEOUT_MS,
    )
    async with closing(connection):
        yield connection


POLL_S = 0.5
FETCH_ROWS = 5000

# The customers' other traffic in the same window is kept apart by the id of the key.
_WHERE = "FROM requests WHERE created_at BETWEEN $1 AND $2 AND api_key_id = ANY($3)"
_COUNT_FINAL = f"SELECT count(*) {_WHERE} AND status IN ('completed', 'failed')"
_ROWS = f"SELECT id, status {_WHERE}"


@dataclass(frozen=True)
class AuditResult:
    """What the comparison found; all numbers are requests."""

    expected: int
    """Answers that say their request was accepted: completed or failed after acceptance."""
    rows: int
    """Rows of these keys in the window."""
    completed_answers: int
    completed_rows: int
    missing: int
    """Accepted, but no row."""
    duplicated: int
    """More than one row."""
    wrong_status: int
    """A row whose status is not what the answer said."""
    refused: int
    """Refused at the door, yet there is a row."""
    unexplained: int
    """Rows whose id no answer carried: requests without an answer, or other traffic with these keys."""
    waited_s: float
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether every accepted request has its one row."""
        return not (self.error or self.missing or self.duplicated or self.wrong_status or self.refused)


@dataclass(frozen=True)
class AuditWindow:
    """Which rows to look at: ids made from `begin` to `end` by one of these keys."""

    begin: datetime
    end: datetime
    api_key_ids: tuple[str, ...]


def key_id(api_key: str) -> str:
    """The public part of a key `tl_<id>_<secret>`, which is what the audit stores; empty for another form."""
    parts = api_key.split("_")
    return parts[1] if len(parts) == 3 else ""


async def check_audit(database_url: str, window: AuditWindow, ids: AnswerIds, patience_s: float) -> AuditResult:
    """Compare, again and again until it agrees or `patience_s` is over. Never raises for a database that is away."""
    began = time.monotonic()
    fates = {name: fate for fate in Fate for name in ids.of(fate)}
    result = compare(fates, [])
    try:
        async with audit_connection(database_url) as connection:
            result = await _compare_until_agreed(connection, window, fates, began + patience_s)
    except (*AWAY, ValueError) as error:
        result = replace(result, error=f"The audit cannot be read: {reason(error)}.")
    return replace(result, waited_s=time.monotonic() - began)


async def _compare_until_agreed(
    connection: Connection, window: AuditWindow, fates: Mapping[str, Fate], deadline: float
) -> AuditResult:
    arguments = (window.begin, window.end, list(window.api_key_ids))
    expected = sum(fate in (Fate.COMPLETED, Fate.FAILED) for fate in fates.values())
    while True:
        in_time = time.monotonic() < deadline
        # The count is cheap, so it decides when the ids are worth fetching.
        if not in_time or await connection.fetchval(_COUNT_FINAL, *arguments) >= expected:
            result = compare(fates, await _rows(connection, arguments))
            if result.ok or not in_time:
                return result
        await asyncio.sleep(POLL_S)


async def _rows(connection: Connection, arguments: Sequence[object]) -> list[tuple[str, str]]:
    async with connection.transaction(readonly=True):
        cursor = connection.cursor(_ROWS, *arguments, prefetch=FETCH_ROWS)
        return [_pair(row) async for row in cursor]


def _pair(row: asyncpg.Record) -> tuple[str, str]:
    return row[0], row[1]


def compare(fates: Mapping[str, Fate], rows: Iterable[tuple[str, str]]) -> AuditResult:
    """Compare the fates that answers told with rows of (id, status)."""
    rows = list(rows)
    seen = Counter(name for name, _ in rows)
    status = dict(rows)
    by_fate = Counter(fates.values())
    accepted = [name for name, fate in fates.items() if fate in (Fate.COMPLETED, Fate.FAILED)]
    return AuditResult(
        expected=len(accepted),
        rows=len(rows),
        completed_answers=by_fate[Fate.COMPLETED],
        completed_rows=sum(state == "completed" for _, state in rows),
        missing=sum(name not in seen for name in accepted),
        duplicated=sum(count > 1 for count in seen.values()),
        wrong_status=sum(name in status and status[name] != fates[name].value for name in accepted),
        refused=sum(fate is Fate.REFUSED and name in seen for name, fate in fates.items()),
        unexplained=sum(name not in fates for name in seen),
        waited_s=0.0,
    )
