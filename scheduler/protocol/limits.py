"""Limits as people look them up: recent rejections, what is left, and quotas restored after a loss of Redis.

The audit has accepted requests only, and a rejection may not write to Redis in `admit`. So each gateway sends what it
rejected with its heartbeat: one list a gateway, bounded in number and in time. A gateway's id is new with every start
and the lists outlive it, so `refusal_lists` is their index. Looking up what is left (`GET /v1/me`, `tierlane explain`)
spends nothing.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis

from ratelimit.limits import EffectiveLimits, RemainingLimits, packed_limits
from scheduler.protocol.admission import KINDS
from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script
from scheduler.request_id import created_ms

MAX_A_BEAT = 256
"""Refusals that one beat may carry."""

KEPT_A_GATEWAY = 20_000
"""Refusals in one gateway's list, about 200 bytes each; a customer that is refused all the time fills it in 10 minutes."""

KEEP_MS = 600_000
"""How long a gateway's list stands after its newest entry."""

_LISTS_READ = 64
_PAGE = 500
_PAGES_FOR_RECENT = 10


class RejectionRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One request that was not let in, with the limits that were in force for it then.

    `outcome` is what admission said, "" where it was not asked. Rates are requests/s; 0 in a limit means that there is no
    such limit. Inputs are not in it.
    """

    id: str
    customer_id: str
    key_id: str
    tier: str
    code: str  # What the client was told: an ErrorCode.
    outcome: str = ""
    factor: float = 1.0
    rate: float = 0.0
    burst: float = 0.0
    tokens_per_minute: float = 0.0
    max_concurrency: int = 0
    key_rate: float = 0.0
    key_burst: float = 0.0
    quota: str = ""  # The period of the quota that refused it, such as 1day.
    quota_amount: int = 0
    remaining: float = 0.0  # Requests that were left.
    tokens_left: float = 0.0
    in_use: int = 0
    depth: int = 0  # Requests that waited in its tier.
    retry_after_ms: int = 0
    more: int = 0  # So many more of its customer were refused for the same reason within the beat, and are not kept.
    limit: str = ""  # The bucket that rejected it, in words, such as "60000 tokens per minute".
    left: float = 0.0  # Units that were left in it.

    @property
    def at_ms(self) -> int:
        """When it came, ms since the epoch by its gateway's clock: the id carries it."""
        return created_ms(self.id)


_refusal = msgspec.msgpack.Decoder(RejectionRecord)


async def find_refusal(client: Redis, keys: Keys, request_id: str) -> RejectionRecord | None:
    """The refusal of a request; None where none is kept. Reads every kept one at the worst. Raises RedisUnavailable."""
    wanted = request_id.encode()
    for name in await _lists(client, keys):
        async for packed in _entries(client, name, KEPT_A_GATEWAY):
            # Most entries are told from the wanted one by their bytes, which costs less than decoding.
            if wanted in packed and (found := _readable(packed)) and found.id == request_id:
                return found
    return None


async def recent_refusals(client: Redis, keys: Keys, customer_id: str, limit: int) -> list[RejectionRecord]:
    """The newest refusals of a customer, newest first, among the newest 5,000 of each gateway. Raises RedisUnavailable."""
    wanted = customer_id.encode()
    found: dict[str, RejectionRecord] = {}  # By id: a beat whose outcome was not known may have been written twice.
    for name in await _lists(client, keys):
        here = 0
        async for packed in _entries(client, name, _PAGE * _PAGES_FOR_RECENT):
            if wanted in packed and (refusal := _readable(packed)) and refusal.customer_id == customer_id:
                found[refusal.id] = refusal
                here += 1
                if here >= limit:
                    break
    return sorted(found.values(), key=lambda refusal: refusal.id, reverse=True)[:limit]


async def _lists(client: Redis, keys: Keys) -> list[str]:
    """The lists that may stand, the one with the newest entry first."""
    async with bounded():
        gateways: list[Any] = await client.zrange(keys.refusal_lists, 0, _LISTS_READ - 1, desc=True)
    return [keys.refusals(gateway.decode()) for gateway in gateways]


async def _entries(client: Redis, name: str, most: int) -> AsyncIterator[bytes]:
    """The entries of a list, newest first, a page a call: a long reply would hold up everybody else."""
    for start in range(0, most, _PAGE):
        async with bounded():
            page: list[Any] = await client.lrange(name, start, start + _PAGE - 1)
        for packed in page:
            yield packed
        if len(page) < _PAGE:
            return


def _readable(packed: bytes) -> RejectionRecord | None:
    try:
        return _refusal.decode(packed)
    except msgspec.MsgspecError:  # Written by a newer version.
        return None


_encode = msgspec.msgpack.Encoder().encode
_left = msgspec.msgpack.Decoder(RemainingLimits)


class LimitState:
    """The limit_state script on one pool."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._script = Script("limit_state", client, keys)

    async def read(self, customer_id: str, limits: EffectiveLimits, key_id: str = "") -> RemainingLimits:
        """What is left of `limits`; `key_id` is needed where the key has its own. Raises RedisUnavailable."""
        rate, burst = (limits.key.rate, limits.key.size) if limits.key else (0.0, 0.0)
        packed = await self._script(customer_id, _encode(packed_limits(limits)), key_id, rate, burst, KINDS)
        return _left.decode(packed)


CHUNK = 1000


class QuotaSpent(NamedTuple):
    """How many requests count against one quota of one customer, in the window that began at `began_ms` (UTC)."""

    customer_id: str
    period: str  # Such as 1day.
    began_ms: int
    spent: int


class QuotaRestore:
    """The quota_restore script on one pool. Both methods raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._names = (keys.epoch, keys.quotas_told)
        self._script = Script("quota_restore", client, keys)

    async def wanted(self) -> bool:
        """Whether this Redis has a beginning since which nobody has told it."""
        epoch, told = await self._look()
        return epoch is not None and epoch != told

    async def tell(self, spent: Sequence[QuotaSpent]) -> int:
        """Raise what stands lower; how many did. One that is emptied meanwhile still wants to be told."""
        epoch, _ = await self._look()
        raised = 0
        for start in range(0, max(1, len(spent)), CHUNK):
            is_last = start + CHUNK >= len(spent)
            raised += await self._tell_some(spent[start : start + CHUNK], epoch or b"" if is_last else b"")
        return raised

    async def _look(self) -> Sequence[Any]:
        """In bytes, None where it is not known: when this Redis began, and of which beginning it was told."""
        async with bounded():
            return await self._client.mget(*self._names)

    async def _tell_some(self, chunk: Sequence[QuotaSpent], told: bytes) -> int:
        return int(await self._script(_encode(chunk), told))
