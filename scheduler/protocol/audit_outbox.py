"""Audit records as they wait in Redis: an `outbox` element is a msgpack array of them, written by one script.

Lua has no None inside an array, so an absent text is "" and an absent number is 0 or -1; the ledger turns them
into NULL. Each record is an array whose first element is its tag, in the order of the fields below. What scripts write of
many requests at once says in one record what they have in common: `Entered` and `Closed`, which readers never see.
"""

from collections.abc import Sequence
from typing import Any

import msgspec


class Accepted(msgspec.Struct, array_like=True, frozen=True, tag="a"):
    """A request was admitted. Written by `admit`."""

    id: str
    customer_id: str
    api_key_id: str
    tier: str
    model: str
    gateway_id: str
    input_bytes: int
    trace_id: str


class Ended(msgspec.Struct, array_like=True, frozen=True, tag="e"):
    """A request reached its terminal state. Times are milliseconds; `ended_at_ms` is Redis TIME."""

    id: str
    state: str
    error_code: str
    ended_at_ms: int
    latency_ms: float
    queue_ms: float  # -1: it never left its tier queue
    gpu_ms: float  # -1: it never ran to an end
    batch_id: str
    batch_size: int
    worker_id: str
    attempts: int
    tokens_used: int
    output_bytes: int
    mode: str = "queue"  # Or "direct": a worker was called past Redis.
    delivered: bool = False  # Written by a gateway for what it told its client, which outweighs a failure noted later.
    served_from: str = (
        ""  # `cache`, or `collapsed` into the run of an equal request; "": it had a run of its own, or none.
    )


class DeadLetter(msgspec.Struct, array_like=True, frozen=True, tag="d"):
    """A request was given up for good. `body` is its packed payload as Lua packs a string; see packed.inner."""

    id: str
    customer_id: str
    tier: str
    error_code: str
    attempts: int
    worker_ids: list[str]
    body: msgspec.Raw


class Entered(msgspec.Struct, array_like=True, frozen=True, tag="c"):
    """All that one call of `admit` accepted."""

    gateway_id: str
    groups: list[tuple[str, str, str, str, Any, Any, Any]]  # Tier, customer, key, model; then limits.
    each: list[Any]  # Flat: id, number of its group, input bytes, trace.

    def records(self) -> list["Record"]:
        """One for each request. Raises TypeError, ValueError or IndexError."""
        found: list[Record] = []
        each = iter(self.each)
        for request_id, number, size, trace in zip(each, each, each, each, strict=True):
            tier, customer, key, model, *_ = self.groups[number - 1]
            found.append(Accepted(request_id, customer, key, tier, model, self.gateway_id, size, trace))
        return found


class Closed(msgspec.Struct, array_like=True, frozen=True, tag="f"):
    """Members of one batch that ended in one way at one time, or requests that never were in one."""

    state: str
    error_code: str
    ended_at_ms: int
    batch_id: str
    batch_size: int
    worker_id: str
    attempts: int
    each: list[Any]  # Flat: id, latency ms, queue ms, gpu ms, tokens used, output bytes.
    served_from: str = ""

    def records(self) -> list["Record"]:
        """One for each request. Raises ValueError."""
        state, code, at_ms, attempts = self.state, self.error_code, self.ended_at_ms, self.attempts
        batch = self.batch_id, self.batch_size, self.worker_id
        each = iter(self.each)
        more = ("queue", False, self.served_from) if self.served_from else ()
        return [
            Ended(request_id, state, code, at_ms, latency, queue, gpu, *batch, attempts, tokens, size, *more)
            for request_id, latency, queue, gpu, tokens, size in zip(each, each, each, each, each, each, strict=True)
        ]


Record = Accepted | Ended | DeadLetter

_Known = Accepted | Ended | DeadLetter | Entered | Closed
_all = msgspec.msgpack.Decoder(list[_Known])
_one = msgspec.msgpack.Decoder(_Known)
_many = msgspec.msgpack.Decoder(list[msgspec.Raw])
encode_records = msgspec.msgpack.Encoder().encode


def decode_entry(entry: bytes) -> tuple[list[Record], list[bytes]]:
    """Decode one outbox element into its records and the raw bytes of those that cannot be read.

    One bad record never costs its neighbours: it is returned apart, to be counted and set aside.
    """
    try:
        return [record for known in _all.decode(entry) for record in _records(known)], []
    except _UNREADABLE:
        return _read_apart(entry)


_UNREADABLE = (msgspec.MsgspecError, TypeError, ValueError, IndexError)


def _records(known: _Known) -> Sequence[Record]:
    return known.records() if isinstance(known, Entered | Closed) else (known,)


def _read_apart(entry: bytes) -> tuple[list[Record], list[bytes]]:
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
