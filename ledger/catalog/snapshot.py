"""The catalog as gateways and schedulers see it: one immutable picture of PostgreSQL's configuration tables.

Structs of msgspec, because a hundred thousand keys are built of them and they cost a fifth of a dataclass.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from ratelimit.limits import BaseLimits, Values
from ratelimit.quotas import key_of

NO_CORDONS: Mapping[str, "WorkerCordon"] = MappingProxyType({})


class Tier(msgspec.Struct, frozen=True, gc=False):
    """One service class, with the default limits of its customers."""

    name: str
    priority: int  # 1 is served first.
    guaranteed_share: float  # 0..1 of the capacity, under contention.
    limits: Values
    max_queue_depth: int
    max_queue_ms: int | None  # None: by the backend of the pool.
    shed_depth: int | None
    shed_wait_ms: int | None
    shadow: bool = False  # Its limits are judged and counted, but not enforced.
    paused: bool = False  # No batch is formed of what waits.
    slo_ms: int | None = None  # Objective of the p95 of its response time.
    slo_success: float | None = None  # Objective of the share of requests without a failure of the service, 0..1.
    interactive_jobs: bool = False  # A job may ask for the priority of interactive requests.
    auxiliary_rate: float | None = None  # Of requests that run no model, per second; None: as of other requests.
    auxiliary_burst: float | None = None


class CellRow(msgspec.Struct, frozen=True, gc=False):
    """One cell."""

    name: str
    redis_url: str | None  # Without credentials; None: at the server of TIERLANE_REDIS_URL.
    state: str  # open, draining or closed.
    weight: float


class Customer(msgspec.Struct, frozen=True, gc=False):
    """A customer with its base limits: its own where it has them, else its tier's."""

    id: str
    name: str
    tier: str
    suspended: bool
    limits: Values
    max_queue_ms: int | None
    quotas: tuple[tuple[str, int], ...] = ()  # As in Identity.
    priority: int = 0  # The tier's.
    callback_hosts: str | None = None  # Own list of hosts, with commas; None: the deployment's.
    weight: float = 1.0  # Its part of the tier's GPU time, in proportion to the weights of others that wait.
    cell: str | None = None  # None: chosen by its id.
    spread: int = 1  # The number of cells that it can use (`usable_spread`).
    models: tuple[str, ...] | None = None  # Those that its keys may use; None: all.
    zone: str = ""  # IANA name of its time zone; "": UTC.
    alert_url: str | None = None
    alert_shares: tuple[
        tuple[str, tuple[float, ...]], ...
    ] = ()  # By the name of its quotas, but for those with the usual ones.

    def identity(self, key_id: str = "") -> "Identity":
        """A caller of this customer, without a limit of its key."""
        return Identity(
            key_id,
            self.id,
            self.name,
            self.tier,
            self.max_queue_ms,
            self.priority,
            self.cell,
            self.models,
            limits=self.limits,
            quotas=self.quotas,
            weight=self.weight,
            spread=self.spread,
            zone=self.zone,
        )


class Identity(BaseLimits, frozen=True, gc=False):
    """Who a request comes from, as its key says; built once per key and shared by all its requests."""

    key_id: str
    customer_id: str
    customer_name: str
    tier: str
    max_queue_ms: int | None
    priority: int = 0  # The tier's, 1 first; 0: not known.
    cell: str | None = None  # The customer's, as in Customer.
    models: tuple[str, ...] | None = None  # Those that it may use, of the customer's and of the key's; None: all.


def allowed_models(own: Iterable[str], of_customer: tuple[str, ...] | None) -> tuple[str, ...]:
    """The models of a key with a list of its own, in its order. A key cannot have more than its customer."""
    return tuple(name for name in own if of_customer is None or name in of_customer)


class Key(msgspec.Struct, frozen=True, gc=False):
    """One API key. `expires_at` is seconds since the epoch, infinity for never."""

    identity: Identity
    secret_hash: bytes
    expires_at: float
    revoked: bool
    suspended: bool


class Quota(msgspec.Struct, frozen=True, gc=False):
    """`amount` per `every` times `unit`, of one customer or of each customer of a tier (the other is None).

    `mark` says what is counted, "" for requests; `amount` is in its smallest parts (ratelimit/quotas.py).
    """

    customer_id: str | None
    tier: str | None
    amount: int
    every: int
    unit: str  # One of PERIOD_S.
    text: str
    mark: str = ""
    alert_shares: tuple[float, ...] | None = None  # None: the usual ones.


class Price(NamedTuple):
    """The prices of a model from a time on, seconds since the epoch; 0: free."""

    valid_from: float
    usd_per_gpu_s: float
    usd_per_1000_tokens: float


NO_PRICE = Price(0.0, 0.0, 0.0)


class Model(msgspec.Struct, frozen=True, gc=False):
    """A model and how its batches are made; times in milliseconds but for the cache's."""

    name: str
    pool: str
    max_batch_size: int
    max_batch_tokens: int | None
    max_wait_ms: int
    rps_per_gpu: float
    target_utilization: float
    cache_ttl_s: int
    enabled: bool
    cache_scope: str = "customer"  # Or global: among whom equal requests share.
    rps_per_gpu_fixed: bool = False  # Capacity is `rps_per_gpu` of each healthy GPU, whatever is measured.
    capabilities: frozenset[str] | None = None  # Of the server behind it, beyond text; None: all but extensions.
    prices: tuple[Price, ...] = ()  # The latest first.
    tpot_ms: float | None = None  # Objective for the milliseconds per token, in engines with slots.

    def price_at(self, now: float) -> Price:
        """The price at a time; without one it is free."""
        return next((price for price in self.prices if price.valid_from <= now), NO_PRICE)


class WorkerCordon(NamedTuple):
    """Why a worker is to claim nothing, and who set that, "" if not known; as text "by ACTOR: REASON"."""

    reason: str = ""
    by: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (f"by {self.by}" if self.by else "", self.reason)))


class Snapshot(msgspec.Struct, frozen=True):
    """Everything at one version; never changed, only replaced.

    `tiers` are in order of priority; keys, customers and models go by id or name; `quotas` are in no order. `cordons` are
    by the id of a worker, which is to claim nothing. `cells` are by name; the default cell may have no row. `has_key_quotas`:
    whether a key may have quotas of its own.
    """

    version: int
    tiers: tuple[Tier, ...]
    customers: Mapping[str, Customer]
    keys: Mapping[str, Key]
    models: Mapping[str, Model]
    quotas: tuple[Quota, ...]
    cordons: Mapping[str, WorkerCordon] = NO_CORDONS
    cells: tuple[CellRow, ...] = ()
    has_key_quotas: bool = False

    def quotas_of_keys(self) -> dict[str, dict[str, int]]:
        """The quotas of keys, name and amount, by the ids of their customers."""
        found: dict[str, dict[str, int]] = {}
        for key in self.keys.values() if self.has_key_quotas else ():
            identity = key.identity
            for name, amount in identity.quotas:
                if key_of(name) and not key.revoked:
                    of_customer = found.setdefault(identity.customer_id, {})
                    of_customer[name] = max(amount, of_customer.get(name, 0))
        return found

    @property
    def cordoned(self) -> frozenset[str]:
        """The ids of the cordoned workers."""
        return frozenset(self.cordons)

    def tier(self, name: str) -> Tier:
        """The tier of that name. Raises KeyError."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)
