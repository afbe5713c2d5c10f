"""The memory of one queued request in Redis, with its lease and all other keys."""

import asyncio
from collections.abc import Mapping
from typing import Any

from cases.depth import MODEL
from cases.feeder import Feeder
from cases.outcome import Check, Outcome, at_most, figure
from cases.stack import Stack, started

WAITING = 20_000
MOST_BYTES = 700


def run(*, quick: bool) -> Outcome:
    """Fill the queue of a slow worker, which claims few requests meanwhile."""
    waiting = WAITING // 4 if quick else WAITING
    with started(workers=1, batch=1, gateways=1, backend="simulated:2000") as stack:
        model = str(stack.value(MODEL))
        stack.raise_limits()
        found = asyncio.run(_fill(stack, model, waiting))
    return Outcome(judge(found), found, [])


def judge(found: Mapping[str, Any]) -> list[Check]:
    """Compare the bytes without the body, at most and after the audit has read its records."""
    return [
        at_most("bytes a waiting request, without its body", found["most"] - found["body"], MOST_BYTES),
        figure("the same five seconds later", f"{found['settled'] - found['body']:,.0f}"),
    ]


async def _fill(stack: Stack, model: str, waiting: int) -> dict[str, float]:
    feeder = Feeder(stack.redis_url, model)
    async with feeder.open():
        await feeder.reach(200)  # Scripts, buckets and lists exist once.
        await asyncio.sleep(3)
        empty, depth = await feeder.memory(), await feeder.depth()
        await feeder.reach(waiting + depth)
        most, added = await feeder.memory(), await feeder.depth() - depth
        await asyncio.sleep(5)
        settled, left = await feeder.memory(), await feeder.depth() - depth
        return {"most": (most - empty) / added, "settled": (settled - empty) / left, "body": float(len(feeder.body))}
