"""Rows of `requests` from audit records, in COPY's binary format. Pure functions.

The two records of a request, accepted and ended, make one row. Fields that many requests share (of the customer, of the
batch) are encoded once and cached.
"""

import re
from functools import lru_cache
from math import inf
from struct import Struct
from typing import Any
from uuid import UUID

from ledger.audit.copy_format import (
    EPOCH_MS,
    MAX_MS,
    NULL,
    encode_count,
    encode_double,
    encode_integer,
    encode_raw,
    encode_smallint,
    encode_text,
    encode_timestamptz,
)
from scheduler.errors import ErrorCode, http_status
from scheduler.protocol.audit_records import AcceptedRecord, EndedRecord
from scheduler.states import State

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
    head += encode_count(accepted.input_bytes) if accepted else NULL
    if ended is None:
        head += NULL * 5
    else:
        head += encode_double(ended.latency_ms) + encode_double(ended.queue_ms) + encode_count(ended.tokens_used)
        head += encode_count(ended.output_bytes) + encode_double(ended.cost_ms)
    return head + _owner_of(accepted) + _run_of(ended)


def id_of(row: Row) -> str:
    return row[6:42].decode()


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
    if state not in (State.COMPLETED, State.FAILED):
        raise ValueError(f"{state!r} is not a terminal state")
    code = "" if state == State.COMPLETED else error_code or ErrorCode.INTERNAL_ERROR.value
    fields = (
        encode_text(state),
        encode_text(code),
        encode_smallint(http_status(code)),
        encode_timestamptz(ended_at_ms),
        encode_double(gpu_ms),
        encode_text(batch_id),
        encode_count(batch_size),
        encode_text(worker_id),
        encode_integer(attempts),  # 0 is not NULL: the request never ran.
        encode_text(mode if mode in _MODES else ""),  # A newer version may have another mode.
        encode_raw(b"\x01" if delivered else b"\x00"),
        encode_text(served_from if served_from in _SHARED else ""),
    )
    return b"".join(fields)
