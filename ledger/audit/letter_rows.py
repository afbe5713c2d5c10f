"""Rows of `dead_letters` from audit records.

A request that failed for good has a dead letter, whose body is customer data and is stored without changes.
"""

from datetime import UTC, datetime
from typing import NamedTuple

from ledger.audit.rows import check_id
from scheduler.errors import ErrorCode
from scheduler.payload import decode_payload
from scheduler.protocol.audit_records import DeadLetterRecord, EndedRecord
from scheduler.redis_client.scripts import inner
from scheduler.states import tier_of

MAX_ATTEMPTS = 1_000_000


class LetterRow(NamedTuple):
    """A row of dead_letters, in the order of the parameters of `insert_dead_letters`."""

    request_id: str
    dead_at: datetime | None  # None: the time of the insert.
    customer_id: str | None
    tier: str | None
    model: str | None
    error_code: str
    attempts: int
    worker_ids: list[str]
    body: bytes | None


def to_letter_row(letter: DeadLetterRecord, ended: EndedRecord | None) -> LetterRow:
    """The row of one dead letter. Its time is the end of the request, if known.

    Raises ValueError for an invalid id or number of attempts. These are checked here, since PostgreSQL would log a part of a
    row that it rejects.
    """
    check_id(letter.id)
    if not 0 <= letter.attempts <= MAX_ATTEMPTS:
        raise ValueError(f"{letter.attempts} is not a number of attempts")
    try:
        body = inner(bytes(letter.body)) or None
    except ValueError:  # nil or false: the script had no body any more.
        body = None
    try:
        model = decode_payload(body).model if body else None
    except ValueError:  # A body that cannot be decoded is stored all the same.
        model = None
    ended_ms = ended.ended_at_ms if ended else 0
    return LetterRow(
        request_id=letter.id,
        dead_at=datetime.fromtimestamp(ended_ms / 1000, tz=UTC) if ended_ms > 0 else None,
        customer_id=letter.customer_id or None,
        tier=tier_of(letter.tier) or None,
        model=model,
        error_code=letter.error_code or ErrorCode.INTERNAL_ERROR.value,
        attempts=letter.attempts,
        worker_ids=letter.worker_ids,
        body=body,
    )
