"""`admit`: many submissions in one call, each admitted whole or not at all."""

from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from scheduler.keys import Keys
from scheduler.scripts import RedisFull, Script
from scheduler.states import Admission

MAX_SUBMISSIONS = 256
"""A call: keeps the script under a millisecond or two, and Lua's unpack within its stack."""

KEEP_MS = 30_000
"""How long a request is kept past its deadline: the result is the truth that pub/sub may have lost."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One request that asks to enter. Times are ms that are left, `rate` and `burst` the key's limit in requests.

    The order of the fields is that of admit.lua; `body` stays last, since it travels apart (Lua's msgpack has no bin).
    """

    id: str
    tier: str
    customer_id: str
    api_key_id: str
    nonce: str
    model: str
    input_bytes: int
    total_ms: int
    queue_ms: int
    rate: float
    burst: float
    trace_id: str = ""
    idempotency: str = ""  # What names the client's Idempotency-Key, unique over customers; "": none was sent.
    fingerprint: str = ""  # Of the body, so that a key that is used for another body is noticed.
    again: bool = False  # It was accepted before, and Redis may have lost it: no limit is asked or spent again.
    body: bytes


class TierLimit(msgspec.Struct, array_like=True, frozen=True):
    """What a tier may take now. `ahead` names this tier and every tier above it; -1 switches a shed rule off."""

    name: str
    rate: float
    burst: float
    max_depth: int
    ahead: Sequence[str]
    shed_depth: int = -1
    shed_wait_ms: int = -1


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """The answer to one submission, with the state of the key's bucket after it.

    `remaining` requests are left, the bucket is full again in `reset_ms`, trying again pays after `retry_after_ms`
    (0 where accepted), and `depth` requests wait in the tier.
    """

    outcome: Admission
    remaining: float
    reset_ms: int
    retry_after_ms: int
    depth: int
    stored_id: str = ""  # Whose stored answer is to be replayed, where the outcome is REPLAYED.


_encode = msgspec.msgpack.Encoder().encode
_verdicts = msgspec.msgpack.Decoder(list[Verdict])


class Admissions:
    """The admit script on behalf of one gateway."""

    def __init__(self, client: Redis, keys: Keys, gateway_id: str) -> None:
        self._script = Script("admit", client, keys)
        self._gateway_id = gateway_id

    async def admit(
        self, tiers: Sequence[TierLimit], capacity_rps: float, submissions: Sequence[Submission], redis_ms: int = 0
    ) -> list[Verdict]:
        """Verdicts in the order of the submissions. Idempotent by id, so it may be sent again after RedisUnavailable.

        `redis_ms`: Redis TIME now, at the latest, in ms; 0 where it is not known. A Redis that stood still takes up calls
        that everybody has given up: by this it knows how late they are.
        Raises ValueError for too many submissions or for a tier that is not among `tiers`.
        """
        if len(submissions) > MAX_SUBMISSIONS:
            raise ValueError(f"{len(submissions)} submissions in one call; at most {MAX_SUBMISSIONS}")
        if unknown := {s.tier for s in submissions} - {t.name for t in tiers}:
            raise ValueError(f"no limits were given for tier {min(unknown)!r}")
        asked = _encode([msgspec.structs.astuple(s)[:-1] for s in submissions])
        bodies = [s.body for s in submissions]
        try:
            packed = await self._script(
                self._gateway_id, capacity_rps, _encode(tiers), asked, KEEP_MS, redis_ms, *bodies
            )
        except RedisFull:
            return [Verdict(Admission.BACKPRESSURE, 0.0, 0, 1000, 0) for _ in submissions]
        return _verdicts.decode(packed)
