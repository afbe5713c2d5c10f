"""Run one batch on the model process, and kill the process when it hangs.

A hung kernel and a hung interpreter look alike from outside: no progress. So a batch that shows none for its cap is
killed; one that shows progress may go on, but never beyond the timeout of any batch. A batch that writes streams is bounded
by their deadlines instead: the model process ends each of them at its own, and is killed only where it does not.

A watcher that stood still itself (SIGSTOP, a frozen machine) has seen nothing meanwhile, and the answer may lie unread: then
the batch gets its time anew. Else a moment's standstill would cost every model that runs, and minutes to load it again.
"""

import asyncio
import time
from collections.abc import Sequence

from gpu_pool.model_process.handle import Begun, Hear, ModelProcess, hear_nothing, unheard
from gpu_pool.model_process.messages import Done, Piece
from gpu_pool.standstill import GAP_S
from scheduler.errors import TierlaneError


class ModelHung(TierlaneError):
    """The batch ran into its cap, and its model process was killed."""


async def run_watched(
    model: ModelProcess,
    bodies: Sequence[bytes],
    *,
    cap_ms: float,
    timeout_ms: float,
    budget_ms: float,
    hear: Hear = hear_nothing,
    left_ms: Sequence[int] = (),
    begun: Begun = unheard,
) -> Done:
    """The model's answer. Raises ModelHung after killing the process, ModelLost where it ended by itself.

    `cap_ms` bounds the time without progress, `timeout_ms` the whole run; `budget_ms` is what the model process may
    spend on taking a failed batch apart, `hear` is told what it adds to its streams meanwhile, `left_ms` is how long each
    body can still be used, `begun` is told how to say who does not wait any more.
    """
    watch = _Watch(model, cap_ms, timeout_ms, max((*left_ms, timeout_ms)) + cap_ms)

    def heard(pieces: Sequence[Piece]) -> None:
        watch.streams()
        hear(pieces)

    try:
        return await model.run(bodies, budget_ms, heard, left_ms, begun)
    finally:
        watch.stop()


class _Watch:
    """A timer that looks at the limit as it stands when it fires: progress puts it off."""

    def __init__(self, model: ModelProcess, cap_ms: float, timeout_ms: float, streams_ms: float) -> None:
        self._model = model
        self._cap_ms = cap_ms
        self._timeout_ms = timeout_ms
        self._streams_ms = streams_ms
        self._started = time.monotonic()
        self._look_after(min(cap_ms, timeout_ms) / 1000)

    def stop(self) -> None:
        self._timer.cancel()

    def streams(self) -> None:
        """The batch writes streams: it may run for as long as they have."""
        self._timeout_ms = self._streams_ms

    def _look_after(self, seconds: float) -> None:
        self._due = time.monotonic() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._due > GAP_S:
            self._started = now
        seen = max(self._started, self._model.progress_at)
        limit = min(self._started + self._timeout_ms / 1000, seen + self._cap_ms / 1000)
        left_s = limit - now
        if left_s > 0:
            self._look_after(left_s)
            return
        said = f"The model showed no progress for {self._cap_ms:.0f} ms, or ran for {self._timeout_ms:.0f} ms."
        self._model.give_up(ModelHung(said))
