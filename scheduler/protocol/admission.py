"""`admit`: admission of requests.

A call has many submissions, each of which is admitted completely or not at all.
"""

import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis

from ratelimit.limits import EffectiveLimits, RemainingLimits, packed_kinds, packed_limits
from ratelimit.periods import HALF_YEAR_S, Offsets, offsets_near
from ratelimit.quotas import Meter
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import MAX_CALL_BYTES, RedisFull, Script
from scheduler.states import Admission, background_of

MAX_SUBMISSIONS = 256
"""Per call: keeps the script under two milliseconds, and Lua's unpack within its stack."""

KEEP_MS = 30_000
"""How long a request is kept after its deadline, because pub/sub may lose the message with its reply."""


_encode = msgspec.msgpack.Encoder().encode
FLAT = ("id", "group", "input_bytes", "total_ms", "queue_ms", "tokens", "length", "nonce", "trace", "rare")
"""A packed submission, as scheduler/lua/includes/submissions.lua reads it."""

COSTS = {name: position for position, name in enumerate(FLAT, 1)}
KINDS = _encode(packed_kinds(COSTS))


class ReplayLimits(NamedTuple):
    """How long replies of requests with an Idempotency-Key are stored in Redis, and how many per customer and pool.

    The oldest are evicted first; `max_bytes` is Redis memory.
    """

    keep_ms: int
    max_answers: int
    max_bytes: int


class Residence(IntEnum):
    """What admission checks of the home of a customer."""

    ONLY = 0  # The gateway knows no other cell: its limits must not have left this one.
    HERE = 1  # They must have arrived in this cell.
    ASKED = 2  # The same, and no other cell knows its Idempotency-Key.
    SPREAD = 3  # It has several cells: nothing is checked.


class SubmissionGroup(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What the submissions of one key for one model have in common, with the current limits of the customer.

    One object serves many submissions; two objects with equal fields are one group of a call.
    """

    tier: str
    customer_id: str
    api_key_id: str
    model: str
    limits: EffectiveLimits
    endpoint: str = ""  # For the audit.
    meter: Meter | None = None  # If a quota of its customer counts GPU time, tokens or money.
    background: bool = False  # They wait in the background queue of the tier.
    home: Residence = Residence.ONLY


class Submission(msgspec.Struct, frozen=True, gc=False):
    """One request for admission. Times are ms left.

    `tokens`: the charge until the used tokens are known. `body` is sent separately, because Lua's msgpack has no bin type.
    """

    id: str
    group: SubmissionGroup
    nonce: str
    input_bytes: int
    total_ms: int
    queue_ms: int
    body: bytes
    tokens: int = 0
    trace_id: str = ""
    idempotency: str = ""  # The client's Idempotency-Key, unique over all customers; "": none was sent.
    fingerprint: str = ""  # Of the body, to detect a key that is used for another body.
    together: int = 0  # This many, from this one on, are admitted together or not at all; 0 and 1: only this one.
    again: bool = False  # It was accepted before, and Redis may have lost it: no limit is checked or charged again.
    same: str = ""  # The coalescing key: requests with the same one get the same result; "": none.
    keep_answer_ms: int = 0  # How long its result may be cached for later equal requests,
    model_version: str = ""  # if it is of this version.

    @property
    def tier(self) -> str:
        return self.group.tier

    @property
    def customer_id(self) -> str:
        return self.group.customer_id

    @property
    def api_key_id(self) -> str:
        return self.group.api_key_id

    @property
    def model(self) -> str:
        return self.group.model

    @property
    def limits(self) -> EffectiveLimits:
        return self.group.limits

    @property
    def endpoint(self) -> str:
        return self.group.endpoint

    @property
    def meter(self) -> Meter | None:
        return self.group.meter

    @property
    def background(self) -> bool:
        return self.group.background


class TierLimit(msgspec.Struct, array_like=True, frozen=True):
    """The current limits of a tier. `ahead` names this tier and every tier above it; -1 disables a shed rule.

    `share`: the guaranteed share, 0..1. The limits of a `shadow` tier are evaluated and reported, but reject no request.
    `places`: how many requests are in the tier queue before others wait in the backlogs of their customers. `open`: while no
    request is in backlogs, a customer of weight 1 with so many open requests is within its share of the tier; 0: a quarter of the places.
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
    places: int = 64
    open: float = 0.0


class Verdict(msgspec.Struct, frozen=True):
    """The result of one submission. After its call, `left` remains of its limits, and `depth` requests are queued in its tier.

    A retry can succeed after `retry_after_ms` (0 if accepted). `shadowed`: the rejection that a tier in shadow would have
    returned, "" for none. Submissions that were accepted in one call with the same key and model share one object.
    """

    outcome: Admission
    left: RemainingLimits = RemainingLimits()
    retry_after_ms: int = 0
    depth: int = 0
    stored_id: str = ""  # The request of its Idempotency-Key, if the outcome is REPLAYED or IN_PROGRESS.
    shadowed: str = ""
    reply: bytes = b""  # The reply if it has ended already, with a cached result.
    quotas: tuple[str, ...] = ()  # The names of those without room for it, if the outcome is QUOTA; empty: not known.


class _PackedVerdict(msgspec.Struct, array_like=True):
    """A verdict in the reply of admit.lua that reports more than an acceptance."""

    outcome: Admission
    retry_after_ms: int
    text: str  # The stored id, or the names of quotas.
    shadowed: str
    reply: bytes = b""


_Reply = tuple[list[tuple[RemainingLimits, int]], list[_PackedVerdict | None]]
_reply = msgspec.msgpack.Decoder(_Reply)


def _admit(
    *,
    gateway_id: str,
    capacity: float,
    packed_tiers: bytes,
    packed_groups: bytes,
    packed_submissions: bytes,
    keep_ms: int,
    sent_at: int,
    run_ms: int,
    bodies: bytes,
    has_repeats: int,
    replay_ms: int,
    replay_rows: int,
    replay_bytes: int,
    pass_ms: int,
    packed_kinds: bytes,
    packed_endpoints: bytes,
    packed_background: bytes,
    packed_homes: bytes,
) -> None: ...


class Admissions:
    """The script `admit` for one gateway.

    `keep_ms`: how long a request is kept after its deadline. `pass_ms`: the interval of scheduler passes; while no scheduler
    runs, no tier is shed by depth.
    """

    def __init__(
        self,
        client: Redis,
        keys: Keys,
        gateway_id: str,
        keep_ms: int = KEEP_MS,
        *,
        replays: ReplayLimits,
        pass_ms: int,
    ) -> None:
        self._script = Script("admit", _admit, client, keys)
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

        `redis_ms`: the latest Redis TIME, in ms, at which the call is sent; 0 if unknown. Redis may process a buffered call
        after a suspension, and deadlines count from this time. `run_ms`: the time of a run; a request whose wait would
        leave less is rejected.
        Raises ValueError for too many submissions or for a tier that is not in `tiers`.
        """
        if len(submissions) > MAX_SUBMISSIONS:
            raise ValueError(f"{len(submissions)} submissions in one call; at most {MAX_SUBMISSIONS}")
        if unknown := {group.tier for group in {s.group for s in submissions}} - {t.name for t in tiers}:
            raise ValueError(f"no limits were given for tier {min(unknown)!r}")
        if not submissions:
            return []
        repeats = len({s.id for s in submissions}) < len(submissions)
        groups, endpoints, background, homes, numbers, fields, bodies = _packed(submissions)
        if background:
            tiers = [*tiers, *map(_background_limit, tiers)]
        try:
            packed = await self._script(
                gateway_id=self._gateway_id,
                capacity=capacity_rps,
                packed_tiers=_encode(tiers),
                packed_groups=groups,
                packed_submissions=fields,
                keep_ms=self._keep_ms,
                sent_at=redis_ms,
                run_ms=run_ms,
                bodies=bodies,
                has_repeats=int(repeats),
                replay_ms=self._replays.keep_ms,
                replay_rows=self._replays.max_answers,
                replay_bytes=self._replays.max_bytes,
                pass_ms=self._pass_ms,
                packed_kinds=KINDS,
                packed_endpoints=endpoints,
                packed_background=background,
                packed_homes=homes,
            )
        except RedisFull:
            return [Verdict(Admission.BACKPRESSURE, retry_after_ms=1000) for _ in submissions]
        return _verdicts(numbers, *_reply.decode(packed))


def _background_limit(tier: TierLimit) -> TierLimit:
    """The limit of the background queue of a tier: without shed rules or a predicted wait, since no client waits."""
    ahead = [background_of(name) for name in tier.ahead]
    name = background_of(tier.name)
    return msgspec.structs.replace(tier, name=name, ahead=ahead, shed_depth=-1, shed_wait_ms=-1, share=0.0)


def calls_of(submissions: Sequence[Submission]) -> Iterator[Sequence[Submission]]:
    """The submissions in order, in parts of at most one call. None may belong to a group that is admitted together."""
    start, size = 0, 0
    for end, submission in enumerate(submissions):
        length = len(submission.body)
        if end > start and (end - start == MAX_SUBMISSIONS or size + length > MAX_CALL_BYTES):
            yield submissions[start:end]
            start, size = end, 0
        size += length
    if start < len(submissions):
        yield submissions[start:]


def _verdicts(
    numbers: Sequence[int], groups: Sequence[tuple[RemainingLimits, int]], packed: Sequence[_PackedVerdict | None]
) -> list[Verdict]:
    """The verdicts of submissions, each of the group of its number, from 1."""
    accepted = [Verdict(Admission.ACCEPTED, left, depth=depth) for left, depth in groups]
    return [
        accepted[number - 1]
        if each is None
        else Verdict(
            each.outcome,
            accepted[number - 1].left,
            each.retry_after_ms,
            accepted[number - 1].depth,
            "" if each.outcome is Admission.QUOTA else each.text,
            each.shadowed,
            each.reply,
            tuple(each.text.split()) if each.outcome is Admission.QUOTA else (),
        )
        for number, each in zip(numbers, packed, strict=True)
    ]


def current_offsets(zone: str) -> Offsets:
    """The offsets of a zone around the time of this machine; Redis TIME selects among them. Empty for ""."""
    return offsets_near(zone, int(time.time()) // HALF_YEAR_S) if zone else ()


def _packed_group(group: SubmissionGroup) -> tuple[Any, ...]:
    limits = packed_limits(group.limits, group.meter, current_offsets(group.limits.zone))
    return group.tier, group.customer_id, group.api_key_id, group.model, *group.limits.key_in_cell, limits


def _packed(submissions: Sequence[Submission]) -> tuple[bytes, bytes, bytes, bytes, Sequence[int], bytes, bytes]:
    """Groups, their endpoints, those in the background, their homes, the group of each submission, submissions and bodies as
    admit.lua reads them.

    A group has what its submissions have in common.
    """
    numbers: dict[SubmissionGroup, int] = {}
    distinct: dict[tuple[str | int, ...], SubmissionGroup] = {}
    fields: list[Any] = []
    bodies: list[bytes] = []
    for s in submissions:
        group = s.group
        number = numbers.get(group)
        if number is None:
            key = (
                group.tier,
                group.customer_id,
                group.api_key_id,
                group.model,
                group.endpoint,
                group.background,
                group.home,
            )
            first = distinct.setdefault(key, group)
            number = numbers[group] = len(distinct) if first is group else numbers[first]
        rare: Any = False
        if s.idempotency or s.again or s.together > 1 or s.same:
            rare = s.idempotency, s.fingerprint, s.again, 0 if s.again else s.together
            if s.same:
                rare += s.same, s.keep_answer_ms, s.model_version
        body = s.body
        bodies.append(body)
        fields += (s.id, number, s.input_bytes, s.total_ms, s.queue_ms, s.tokens, len(body), s.nonce, s.trace_id, rare)
    numbers_of = fields[FLAT.index("group") :: len(FLAT)]
    groups = distinct.values()
    background, homes = [g.background for g in groups], [g.home for g in groups]
    return (
        _encode([_packed_group(g) for g in groups]),
        _encode([g.endpoint for g in groups]),
        _encode(background) if any(background) else b"",
        _encode(homes) if any(homes) else b"",
        numbers_of,
        _encode(fields),
        b"".join(bodies),
    )
