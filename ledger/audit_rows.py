"""Audit records to rows of `requests`: pure functions.

A request has two records, accepted and ended, that may arrive together, apart, twice, or in the wrong order. Those in
one batch are folded into one row here; those in different batches meet in ledger/sql/merge_requests.sql.
"""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from math import inf
from typing import Any, NamedTuple

from scheduler.audit import Accepted, Ended, Record
from scheduler.errors import ErrorCode, http_status
from scheduler.request_id import created_at
from scheduler.states import State

COLUMNS = (
    "id",
    "created_at",
    "customer_id",
    "api_key_id",
    "tier",
    "model",
    "status",
    "error_code",
    "http_status",
    "completed_at",
    "latency_ms",
    "queue_ms",
    "gpu_ms",
    "batch_id",
    "batch_size",
    "worker_id",
    "gateway_id",
    "attempts",
    "tokens_used",
    "input_bytes",
    "output_bytes",
    "trace_id",
)
_ID = re.compile(r"req_[0-9a-f]{32}")
_NOT_ACCEPTED = (None,) * 6
_NOT_ENDED = (None,) * 11

Row = tuple[Any, ...]


class Pair(NamedTuple):
    """What is known of one request in one batch."""

    accepted: Accepted | None
    ended: Ended | None


def fold(records: Iterable[Record]) -> dict[str, Pair]:
    """One pair per request id. Of two of one kind the first stands: the first terminal state is the true one."""
    pairs: dict[str, Pair] = {}
    for record in records:
        accepted, ended = pairs.get(record.id, (None, None))
        if isinstance(record, Accepted):
            pairs[record.id] = Pair(accepted or record, ended)
        else:
            pairs[record.id] = Pair(accepted, ended or record)
    return pairs


def to_row(request_id: str, pair: Pair) -> Row:
    """The row of one request, in the order of COLUMNS. Raises ValueError for an id or a state that is not ours."""
    if _ID.fullmatch(request_id) is None:
        raise ValueError(f"{request_id!r} is not a request id")
    customer, key, tier, model, gateway, input_bytes, trace = _accepted_part(pair.accepted)
    status, code, http, completed, latency, queue, gpu, batch, size, worker, attempts, tokens, out = _ended_part(
        pair.ended
    )
    return (
        request_id,
        created_at(request_id),
        customer,
        key,
        tier,
        model,
        status,
        code,
        http,
        completed,
        latency,
        queue,
        gpu,
        batch,
        size,
        worker,
        gateway,
        attempts,
        tokens,
        input_bytes,
        out,
        trace,
    )


def _accepted_part(record: Accepted | None) -> tuple[Any, ...]:
    if record is None:
        return (*_NOT_ACCEPTED, None)
    return (
        record.customer_id or None,
        record.api_key_id or None,
        record.tier or None,
        record.model or None,
        record.gateway_id or None,
        record.input_bytes or None,
        record.trace_id or None,
    )


def _ended_part(record: Ended | None) -> tuple[Any, ...]:
    if record is None:
        return (State.QUEUED.value, *_NOT_ENDED, None)
    code = _error_code(record)
    return (
        record.state,
        code,
        http_status(code or ""),
        _moment(record.ended_at_ms),
        _time(record.latency_ms),
        _time(record.queue_ms),
        _time(record.gpu_ms),
        record.batch_id or None,
        record.batch_size or None,
        record.worker_id or None,
        record.attempts,  # 0 says something: it never ran.
        record.tokens_used or None,
        record.output_bytes or None,
    )


def _error_code(record: Ended) -> str | None:
    """None exactly for what completed: a failure must not go without a reason, nor a success with one."""
    if record.state == State.COMPLETED:
        return None
    if record.state != State.FAILED:
        raise ValueError(f"{record.state!r} is not a terminal state")
    return record.error_code or ErrorCode.INTERNAL_ERROR.value


def _time(milliseconds: float) -> float | None:
    # Written so that NaN, too, is None.
    return milliseconds if 0 <= milliseconds < inf else None


def _moment(epoch_ms: int) -> datetime | None:
    return datetime.fromtimestamp(epoch_ms / 1000, tz=UTC) if epoch_ms > 0 else None
