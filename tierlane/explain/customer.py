"""The limits of a customer: base, factor and its cause, what is in force, what is left. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from gateway.operations.health.worker_problems import worker_problems
from ledger.audit.queries import FailedRequest
from ledger.catalog.snapshot import NO_CORDONS, Customer, Identity, Model, Tier, WorkerCordon
from ratelimit.limit_figures import limit_figures
from ratelimit.limits import NO_BUCKET, RemainingLimits, effective
from ratelimit.quotas import key_of, quota_title, quota_words, shown_amount, without_key
from scheduler.protocol.limits import RejectionRecord
from scheduler.protocol.pool_view import CustomerQueue, Observation
from tierlane.explain.factor import (
    GatewayPart,
    PoolCapacity,
    TierPart,
    apart,
    capacity_of,
    capacity_words,
    gateways_of,
    tier_parts,
    why,
)
from tierlane.explain.request import limit_words


class CustomerRecord(msgspec.Struct, frozen=True):
    """A customer in PostgreSQL: `own` names the limits that are its own, not its tier's. `suspension`: by whom and when, if known."""

    customer: Customer
    own: frozenset[str] = frozenset()
    keys: tuple[Identity, ...] = ()  # Valid keys with a limit, models or quotas of their own.
    suspension: str = ""

    def key_quotas(self) -> dict[str, tuple[str, int]]:
        """The quotas of its keys by name, with the key and the amount; a rotated key shares those of its successor."""
        return {name: (key.key_id, amount) for key in self.keys for name, amount in key.quotas if key_of(name)}

    def as_identity(self) -> Identity:
        """The customer without any of its keys."""
        return self.customer.identity()


class LimitLine(msgspec.Struct, frozen=True):
    """One limit: its base and owner, what is in force, what is left. None: not limited, or not known."""

    limit: str
    base: float | None
    of: str
    effective: float | None
    left: float | None = None
    anew_in_ms: int | None = None


class PastRefusal(msgspec.Struct, frozen=True):
    """One rejection of the last minutes."""

    request_id: str
    at_ms: int
    code: str
    refused_by: str
    factor: float
    more: int


class CustomerExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known about one customer."""

    customer: str
    customer_id: str | None = None
    tier: str | None = None
    suspended: bool = False
    cells: list[str] = []  # Its cells, the best first; empty: not known, or none is open.
    weight: float | None = None
    gpu_share: float | None = None  # Of the GPU time of its tier in the last minute, 0..1.
    models: tuple[str, ...] | None = None  # Those that its keys may use; None: all, or not known.
    key_models: dict[str, tuple[str, ...]] = {}  # By key, of those with a list of their own.
    key_quotas: dict[str, list[str]] = {}  # By key, of those with quotas of their own.
    queues: list[CustomerQueue] | None = None  # None: not read.
    factor: float | None = None
    why: list[str] = []
    limits: list[LimitLine] = []
    capacity: PoolCapacity | None = None
    tiers: list[TierPart] = []
    gateways: list[GatewayPart] = []
    refusals: list[PastRefusal] | None = None  # None: not read.
    failed: list[FailedRequest] | None = None  # Accepted requests of the last hour; None: not read.
    not_read: list[str] = []


class Pool(msgspec.Struct, frozen=True):
    """The pool; without an observation where Redis did not respond, without rows where PostgreSQL did not."""

    name: str
    tiers: Sequence[Tier] = ()
    models: Sequence[Model] = ()
    observation: Observation | None = None
    cordons: Mapping[str, WorkerCordon] = NO_CORDONS


def explain_customer(
    name: str,
    row: CustomerRecord | None,
    pool: Pool,
    *,
    left: RemainingLimits | None = None,
    refusals: Sequence[RejectionRecord] | None = None,
    queues: list[CustomerQueue] | None = None,
    gpu_share: float | None = None,
    failed: list[FailedRequest] | None = None,
    cells: Sequence[str] = (),
    not_read: Sequence[str] = (),
) -> CustomerExplanation:
    """Combine what is known; `name` is the argument, `not_read` what is missing and why. The pool is that of its first cell."""
    customer = row.customer if row else None
    seen = pool.observation
    gateways: list[GatewayPart] = []
    if seen is not None:
        # Where the customer's tier is not known, the lowest one is shown: the first to be reduced.
        named = [name for gateway in seen.gateways for name in gateway.tiers]
        gateways = gateways_of(customer.tier if customer else named[-1] if named else "", seen)
    parts = tier_parts(pool.tiers, seen, gateways[0]) if seen and gateways else []
    capacity = capacity_of(seen, pool.models, pool.name, gateways[0]) if seen and gateways else None
    factor = gateways[0].factor if gateways and customer else None
    return CustomerExplanation(
        customer=customer.name if customer else name,
        customer_id=customer.id if customer else None,
        tier=customer.tier if customer else None,
        suspended=customer.suspended if customer else False,
        cells=list(cells),
        weight=customer.weight if customer else None,
        gpu_share=gpu_share,
        models=customer.models if customer else None,
        key_models={} if row is None else _key_models(row),
        key_quotas={} if row is None else _key_quotas(row),
        queues=queues,
        factor=factor,
        why=_reasons(row, pool, parts, capacity),
        limits=_lines(row, None if seen is None else 1.0 if factor is None else factor, left) if row else [],
        capacity=capacity,
        tiers=parts,
        gateways=gateways,
        refusals=None if refusals is None else [past(refusal) for refusal in refusals],
        failed=failed,
        not_read=list(not_read),
    )


def _key_models(row: CustomerRecord) -> dict[str, tuple[str, ...]]:
    shared = row.customer.models
    return {key.key_id: key.models for key in row.keys if key.models is not None and key.models != shared}


def _key_quotas(row: CustomerRecord) -> dict[str, list[str]]:
    found = {key.key_id: [quota_words(name, amount) for name, amount in key.quotas if key_of(name)] for key in row.keys}
    return {key_id: quotas for key_id, quotas in found.items() if quotas}


def factor_of(tier: str, observation: Observation | None) -> float:
    """The factor to show: the lowest of all gateways, 1 where none is in force."""
    gateways = gateways_of(tier, observation) if observation else []
    return gateways[0].factor if gateways else 1.0


def past(refusal: RejectionRecord) -> PastRefusal:
    """One line of the list of rejections."""
    return PastRefusal(refusal.id, refusal.at_ms, refusal.code, limit_words(refusal), refusal.factor, refusal.more)


def _reasons(
    row: CustomerRecord | None,
    pool: Pool,
    parts: Sequence[TierPart],
    capacity: PoolCapacity | None,
) -> list[str]:
    said: list[str] = []
    customer = row.customer if row else None
    if row is not None and row.customer.suspended:
        since = f", {row.suspension}" if row.suspension else ""
        said.append(
            f"{row.customer.name} is suspended{since}: every request is rejected with account_suspended until "
            f"`tierlane customer activate {row.customer.name}`."
        )
    if capacity is not None and pool.observation is not None:
        named = [part.name for part in parts if customer is None or part.name == customer.tier]
        said += [why(name, parts, capacity) for name in named]
        said += [words for name in named if (words := apart(name, gateways_of(name, pool.observation)))]
        if unhealthy := [worker for worker in pool.observation.workers if not worker.healthy]:
            said.append(f"Not healthy: {worker_problems(unhealthy, pool.cordons)}.")
        said.append(capacity_words(capacity))
    elif pool.observation is not None:
        said.append("No gateway is running, so no factor is in force.")
    if customer and any(tier.shadow for tier in pool.tiers if tier.name == customer.tier):
        said.append(f"Tier {customer.tier} is in shadow: its limits are checked and counted, but not enforced.")
    return said


def _lines(row: CustomerRecord, factor: float | None, left: RemainingLimits | None) -> list[LimitLine]:
    """Every limit; the quotas of keys are the last ones of `left`. Without a factor the effective values of reduced limits are not known."""
    identity, of_keys = row.as_identity(), row.key_quotas()
    shared = len(identity.quotas)
    spare = left.quotas[shared:] if left else ()
    known = spare if len(spare) == len(of_keys) else [(None, None)] * len(of_keys)
    left = left and left._replace(quotas=left.quotas[:shared])
    lines: list[LimitLine] = []
    for each in limit_figures(effective(identity), None if factor is None else effective(identity, factor), left):
        owner, now = "quotas", each.effective
        if each.column is not None:
            owner = "own" if each.name in row.own else f"tier {row.customer.tier}"
            now = None if now is None else round(now, 4)
        lines.append(LimitLine(each.name, each.base, owner, now, each.left, each.reset_ms))
    for key in row.keys:
        if not key.key_rate:
            continue
        whole, part = effective(key).key or NO_BUCKET, effective(key, factor or 0.0).key or NO_BUCKET
        rate, burst = (None, None) if factor is None else (round(part.rate, 4), round(part.size, 4))
        lines.append(LimitLine(f"key {key.key_id} requests_per_second", whole.rate, "key", rate))
        lines.append(LimitLine(f"key {key.key_id} burst", whole.size, "key", burst))
    for (name, (key_id, amount)), (rest, reset_ms) in zip(of_keys.items(), known, strict=True):
        base = shown_amount(name, amount)
        free = None if rest is None else shown_amount(name, rest)
        lines.append(LimitLine(f"key {key_id} {quota_title(without_key(name))}", base, "key", base, free, reset_ms))
    return lines
