"""The audit outbox in Redis: its records, its entries until they are in PostgreSQL, and its lag.

An `outbox` entry is a msgpack array of records, written by one script. Lua has no None inside an array, so an absent text is
"" and an absent number is 0 or -1; the ledger converts them into NULL. Each record is an array whose first element is its
tag, followed by the fields below. Scripts combine the records of many requests with common fields into one (`Entered`,
`Closed`), which is expanded here. A new field is the last one and has a default: older versions skip it, and their records
lack it.

Only the ledger's auditor reads entries. The lag is the age of the oldest entry that is not in PostgreSQL yet. Entries that
the auditor holds until requests have ended do not count.
"""

from collections.abc import Sequence
from hashlib import sha1
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script
from scheduler.request_id import created_ms


class AcceptedRecord(msgspec.Struct, array_like=True, frozen=True, tag="a"):
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


class EndedRecord(msgspec.Struct, array_like=True, frozen=True, tag="e"):
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
        each, endpoints = iter(self.each), self.endpoints or [""] * len(self.groups)
        for request_id, number, size, trace in zip(each, each, each, each, strict=True):
            tier, customer, key, model, *_ = self.groups[number - 1]
            endpoint = endpoints[number - 1]
            found.append(AcceptedRecord(request_id, customer, key, tier, model, self.gateway_id, size, trace, endpoint))
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
    costs: list[
        float
    ] = []  # Of each request, as in EndedRecord; not in `each`, because older versions would misread it.

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

_Known = AcceptedRecord | EndedRecord | DeadLetterRecord | Entered | Closed
_all = msgspec.msgpack.Decoder(list[_Known])
_one = msgspec.msgpack.Decoder(_Known)
_many = msgspec.msgpack.Decoder(list[msgspec.Raw])
encode_records = msgspec.msgpack.Encoder().encode


def decode_entry(entry: bytes) -> tuple[list[Record], list[bytes]]:
    """Decode one outbox entry. Returns its records, and the raw bytes of unreadable ones.

    An unreadable record does not affect the others.
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


BAD_CAP = 1000
"""The maximum number of stored entries that could not be written to PostgreSQL."""

TAKE_BYTES = 8 << 20
"""A take ends with the entry that reaches this size: dead letters contain bodies, and the call has a timeout."""


HELD_MS = 10_000
"""How long after a take its held entries do not count as lag; an auditor takes twice a second."""


class Taken(NamedTuple):
    """The result of a take."""

    held: int  # The number of held entries that Redis confirms: all that the caller named, or 0.
    entries: list[bytes]  # The entries after those, the oldest first.
    more: bool  # Whether there are probably more.


def name_of(entry: bytes) -> str:
    """The hash of an entry, by which the auditor names it to Redis."""
    return sha1(entry, usedforsecurity=False).hexdigest()


def _audit_take(*, auditor_id: str, limit: int, max_bytes: int, held: int, newest_name: str, held_ms: int) -> None: ...
def _audit_drop(*, auditor_id: str, count: int, oldest_name: str, max_bad: int, bad: Sequence[bytes]) -> None: ...


class Outbox:
    """One auditor's access to the outbox: take entries, then drop committed ones. All methods raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, auditor_id: str) -> None:
        self._client = client
        self._keys = keys
        self._own = keys.auditor_outbox(auditor_id)
        self._auditor_id = auditor_id
        self._take = Script("audit_take", _audit_take, client, keys)
        self._drop = Script("audit_drop", _audit_drop, client, keys)

    async def take(self, limit: int, held: int = 0, newest: str = "") -> Taken:
        """Move up to `limit` entries into the auditor's own list, those of dead auditors first.

        `held`: the caller already has this many of the oldest entries in that list, and `newest` is the name of the last of
        them. They are not returned again, unlike others that were taken before and not dropped. If Redis does not confirm them,
        it lost data or was set back: then nothing is taken, and the result has `held` 0. A take ends early with the entry that
        reaches TAKE_BYTES. Only the auditor that holds the lock may call this.
        """
        there, *entries = await self._take(
            auditor_id=self._auditor_id,
            limit=limit,
            max_bytes=TAKE_BYTES,
            held=held,
            newest_name=newest,
            held_ms=HELD_MS,
        )
        full = len(entries) >= limit or sum(map(len, entries)) >= TAKE_BYTES
        return Taken(there, entries, full or there != held)

    async def drop(self, count: int, oldest: str, bad: Sequence[bytes] = ()) -> None:
        """Remove the `count` oldest entries of the own list, because they are committed; `bad` ones are stored separately.

        `oldest`: the name of the first of them. If the list starts with another entry, nothing is removed.
        """
        await self._drop(auditor_id=self._auditor_id, count=count, oldest_name=oldest, max_bad=BAD_CAP, bad=bad)

    async def depth(self) -> int:
        """The number of entries, including taken ones."""
        async with bounded(self._client):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.llen(self._keys.outbox)
            pipeline.llen(self._own)
            waiting, taken = await pipeline.execute()
        return int(waiting) + int(taken)


class AuditLag:
    """Reads the oldest entries of the outbox and of the auditors' lists. Not called for requests of customers."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def oldest_ms(self) -> int | None:
        """When the oldest entry was written, in ms since the epoch; None if there is none.

        Raises RedisUnavailable.
        """
        async with bounded(self._client):
            members: set[bytes] = await self._client.smembers(self._keys.auditors)  # type: ignore[assignment]
            auditors = [member.decode() for member in members]
            held = (
                await self._client.mget([self._keys.auditor_held(auditor) for auditor in auditors]) if auditors else []
            )
            pipeline = self._client.pipeline(transaction=False)
            for auditor, count in zip(auditors, held, strict=True):
                pipeline.lindex(self._keys.auditor_outbox(auditor), -1 - int(count or 0))
            pipeline.lindex(self._keys.outbox, -1)
            oldest: list[bytes | None] = await pipeline.execute()
        times = [time for entry in oldest if entry and (time := written_ms(entry)) is not None]
        return min(times, default=None)


def written_ms(entry: bytes) -> int | None:
    """When an entry was written, according to its first record; None if it cannot be read."""
    for record in decode_entry(entry)[0]:
        if isinstance(record, EndedRecord):
            return record.ended_at_ms
        try:
            return created_ms(record.id)
        except ValueError:
            continue
    return None
