"""Audit records as they wait in Redis: an `outbox` element is a msgpack array of them, written by one script.

Lua has no None inside an array, so an absent text is "" and an absent number is 0 or -1; the ledger turns them
into NULL. Each record is an array whose first element is its tag, in the order of the fields below.
"""

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


class DeadLetter(msgspec.Struct, array_like=True, frozen=True, tag="d"):
    """A request was given up for good. `body` is its packed payload as Lua packs a string; see packed.inner."""

    id: str
    customer_id: str
    tier: str
    error_code: str
    attempts: int
    worker_ids: list[str]
    body: msgspec.Raw


Record = Accepted | Ended | DeadLetter

_all = msgspec.msgpack.Decoder(list[Record])
_one = msgspec.msgpack.Decoder(Record)
_many = msgspec.msgpack.Decoder(list[msgspec.Raw])
encode_records = msgspec.msgpack.Encoder().encode


def decode_entry(entry: bytes) -> tuple[list[Record], list[bytes]]:
    """Decode one outbox element into its records and the raw bytes of those that cannot be read.

    One bad record never costs its neighbours: it is returned apart, to be counted and set aside.
    """
    try:
        return _all.decode(entry), []
    except msgspec.MsgspecError:
        return _read_apart(entry)


def _read_apart(entry: bytes) -> tuple[list[Record], list[bytes]]:
    try:
        parts = _many.decode(entry)
    except msgspec.MsgspecError:
        return [], [entry]
    records: list[Record] = []
    bad: list[bytes] = []
    for part in parts:
        try:
            records.append(_one.decode(part))
        except msgspec.MsgspecError:
            bad.append(bytes(part))
    return records, bad
