"""The names of all keys in Redis, with type, content, owner and time to live (TTL).

The default pool has no prefix; other pools have `{<pool>}:`. In a cell other than the default one, and on a server in
cluster mode, all names begin with a hash tag, `{cell:<cell>}:`, which puts them into one slot, because customers' limits
apply across pools. Lua builds the same names from the prefix.

The URL of a cell is that of its server, with the name of the cell as its fragment: `redis://host:6379/0#west`. A URL
without a fragment is that of the default cell.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

JOBS_GATEWAY = "jobs"
"""The gateway id of jobs. No process has this id, and it never counts as lost (owners.lua): jobs have no waiting client."""

PROTOCOL = "1.0"
"""The version of the stored data, the same as in `protocol.lua`. This code cannot read rows of another major version."""


CLUSTER_SCHEMES = ("redis+cluster://", "rediss+cluster://")
DEFAULT_CELL = "default"


class RedisKey(NamedTuple):
    """A key for docs/redis-keys.md. `owner`: the script or process that creates it. `ttl`: "" for none."""

    name: str
    type: str
    content: str
    owner: str
    ttl: str = ""


KEYS = (
    RedisKey(
        "queue:<tier>",
        "list",
        "requests that leave next, oldest on the right; ended ones stay until skipped",
        "admit",
    ),
    RedisKey(
        "backlog:<tier>:<customer>", "list", "requests of a customer that wait for places in `queue:<tier>`", "admit"
    ),
    RedisKey("backlogs:<tier>", "sorted set", "customers with a backlog, by the GPU time that they received", "admit"),
    RedisKey(
        "backlog:<tier>:<customer>:<key>",
        "list",
        "the same, of a key with a weight; with it the four others, too",
        "admit",
    ),
    RedisKey("waiting:<tier>", "string", "number of requests in all backlogs", "admit"),
    RedisKey("fair:<tier>", "hash", "virtual time, sum of weights, mean cost in ms", "admit", "20 min"),
    RedisKey("flow:<tier>:<customer>", "hash", "one customer: tag, weight, mean cost in ms", "admit", "10 min"),
    RedisKey(
        "inflight:<tier>:<batch>",
        "list",
        "ids of one batch and tier",
        "form_batch",
        "60 s after the last deadline or lease",
    ),
    RedisKey("batch_queue", "list", "ids of ready batches, next on the left", "form_batch"),
    RedisKey("batch:<batch>", "hash", "one batch", "form_batch", "60 s after the last deadline or lease"),
    RedisKey("slots", "hash", "free slots and slots of each worker that has slots", "worker_beat, claim, finish_part"),
    RedisKey("unclaimed", "hash", "sizes of the batches for slots that wait for a claim", "form_batch", "60 s"),
    RedisKey("stops:<worker>", "list", "requests that this worker should stop running in its slots", "cancel", "10 s"),
    RedisKey("leases", "sorted set", "batch id, by the end of its lease", "form_batch"),
    RedisKey(
        "request:<request>",
        "hash",
        "one request",
        "admit",
        "total time + 30 s; with `Idempotency-Key` 24 h; job: until its result expires",
    ),
    RedisKey("idem:<value>", "hash", "request of an `Idempotency-Key`", "admit", "as its request"),
    RedisKey(
        "replays:<customer>",
        "list",
        "stored replies of `Idempotency-Key`s, oldest first",
        "finish",
        "24 h from the newest",
    ),
    RedisKey(
        "same:<value>",
        "hash",
        "running request of a coalescing key, or its result",
        "admit",
        "the request's time + 1 s; a result `cache_ttl_s`",
    ),
    RedisKey(
        "same_kept",
        "sorted set",
        "cached results by expiry; at most 10,000 of 16 KiB",
        "finish",
        "the longest result",
    ),
    RedisKey("riders:<request>", "list", "followers of this request", "admit", "as its followers"),
    RedisKey(
        "sharing",
        "sorted set",
        "ended requests whose followers have not ended, by time",
        "finish",
        "60 s from the last one",
    ),
    RedisKey("outbox", "list", "audit entries, newest on the left", "admit, finish"),
    RedisKey("outbox:<auditor>", "list", "entries not committed by this auditor, at most 64 MB", "audit_take"),
    RedisKey(
        "audit_held:<auditor>",
        "string",
        "number of its oldest entries that wait for ends",
        "audit_take",
        "10 s",
    ),
    RedisKey("auditors", "set", "auditors that may have an `outbox:<auditor>`", "audit_take"),
    RedisKey("outbox_bad", "list", "entries that PostgreSQL cannot store, newest 1,000", "auditor"),
    RedisKey("damaged", "list", "unreadable rows, without client data, newest 1,000", "any script"),
    RedisKey("dlq", "list", "ids of dead letters, newest 10,000", "fail, reap, finish"),
    RedisKey("retry_budget", "hash", "retries left in `tokens`, as of `at` (microseconds)", "fail, reap", "60 s"),
    RedisKey("wake", "list", "one token that wakes a scheduler", "admit, claim, finish"),
    RedisKey("wake_at", "hash", "which events wake each dispatcher", "look", "2 s"),
    RedisKey("formed_at", "string", "when the last batch was formed", "form_batch", "60 s"),
    RedisKey("reaped_at", "string", "last pass of the reaper", "reap", "60 s"),
    RedisKey("scheduled_at", "string", "last pass of a scheduler", "reap", "60 s"),
    RedisKey("resumed_at", "string", "last suspension that the reaper detected", "reap", "1 s"),
    RedisKey(
        "epoch",
        "string",
        "microseconds of the first use of this data; a change: data was lost",
        "gateway_beat",
    ),
    RedisKey("epoch_run", "string", "`run_id` of the server of the epoch", "gateway_beat"),
    RedisKey("gpus", "sorted set", "worker ids, by last heartbeat; removed after 5 minutes", "worker_beat"),
    RedisKey("cordoned", "set", "cordoned workers, from the table `cordons`", "cordon"),
    RedisKey("tpot_ms", "string", "for workers: the smallest `models.tpot_ms` of the pool", "cordon", "60 s"),
    RedisKey("moves", "string", "for workers: all cells, and the chances of a move to each", "scheduler", "2 s"),
    RedisKey("gpu:<worker>", "hash", "one worker", "worker_beat", "5 min from the last heartbeat"),
    RedisKey("healthy_gpu_count", "string", "number of healthy workers", "census", "3 s"),
    RedisKey("notices", "sorted set", "problems reported for health", "census", "5 s after the last"),
    RedisKey("bad:<key>:<ms>", "any", "an index that had a wrong type", "repair", "7 days"),
    RedisKey("repairs", "set", "indexes that are not rebuilt yet", "repair", "24 h"),
    RedisKey("gateways", "sorted set", "gateway ids, by last heartbeat", "gateway_beat"),
    RedisKey(
        "gateway:<gateway>",
        "hash",
        "one gateway: `stats`, `last_heartbeat`",
        "gateway_beat",
        "2 s from the last heartbeat",
    ),
    RedisKey(
        "refusals:<gateway>",
        "list",
        "recent rejections for `tierlane explain`, newest 20,000",
        "gateway_beat",
        "10 min from the newest",
    ),
    RedisKey("refusal_lists", "sorted set", "gateways with such a list", "gateway_beat", "10 min from the newest"),
    RedisKey(
        "rl:customer:<customer>",
        "hash",
        "remaining limits of a customer; `cost:<prefix>`: mean GPU time of its requests in a pool in µs, and when it changed; "
        "`home`: whether they are in this cell, by which version of the catalog, since when; `share`, `g:<quota>`: parts of "
        "its limits in this cell, if it uses several",
        "admit",
        "1 h to 7 days; quotas until their window ends",
    ),
    RedisKey(
        "rl:leases:<customer>",
        "sorted set",
        "open requests of a customer, by the end of their lease; those in other cells as `<cell>/<request>`",
        "admit",
        "10 min after the last",
    ),
    RedisKey(
        "rl:key:<key>",
        "hash",
        "bucket of a key with its own limit: `tokens`, `at`, `rate`; `home`: the version by which it is in this cell",
        "admit",
        "1 h to 7 days",
    ),
    RedisKey(
        "rl:tier:<tier>",
        "hash",
        "bucket of a tier or, as `<tier>.background`, of its jobs, with the same fields",
        "admit",
        "1 h to 7 days",
    ),
    RedisKey("rl:shared", "set", "customers with parts of their limits in this cell", "allot", "7 days"),
    RedisKey("allotter", "hash", "the allotter that sets these parts, and its last call", "allot", "7 days"),
    RedisKey("history", "list", "points of the dashboard's charts, newest 1,800", "gateway", "60 min from the newest"),
    RedisKey(
        "history_week", "list", "the same of five minutes each, newest 2,016", "gateway", "7 days from the newest"
    ),
    RedisKey("history_turn", "string", "gateway that writes `history` and `history_week`", "gateway", "5 s"),
    RedisKey("pools", "set", "pools to serve", "scheduler"),
    RedisKey("protocol", "string", "version of the stored data", "first process"),
    RedisKey("quotas_told", "string", "epoch for which quotas were restored from the audit", "quota_restore"),
)
"""Every key. `python -m scheduler` writes the table of docs/redis-keys.md from it."""

PERMANENT = frozenset(key.name for key in KEYS if not key.ttl and "<" not in key.name)
"""Keys that may have no TTL: short lists, indexes that are cleaned up, or durable queues. Only `queue:<tier>`,
its backlogs and `outbox:<auditor>` have none either."""


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


def cell_of(redis_url: str) -> str:
    """The name of the cell that a URL names."""
    return redis_url.partition("#")[2] or DEFAULT_CELL


def place_name(pool: str, cell: str) -> str:
    """A pool in a cell: `<pool>@<cell>`; in the default cell the name of the pool."""
    return pool if cell == DEFAULT_CELL else f"{pool}@{cell}"


def hash_tag(cell: str) -> str:
    """The hash tag of a cell. No pool has such a name, so that Lua recognizes it in a prefix."""
    return f"{{cell:{cell}}}"


def tag_of(redis_url: str) -> str:
    """The beginning of all names in the cell of this URL: a hash tag; nothing in the default cell, except on a cluster."""
    cell = cell_of(redis_url)
    return f"{hash_tag(cell)}:" if cell != DEFAULT_CELL or redis_url.startswith(CLUSTER_SCHEMES) else ""


class Keys:
    """The keys of one pool. `tag`: as `tag_of` returns it."""

    def __init__(self, pool: str = "default", tag: str = "") -> None:
        if not is_pool_name(pool):
            raise ValueError(f"pool {pool!r} must consist of letters, digits, - and _")
        self.pool = pool
        self.tag = tag
        self.prefix = tag if pool == "default" else f"{tag}{{{pool}}}:"
        self.batch_queue = self.prefix + "batch_queue"
        self.leases = self.prefix + "leases"
        self.outbox = self.prefix + "outbox"
        self.outbox_bad = self.prefix + "outbox_bad"
        self.auditors = self.prefix + "auditors"
        self.dlq = self.prefix + "dlq"
        self.retry_budget = self.prefix + "retry_budget"
        self.wake = self.prefix + "wake"
        self.formed_at = self.prefix + "formed_at"
        self.reaped_at = self.prefix + "reaped_at"
        self.scheduled_at = self.prefix + "scheduled_at"
        self.resumed_at = self.prefix + "resumed_at"
        self.wake_at = self.prefix + "wake_at"
        self.epoch = self.prefix + "epoch"
        self.epoch_run = self.prefix + "epoch_run"
        self.quotas_told = self.prefix + "quotas_told"
        self.gpus = self.prefix + "gpus"
        self.cordoned = self.prefix + "cordoned"
        self.moves = self.prefix + "moves"
        self.gateways = self.prefix + "gateways"
        self.refusal_lists = self.prefix + "refusal_lists"
        self.sharing = self.prefix + "sharing"
        self.same_kept = self.prefix + "same_kept"
        self.pools = tag + "pools"  # Shared by all pools, like customers' limits.
        self.protocol = tag + "protocol"  # Shared by all pools.
        self.damaged = self.prefix + "damaged"
        self.history = self.prefix + "history"
        self.history_week = self.prefix + "history_week"
        self.history_turn = self.prefix + "history_turn"
        self.healthy_gpu_count = self.prefix + "healthy_gpu_count"
        self.notices = self.prefix + "notices"
        self.repairs = self.prefix + "repairs"

    @classmethod
    def at(cls, redis_url: str, pool: str = "default") -> "Keys":
        """The keys of a pool at this Redis."""
        return cls(pool, tag_of(redis_url))

    def queue(self, tier: str) -> str:
        return f"{self.prefix}queue:{tier}"

    def backlog(self, tier: str, customer_id: str) -> str:
        """The requests of a customer that wait for places in the tier queue, oldest on the right."""
        return f"{self.prefix}backlog:{tier}:{customer_id}"

    def backlogs(self, tier: str) -> str:
        """The customers with a backlog, by tag."""
        return f"{self.prefix}backlogs:{tier}"

    def flow(self, tier: str, customer_id: str) -> str:
        """A customer's tag, weight and mean cost."""
        return f"{self.prefix}flow:{tier}:{customer_id}"

    def fair(self, tier: str) -> str:
        """A tier's virtual time, sum of weights, mean cost."""
        return f"{self.prefix}fair:{tier}"

    def waiting(self, tier: str) -> str:
        """The number of requests in all backlogs of a tier."""
        return f"{self.prefix}waiting:{tier}"

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

    def stops(self, worker_id: str) -> str:
        """Requests that the worker should stop running in its slots."""
        return f"{self.prefix}stops:{worker_id}"

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
        return name in PERMANENT or name.startswith(("queue:", "backlog:", "backlogs:", "waiting:", "outbox:"))
