"""The names of all keys in Redis. Their types and lifetimes are in docs/redis-keys.md.

The default pool has no prefix; other pools have `{<pool>}:`. Redis Cluster is not supported, because customers' limits
apply across pools. Lua builds the same names from the prefix.
"""

from collections.abc import Iterable
from typing import Protocol

JOBS_GATEWAY = "jobs"
"""The gateway id of jobs. No process has this id, and it never counts as lost (owners.lua): jobs have no waiting client."""

PROTOCOL = "1.0"
"""The version of the stored data, the same as in `protocol.lua`. This code cannot read rows of another major version."""

PERMANENT = frozenset(
    {
        "batch_queue",
        "leases",
        "outbox",
        "dlq",
        "gpus",
        "gateways",
        "auditors",
        "epoch",
        "epoch_run",
        "wake",
        "outbox_bad",
        "quotas_told",
        "cordoned",
        "pools",
        "protocol",
        "damaged",
    }
)
"""Keys that may have no TTL: short lists, indexes that are cleaned up, or durable queues. Only `queue:<tier>` and
`outbox:<auditor>` have none either."""


def is_pool_name(pool: str) -> bool:
    """Whether a name is valid for a pool: letters, digits, - and _."""
    return bool(pool) and all(c.isalnum() or c in "-_" for c in pool)


class Placed(Protocol):
    """A model with its pool."""

    @property
    def pool(self) -> str: ...
    @property
    def enabled(self) -> bool: ...


def pools_of(models: Iterable[Placed]) -> set[str]:
    """The pools that enabled models name."""
    return {model.pool for model in models if model.enabled and is_pool_name(model.pool)}


def pools_to_serve(models: Iterable[Placed]) -> set[str]:
    """The pools that models name, including disabled models, because their accepted requests must still end."""
    return {model.pool for model in models if is_pool_name(model.pool)}


class Keys:
    """The keys of one pool."""

    def __init__(self, pool: str = "default") -> None:
        if not is_pool_name(pool):
            raise ValueError(f"pool {pool!r} must consist of letters, digits, - and _")
        self.pool = pool
        self.prefix = "" if pool == "default" else f"{{{pool}}}:"
        self.batch_queue = self.prefix + "batch_queue"
        self.leases = self.prefix + "leases"
        self.outbox = self.prefix + "outbox"
        self.outbox_bad = self.prefix + "outbox_bad"
        self.auditors = self.prefix + "auditors"
        self.dlq = self.prefix + "dlq"
        self.retry_budget = self.prefix + "retry_budget"
        self.wake = self.prefix + "wake"
        self.reaped_at = self.prefix + "reaped_at"
        self.scheduled_at = self.prefix + "scheduled_at"
        self.resumed_at = self.prefix + "resumed_at"
        self.wake_at = self.prefix + "wake_at"
        self.epoch = self.prefix + "epoch"
        self.epoch_run = self.prefix + "epoch_run"
        self.quotas_told = self.prefix + "quotas_told"
        self.gpus = self.prefix + "gpus"
        self.cordoned = self.prefix + "cordoned"
        self.gateways = self.prefix + "gateways"
        self.refusal_lists = self.prefix + "refusal_lists"
        self.sharing = self.prefix + "sharing"
        self.same_kept = self.prefix + "same_kept"
        self.pools = "pools"  # Shared by all pools, like customers' limits.
        self.protocol = "protocol"  # Shared by all pools.
        self.damaged = self.prefix + "damaged"
        self.history = self.prefix + "history"
        self.history_turn = self.prefix + "history_turn"
        self.healthy_gpu_count = self.prefix + "healthy_gpu_count"
        self.notices = self.prefix + "notices"
        self.repairs = self.prefix + "repairs"

    def queue(self, tier: str) -> str:
        return f"{self.prefix}queue:{tier}"

    def inflight(self, tier: str, batch_id: str) -> str:
        return f"{self.prefix}inflight:{tier}:{batch_id}"

    def batch(self, batch_id: str) -> str:
        return f"{self.prefix}batch:{batch_id}"

    def request(self, request_id: str) -> str:
        return f"{self.prefix}request:{request_id}"

    def idempotency(self, value: str) -> str:
        """The request of a client's Idempotency-Key; `value`: `Submission.idempotency`."""
        return f"{self.prefix}idem:{value}"

    def replays(self, customer_id: str) -> str:
        """The stored replies of a customer's Idempotency-Keys, oldest first."""
        return f"{self.prefix}replays:{customer_id}"

    def same(self, value: str) -> str:
        """The running request, or the cached reply, of a coalescing key; `value`: `Submission.same`."""
        return f"{self.prefix}same:{value}"

    def followers(self, request_id: str) -> str:
        """The requests that wait for the run of this one."""
        return f"{self.prefix}riders:{request_id}"

    def gpu(self, worker_id: str) -> str:
        return f"{self.prefix}gpu:{worker_id}"

    def gateway(self, gateway_id: str) -> str:
        return f"{self.prefix}gateway:{gateway_id}"

    def refusals(self, gateway_id: str) -> str:
        """Recent rejections of a gateway; `refusal_lists` names the gateways with such a list."""
        return f"{self.prefix}refusals:{gateway_id}"

    def responses(self, gateway_id: str) -> str:
        """A channel, not a key."""
        return f"{self.prefix}responses:{gateway_id}"

    def auditor_outbox(self, auditor_id: str) -> str:
        return f"{self.prefix}outbox:{auditor_id}"

    def auditor_held(self, auditor_id: str) -> str:
        """The number of the oldest entries in an auditor's list that it holds until requests have ended."""
        return f"{self.prefix}audit_held:{auditor_id}"

    def is_permanent(self, key: str) -> bool:
        """Whether a key may live without a TTL."""
        name = key.removeprefix(self.prefix)
        return name in PERMANENT or name.startswith(("queue:", "outbox:"))
