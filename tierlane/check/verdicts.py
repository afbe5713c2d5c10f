"""What each thing that was seen of a system means: pure functions from figures to lines of the check."""

from collections.abc import Collection, Mapping, Sequence

from ledger.catalog.snapshot import Model, Tier
from scheduler.protocol.pool_view import Observation
from scheduler.redis_client.connections import CLUSTER_MODE, MINIMUM_VERSION, NO_CLUSTER
from scheduler.redis_client.keys import pools_of
from tierlane.check.item import Item

MOST_SKEW_MS = 100.0
STALE_AUDIT_MS = 10_000


def redis(info: Mapping[str, object]) -> list[Item]:
    """The version, the mode, and whether it may throw work away; `info` is what INFO says."""
    text = str(info.get("redis_version", "unknown"))
    version = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    new_enough = version >= MINIMUM_VERSION
    policy = str(info.get("maxmemory_policy", "unknown"))
    cluster = str(info.get("cluster_enabled", 0)) != "0"
    return [
        Item("redis", "version", "pass", text)
        if new_enough
        else Item("redis", "version", "fail", text, "Tierlane needs Redis 7.0 or Valkey 7.2."),
        Item("redis", "mode", "fail", CLUSTER_MODE, NO_CLUSTER)
        if cluster
        else Item("redis", "mode", "pass", "it holds all keys"),
        Item("redis", "eviction", "pass", f"maxmemory-policy {policy}")
        if policy == "noeviction"
        else Item(
            "redis", "eviction", "fail", f"maxmemory-policy {policy}", "It can evict queued work: set it to noeviction."
        ),
    ]


def clock(group: str, skew_ms: float, round_trip_ms: float) -> Item:
    """How far a server's clock is from this machine's; half of the round trip is what cannot be known."""
    said = f"{skew_ms:+.0f} ms from this machine, within {round_trip_ms / 2:.0f} ms"
    if abs(skew_ms) - round_trip_ms / 2 <= MOST_SKEW_MS:
        return Item(group, "clock", "pass", said)
    return Item(
        group,
        "clock",
        "fail",
        said,
        f"Have both follow NTP: more than {MOST_SKEW_MS:.0f} ms makes times of requests wrong.",
    )


def migrations(revision: str | None, head: str, *, behind: bool) -> Item:
    """Whether the schema is the one that this installation needs."""
    if behind:
        return Item(
            "postgresql", "migrations", "fail", f"at {revision or 'none'}, not {head}", "Run `tierlane migrate`."
        )
    if revision != head:
        return Item(
            "postgresql",
            "migrations",
            "warn",
            f"at {revision}, which is newer than {head}",
            "Upgrade this installation.",
        )
    return Item("postgresql", "migrations", "pass", f"at {head}")


def tiers(rows: Sequence[Tier]) -> list[Item]:
    """Rows that gateways would accept are sane; paused ones are told."""
    named = ", ".join(f"{tier.name} ({tier.guaranteed_share:g})" for tier in rows)
    paused = [tier.name for tier in rows if tier.paused]
    items = [Item("catalog", "tiers", "pass", f"{named}: shares of the capacity that are guaranteed")]
    if paused:
        advice = "`tierlane queue resume TIER` lets its requests run again."
        items.append(Item("catalog", "paused", "warn", f"paused: {', '.join(paused)}", advice))
    return items


def models(rows: Collection[Model]) -> Item:
    """Whether anything can be asked for."""
    enabled = sorted(model.name for model in rows if model.enabled)
    if enabled:
        return Item("catalog", "models", "pass", ", ".join(enabled))
    return Item("catalog", "models", "fail", "none is enabled", "Add one: `tierlane model create NAME`.")


def pools(rows: Collection[Model], seen: Mapping[str, Observation]) -> list[Item]:
    """Whether each pool that an enabled model names has a healthy worker."""
    return [_pool(pool, seen[pool]) for pool in sorted(pools_of(rows)) if pool in seen]


def _pool(pool: str, look: Observation) -> Item:
    name, said = f"pool {pool}", f"{look.healthy_gpus} of {look.total_gpus} workers are healthy"
    if not look.healthy_gpus:
        advice = (
            f"Start a worker with TIERLANE_POOL={pool}, or see the logs of those that there are; `tierlane gpu list`."
        )
        return Item("workers", name, "fail", said, advice)
    cordoned = [worker.id for worker in look.workers if worker.status == "cordoned"]
    if look.healthy_gpus < look.total_gpus:
        advice = f"Cordoned: {', '.join(cordoned)}." if cordoned else "`tierlane gpu list` shows which."
        return Item("workers", name, "warn", said, advice)
    return Item("workers", name, "pass", said)


def gateway(document: Mapping[str, object]) -> list[Item]:
    """What a gateway says of the whole: `down` fails, `degraded` is a warning; its reasons are the advice."""
    status, lag = document.get("status"), document.get("audit_lag_ms")
    reasons = document.get("reasons")
    why = " ".join(str(reason) for reason in reasons) if isinstance(reasons, list) else ""
    items = [Item("gateway", "health", "fail", str(status), why)]
    if status in ("healthy", "degraded"):
        items = [Item("gateway", "health", "pass" if status == "healthy" else "warn", str(status), why)]
    if not isinstance(lag, int):
        items.append(Item("audit", "lag", "warn", "not known"))
    elif lag > STALE_AUDIT_MS:
        items.append(Item("audit", "lag", "fail", f"{lag:,} ms", "Is a scheduler running, and PostgreSQL up?"))
    else:
        items.append(Item("audit", "lag", "pass", f"{lag:,} ms"))
    return items


def dead_letters(count: int) -> Item:
    """Whether requests were given up for good."""
    if not count:
        return Item("audit", "dead letters", "pass", "none")
    return Item("audit", "dead letters", "warn", f"{count:,}", "`tierlane dlq list` shows them; requeue or purge them.")
