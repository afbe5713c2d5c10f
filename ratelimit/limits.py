"""The limits of a customer: the one list that admission, refunds, headers, `explain`, `/v1/me`, direct mode and docs use.

There are three mechanisms: token buckets (BUCKETS, one entry for each counted unit), concurrency, and quotas (rows of the
table `quotas`). A new limit on a unit that a request costs is a new entry in BUCKETS; CONTRIBUTING.md, "A limit", lists
the files. Pure: no I/O, no clock.

Rates are reduced with the capacity. Concurrency and quotas are not: concurrency falls when fewer requests are admitted,
and quotas are part of a contract.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from ratelimit.quotas import Meter, is_metered

REQUESTS, TOKENS, CONCURRENCY = "requests", "tokens", "concurrency"
"""Names of limits in RateLimit headers and in `limit_policies` of an error."""

MOST_RATE = 1_000_000
MOST_COUNT = 10_000_000

FRESH = 0.25
"""The share of a bucket that is available if its level is unknown, as in ratelimit/lua/bucket.lua."""

_LEAST_KEY_RATE = 1e-6

Values = tuple[float | None, ...]
"""One value for each of LIMIT_COLUMNS, of a tier, a customer or an identity; None for no limit."""

_PERIODS = {1: "second", 60: "minute", 3600: "hour"}

LEAST_SIZE = 20
"""Requests in the bucket of a customer of several cells, for each cell, that remain when its limits are reduced: a cell may have a
twentieth of its even part, and must be able to admit a request.
"""

_Packed = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LimitColumn:
    """A column of `tiers` (the default) and `customers` (null: the tier's), with its comments in the database.

    Its CHECK accepts `least` to `most`, without them values above 0. `required`: every tier has a value.
    """

    name: str
    type: Literal["double", "integer", "bigint"]
    tier_text: str
    customer_text: str
    least: int = 0
    most: int | None = None
    required: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class BucketKind:
    """A token bucket of each customer, over all of its keys, in units that a request costs.

    `rate` units are added in `period_s` seconds, up to `size` (without a column for it: up to `rate`). `cost` is the field of
    a `Submission` with the units that one request costs; "" means 1. `settled`: when the request ends, its cost becomes
    the used tokens. `outcome` is the member of `Admission` that rejects. `unit` is the `qu` parameter of
    RateLimit-Policy. `fields` are the level and the rate in the customer's hash in Redis (`rl:customer:<id>`). `meaning` is
    its row in docs/limits.md.
    """

    name: str
    meaning: str
    outcome: str
    rate: LimitColumn
    fields: tuple[str, str]
    size: LimitColumn | None = None
    period_s: int = 60
    cost: str = ""
    settled: bool = False
    unit: str = ""
    advice: str = ""

    def units(self, request: object) -> int:
        """The cost of a request: a `Submission`, or another object with the field."""
        return getattr(request, self.cost) if self.cost else 1

    def words(self, rate: float, size: float) -> str:
        """The limit for users: `2 requests/s (burst 10)` or `60000 tokens per minute`."""
        if self.size is not None:
            return f"{number(rate)} {self.name.replace('-', ' ')}/s (burst {int(size)})"
        return f"{int(rate)} {self.name.replace('-', ' ')} per {_PERIODS[self.period_s]}"


BUCKETS = (
    BucketKind(
        REQUESTS,
        "requests/s with a burst, over all keys",
        outcome="customer_limit",
        rate=LimitColumn(
            "requests_per_second",
            "double",
            "Rate limit of each customer.",
            "Rate limit; null: the tier's.",
            most=MOST_RATE,
        ),
        size=LimitColumn(
            "burst",
            "double",
            "Bucket size of each customer, requests.",
            "Bucket size; null: the tier's.",
            least=1,
            most=MOST_COUNT,
        ),
        fields=("tokens", "rate"),
        period_s=1,
        advice="Send slower, or raise the customer's requests_per_second or burst.",
    ),
    BucketKind(
        TOKENS,
        "model tokens per minute",
        outcome="token_limit",
        rate=LimitColumn(
            "tokens_per_minute",
            "bigint",
            "Token limit of each customer; null: none.",
            "Token limit; null: the tier's.",
            required=False,
        ),
        fields=("budget", "pace"),
        cost="tokens",
        settled=True,
        unit="tokens",
        advice="Request fewer tokens (max_tokens counts in advance), or raise its tokens_per_minute.",
    ),
)
"""In the order in which admission checks them. The first one counts requests; every customer has it."""

MAX_CONCURRENCY = LimitColumn(
    "max_concurrency",
    "integer",
    "Concurrent requests of each customer.",
    "Concurrent requests; null: the tier's.",
    least=1,
    most=MOST_COUNT,
)

AUXILIARY_COLUMNS = (
    LimitColumn(
        "auxiliary_requests_per_second",
        "double",
        "Rate limit of each customer's requests that run no model, at most that of its other requests; null: the same.",
        "",
        most=MOST_RATE,
        required=False,
    ),
    LimitColumn(
        "auxiliary_burst",
        "double",
        "Bucket size for them, at most that of its other requests; null: the same.",
        "",
        least=1,
        most=MOST_COUNT,
        required=False,
    ),
)
"""Columns of `tiers` only."""

AUXILIARY = BucketKind(
    "auxiliary-requests",
    "requests/s that run no model, with a burst",
    outcome="auxiliary_limit",
    rate=AUXILIARY_COLUMNS[0],
    size=AUXILIARY_COLUMNS[1],
    fields=("", ""),
    period_s=1,
)
"""Counted by each gateway for itself, not by admission."""

REQUEST_BUCKET = BUCKETS[0]
LIMIT_COLUMNS = (
    *(column for column in (REQUEST_BUCKET.rate, REQUEST_BUCKET.size) if column),
    MAX_CONCURRENCY,
    *(column for kind in BUCKETS[1:] for column in (kind.rate, kind.size) if column),
)
"""All columns with a limit, in the order of `Values`."""

_AT = {column.name: index for index, column in enumerate(LIMIT_COLUMNS)}
REQUEST_RATE = _AT[REQUEST_BUCKET.rate.name]
"""The position of the rate of requests in `Values`."""

OWN_OUTCOMES = frozenset({"key_limit", CONCURRENCY, "quota", *(kind.outcome for kind in BUCKETS)})
"""Outcomes of admission for the limits of the customer, which do not depend on other customers."""

REDUCED_OUTCOMES = OWN_OUTCOMES - {CONCURRENCY, "quota"}
"""Those of limits that are reduced with the capacity."""


def values(**columns: float | None) -> Values:
    """The values of the named columns, None for the others. Raises KeyError for an unknown name."""
    found: list[float | None] = [None] * len(LIMIT_COLUMNS)
    for name, value in columns.items():
        found[_AT[name]] = value
    return tuple(found)


def value_of(limits: Values, column: LimitColumn | str) -> float | None:
    """One value by its column."""
    return limits[_AT[column if isinstance(column, str) else column.name]]


class Bucket(NamedTuple):
    """A token bucket: `rate` units in the kind's period, at most `size` units."""

    kind: BucketKind
    rate: float
    size: float

    @property
    def per_s(self) -> float:
        """Units per second."""
        return self.rate / self.kind.period_s

    @property
    def words(self) -> str:
        """The limit for users."""
        return self.kind.words(self.rate, self.size)


NO_BUCKET = Bucket(REQUEST_BUCKET, 0.0, 0.0)


class EffectiveLimits(NamedTuple):
    """The current limits of one identity. Hashable, so that derived values can be cached.

    `buckets`: those of the customer, in the order of BUCKETS; `key`: the key's own bucket of requests, or None.
    `max_concurrency` is 0 without a limit. `quotas`: name and amount, such as ("1day", 10000), as in ratelimit/quotas.py.
    `weight`: the customer's part of its tier's GPU time, in proportion to the weights of others that wait; `key_weight`:
    the key's part of its customer's, 0: that of all keys without a weight together. `spread`: the number of cells that it
    uses; each has a part of these limits, which the allotter sets (scheduler/cells/), and an even part of the key's.
    """

    buckets: tuple[Bucket, ...]
    key: Bucket | None = None
    max_concurrency: int = 0
    quotas: tuple[tuple[str, int], ...] = ()
    weight: float = 1.0
    metered: bool = False  # Whether a quota counts GPU time, tokens or money.
    key_weight: float = 0.0
    spread: int = 1
    zone: str = ""  # IANA name of the time zone of its quotas; "": UTC.

    @property
    def key_in_cell(self) -> tuple[float, float]:
        """Rate and size of the key's own bucket in one cell; 0 without one. The cells get its requests in turn."""
        if self.key is None:
            return 0.0, 0.0
        return self.key.rate / self.spread, max(1.0, self.key.size / self.spread)

    @property
    def key_requests(self) -> Bucket:
        """The requests of one key: the smaller rate and size of its customer's and its own bucket."""
        bucket, own = self.buckets[0], self.key
        return bucket if own is None else Bucket(bucket.kind, min(bucket.rate, own.rate), min(bucket.size, own.size))

    def bucket_of(self, outcome: str) -> Bucket | None:
        """The bucket that rejects with this outcome of admission, or None."""
        if outcome == "key_limit":
            return self.key
        return next((bucket for bucket in self.buckets if bucket.kind.outcome == outcome), None)


NO_LIMITS = EffectiveLimits((), weight=0.0)  # The weight is not known: the one in force is kept.
"""For a request that was admitted before and is not checked again."""


class Level(NamedTuple):
    """The remaining units of a bucket (negative: a debt), and ms until it is full."""

    left: float
    reset_ms: int


class RemainingLimits(NamedTuple):
    """What is left of `EffectiveLimits`.

    `buckets` in the same order; for requests it is the key's own bucket if that has less. `in_use`: requests in progress.
    `quotas`: the remaining amount and ms until the window ends, in the same order; empty if unknown.
    """

    buckets: Sequence[Level] = ()
    in_use: int = 0
    quotas: Sequence[tuple[int, int]] = ()


class BaseLimits(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The base limits of one identity."""

    limits: Values
    quotas: tuple[tuple[str, int], ...] = ()  # Name and amount, such as ("1day", 10000), each name once.
    key_rate: float = 0.0  # The key's own limit, requests/s and bucket size; 0 = it has none.
    key_burst: float = 0.0
    weight: float = 1.0  # The customer's.
    key_weight: float = 0.0  # The key's part of its customer's; 0: that of all keys without a weight together.
    spread: int = 1  # The number of cells that the customer can use (`usable_spread`).
    zone: str = ""  # IANA name of the time zone of its quotas; "": UTC.


def usable_spread(limits: Values, spread: int) -> int:
    """How many cells a customer can use: each of them must be able to admit a request with its part of the limits."""
    least = min(value_of(limits, column) or 0.0 for column in (REQUEST_BUCKET.size, MAX_CONCURRENCY) if column)
    return max(1, min(spread, int(least) // 3))


def effective(identity: BaseLimits, factor: float = 1.0) -> EffectiveLimits:
    """The identity's limits at `factor` (0..1) of its base limits.

    A bucket holds at least one unit, so that a reduced limit is never 0.
    """
    key = None
    if identity.key_rate > 0:
        rate = max(_LEAST_KEY_RATE, identity.key_rate * factor)  # 0 means no limit.
        key = Bucket(REQUEST_BUCKET, rate, max(1.0, identity.key_burst * factor))
    buckets = base_buckets(identity.limits, factor, identity.spread)
    concurrency = int(value_of(identity.limits, MAX_CONCURRENCY) or 0)
    quotas = identity.quotas
    metered = any(is_metered(name) for name, _ in quotas)
    return EffectiveLimits(
        buckets, key, concurrency, quotas, identity.weight, metered, identity.key_weight, identity.spread, identity.zone
    )


def auxiliary_limits(identity: BaseLimits, rate: float | None, size: float | None) -> tuple[Bucket, ...]:
    """The buckets of requests that run no model: the customer's and, of a key with a limit of its own, the key's.

    `rate` and `size` are those of the tier; the limits of other requests are never exceeded. None of them is reduced.
    """
    base = effective(identity)
    of_requests = (base.buckets[0],) if base.key is None else (base.buckets[0], base.key)
    return tuple([Bucket(AUXILIARY, min(rate or b.rate, b.rate), min(size or b.size, b.size)) for b in of_requests])


def base_buckets(limits: Values, factor: float = 1.0, spread: int = 1) -> tuple[Bucket, ...]:
    """The buckets of a customer at `factor` (0..1) of these limits."""
    buckets: list[Bucket] = []
    for kind in BUCKETS:
        rate = value_of(limits, kind.rate)
        if rate and kind.size is None:
            size = max(1.0, rate * factor)
            buckets.append(Bucket(kind, size, size))
        elif rate and kind.size is not None:
            size = value_of(limits, kind.size) or 0.0
            least = 1.0 if spread == 1 else min(size, LEAST_SIZE * spread)
            buckets.append(Bucket(kind, rate * factor, max(least, size * factor)))
    return tuple(buckets)


def number(value: float) -> str:
    """A rate with at most two decimals, or six below 1."""
    digits = f"{value:.2f}" if value >= 1 else f"{value:.6f}"
    return digits.rstrip("0").rstrip(".")


def packed_kinds(costs: dict[str, int], kinds: Sequence[BucketKind] = BUCKETS) -> list[_Packed]:
    """The kinds as Lua reads them: {outcome, level field, rate field, period in s, index of the cost, settled} each.

    `costs`: the indexes, in a packed submission, of the fields that `BucketKind.cost` names; 0 means one unit per request.
    """
    return [(k.outcome, *k.fields, k.period_s, costs[k.cost] if k.cost else 0, k.settled) for k in kinds]


def packed_limits(limits: EffectiveLimits, meter: Meter | None = None, offsets: Sequence[int] = ()) -> _Packed:
    """The limits of a customer as Lua reads them: {{kind, rate, size}...}, concurrency, quotas, weight, perhaps meter, key's weight,
    spread, `offsets` of its time zone (ratelimit/periods.py).
    """
    packed = packed_buckets(limits.buckets), limits.max_concurrency, limits.quotas, limits.weight
    if offsets:
        return (*packed, meter or False, limits.key_weight, limits.spread > 1 and limits.spread, offsets)
    if limits.spread > 1:
        return (*packed, meter or False, limits.key_weight, limits.spread)
    if limits.key_weight > 0:
        return (*packed, meter or False, limits.key_weight)
    return packed if meter is None else (*packed, meter)


def packed_buckets(buckets: Sequence[Bucket]) -> list[_Packed]:
    """Buckets as Lua reads them: {kind, rate, size} each."""
    return [(_NUMBER[b.kind.name], b.rate, b.size) for b in buckets]


_NUMBER = {kind.name: number for number, kind in enumerate(BUCKETS, 1)}
