"""What one waiting request takes in Redis, with its lease and whatever else is kept of it."""

import asyncio
from collections.abc import Mapping
from typing import Any

from cases.depth import MODEL
from cases.feeder import Feeder
from cases.outcome import Check, Outcome, at_most, told
from cases.stand import Stand, started

WAITING = 20_000
MOST_BYTES = 700


def run(*, quick: bool) -> Outcome:
    """Workers that take a few seconds for one request take hardly any away meanwhile."""
    waiting = WAITING // 4 if quick else WAITING
    with started(workers=1, batch=1, gateways=1, backend="simulated:2000") as stand:
        model = str(stand.value(MODEL))
        stand.raise_limits()
        found = asyncio.run(_fill(stand, model, waiting))
    return Outcome(judge(found), found, [])


def judge(found: Mapping[str, Any]) -> list[Check]:
    """Bytes beside the body, at the most that was seen and when the audit had taken its records, which it may hold."""
    return [
        at_most("bytes a waiting request, without its body", found["most"] - found["body"], MOST_BYTES),
        told("the same five seconds later", f"{found['settled'] - found['body']:,.0f}"),
    ]


async def _fill(stand: Stand, model: str, waiting: int) -> dict[str, float]:
    feeder = Feeder(stand.redis_url, model)
    async with feeder.open():
        await feeder.reach(200)  # What exists once: scripts, the customer's buckets, the lists.
        await asyncio.sleep(3)
        empty, depth = await feeder.memory(), await feeder.depth()
        await feeder.reach(waiting + depth)
        most, added = await feeder.memory(), await feeder.depth() - depth
        await asyncio.sleep(5)
        settled, left = await feeder.memory(), await feeder.depth() - depth
        return {"most": (most - empty) / added, "settled": (settled - empty) / left, "body": float(len(feeder.body))}
