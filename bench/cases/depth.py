"""Whether a request costs more where 100,000 others wait than where 100 do: the queue is kept at that depth under load."""

import asyncio
from collections.abc import Mapping
from statistics import median
from typing import Any

from cases.feeder import WAIT_MS, Feeder
from cases.outcome import Check, Outcome, at_most, more, told
from cases.stand import Stand, started, used_us

DEPTHS = (100, 100_000)
WORKERS = 2
MOST_MORE = 10.0
MODEL = "SELECT min(name) FROM models WHERE enabled"
ROUNDS = 3


def run(*, quick: bool) -> Outcome:
    """Both depths on one stack, the smaller one first: to empty a queue of the larger one takes longer than a round."""
    seconds, rounds = (4, 1) if quick else (10, ROUNDS)
    # The stack knows how long the feeder's requests may wait, or it would close them as abandoned meanwhile.
    with started(workers=WORKERS, gateways=1, total_request_ms=WAIT_MS) as stand:
        model = str(stand.value(MODEL))
        stand.raise_limits()
        found = asyncio.run(_rounds(stand, model, seconds, rounds))
    return Outcome(judge(found), found, [])


def judge(found: Mapping[str, Any]) -> list[Check]:
    """The cost at the larger depth beside that at the smaller one; the first sum is a floor of the second."""
    costs = {int(depth): sum(by_role.values()) for depth, by_role in found.items()}
    parts = ", ".join(f"{cost:.1f} us at {depth:,}" for depth, cost in costs.items())
    return [
        at_most(
            "CPU more at a queue of 100,000 than of 100", more(costs[DEPTHS[1]], costs[DEPTHS[0]]), MOST_MORE, " %", 1
        ),
        told("CPU of a request without a gateway", parts),
    ]


async def _rounds(stand: Stand, model: str, seconds: int, rounds: int) -> dict[str, Any]:
    costs: dict[int, list[dict[str, float]]] = {depth: [] for depth in DEPTHS}
    feeder = Feeder(stand.redis_url, model)
    async with feeder.open():
        await feeder.reach(DEPTHS[0])
        await feeder.hold(DEPTHS[0], 4.0)  # What is started, connected and measured once.
        for _ in range(rounds):
            costs[DEPTHS[0]].append(await _cost(stand, feeder, DEPTHS[0], seconds))
        for _ in range(rounds):
            costs[DEPTHS[1]].append(await _cost(stand, feeder, DEPTHS[1], seconds))
    return {str(depth): _middle(found) for depth, found in costs.items()}


async def _cost(stand: Stand, feeder: Feeder, depth: int, seconds: int) -> dict[str, float]:
    await feeder.reach(depth)
    await feeder.hold(depth, 2.0)
    before, submitted = await asyncio.to_thread(stand.reading), feeder.submitted
    await feeder.hold(depth, seconds)
    after = await asyncio.to_thread(stand.reading)
    # At a constant depth as many are served as are submitted.
    cost = used_us(before, after, feeder.submitted - submitted)
    cost.pop("gateway", None)
    return cost


def _middle(found: list[dict[str, float]]) -> dict[str, float]:
    """By role, the middle one of the rounds: at any depth PostgreSQL's autovacuum, due once a minute, falls into one."""
    return {role: median(one[role] for one in found) for role in found[0]}
