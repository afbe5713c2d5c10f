"""The records of the audit outbox.

An `outbox` entry is a msgpack array of records, written by one script. Lua has no None inside an array, so an absent text is
"" and an absent number is 0 or -1; the ledger converts them into NULL. Each record is an array whose first element is its
tag, followed by the fields below. Scripts combine the records of many requests with common fields into one (`Entered`,
`Closed`), which is expanded here. A new field is the last one and has a default: older versions skip it, and their records
lack it.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

_UNREADABLE = (msgspec.MsgspecError, TypeError, ValueError, IndexError)
_many = msgspec.msgpack.Decoder(list[msgspec.Raw])
encode_records = msgspec.msgpack.Encoder().encode


class AcceptedRecord(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="a"):
    """A request was admitted. Written by `admit`."""

    id: str
    customer_id: str
    api_key_id: str
    tier: str
    model: str
    gateway_id: str
    input_bytes: int
    trace_id: str
    endpoint: str = ""  # As in metrics, such as /v1/chat/completions.


class EndedRecord(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="e"):
    """A request reached its terminal state. Times are milliseconds; `ended_at_ms` is Redis TIME."""

    id: str
    state: str
    error_code: str
    ended_at_ms: int
    latency_ms: float
    queue_ms: float  # -1: it never left its tier queue.
    gpu_ms: float  # -1: no run of it ended.
    batch_id: str
    batch_size: int
    worker_id: str
    attempts: int
    tokens_used: int
    output_bytes: int
    mode: str = "queue"  # Or "direct": a worker was called without Redis.
    delivered: bool = False  # Written by a gateway for the response that it sent; it overrides a later failure.
    served_from: str = ""
    """`cache`, `collapsed` (the run of an equal request), or "" for its own run or none."""
    cost_ms: float = -1.0  # The GPU time that it pays; -1: it is not charged, or an older version recorded it.


class DeadLetterRecord(msgspec.Struct, array_like=True, frozen=True, tag="d"):
    """A request became a dead letter. `tier` may be that of a background queue. `body`: its packed payload, as a string in Lua's msgpack; see `inner` in scripts.py."""

    id: str
    customer_id: str
    tier: str
    error_code: str
    attempts: int
    worker_ids: list[str]
    body: msgspec.Raw


class Entered(msgspec.Struct, array_like=True, frozen=True, tag="c"):
    """All requests that one call of `admit` accepted."""

    gateway_id: str
    groups: list[tuple[str, str, str, str, Any, Any, Any]]  # Tier, customer, key, model; then limits.
    each: list[Any]  # Flat: id, number of its group, input bytes, trace.
    endpoints: list[str] = []  # Of each group; not in the groups, because older versions accept only tuples of seven.

    def records(self) -> list["Record"]:
        """A record for each request. Raises TypeError, ValueError or IndexError."""
        found: list[Record] = []
        each, endpoints, gateway_id = iter(self.each), self.endpoints or [""] * len(self.groups), self.gateway_id
        for request_id, number, size, trace in zip(each, each, each, each, strict=True):
            tier, customer, key, model, *_ = self.groups[number - 1]
            endpoint = endpoints[number - 1]
            found.append(AcceptedRecord(request_id, customer, key, tier, model, gateway_id, size, trace, endpoint))
        return found


class Closed(msgspec.Struct, array_like=True, frozen=True, tag="f"):
    """Requests of one batch, or of none, that ended in the same way at the same time."""

    state: str
    error_code: str
    ended_at_ms: int
    batch_id: str
    batch_size: int
    worker_id: str
    attempts: int
    each: list[Any]  # Flat: id, latency ms, queue ms, gpu ms, tokens used, output bytes.
    served_from: str = ""
    costs: list[float] = []  # As in EndedRecord; not in `each`, because older versions would misread it.

    def records(self) -> list["Record"]:
        """A record for each request. Raises ValueError."""
        state, code, at_ms, attempts = self.state, self.error_code, self.ended_at_ms, self.attempts
        batch = self.batch_id, self.batch_size, self.worker_id
        each, more = iter(self.each), ("queue", False, self.served_from)
        requests = zip(each, each, each, each, each, each, strict=True)
        costs = self.costs or [-1.0] * (len(self.each) // 6)
        return [
            EndedRecord(
                request_id, state, code, at_ms, latency, queue, gpu, *batch, attempts, tokens, size, *more, cost
            )
            for (request_id, latency, queue, gpu, tokens, size), cost in zip(requests, costs, strict=True)
        ]


Record = AcceptedRecord | EndedRecord | DeadLetterRecord

_GROUPS = (Entered, Closed)
_Known = AcceptedRecord | EndedRecord | DeadLetterRecord | Entered | Closed
_all = msgspec.msgpack.Decoder(list[_Known])
_one = msgspec.msgpack.Decoder(_Known)


def decode_entry(entry: bytes) -> tuple[list[Record], list[bytes]]:
    """Decode one outbox entry. Returns its records, and the raw bytes of unreadable ones.

    An unreadable record does not affect the others.
    """
    try:
        found: list[Record] = []
        for known in _all.decode(entry):
            if isinstance(known, _GROUPS):
                found += known.records()
            else:
                found.append(known)
    except _UNREADABLE:
        pass
    else:
        return found, []
    try:
        parts = _many.decode(entry)
    except msgspec.MsgspecError:
        return [], [entry]
    records: list[Record] = []
    bad: list[bytes] = []
    for part in parts:
        try:
            records += _records(_one.decode(part))
        except _UNREADABLE:
            bad.append(bytes(part))
    return records, bad


def _records(known: _Known) -> Sequence[Record]:
    return known.records() if isinstance(known, _GROUPS) else (known,)
