"""Batches of a check, run by one model process as a worker's.

The model runs in a child process, so that what crashes or hangs ends there alone; after a crash the next batch starts
another process.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_pool.backends.backend import ItemResult
from gpu_pool.model_process.handle import ModelProcess
from gpu_pool.model_process.launch import ModelLaunch
from gpu_pool.model_process.messages import Piece
from gpu_pool.model_process.watchdog import ModelHung, run_watched
from scheduler.errors import ErrorCode, TierlaneError
from scheduler.payload import Payload, Task, encode_payload

STREAM = "check 0"
"""The address in the payload of a stream; nothing is sent to it."""


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """How each text is put to the model: parameters and task of the request, and how long a batch may run."""

    parameters: dict[str, object] = field(default_factory=dict)
    task: Task = Task.COMPLETE
    timeout_ms: float = 3000.0
    total_ms: float = 4000.0
    """The deadline of a request, for the finding about the time of a batch."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The result of one batch: its time and items, `fault` if it was bisected, `lost` if the process was lost.

    `hung`: it was lost because it ran for too long.
    """

    ms: float = 0.0
    results: list[ItemResult] = field(default_factory=list)
    fault: str = ""
    lost: str = ""
    hung: bool = False
    pieces: dict[int, str] = field(default_factory=dict)
    """The text that was streamed of each item, by its position; only of a stream."""

    @property
    def failed(self) -> list[ItemResult]:
        """The results without an output."""
        return [result for result in self.results if result.error_code]

    @property
    def outputs(self) -> list[str | None]:
        """Of each item, None where it failed."""
        return [None if result.error_code else result.output for result in self.results]

    @property
    def too_long(self) -> bool:
        """Whether the time limit ended the process or inputs; after a fault it may be the fault that took the time."""
        late = any(result.error_code == ErrorCode.GPU_TIMEOUT for result in self.results)
        return self.hung or (late and not self.fault)

    @property
    def wrong(self) -> str:
        """Why this is not one good answer for each input, in a sentence; "": it is."""
        failed = self.failed
        return self.lost or self.fault or (f"{failed[0].error_code}: {failed[0].output}" if failed else "")


class NotLoaded(TierlaneError):
    """The model does not load; the message says why."""


class Probe:
    """Sends batches to one model process. The caller closes it."""

    def __init__(self, launch: ModelLaunch, request: ProbeRequest, load_timeout_s: float) -> None:
        self._launch = launch
        self.request = request
        self._load_timeout_s = load_timeout_s
        self._model: ModelProcess | None = None
        self.version = ""
        self.load_s = 0.0

    async def load(self) -> None:
        """Start the process and wait until it is ready. Raises NotLoaded."""
        started = time.monotonic()
        try:
            self._model = await ModelProcess.spawn(self._launch)
            async with asyncio.timeout(self._load_timeout_s):
                self.version = await self._model.ready()
        except TimeoutError:
            await self.close()
            raise NotLoaded(f"The model did not load within {self._load_timeout_s:g} s.") from None
        except (TierlaneError, OSError) as error:
            await self.close()
            raise NotLoaded(str(error)) from error
        self.load_s = time.monotonic() - started

    async def ask(self, texts: Sequence[str], *, caps: float = 1.0, stream: bool = False) -> ProbeAnswer:
        """One batch of these, for at most so many times the cap; never raises for what the model does."""
        request, pieces = self.request, dict[int, str]()
        target = STREAM if stream else ""
        bodies = [encode_payload(Payload("check", text, request.parameters, request.task, target)) for text in texts]
        limit = caps * request.timeout_ms

        def add(streamed: Sequence[Piece]) -> None:
            for piece in streamed:
                pieces[piece.place] = pieces.get(piece.place, "")[: piece.offset] + piece.text

        try:
            if self._model is None:
                await self.load()
            if self._model is None:
                raise NotLoaded("The model process is gone.")
            done = await run_watched(
                self._model, bodies, cap_ms=limit, timeout_ms=limit, budget_ms=limit, on_pieces=add
            )
        except TierlaneError as error:  # Lost, hung, not loaded, too large to be sent: all of them end this batch.
            await self.close()
            return ProbeAnswer(lost=str(error), hung=isinstance(error, ModelHung))
        return ProbeAnswer(done.gpu_ms, done.results, done.fault, pieces=pieces)

    async def close(self) -> None:
        """End the process, if there is one."""
        model, self._model = self._model, None
        if model is not None:
            await model.close()
