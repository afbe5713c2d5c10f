"""Audit records to rows of `requests`: pure functions.

A request has two records, accepted and ended, that may arrive together, apart, twice, or in the wrong order. Those in
one batch are folded into one row here; those in different batches meet in ledger/sql/merge_requests.sql. One that was
given up for good has a dead letter beside them, which is a row of another table (ledger/letter_rows.py).
"""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from math import inf
from typing import Any, NamedTuple

from scheduler.audit import Accepted, DeadLetter, Ended, Record
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
    "mode",
    "delivered",
)
_ID = re.compile(r"req_[0-9a-f]{32}")
_NOT_ACCEPTED = (None,) * 6
_NOT_ENDED = (None,) * 14
_MODES = frozenset({"queue", "direct"})

Row = tuple[Any, ...]


class Known(NamedTuple):
    """What is known of one request in one batch.

    `told` is a result that the client was given, where `ended` is one already: it changes nothing, unless an earlier
    batch has left a failure in the table that it outweighs.
    """

    accepted: Accepted | None = None
    ended: Ended | None = None
    letter: DeadLetter | None = None
    told: Ended | None = None


_NOTHING = Known()


def fold(records: Iterable[Record]) -> dict[str, Known]:
    """What is known per request id. Of two of one kind the first stands, but see `outweighs`."""
    requests: dict[str, Known] = {}
    for record in records:
        known = requests.get(record.id, _NOTHING)
        if isinstance(record, Accepted):
            requests[record.id] = Known(known.accepted or record, known.ended, known.letter, known.told)
        elif isinstance(record, Ended):
            requests[record.id] = _with_end(known, record)
        else:
            requests[record.id] = Known(known.accepted, known.ended, known.letter or record, known.told)
    return requests


def _with_end(known: Known, record: Ended) -> Known:
    if known.ended is None or outweighs(record, known.ended):
        return Known(known.accepted, record, known.letter, known.told)
    if _is_told(record) and not known.ended.delivered:
        return Known(known.accepted, known.ended, known.letter, known.told or record)
    return known


def outweighs(new: Ended, old: Ended) -> bool:
    """Whether an end replaces an earlier one: the client was given a result, and then a failure was noted for nobody.

    Otherwise the first terminal state is the true one.
    """
    return _is_told(new) and old.state == State.FAILED and not old.delivered


def _is_told(record: Ended) -> bool:
    return record.delivered and record.state == State.COMPLETED


def check_id(request_id: str) -> None:
    """Raises ValueError for an id that is not ours: no table takes it."""
    if _ID.fullmatch(request_id) is None:
        raise ValueError(f"{request_id!r} is not a request id")


def to_row(request_id: str, known: Known) -> Row:
    """The row of one request, in the order of COLUMNS. Raises ValueError for an id or a state that is not ours."""
    check_id(request_id)
    customer, key, tier, model, gateway, input_bytes, trace = _accepted_part(known.accepted)
    status, code, http, completed, latency, queue, gpu, batch, size, worker, attempts, tokens, out, mode, delivered = (
        _ended_part(known.ended)
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
        mode,
        delivered,
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
        return (State.QUEUED.value, *_NOT_ENDED)
    code = _error_code(record)
    return (
        record.state,
        code,
        http_status(code or ""),
        moment(record.ended_at_ms),
        _time(record.latency_ms),
        _time(record.queue_ms),
        _time(record.gpu_ms),
        record.batch_id or None,
        record.batch_size or None,
        record.worker_id or None,
        record.attempts,  # 0 says something: it never ran.
        record.tokens_used or None,
        record.output_bytes or None,
        record.mode if record.mode in _MODES else None,  # A newer version may know another one.
        record.delivered,
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


def moment(epoch_ms: int) -> datetime | None:
    """Milliseconds since the epoch as a time; None for 0 and less, which stand for "not known"."""
    return datetime.fromtimestamp(epoch_ms / 1000, tz=UTC) if epoch_ms > 0 else None
