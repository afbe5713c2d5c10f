"""The keyspace: every Redis name has its one owner here. The table with types and lifetimes is in docs/redis-keys.md.

The default pool has no prefix. Any other pool has `{<pool>}:`. Redis Cluster is not supported, since
customers' limits hold across pools. Lua builds the same names from the prefix.
"""

from collections.abc import Iterable
from typing import Protocol

JOBS_GATEWAY = "jobs"
"""Whose requests jobs are. No process has this name, and it never counts as gone (owners.lua): nobody waits for a job."""

PROTOCOL = "1.0"
"""The version of all that is stored in Redis, as `protocol.lua` has it: another major is of rows that this code cannot read."""

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
"""Keys that may stand without a TTL: each is a short list, an index that is swept, or durable work. Beside them only
`queue:<tier>` and `outbox:<auditor>` have none."""


def is_pool_name(pool: str) -> bool:
    """Whether a pool may be called so: letters, digits, - and _."""
    return bool(pool) and all(c.isalnum() or c in "-_" for c in pool)


class Placed(Protocol):
    """A model, as far as its place is concerned."""

    @property
    def pool(self) -> str: ...
    @property
    def enabled(self) -> bool: ...


def pools_of(models: Iterable[Placed]) -> set[str]:
    """The pools that enabled models name."""
    return {model.pool for model in models if model.enabled and is_pool_name(model.pool)}


def pools_to_serve(models: Iterable[Placed]) -> set[str]:
    """Those, and the pools of models that are switched off: what was accepted there may still wait for its end."""
    return {model.pool for model in models if is_pool_name(model.pool)}


class Keys:
    """The names of one pool."""

    def __init__(self, pool: str = "default") -> None:
        if not is_pool_name(pool):
            raise ValueError(f"pool {pool!r} must be made of letters, digits, - and _")
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
        self.pools = "pools"  # One for all pools, like customers' limits.
        self.protocol = "protocol"  # The same.
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
        """Whose request holds a client's Idempotency-Key; `value` is what `Submission.idempotency` says."""
        return f"{self.prefix}idem:{value}"

    def replays(self, customer_id: str) -> str:
        """Which answers are kept for a customer's Idempotency-Keys, oldest first."""
        return f"{self.prefix}replays:{customer_id}"

    def same(self, value: str) -> str:
        """Which request runs for all that are equal to it, or its answer; `value` is what `Submission.same` says."""
        return f"{self.prefix}same:{value}"

    def followers(self, request_id: str) -> str:
        """Who waits for the run of this request."""
        return f"{self.prefix}riders:{request_id}"

    def gpu(self, worker_id: str) -> str:
        return f"{self.prefix}gpu:{worker_id}"

    def gateway(self, gateway_id: str) -> str:
        return f"{self.prefix}gateway:{gateway_id}"

    def refusals(self, gateway_id: str) -> str:
        """What a gateway refused in the last minutes; `refusal_lists` names the gateways that have such a list."""
        return f"{self.prefix}refusals:{gateway_id}"

    def responses(self, gateway_id: str) -> str:
        """A channel, not a key."""
        return f"{self.prefix}responses:{gateway_id}"

    def auditor_outbox(self, auditor_id: str) -> str:
        return f"{self.prefix}outbox:{auditor_id}"

    def auditor_held(self, auditor_id: str) -> str:
        """How many of the oldest entries in an auditor's own list wait on purpose, for the ends of requests."""
        return f"{self.prefix}audit_held:{auditor_id}"

    def is_permanent(self, key: str) -> bool:
        """Whether a key may live without a TTL."""
        name = key.removeprefix(self.prefix)
        return name in PERMANENT or name.startswith(("queue:", "outbox:"))
