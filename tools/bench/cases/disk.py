"""The cost of durability: stacks with and without the append-only file of Redis and fsync of PostgreSQL.

All other cases run without (`tierlane up --ephemeral`); the default is with.
"""

import asyncio
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from cases.outcome import Check, Outcome, figure, none_of
from cases.stack import started
from cases.throughput import by_role, load_notes, loaded
from redis.asyncio import Redis

CONNECTIONS = 1000
ROUNDS = 3
KINDS = {"memory": "in memory", "disk": "on disk"}


def run(*, quick: bool) -> Outcome:
    """Alternate stacks of both kinds, and which is first, because the speed of the machine varies."""
    seconds, rounds = (8, 1) if quick else (20, ROUNDS)
    data: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in list(KINDS)[:: -1 if number % 2 else 1]:
            data[kind].append(_round(seconds, durable=kind == "disk"))
    return Outcome(judge(data), data, load_notes())


def judge(data: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Check]:
    """Compare the medians of the rounds, and errors and rows of all rounds on disk."""
    checks = []
    for kind, label in KINDS.items():
        rate, p50, p99, most = (_median(data[kind], figure) for figure in ("rate", "p50_ms", "p99_ms", "max_ms"))
        checks += [
            figure(f"{label}: requests/s", f"{rate:,.0f}"),
            figure(f"{label}: p50, p99, at most", f"{p50:.1f}, {p99:.0f}, {most:.0f} ms"),
            figure(f"{label}: CPU of a request, all roles", by_role(_roles(data[kind]))),
            figure(f"{label}: Redis' CPU over the gateways'", f"{_redis_share(data[kind]):.3f}"),
        ]
    return [
        *checks,
        figure("on disk: times that Redis rewrote its file", f"{sum(each['rewrites'] for each in data['disk']):,}"),
        none_of("on disk: errors", sum(each["errors"] for each in data["disk"])),
        none_of(
            "on disk: answers without their audit row, or rows too many",
            sum(each["rows_off"] for each in data["disk"]),
        ),
    ]


def _median(rounds: Sequence[Mapping[str, Any]], figure: str) -> float:
    return float(median(each[figure] for each in rounds))


def _roles(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {role: float(median(each["cpu_us"][role] for each in rounds)) for role in rounds[0]["cpu_us"]}


def _redis_share(rounds: Sequence[Mapping[str, Any]]) -> float:
    """The ratio varies less than either, because a slow machine affects both."""
    return float(median(each["cpu_us"]["redis"] / each["cpu_us"]["gateway"] for each in rounds))


def _round(seconds: int, *, durable: bool) -> dict[str, Any]:
    with started(workers=34, durable=durable) as stack:
        stack.raise_limits()
        found = loaded(stack, CONNECTIONS, seconds, 5)
        return {**found, "rewrites": asyncio.run(_rewrites(stack.redis_url))}


async def _rewrites(url: str) -> int:
    async with Redis.from_url(url) as client:
        return int((await client.info("persistence"))["aof_rewrites"])
