"""Run one batch on the model process, and kill the process when it hangs.

A hung kernel and a hung interpreter look alike from outside: no progress. So a batch that shows none for its cap is
killed; one that shows progress may go on, but never beyond the timeout of any batch.
"""

import asyncio
import time
from collections.abc import Sequence

from gpu_pool.backend import Item
from gpu_pool.frames import Done
from gpu_pool.model_handle import ModelProcess
from scheduler.errors import TierlaneError


class ModelHung(TierlaneError):
    """The batch ran into its cap, and its model process was killed."""


async def run_watched(
    model: ModelProcess, items: Sequence[Item], *, cap_ms: float, timeout_ms: float, budget_ms: float
) -> Done:
    """The model's answer. Raises ModelHung after killing the process, ModelLost where it ended by itself.

    `cap_ms` bounds the time without progress, `timeout_ms` the whole run; `budget_ms` is what the model process may
    spend on taking a failed batch apart.
    """
    started = time.monotonic()
    answer = asyncio.create_task(model.run(items, budget_ms))
    try:
        while not answer.done():
            limit = min(started + timeout_ms / 1000, max(started, model.progress_at) + cap_ms / 1000)
            left_s = limit - time.monotonic()
            if left_s <= 0:
                model.kill()
                raise ModelHung(f"The model showed no progress for {cap_ms:.0f} ms, or ran for {timeout_ms:.0f} ms.")
            await asyncio.wait([answer], timeout=left_s)
        return answer.result()
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
