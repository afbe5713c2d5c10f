"""What it costs to keep everything on the disk: Redis' append-only file and PostgreSQL's fsync, with and without by turns.

All other cases run without (`tierlane up --ephemeral`); `tierlane up` by itself runs with it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from cases.outcome import Check, Outcome, none_of, told
from cases.stand import started
from cases.throughput import by_role, load_notes, loaded
from redis.asyncio import Redis

CONNECTIONS = 1000
ROUNDS = 3
KINDS = {"memory": "in memory", "disk": "on disk"}


def run(*, quick: bool) -> Outcome:
    """Stacks by turns, since the machine is not the same from minute to minute; who begins changes."""
    seconds, rounds = (8, 1) if quick else (20, ROUNDS)
    data: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in list(KINDS)[:: -1 if number % 2 else 1]:
            data[kind].append(_round(seconds, durable=kind == "disk"))
    return Outcome(judge(data), data, load_notes())


def judge(data: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Check]:
    """The medians of the rounds; errors and rows of all of those on disk."""
    checks = []
    for kind, label in KINDS.items():
        rate, p50, p99, most = (_median(data[kind], figure) for figure in ("rate", "p50_ms", "p99_ms", "max_ms"))
        checks += [
            told(f"{label}: requests/s", f"{rate:,.0f}"),
            told(f"{label}: p50, p99, at most", f"{p50:.1f}, {p99:.0f}, {most:.0f} ms"),
            told(f"{label}: CPU of a request, all roles", by_role(_roles(data[kind]))),
            told(f"{label}: Redis' CPU over the gateways'", f"{_redis_share(data[kind]):.3f}"),
        ]
    return [
        *checks,
        told("on disk: times that Redis rewrote its file", f"{sum(each['rewrites'] for each in data['disk']):,}"),
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
    """Steadier than either, because what slows the machine slows both."""
    return float(median(each["cpu_us"]["redis"] / each["cpu_us"]["gateway"] for each in rounds))


def _round(seconds: int, *, durable: bool) -> dict[str, Any]:
    with started(workers=34, durable=durable) as stand:
        stand.raise_limits()
        found = loaded(stand, CONNECTIONS, seconds, 5)
        return {**found, "rewrites": asyncio.run(_rewrites(stand.redis_url))}


async def _rewrites(url: str) -> int:
    async with Redis.from_url(url) as client:
        return int((await client.info("persistence"))["aof_rewrites"])
