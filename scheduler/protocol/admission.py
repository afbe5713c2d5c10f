"""`admit` and `adopt`: submissions enter, and a gateway restores what Redis may have lost.

A call has many submissions, each admitted whole or not at all.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis

from ratelimit.limits import EffectiveLimits, RemainingLimits, packed_kinds, packed_limits
from scheduler.protocol.audit_outbox import AcceptedRecord, EndedRecord, encode_records
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import MAX_CALL_BYTES, RedisFull, Script
from scheduler.states import Admission

MAX_SUBMISSIONS = 256
"""A call: keeps the script under a millisecond or two, and Lua's unpack within its stack."""

KEEP_MS = 30_000
"""How long a request is kept past its deadline: the result is the truth that pub/sub may have lost."""


PASS_MS = 100
"""The default interval of the schedulers' passes."""

DAY_MS = 86_400_000


class ReplayLimits(NamedTuple):
    """How long the answers of requests with an Idempotency-Key are kept in Redis, and how many for one customer and pool.

    The oldest leave first; `size` is in bytes of Redis' memory.
    """

    keep_ms: int = DAY_MS
    rows: int = 10_000
    size: int = 16 << 20


class Submission(msgspec.Struct, kw_only=True, gc=False):
    """One request for admission, with the limits of its customer as they are in force now. Times are ms left.

    Not frozen, because `total_ms` shrinks while it waits for the call. `tokens` is what the request is charged until it is
    known what it used. `body` is sent apart, since Lua's msgpack has no bin.
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
    limits: EffectiveLimits
    trace_id: str = ""
    idempotency: str = ""  # What names the client's Idempotency-Key, unique over customers; "": none was sent.
    fingerprint: str = ""  # Of the body, so that a key that is used for another body is noticed.
    tokens: int = 0
    together: int = 0  # So many from this one on enter together or not at all; 0 and 1: this one by itself.
    again: bool = False  # It was accepted before, and Redis may have lost it: no limit is asked or spent again.
    same: str = ""  # What names all requests whose answer must be this one's as well; "": it shares with none.
    keep_answer_ms: int = 0  # How long its answer may be told those who ask the same later;
    model_version: str = ""  # kept only if it is of this version.
    body: bytes


class TierLimit(msgspec.Struct, array_like=True, frozen=True):
    """What a tier may take now. `ahead` names this tier and every tier above it; -1 switches a shed rule off.

    `share` is the tier's guaranteed share, 0..1. A `shadow` tier's limits are judged and told, but let everybody in.
    """

    name: str
    rate: float
    burst: float
    max_depth: int
    ahead: Sequence[str]
    shed_depth: int = -1
    shed_wait_ms: int = -1
    share: float = 0.0
    shadow: bool = False


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """The result of one submission: `left` is what is left of its limits after it, itself included.

    A retry can succeed after `retry_after_ms` (0 where accepted); `depth` requests wait in the tier. `shadowed` is the
    rejection that a tier in shadow would have returned, "" for none.
    """

    outcome: Admission
    left: RemainingLimits = RemainingLimits()
    retry_after_ms: int = 0
    depth: int = 0
    stored_id: str = ""  # The request that has its idempotency key, where the outcome is REPLAYED or IN_PROGRESS.
    shadowed: str = ""
    reply: bytes = b""  # The stored reply, where it has ended already: an answer that was kept is this one's.


REPLAYS = ReplayLimits()
_encode = msgspec.msgpack.Encoder().encode
FLAT = ("id", "group", "input_bytes", "total_ms", "queue_ms", "tokens", "length", "nonce", "trace", "rare")
"""A packed submission, as scheduler/lua/includes/asking.lua reads it."""

COSTS = {name: position for position, name in enumerate(FLAT, 1)}
KINDS = _encode(packed_kinds(COSTS))
_verdicts = msgspec.msgpack.Decoder(list[Verdict])


class Admissions:
    """The admit script on behalf of one gateway.

    `keep_ms`: how long a request is kept past its deadline. `pass_ms`: between two passes of a scheduler, so that a missing
    one is noticed: depth sheds no tier then.
    """

    def __init__(
        self,
        client: Redis,
        keys: Keys,
        gateway_id: str,
        keep_ms: int = KEEP_MS,
        *,
        replays: ReplayLimits = REPLAYS,
        pass_ms: int = PASS_MS,
    ) -> None:
        self._script = Script("admit", client, keys)
        self._gateway_id = gateway_id
        self._keep_ms = keep_ms
        self._replays = replays
        self._pass_ms = pass_ms

    async def admit(
        self,
        tiers: Sequence[TierLimit],
        capacity_rps: float,
        submissions: Sequence[Submission],
        redis_ms: int = 0,
        run_ms: int = 0,
    ) -> list[Verdict]:
        """Verdicts in the order of the submissions. Idempotent by id, so it may be sent again after RedisUnavailable.

        `redis_ms`: Redis TIME now, at the latest, in ms; 0 where it is not known. A Redis that stood still takes up calls
        that everybody has given up: by this it knows how late they are. `run_ms`: what a run takes, so that none is let in
        whose wait would leave no time for it.
        Raises ValueError for too many submissions or for a tier that is not among `tiers`.
        """
        if len(submissions) > MAX_SUBMISSIONS:
            raise ValueError(f"{len(submissions)} submissions in one call; at most {MAX_SUBMISSIONS}")
        if unknown := {s.tier for s in submissions} - {t.name for t in tiers}:
            raise ValueError(f"no limits were given for tier {min(unknown)!r}")
        if not submissions:
            return []
        repeats = len({s.id for s in submissions}) < len(submissions)
        groups, asked, bodies = _packed(submissions)
        try:
            packed = await self._script(
                self._gateway_id,
                capacity_rps,
                _encode(tiers),
                groups,
                asked,
                self._keep_ms,
                redis_ms,
                run_ms,
                bodies,
                int(repeats),
                *self._replays,
                self._pass_ms,
                KINDS,
            )
        except RedisFull:
            return [Verdict(Admission.BACKPRESSURE, retry_after_ms=1000) for _ in submissions]
        return _verdicts.decode(packed)


def calls_of(submissions: Sequence[Submission]) -> Iterator[Sequence[Submission]]:
    """The same in order, in pieces that one call may carry. None of them may have to enter together with others."""
    start, size = 0, 0
    for end, submission in enumerate(submissions):
        length = len(submission.body)
        if end > start and (end - start == MAX_SUBMISSIONS or size + length > MAX_CALL_BYTES):
            yield submissions[start:end]
            start, size = end, 0
        size += length
    if start < len(submissions):
        yield submissions[start:]


def _packed(submissions: Sequence[Submission]) -> tuple[bytes, bytes, bytes]:
    """Groups, submissions and bodies as admit.lua reads them; what submissions have in common is told once."""
    numbers: dict[tuple[str, ...], int] = {}
    groups: list[tuple[Any, ...]] = []
    asked: list[Any] = []
    bodies: list[bytes] = []
    for s in submissions:
        key = (s.tier, s.customer_id, s.api_key_id, s.model)
        number = numbers.get(key)
        if number is None:
            groups.append(_group(s))
            number = numbers[key] = len(groups)
        rare = _rare(s) if s.idempotency or s.again or s.together > 1 or s.same else False
        body = s.body
        bodies.append(body)
        asked += (s.id, number, s.input_bytes, s.total_ms, s.queue_ms, s.tokens, len(body), s.nonce, s.trace_id, rare)
    return _encode(groups), _encode(asked), b"".join(bodies)


def _rare(s: Submission) -> tuple[Any, ...]:
    together = 0 if s.again else s.together
    if not s.same:
        return s.idempotency, s.fingerprint, s.again, together
    return s.idempotency, s.fingerprint, s.again, together, s.same, s.keep_answer_ms, s.model_version


def _group(s: Submission) -> tuple[Any, ...]:
    own = s.limits.key
    rate, burst = (own.rate, own.size) if own else (0.0, 0.0)
    return s.tier, s.customer_id, s.api_key_id, s.model, rate, burst, packed_limits(s.limits)


MAX_PAIRS = 256
"""A call, so that it never holds the server."""


class Adoption:
    """The adopt script on one pool."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._script = Script("adopt", client, keys)

    async def adopt(self, pairs: Sequence[tuple[AcceptedRecord, EndedRecord | None]]) -> int:
        """Tell again how these requests began and ended; returns how many of them were still open in Redis.

        Those end as told, and no worker's late result changes that; a beginning without an end ends nothing. The
        records go to the outbox whatever Redis knows: the auditor folds what it has already, in whatever order it
        comes, so telling twice does no harm.
        Raises ValueError for more than MAX_PAIRS, and RedisUnavailable.
        """
        if len(pairs) > MAX_PAIRS:
            raise ValueError(f"{len(pairs)} pairs in one call; at most {MAX_PAIRS}")
        if not pairs:
            return 0
        told = _encode([(end.id, end.state, end.error_code, end.delivered) for _, end in pairs if end])
        records = encode_records([record for pair in pairs for record in pair if record])
        return int(await self._script(told, records))
