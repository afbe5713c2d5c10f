"""Verification of a run against the audit: exactly one row, in the right state, for each request that was accepted.

Ids are compared one by one: equal counts could hide one row too many beside one too few. Rows are written a little
later than answers are given, so the comparison waits for them, but not for ever. The database is read in short, read-only
queries.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from ledger.postgres import AWAY, Connection, reason
from tierlane_tools.bench.verification.answer_ids import AnswerIds
from tierlane_tools.bench.verification.audit_connection import audit_connection
from tierlane_tools.bench.verification.fate import Fate

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
            async with connection.transaction(readonly=True):
                cursor = connection.cursor(_ROWS, *arguments, prefetch=FETCH_ROWS)
                rows = [(row[0], row[1]) async for row in cursor]
            result = compare(fates, rows)
            if result.ok or not in_time:
                return result
        await asyncio.sleep(POLL_S)


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
