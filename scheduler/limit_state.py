"""What is left of one customer's limits now, for people who ask: `GET /v1/me` and `tierlane explain`. Spends nothing."""

from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script


class LimitsInForce(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a customer, and of one of its keys, as admission is told them; 0 where there is no such limit."""

    customer_id: str
    rate: float  # Requests/s.
    burst: float
    tokens_per_minute: float = 0.0
    max_concurrency: int = 0
    quotas: Sequence[tuple[str, int]] = ()  # Period and amount, such as ("1day", 10000).
    key_id: str = ""
    key_rate: float = 0.0
    key_burst: float = 0.0


class LimitsLeft(msgspec.Struct, array_like=True, frozen=True):
    """What is left of them: fields as in `Verdict`, `in_use` without the one who asks."""

    remaining: float
    reset_ms: int
    tokens_left: float
    tokens_reset_ms: int
    in_use: int
    quotas: Sequence[tuple[int, int]]  # What is left and ms until it starts anew, in the order of the limits.


_encode = msgspec.msgpack.Encoder().encode
_left = msgspec.msgpack.Decoder(LimitsLeft)


class LimitState:
    """The limit_state script on one pool."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._script = Script("limit_state", client, keys)

    async def read(self, limits: LimitsInForce) -> LimitsLeft:
        """Look. Raises RedisUnavailable."""
        told = _encode((limits.rate, limits.burst, limits.tokens_per_minute, limits.max_concurrency, limits.quotas))
        packed = await self._script(limits.customer_id, told, limits.key_id, limits.key_rate, limits.key_burst)
        return _left.decode(packed)
