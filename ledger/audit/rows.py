"""What audit records come to: pure functions that fold them by request and make rows of `requests` from them.

A request has two records, accepted and ended, that may arrive together, apart, twice, or in the wrong order. Those in
one batch are folded into one row here; those in different batches meet in ledger/sql/merge_requests.sql. One that was
given up for good has a dead letter beside them, which is a row of another table (ledger/letter_rows.py).

A row is made in the form in which COPY is sent it, and what many requests share (whose they are, the batch in which
they ran) is made once for all of them: nothing is built per request that is not written.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from math import inf
from struct import Struct
from typing import Any
from uuid import UUID

from ledger import copy_format as copy
from scheduler.errors import ErrorCode, http_status
from scheduler.protocol.audit_outbox import Accepted, DeadLetter, Ended, Record
from scheduler.states import State

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
_LAST_ID = f"req_{copy.MOST_MS:012x}~"
_HEAD = Struct(">hi36siq")
_WHOLE = Struct(">hi36siqiiididiiii")  # And five numbers that are all known.
_FIELDS = len(COLUMNS)
_NOBODY = copy.NULL * 5
_NO_RUN = copy.text(State.QUEUED) + copy.NULL * 11
_MODES = frozenset({"queue", "direct"})
_SHARED = frozenset({"cache", "collapsed"})

Row = bytes


class Folded:
    """What is known of requests, by their ids, each in the order of its arrival.

    `told` are answers that a client was given where the same end stands already: they change nothing, unless an earlier
    batch has left another end in the table that they outweigh.
    """

    def __init__(self) -> None:
        self.accepted: dict[str, Accepted] = {}
        self.ended: dict[str, Ended] = {}
        self.letters: dict[str, DeadLetter] = {}
        self.told: dict[str, Ended] = {}

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self.accepted or self.ended or self.letters)

    def add(self, records: Iterable[Record]) -> None:
        """Of two records of one kind the first stands, but see `outweighs`."""
        accepted, ended = self.accepted, self.ended
        for record in records:
            if isinstance(record, Ended):
                first = ended.setdefault(record.id, record)
                if first is not record:
                    self._second_end(first, record)
            elif isinstance(record, Accepted):
                accepted.setdefault(record.id, record)
            else:
                self.letters.setdefault(record.id, record)

    def _second_end(self, first: Ended, second: Ended) -> None:
        if outweighs(second, first):
            self.ended[second.id] = second
        elif second.delivered and not first.delivered:
            self.told.setdefault(second.id, second)


def fold(records: Iterable[Record]) -> Folded:
    """What is known of requests by these records."""
    folded = Folded()
    folded.add(records)
    return folded


def outweighs(new: Ended, old: Ended) -> bool:
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


def to_row(request_id: str, accepted: Accepted | None, ended: Ended | None) -> Row:
    """The row of one request, in the order of COLUMNS.

    Raises ValueError for an id, a customer or a state that is not ours, and struct.error for what no column can hold.
    """
    check_id(request_id)
    created = (int(request_id[4:16], 16) - copy.EPOCH_MS) * 1000
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


def _numbers(accepted: Accepted | None, ended: Ended | None) -> bytes:
    size = _count(accepted.input_bytes) if accepted else copy.NULL
    if ended is None:
        return size + copy.NULL * 4
    times = copy.double(ended.latency_ms) + copy.double(ended.queue_ms)
    return size + times + _count(ended.tokens_used) + _count(ended.output_bytes)


def _whose_of(record: Accepted | None) -> bytes:
    if record is None:
        return copy.NULL + _NOBODY
    whose = _whose(record.customer_id, record.api_key_id, record.tier, record.model, record.gateway_id)
    return copy.text(record.trace_id) + whose


@lru_cache(maxsize=8192)
def _whose(customer_id: str, *texts: str) -> bytes:
    """Looked at here and not by PostgreSQL: that says of a customer only that its binary form is wrong."""
    customer = copy.raw(UUID(customer_id).bytes) if customer_id else copy.NULL
    return customer + b"".join(map(copy.text, texts))


def _run_of(record: Ended | None) -> bytes:
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
        copy.text(state),
        copy.text(code),
        copy.smallint(http_status(code)),
        copy.timestamptz(ended_at_ms),
        copy.double(gpu_ms),
        copy.text(batch_id),
        _count(batch_size),
        copy.text(worker_id),
        copy.integer(attempts),  # 0 says something: it never ran.
        copy.text(mode if mode in _MODES else ""),  # A newer version may know another one.
        copy.boolean(delivered),
        copy.text(served_from if served_from in _SHARED else ""),
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
    return copy.integer(value) if value else copy.NULL
