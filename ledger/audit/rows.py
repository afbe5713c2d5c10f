"""Rows of `requests` and `dead_letters` from audit records, in COPY's binary format: pure functions.

A request has two records, accepted and ended, that may arrive together, apart, twice, or in the wrong order. Those in
one batch are folded into one row here; those in different batches meet in ledger/sql/merge_requests.sql. A request that
failed for good has a dead letter beside them; its body is customer data, kept as it is and never shown here.

A field is its length and its value, big-endian; NULL is the length -1. A row begins with the number of its fields. What
many requests share (whose they are, the batch in which they ran) is made once for all of them: nothing is built per
request that is not written.
"""

import re
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime
from functools import lru_cache
from math import inf
from struct import Struct
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from scheduler.errors import ErrorCode, http_status
from scheduler.payload import decode_payload
from scheduler.protocol.audit_outbox import AcceptedRecord, DeadLetterRecord, EndedRecord, Record
from scheduler.redis_client.scripts import inner
from scheduler.states import State

NULL = b"\xff\xff\xff\xff"
_BEGIN = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
_END = b"\xff\xff"
EPOCH_MS = 946_684_800_000  # PostgreSQL counts microseconds from the year 2000.
MOST_MS = 253_402_300_799_999  # The end of the year 9999: what is later could be written, but not read again.

_LENGTH = Struct(">i")
_SMALLINT = Struct(">ih")
_INTEGER = Struct(">ii")
_BIGINT = Struct(">iq")
_DOUBLE = Struct(">id")


def encode_text(value: str) -> bytes:
    """A text; an empty one is NULL."""
    if not value:
        return NULL
    encoded = value.encode()
    return _LENGTH.pack(len(encoded)) + encoded


def encode_raw(value: bytes) -> bytes:
    """The bytes of any type."""
    return _LENGTH.pack(len(value)) + value


def encode_smallint(value: int) -> bytes:
    """Raises struct.error for one that is too large."""
    return _SMALLINT.pack(2, value)


def encode_integer(value: int) -> bytes:
    """Raises struct.error for one that is too large."""
    return _INTEGER.pack(4, value)


def encode_boolean(value: bool) -> bytes:  # noqa: FBT001 - it is a field like the others
    return encode_raw(b"\x01" if value else b"\x00")


def encode_double(value: float) -> bytes:
    """NULL for less than 0, for infinity and for NaN."""
    return _DOUBLE.pack(8, value) if 0 <= value < inf else NULL


def encode_timestamptz(epoch_ms: int) -> bytes:
    """A time; NULL for 0 and less, which stand for "not known". Raises ValueError for one that nobody could read."""
    if epoch_ms > MOST_MS:
        raise ValueError(f"{epoch_ms} is not a time")
    return _BIGINT.pack(8, (epoch_ms - EPOCH_MS) * 1000) if epoch_ms > 0 else NULL


async def stream(rows: Iterable[bytes]) -> AsyncIterator[bytes]:
    """What COPY is sent for these rows."""
    yield b"".join((_BEGIN, *rows, _END))


COLUMNS = (
    # The request's own,
    "id",
    "created_at",
    "input_bytes",
    "latency_ms",
    "queue_ms",
    "tokens_used",
    "output_bytes",
    "trace_id",
    # what it shares with others of its customer,
    "customer_id",
    "api_key_id",
    "tier",
    "model",
    "gateway_id",
    # and with others of its batch.
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
"""In the order in which a row has them; that of the table does not matter to COPY."""

# The version of the UUID is part of it: of another one the first bits are no time.
_ID = re.compile(r"req_[0-9a-f]{12}7[0-9a-f]{19}").fullmatch
_LAST_ID = f"req_{MOST_MS:012x}~"
_HEAD = Struct(">hi36siq")
_WHOLE = Struct(">hi36siqiiididiiii")  # And five numbers that are all known.
_FIELDS = len(COLUMNS)
_NOBODY = NULL * 5
_NO_RUN = encode_text(State.QUEUED) + NULL * 11
_MODES = frozenset({"queue", "direct"})
_SHARED = frozenset({"cache", "collapsed"})

Row = bytes


class Folded:
    """What is known of requests, by their ids, each in the order of its arrival.

    `told` are answers that a client was given where the same end stands already: they change nothing, unless an earlier
    batch has left another end in the table that they outweigh.
    """

    def __init__(self) -> None:
        self.accepted: dict[str, AcceptedRecord] = {}
        self.ended: dict[str, EndedRecord] = {}
        self.letters: dict[str, DeadLetterRecord] = {}
        self.told: dict[str, EndedRecord] = {}

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self.accepted or self.ended or self.letters)

    def add(self, records: Iterable[Record]) -> None:
        """Of two records of one kind the first stands, but see `outweighs`."""
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
            self.told.setdefault(second.id, second)


def fold(records: Iterable[Record]) -> Folded:
    """What is known of requests by these records."""
    folded = Folded()
    folded.add(records)
    return folded


def outweighs(new: EndedRecord, old: EndedRecord) -> bool:
    """Whether an end replaces an earlier one: a client was given it for an answer, and the other one was noted for nobody.

    Of a result and a 504 that were both noted as delivered the 504 is true: direct mode notes a result before it sends it,
    and sends a 504 instead where the disk takes too long. Otherwise the first terminal state is the true one.
    """
    if not new.delivered or (new.state == old.state and new.error_code == old.error_code):
        return False
    return not old.delivered or (old.state == State.COMPLETED and new.error_code == ErrorCode.DEADLINE_EXCEEDED)


def check_id(request_id: str) -> None:
    """Raises ValueError for an id that is not ours: no table takes it."""
    if _ID(request_id) is None or request_id > _LAST_ID:
        raise ValueError(f"{request_id!r} is not a request id")


def to_row(request_id: str, accepted: AcceptedRecord | None, ended: EndedRecord | None) -> Row:
    """The row of one request, in the order of COLUMNS.

    Raises ValueError for an id, a customer or a state that is not ours, and struct.error for what no column can hold.
    """
    check_id(request_id)
    created = (int(request_id[4:16], 16) - EPOCH_MS) * 1000
    if accepted is not None and ended is not None:
        size, latency, queue = accepted.input_bytes, ended.latency_ms, ended.queue_ms
        tokens, output = ended.tokens_used, ended.output_bytes
        if size and tokens and output and 0 <= latency < inf and 0 <= queue < inf:  # As nearly all are: in one step.
            head = _WHOLE.pack(
                _FIELDS, 36, request_id.encode(), 8, created, 4, size, 8, latency, 8, queue, 4, tokens, 4, output
            )
            return head + _whose_of(accepted) + _run_of(ended)
    head = _HEAD.pack(_FIELDS, 36, request_id.encode(), 8, created)
    return head + _numbers(accepted, ended) + _whose_of(accepted) + _run_of(ended)


def id_of(row: Row) -> str:
    """The request of a row."""
    return row[6:42].decode()


def _numbers(accepted: AcceptedRecord | None, ended: EndedRecord | None) -> bytes:
    size = _count(accepted.input_bytes) if accepted else NULL
    if ended is None:
        return size + NULL * 4
    times = encode_double(ended.latency_ms) + encode_double(ended.queue_ms)
    return size + times + _count(ended.tokens_used) + _count(ended.output_bytes)


def _whose_of(record: AcceptedRecord | None) -> bytes:
    if record is None:
        return NULL + _NOBODY
    whose = _whose(record.customer_id, record.api_key_id, record.tier, record.model, record.gateway_id)
    return encode_text(record.trace_id) + whose


@lru_cache(maxsize=8192)
def _whose(customer_id: str, *texts: str) -> bytes:
    """Looked at here and not by PostgreSQL: that says of a customer only that its binary form is wrong."""
    customer = encode_raw(UUID(customer_id).bytes) if customer_id else NULL
    return customer + b"".join(map(encode_text, texts))


def _run_of(record: EndedRecord | None) -> bytes:
    if record is None:
        return _NO_RUN
    shared = (
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
    return _run(*shared)


@lru_cache(maxsize=256)
def _run(state: str, error_code: str, ended_at_ms: int, gpu_ms: float, *run: Any) -> bytes:
    """What the members of one batch mostly have in common."""
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
        encode_integer(attempts),  # 0 says something: it never ran.
        encode_text(mode if mode in _MODES else ""),  # A newer version may know another one.
        encode_boolean(delivered),
        encode_text(served_from if served_from in _SHARED else ""),
    )
    return b"".join(fields)


def _error_code(state: str, code: str) -> str:
    """Empty exactly for what completed: a failure must not go without a reason, nor a success with one."""
    if state == State.COMPLETED:
        return ""
    if state != State.FAILED:
        raise ValueError(f"{state!r} is not a terminal state")
    return code or ErrorCode.INTERNAL_ERROR.value


def _count(value: int) -> bytes:
    """0 stands for "not known"."""
    return encode_integer(value) if value else NULL


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


def to_letter_row(letter: DeadLetterRecord, ended: EndedRecord | None) -> LetterRow:
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
