"""Dead letters to rows of `dead_letters`: pure functions. The body is customer data, kept as it is and never shown here."""

from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from ledger.audit.rows import check_id
from scheduler.errors import ErrorCode
from scheduler.packed import inner
from scheduler.payload import decode_payload
from scheduler.protocol.audit_outbox import DeadLetter, Ended

MOST_ATTEMPTS = 1_000_000


class LetterRow(NamedTuple):
    """One row, in the order of the parameters of ledger/sql/insert_dead_letters.sql."""

    request_id: str
    dead_at: datetime | None  # None: when it is written.
    customer_id: str | None
    tier: str | None
    model: str | None
    error_code: str
    attempts: int
    worker_ids: list[str]
    body: bytes | None


def to_letter_row(letter: DeadLetter, ended: Ended | None) -> LetterRow:
    """The row of one dead letter; its time is that of the request's end, where that is known.

    Raises ValueError for what is not one of ours. Checked here and not left to the table, whose refusal would put a
    part of the row into PostgreSQL's log.
    """
    check_id(letter.id)
    if not 0 <= letter.attempts <= MOST_ATTEMPTS:
        raise ValueError(f"{letter.attempts} is not a number of attempts")
    body = _body(letter.body)
    return LetterRow(
        request_id=letter.id,
        dead_at=_moment(ended.ended_at_ms) if ended else None,
        customer_id=letter.customer_id or None,
        tier=letter.tier or None,
        model=_model(body),
        error_code=letter.error_code or ErrorCode.INTERNAL_ERROR.value,
        attempts=letter.attempts,
        worker_ids=letter.worker_ids,
        body=body,
    )


def _body(packed: msgspec.Raw) -> bytes | None:
    """What was packed; None where the script had no body any more (Lua's nil and false too)."""
    try:
        return inner(bytes(packed)) or None
    except ValueError:
        return None


def _model(body: bytes | None) -> str | None:
    """The model asked for; a body that cannot be read is kept all the same."""
    try:
        return decode_payload(body).model if body else None
    except ValueError:
        return None


def _moment(epoch_ms: int) -> datetime | None:
    """Milliseconds since the epoch as a time; None for 0 and less, which stand for "not known"."""
    return datetime.fromtimestamp(epoch_ms / 1000, tz=UTC) if epoch_ms > 0 else None
