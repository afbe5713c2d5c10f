"""Rows of `requests` and `dead_letters` from audit records, in COPY's binary format. Pure functions.

A request has two records, accepted and ended, which may arrive in either order, apart, or repeatedly. The records of one
batch are folded into one row here; rows of different batches are merged by `merge_requests` in ledger/sql/audit.sql. A
request that failed for good also has a dead letter, whose body is customer data and is stored without changes.

A field is its length and its value, big-endian; NULL has the length -1. A row starts with the number of its fields. Fields
that many requests share (of the customer, of the batch) are encoded once and cached.
"""

import re
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime
from functools import lru_cache
from math import inf
from struct import Struct
from typing import Any, NamedTuple
from uuid import UUID

from scheduler.errors import ErrorCode, http_status
from scheduler.payload import decode_payload
from scheduler.protocol.audit_records import AcceptedRecord, DeadLetterRecord, EndedRecord, Record
from scheduler.redis_client.scripts import inner
from scheduler.states import State, tier_of

NULL = b"\xff\xff\xff\xff"
_BEGIN = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
_END = b"\xff\xff"
EPOCH_MS = 946_684_800_000  # The year 2000, from which PostgreSQL counts microseconds.
MAX_MS = 253_402_300_799_999  # The end of the year 9999: Python cannot read a later time.

_LENGTH = Struct(">i")
_SMALLINT = Struct(">ih")
_INTEGER = Struct(">ii")
_BIGINT = Struct(">iq")
_DOUBLE = Struct(">id")


def encode_text(value: str) -> bytes:
    """Empty text is NULL."""
    if not value:
        return NULL
    encoded = value.encode()
    return _LENGTH.pack(len(encoded)) + encoded


def encode_raw(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


def encode_smallint(value: int) -> bytes:
    return _SMALLINT.pack(2, value)


def encode_integer(value: int) -> bytes:
    return _INTEGER.pack(4, value)


def encode_double(value: float) -> bytes:
    """Negative numbers, infinity and NaN are NULL."""
    return _DOUBLE.pack(8, value) if 0 <= value < inf else NULL


def encode_timestamptz(epoch_ms: int) -> bytes:
    """0 and negative numbers, which mean "unknown", are NULL. Raises ValueError after the year 9999."""
    if epoch_ms > MAX_MS:
        raise ValueError(f"{epoch_ms} is not a time")
    return _BIGINT.pack(8, (epoch_ms - EPOCH_MS) * 1000) if epoch_ms > 0 else NULL


async def stream(rows: Iterable[bytes]) -> AsyncIterator[bytes]:
    """The data of a COPY of these rows."""
    yield b"".join((_BEGIN, *rows, _END))


COLUMNS = (
    # Of the request,
    "id",
    "created_at",
    "input_bytes",
    "latency_ms",
    "queue_ms",
    "tokens_used",
    "output_bytes",
    "cost_ms",
    "trace_id",
    # shared with other requests of the customer,
    "customer_id",
    "api_key_id",
    "tier",
    "model",
    "gateway_id",
    "endpoint",
    # and shared with other requests of the batch.
    "status",
    "error_code",
    "http_status",
    "completed_at",
    "gpu_ms",
    "batch_id",
    "batch_size",
    "worker_id",
    "attempts",
    "mode",
    "delivered",
    "served_from",
)
"""The order of the fields in a row. COPY does not depend on the order in the table."""

# With the version of the UUID: the first bits of other versions are not a time.
_ID = re.compile(r"req_[0-9a-f]{12}7[0-9a-f]{19}").fullmatch
_LAST_ID = f"req_{MAX_MS:012x}~"
_HEAD = Struct(">hi36siq")
_HEAD_AND_NUMBERS = Struct(">hi36siqiiididiiiiid")  # With six numbers, none of which is NULL.
_FIELDS = len(COLUMNS)
_NO_RUN = encode_text(State.QUEUED) + NULL * 11
_MODES = frozenset({"queue", "direct"})
_SHARED = frozenset({"cache", "collapsed"})

Row = bytes


class Folded:
    """Records by request id, in the order of their arrival.

    `delivered` are ends reported by gateways that equal a recorded end. They change a row only if an earlier batch has
    written another end, which they outweigh.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.accepted: dict[str, AcceptedRecord] = {}
        self.ended: dict[str, EndedRecord] = {}
        self.letters: dict[str, DeadLetterRecord] = {}
        self.delivered: dict[str, EndedRecord] = {}
        self.add(records)

    def __bool__(self) -> bool:
        return bool(self.accepted or self.ended or self.letters)

    def add(self, records: Iterable[Record]) -> None:
        """Add records. Of two records of one kind the first is kept, except if the second `outweighs` it."""
        accepted, ended = self.accepted, self.ended
        for record in records:
            if isinstance(record, EndedRecord):
                first = ended.setdefault(record.id, record)
                if first is not record:
                    self._second_end(first, record)
            elif isinstance(record, AcceptedRecord):
                accepted.setdefault(record.id, record)
            else:
                self.letters.setdefault(record.id, record)

    def _second_end(self, first: EndedRecord, second: EndedRecord) -> None:
        if outweighs(second, first):
            self.ended[second.id] = second
        elif second.delivered and not first.delivered:
            self.delivered.setdefault(second.id, second)


def outweighs(new: EndedRecord, old: EndedRecord) -> bool:
    """Whether an end replaces an earlier one: it was delivered to the client, and the earlier one was not.

    A delivered 504 also replaces a delivered result: direct mode records a result before it sends it, and sends a 504 instead
    if the disk takes too long. In all other cases the first end is kept.
    """
    if not new.delivered or (new.state == old.state and new.error_code == old.error_code):
        return False
    return not old.delivered or (old.state == State.COMPLETED and new.error_code == ErrorCode.DEADLINE_EXCEEDED)


def check_id(request_id: str) -> None:
    """Raises ValueError for an invalid id, which no table accepts."""
    if _ID(request_id) is None or request_id > _LAST_ID:
        raise ValueError(f"{request_id!r} is not a request id")


def to_row(request_id: str, accepted: AcceptedRecord | None, ended: EndedRecord | None) -> Row:
    """The row of one request, in the order of COLUMNS.

    Raises ValueError for an invalid id, customer or state, and struct.error for a number that the column cannot hold.
    """
    check_id(request_id)
    created = (int(request_id[4:16], 16) - EPOCH_MS) * 1000
    if accepted is not None and ended is not None:
        size, latency, queue = accepted.input_bytes, ended.latency_ms, ended.queue_ms
        tokens, output, cost = ended.tokens_used, ended.output_bytes, ended.cost_ms
        numbers = size and tokens and output and 0 <= latency < inf and 0 <= queue < inf and 0 <= cost < inf
        if numbers:  # Nearly all requests: one call.
            head = _HEAD_AND_NUMBERS.pack(
                *(_FIELDS, 36, request_id.encode(), 8, created),
                *(4, size, 8, latency, 8, queue, 4, tokens, 4, output, 8, cost),
            )
            return head + _owner_of(accepted) + _run_of(ended)
    head = _HEAD.pack(_FIELDS, 36, request_id.encode(), 8, created)
    return head + _numbers(accepted, ended) + _owner_of(accepted) + _run_of(ended)


def id_of(row: Row) -> str:
    return row[6:42].decode()


def _numbers(accepted: AcceptedRecord | None, ended: EndedRecord | None) -> bytes:
    size = _count(accepted.input_bytes) if accepted else NULL
    if ended is None:
        return size + NULL * 5
    times = encode_double(ended.latency_ms) + encode_double(ended.queue_ms)
    return size + times + _count(ended.tokens_used) + _count(ended.output_bytes) + encode_double(ended.cost_ms)


def _owner_of(record: AcceptedRecord | None) -> bytes:
    if record is None:
        return NULL * 7
    shared = record.customer_id, record.api_key_id, record.tier, record.model, record.gateway_id, record.endpoint
    return encode_text(record.trace_id) + _owner(*shared)


@lru_cache(maxsize=8192)
def _owner(customer_id: str, *texts: str) -> bytes:
    """The customer is checked here, since PostgreSQL would accept any 16 bytes."""
    customer = encode_raw(UUID(customer_id).bytes) if customer_id else NULL
    return customer + b"".join(map(encode_text, texts))


def _run_of(record: EndedRecord | None) -> bytes:
    if record is None:
        return _NO_RUN
    return _run(
        record.state,
        record.error_code,
        record.ended_at_ms,
        record.gpu_ms,
        record.batch_id,
        record.batch_size,
        record.worker_id,
        record.attempts,
        record.mode,
        record.delivered,
        record.served_from,
    )


@lru_cache(maxsize=256)
def _run(state: str, error_code: str, ended_at_ms: int, gpu_ms: float, *run: Any) -> bytes:
    """The fields that most requests of a batch share."""
    batch_id, batch_size, worker_id, attempts, mode, delivered, served_from = run
    code = _error_code(state, error_code)
    fields = (
        encode_text(state),
        encode_text(code),
        encode_smallint(http_status(code)),
        encode_timestamptz(ended_at_ms),
        encode_double(gpu_ms),
        encode_text(batch_id),
        _count(batch_size),
        encode_text(worker_id),
        encode_integer(attempts),  # 0 is not NULL: the request never ran.
        encode_text(mode if mode in _MODES else ""),  # A newer version may have another mode.
        encode_raw(b"\x01" if delivered else b"\x00"),
        encode_text(served_from if served_from in _SHARED else ""),
    )
    return b"".join(fields)


def _error_code(state: str, code: str) -> str:
    """The error code, empty for a completed request and never empty for a failed one."""
    if state == State.COMPLETED:
        return ""
    if state != State.FAILED:
        raise ValueError(f"{state!r} is not a terminal state")
    return code or ErrorCode.INTERNAL_ERROR.value


def _count(value: int) -> bytes:
    """0 means "unknown"."""
    return encode_integer(value) if value else NULL


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
