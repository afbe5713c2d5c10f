"""The audit outbox in Redis: its records, its entries until PostgreSQL has them, and its lag.

An `outbox` element is a msgpack array of records, written by one script. Lua has no None inside an array, so an absent
text is "" and an absent number is 0 or -1; the ledger turns them into NULL. Each record is an array whose first element
is its tag, in the order of the fields below. What scripts write of many requests at once says in one record what they
have in common: `Entered` and `Closed`, which readers never see.

The ledger's auditor is the only reader. The lag is the age of the oldest entry that is not in PostgreSQL yet; entries
that the auditor has read and keeps for the ends of what has only begun in them do not count.
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


class EndedRecord(msgspec.Struct, array_like=True, frozen=True, tag="e"):
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


class DeadLetterRecord(msgspec.Struct, array_like=True, frozen=True, tag="d"):
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
            found.append(AcceptedRecord(request_id, customer, key, tier, model, self.gateway_id, size, trace))
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
            EndedRecord(request_id, state, code, at_ms, latency, queue, gpu, *batch, attempts, tokens, size, *more)
            for request_id, latency, queue, gpu, tokens, size in zip(each, each, each, each, each, each, strict=True)
        ]


Record = AcceptedRecord | EndedRecord | DeadLetterRecord

_Known = AcceptedRecord | EndedRecord | DeadLetterRecord | Entered | Closed
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


BAD_CAP = 1000
"""Entries that could not be written are kept for a look, at most so many."""

TAKE_BYTES = 8 << 20
"""A take ends with the entry that fills this: dead letters carry bodies, and the answer must come in a call's time."""


HELD_MS = 10_000
"""So long health may take it from the last take that entries wait on purpose; an auditor takes twice a second."""


class Taken(NamedTuple):
    """What a take came to."""

    held: int  # How many entries the caller holds that are there: those that it named, or 0 where that is not true.
    entries: list[bytes]  # What comes behind them, oldest first.
    more: bool  # Whether more is likely to wait.


def name_of(entry: bytes) -> str:
    """Its hash, by which auditor and Redis tell whether they speak of the same entry."""
    return sha1(entry, usedforsecurity=False).hexdigest()


class Outbox:
    """One auditor's hands on the outbox: take, then drop what is committed. All raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys, auditor_id: str) -> None:
        self._client = client
        self._keys = keys
        self._own = keys.auditor_outbox(auditor_id)
        self._auditor_id = auditor_id
        self._take = Script("audit_take", client, keys)
        self._drop = Script("audit_drop", client, keys)

    async def take(self, limit: int, held: int = 0, newest: str = "") -> Taken:
        """Move up to `limit` entries into the own list, dead auditors' first.

        `held`: so many of the oldest in that list are known to the caller, and `newest` is the name of the last of them;
        they are not returned again, unlike others that were taken before and not dropped. Where that is not so, Redis
        was lost or set back: nothing is taken, and all that is there counts as not held. A take ends early behind the
        entry with which it comes to TAKE_BYTES. Only the auditor that holds the lock may call this.
        """
        there, *entries = await self._take(self._auditor_id, limit, TAKE_BYTES, held, newest, HELD_MS)
        full = len(entries) >= limit or sum(map(len, entries)) >= TAKE_BYTES
        return Taken(there, entries, full or there != held)

    async def drop(self, count: int, oldest: str, bad: Sequence[bytes] = ()) -> None:
        """Forget the `count` oldest entries of the own list: they are committed, but for `bad`, kept for a look.

        `oldest`: the name of the first of them; where another one stands there, nothing is dropped.
        """
        await self._drop(self._auditor_id, count, oldest, BAD_CAP, *bad)

    async def depth(self) -> int:
        """Entries that wait, the taken ones included."""
        async with bounded():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.llen(self._keys.outbox)
            pipeline.llen(self._own)
            waiting, taken = await pipeline.execute()
        return int(waiting) + int(taken)


class AuditLag:
    """Looks at the tail of the outbox and of each auditor's own list; asked only when health is."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def oldest_ms(self) -> int | None:
        """When the oldest waiting entry was written, ms since the epoch; None when nothing waits.

        Raises RedisUnavailable.
        """
        async with bounded():
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
    """When an outbox entry was written, by its first record; None for one that cannot be read."""
    for record in decode_entry(entry)[0]:
        if isinstance(record, EndedRecord):
            return record.ended_at_ms
        try:
            return created_ms(record.id)
        except ValueError:
            continue
    return None
