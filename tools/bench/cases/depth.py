"""The cost of a request with 100,000 queued requests beside that with 100; the depth is held under load."""

import asyncio
from collections.abc import Mapping
from statistics import median
from typing import Any

from cases.feeder import WAIT_MS, Feeder
from cases.outcome import Check, Outcome, at_most, figure, more
from cases.stack import Stack, started, used_us

DEPTHS = (100, 100_000)
WORKERS = 2
MOST_MORE = 10.0
MODEL = "SELECT min(name) FROM models WHERE enabled"
ROUNDS = 3


def run(*, quick: bool) -> Outcome:
    """Measure both depths on one stack, the smaller one first, because a deep queue empties slowly."""
    seconds, rounds = (4, 1) if quick else (10, ROUNDS)
    # Otherwise the auditor would close the requests of the feeder as abandoned.
    with started(workers=WORKERS, gateways=1, total_request_ms=WAIT_MS) as stack:
        model = str(stack.value(MODEL))
        stack.raise_limits()
        found = asyncio.run(_rounds(stack, model, seconds, rounds))
    return Outcome(judge(found), found, [])


def judge(found: Mapping[str, Any]) -> list[Check]:
    """Compare the cost at both depths."""
    costs = {int(depth): sum(by_role.values()) for depth, by_role in found.items()}
    parts = ", ".join(f"{cost:.1f} us at {depth:,}" for depth, cost in costs.items())
    return [
        at_most(
            "CPU more at a queue of 100,000 than of 100", more(costs[DEPTHS[1]], costs[DEPTHS[0]]), MOST_MORE, " %", 1
        ),
        figure("CPU of a request without a gateway", parts),
    ]


async def _rounds(stack: Stack, model: str, seconds: int, rounds: int) -> dict[str, Any]:
    costs: dict[int, list[dict[str, float]]] = {depth: [] for depth in DEPTHS}
    feeder = Feeder(stack.redis_url, model)
    async with feeder.open():
        await feeder.reach(DEPTHS[0])
        await feeder.hold(DEPTHS[0], 4.0)  # Warm-up.
        for _ in range(rounds):
            costs[DEPTHS[0]].append(await _cost(stack, feeder, DEPTHS[0], seconds))
        for _ in range(rounds):
            costs[DEPTHS[1]].append(await _cost(stack, feeder, DEPTHS[1], seconds))
    return {str(depth): _medians(found) for depth, found in costs.items()}


async def _cost(stack: Stack, feeder: Feeder, depth: int, seconds: int) -> dict[str, float]:
    await feeder.reach(depth)
    await feeder.hold(depth, 2.0)
    before, submitted = await asyncio.to_thread(stack.reading), feeder.submitted
    await feeder.hold(depth, seconds)
    after = await asyncio.to_thread(stack.reading)
    # At a constant depth as many requests are served as are submitted.
    cost = used_us(before, after, feeder.submitted - submitted)
    cost.pop("gateway", None)
    return cost


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    """The median of the rounds by role: autovacuum of PostgreSQL, once a minute, affects one of them."""
    return {role: median(one[role] for one in found) for role in found[0]}
