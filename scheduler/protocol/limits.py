"""Recent rejections, remaining limits, parts of limits in cells, and quotas restored after a loss of Redis.

The audit has accepted requests only, and a rejection must not write to Redis in `admit`. So each gateway sends its
rejections with its heartbeat: one list per gateway, bounded in number and in time. A gateway has a new id after every
start and the lists outlive it, so `refusal_lists` is their index. Reading the remaining limits (`GET /v1/me`,
`tierlane explain`) charges nothing.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis

from ratelimit.limits import Bucket, EffectiveLimits, RemainingLimits, packed_buckets, packed_limits
from scheduler.protocol.admission import KINDS, current_offsets
from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script
from scheduler.request_id import created_ms

MAX_PER_HEARTBEAT = 256
"""Rejections per heartbeat."""

MAX_PER_GATEWAY = 20_000
"""Rejections in one gateway's list, about 200 bytes each; one customer that is always rejected fills it in 10 minutes."""

KEEP_MS = 600_000
"""How long a gateway's list is kept after its newest entry."""

_LISTS_READ = 64
_PAGE = 500
_PAGES_FOR_RECENT = 10

_encode = msgspec.msgpack.Encoder().encode
_left = msgspec.msgpack.Decoder(RemainingLimits)

CHUNK = 1000


class RejectionRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One rejected request, with its limits at that time.

    `outcome`: of admission, "" if it was not called. Rates are requests/s; 0 in a limit means that there is none. It does
    not contain the input.
    """

    id: str
    customer_id: str
    key_id: str
    tier: str
    code: str  # The ErrorCode that the client received.
    outcome: str = ""
    factor: float = 1.0
    rate: float = 0.0
    burst: float = 0.0
    tokens_per_minute: float = 0.0
    max_concurrency: int = 0
    key_rate: float = 0.0
    key_burst: float = 0.0
    quota: str = ""  # The name of the quota that rejected it, such as 1day or 1day:gpu.
    quota_amount: int = 0
    remaining: float = 0.0  # Remaining requests.
    tokens_left: float = 0.0
    in_use: int = 0
    depth: int = 0  # Queued requests of its tier.
    retry_after_ms: int = 0
    more: int = 0  # Further rejections of the customer for the same reason in this heartbeat, which are not stored.
    limit: str = ""  # The bucket that rejected it, such as "60000 tokens per minute".
    left: float = 0.0  # Remaining units in it.
    endpoint: str = ""  # As in metrics.

    @property
    def at_ms(self) -> int:
        """Its time in ms since the epoch, by its gateway's clock; part of the id."""
        return created_ms(self.id)


_rejection = msgspec.msgpack.Decoder(RejectionRecord)


async def find_rejection(client: Redis, keys: Keys, request_id: str) -> RejectionRecord | None:
    """The rejection of a request, or None. Reads all stored ones in the worst case. Raises RedisUnavailable."""
    wanted = request_id.encode()
    for name in await _lists(client, keys):
        async for packed in _entries(client, name, MAX_PER_GATEWAY):
            # Most other entries are excluded by their bytes, which is faster than decoding.
            if wanted in packed and (found := _readable(packed)) and found.id == request_id:
                return found
    return None


async def recent_rejections(client: Redis, keys: Keys, customer_id: str, limit: int) -> list[RejectionRecord]:
    """The newest rejections of a customer, newest first, among the newest 5,000 of each gateway. Raises RedisUnavailable."""
    wanted = customer_id.encode()
    found: dict[str, RejectionRecord] = {}  # By id: a heartbeat with an unknown outcome may have been written twice.
    for name in await _lists(client, keys):
        here = 0
        async for packed in _entries(client, name, _PAGE * _PAGES_FOR_RECENT):
            if wanted in packed and (rejection := _readable(packed)) and rejection.customer_id == customer_id:
                found[rejection.id] = rejection
                here += 1
                if here >= limit:
                    break
    return sorted(found.values(), key=lambda rejection: rejection.id, reverse=True)[:limit]


async def _lists(client: Redis, keys: Keys) -> list[str]:
    """The keys of the lists, the one with the newest entry first."""
    async with bounded(client):
        gateways: list[Any] = await client.zrange(keys.refusal_lists, 0, _LISTS_READ - 1, desc=True)
    return [keys.refusals(gateway.decode()) for gateway in gateways]


async def _entries(client: Redis, name: str, most: int) -> AsyncIterator[bytes]:
    """The entries of a list, newest first, in pages, because a long reply would delay other calls."""
    for start in range(0, most, _PAGE):
        async with bounded(client):
            page: list[Any] = await client.lrange(name, start, start + _PAGE - 1)
        for packed in page:
            yield packed
        if len(page) < _PAGE:
            return


def _readable(packed: bytes) -> RejectionRecord | None:
    try:
        return _rejection.decode(packed)
    except msgspec.MsgspecError:  # Written by a newer version.
        return None


def _limit_state(
    *, customer_id: str, packed_limits: bytes, key_id: str, key_rate: float, key_burst: float, packed_kinds: bytes
) -> None: ...


class LimitState:
    """The script `limit_state` of one pool."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._script = Script("limit_state", _limit_state, client, keys)

    async def read(self, customer_id: str, limits: EffectiveLimits, key_id: str = "") -> RemainingLimits:
        """What is left of `limits`; `key_id` is needed if the key has a limit of its own. Raises RedisUnavailable."""
        key_rate, key_burst = limits.key_in_cell
        packed = await self._script(
            customer_id=customer_id,
            packed_limits=_encode(packed_limits(limits, offsets=current_offsets(limits.zone))),
            key_id=key_id,
            key_rate=key_rate,
            key_burst=key_burst,
            packed_kinds=KINDS,
        )
        return _left.decode(packed)


class Parts(NamedTuple):
    """The parts of a customer's limits that one cell may use, in ten-thousandths; of quotas: that of a new window."""

    rates: int = 0
    concurrency: int = 0
    quotas: int = 0


REMOVED = Parts(-1)
"""The customer uses only this cell from here on."""


class Grant(NamedTuple):
    """`amount` of a quota in one of its windows, of which this cell may spend `grant`. `others`: other cells may spend more."""

    name: str
    amount: int
    window: int = -1
    grant: int = 0
    others: bool = True


class PartsOrder(NamedTuple):
    """The parts of one customer in one cell; None: they are only read. `buckets`: its base limits."""

    customer_id: str
    buckets: Sequence[Bucket]
    parts: Parts | None
    grants: Sequence[Grant] = ()
    zone: str = ""  # Of its quotas, as in EffectiveLimits.


class GrantState(NamedTuple):
    """A quota in the present window of one cell. With `grant` = `spent` it may spend no more."""

    window: int
    spent: int
    grant: int


class PartsState(NamedTuple):
    """The parts of one customer in a cell after a call, which hold for `left_ms`, and then half of them. `asked`: requests so far."""

    parts: Parts | None
    left_ms: int
    open: int
    asked: int
    grants: Sequence[GrantState]


class Allotted(NamedTuple):
    """The reply of a cell. Not `accepted`: nothing was written, and another allotter has it for `held_ms`, with `epoch`."""

    accepted: bool
    now_ms: int
    epoch: int
    held_ms: int
    customers: Sequence[str]
    states: Sequence[PartsState]


_PackedState = tuple[Parts | bool, int, int, int, list[GrantState]]
_PackedAllotted = tuple[bool, int, int, int, list[str], list[_PackedState]]
_allotted = msgspec.msgpack.Decoder(_PackedAllotted, strict=False)


def _allot(
    *, allotter_id: str, epoch: int, call_number: int, ends_at: int, packed_orders: bytes, packed_kinds: bytes
) -> None: ...


class Allotments:
    """The script `allot` of one cell."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._script = Script("allot", _allot, client, keys)

    async def allot(
        self, allotter: str, epoch: int, number: int, ends_ms: int = 0, orders: Sequence[PartsOrder] = ()
    ) -> Allotted:
        """Claim the cell, and process the orders. With epoch 0 it is not claimed. `number` increases with every call.

        `ends_ms`: TIME of the cell until which the parts hold. Raises RedisUnavailable if the outcome is unknown, RedisFull.
        """
        rows: list[tuple[Any, ...]] = []
        for order in orders:
            parts: Any = False if order.parts is None else () if order.parts is REMOVED else order.parts
            grants = [(g.name, g.amount, g.window, g.grant, int(g.others)) for g in order.grants]
            offsets = current_offsets(order.zone) or False
            rows.append((order.customer_id, packed_buckets(order.buckets), parts, grants, offsets))
        packed = await self._script(
            allotter_id=allotter,
            epoch=epoch,
            call_number=number,
            ends_at=ends_ms,
            packed_orders=_encode(rows),
            packed_kinds=KINDS,
        )
        accepted, now_ms, known, held_ms, customers, states = _allotted.decode(packed)
        found = [
            PartsState(known_parts if isinstance(known_parts, Parts) else None, left_ms, in_use, asked, grant_states)
            for known_parts, left_ms, in_use, asked, grant_states in states
        ]
        return Allotted(accepted, now_ms, known, held_ms, customers, found)


class QuotaSpent(NamedTuple):
    """What counts against one quota of one customer, in the window with this number, from `began_ms` to before `ends_ms` (UTC).

    `period` is the name of the quota, `spent` an amount of its smallest parts, as in ratelimit/quotas.py.
    """

    customer_id: str
    period: str  # Such as 1day.
    window: int
    began_ms: int
    ends_ms: int
    spent: int


def _quota_restore(packed_spent: bytes, told: bytes) -> None: ...


class QuotaRestore:
    """The script `quota_restore` of one pool. Both methods raise RedisUnavailable.

    `left`: the names of cells whose customers get another home; for each change, quotas are restored once.
    """

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._names = (keys.epoch, keys.quotas_told)
        self._script = Script("quota_restore", _quota_restore, client, keys)

    async def wanted(self, left: str = "") -> bool:
        """Whether quotas were not restored since the current epoch began."""
        epoch, restored = await self._epochs()
        return epoch is not None and _told(epoch, left) != restored

    async def apply(self, spent: Sequence[QuotaSpent], left: str = "") -> int:
        """Raise lower counts. Returns how many were raised. If Redis is lost meanwhile, a restore is still wanted."""
        epoch, _ = await self._epochs()
        raised = 0
        for start in range(0, max(1, len(spent)), CHUNK):
            is_last = start + CHUNK >= len(spent)
            restored_epoch = _told(epoch or b"", left) if is_last else b""
            raised += int(await self._script(_encode(spent[start : start + CHUNK]), restored_epoch))
        return raised

    async def _epochs(self) -> Sequence[Any]:
        """The current epoch, and the epoch for which quotas were restored; None if unknown."""
        async with bounded(self._client):
            return await self._client.mget(*self._names)


def _told(epoch: bytes, left: str) -> bytes:
    return b"%s %s" % (epoch, left.encode()) if epoch and left else epoch
