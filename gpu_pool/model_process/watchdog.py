"""A batch under the watchdog: a model process without progress is killed.

A hung kernel and a hung interpreter look the same from outside: no progress. So a batch without progress for its cap is
killed; with progress it may go on, but not beyond the timeout of any batch. A batch that writes streams is limited by
their deadlines instead: the model process ends each of them at its own, and is killed only if it does not. A watchdog
that was stalled itself has observed nothing meanwhile, so the batch gets its time again.
"""

import asyncio
import math
import time
from collections.abc import Sequence

from gpu_pool.model_process.handle import ModelProcess, PiecesCallback, StartCallback, ignore_pieces, ignore_start
from gpu_pool.model_process.messages import Done, Piece
from gpu_pool.model_process.stall_detector import GAP_S
from scheduler.errors import TierlaneError


class ModelHung(TierlaneError):
    """The batch reached its cap, and its model process was killed."""


async def run_watched(
    model: ModelProcess,
    bodies: Sequence[bytes],
    *,
    cap_ms: float,
    timeout_ms: float,
    budget_ms: float,
    on_pieces: PiecesCallback = ignore_pieces,
    left_ms: Sequence[int] = (),
    on_start: StartCallback = ignore_start,
) -> Done:
    """The model's answer. Raises ModelHung after killing the process, ModelLost if it ended by itself.

    `cap_ms` limits the time without progress, `timeout_ms` the whole run; `budget_ms` is the time for bisecting a
    failed batch, `on_pieces` is called with pieces of streams, `left_ms` is the time left of each body, `on_start` is called
    with a function that cancels positions.
    """
    watch = Watch(model, cap_ms, timeout_ms, max((*left_ms, timeout_ms)) + cap_ms)

    def watched(pieces: Sequence[Piece]) -> None:
        watch.streams()
        on_pieces(pieces)

    try:
        return await model.run(bodies, budget_ms, watched, left_ms, on_start)
    finally:
        watch.stop()


class Watch:
    """A timer that checks the limits, in milliseconds, when it fires; progress extends `cap_ms`. Kills the process beyond them."""

    def __init__(self, model: ModelProcess, cap_ms: float, timeout_ms: float, streams_ms: float) -> None:
        self._model = model
        self._cap_ms = cap_ms
        self._timeout_ms = timeout_ms
        self._streams_ms = streams_ms
        self._started = time.monotonic()
        self._check_after(min(cap_ms, timeout_ms) / 1000)

    def stop(self) -> None:
        self._timer.cancel()

    def streams(self) -> None:
        """The batch writes streams: it may run until their deadlines."""
        self._timeout_ms = self._streams_ms

    def _check_after(self, seconds: float) -> None:
        self._due = time.monotonic() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        now = time.monotonic()
        if now - self._due > GAP_S:
            self._started = now
        progress_at = max(self._started, self._model.progress_at)
        limit = min(self._started + self._timeout_ms / 1000, progress_at + self._cap_ms / 1000)
        left_s = limit - now
        if left_s > 0:
            self._check_after(left_s)
            return
        ran = f", or ran for {self._timeout_ms:.0f} ms" if self._timeout_ms < math.inf else ""
        message = f"The model showed no progress for {self._cap_ms:.0f} ms{ran}."
        self._model.give_up(ModelHung(message))
