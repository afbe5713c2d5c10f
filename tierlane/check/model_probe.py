"""Batches of a check, run by one model process as a worker's; requests in slots, if the model has slots.

The model runs in a child process, so that what crashes or hangs ends there alone; after a crash the next batch starts
another process.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_pool.backends.backend import ItemResult
from gpu_pool.model_process.handle import ModelProcess
from gpu_pool.model_process.launch import ModelLaunch
from gpu_pool.model_process.messages import Done, Piece, Refused
from gpu_pool.model_process.watchdog import ModelHung, Watch, run_watched
from gpu_pool.worker.slow_model import TRIAL_CAPS
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
    """The deadline of a request to a model that runs batches."""
    slots_total_ms: float = 600_000.0
    """The deadline of a request to a model with slots."""


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


class _SlotRun:
    """Receives what one request in a slot sends."""

    def __init__(self, place: int, pieces: dict[int, str]) -> None:
        self._place, self._pieces = place, pieces
        self.end: asyncio.Future[Done] = asyncio.get_running_loop().create_future()

    def on_piece(self, piece: Piece) -> None:
        """The model added text."""
        self._pieces[self._place] = self._pieces.get(self._place, "")[: piece.offset] + piece.text

    def over(self, answer: Done | Refused | TierlaneError) -> None:
        """The run has ended, or its process is lost."""
        if isinstance(answer, Done):
            self.end.set_result(answer)
        else:
            self.end.set_exception(answer if isinstance(answer, TierlaneError) else TierlaneError(answer.reason))
            self.end.exception()  # Retrieved: another run may have ended the batch.


class NotLoaded(TierlaneError):
    """The model does not load; the message says why."""


class Probe:
    """Sends batches to one model process. The caller closes it."""

    def __init__(self, launch: ModelLaunch, request: ProbeRequest, load_timeout_s: float) -> None:
        self._launch = launch
        self.request = request
        self._load_timeout_s = load_timeout_s
        self._model: ModelProcess | None = None
        self._has_slots = False
        self.version = ""
        self.load_s = 0.0

    async def load(self) -> None:
        """Start the process and wait until it is ready. Raises NotLoaded."""
        started = time.monotonic()
        try:
            self._model = await ModelProcess.spawn(self._launch)
            async with asyncio.timeout(self._load_timeout_s):
                self.version = await self._model.ready()
            self._has_slots = self._model.slots > 0
        except TimeoutError:
            await self.close()
            raise NotLoaded(f"The model did not load within {self._load_timeout_s:g} s.") from None
        except (TierlaneError, OSError) as error:
            await self.close()
            raise NotLoaded(str(error)) from error
        self.load_s = time.monotonic() - started

    @property
    def has_slots(self) -> bool:
        """Whether the model answers single requests, each in a slot; known once it is loaded."""
        return self._has_slots

    @property
    def total_ms(self) -> float:
        """The deadline of a request."""
        return self.request.slots_total_ms if self._has_slots else self.request.total_ms

    @property
    def limit(self) -> str:
        """The deadline of a request, as a clause."""
        return f"a request may take {self.total_ms:,.0f} ms (--total-request-ms)"

    @property
    def timeout_ms(self) -> float:
        """How long a run may take: a request in a slot has until its deadline, of which the check waits for a part."""
        trial_ms = TRIAL_CAPS * self.request.timeout_ms
        return min(self.total_ms, trial_ms) if self._has_slots else self.request.timeout_ms

    async def ask(self, texts: Sequence[str], *, caps: float = 1.0, stream: bool = False) -> ProbeAnswer:
        """One batch of these, for at most so many times the cap; never raises for what the model does."""
        request, pieces = self.request, dict[int, str]()
        target = STREAM if stream else ""
        bodies = [encode_payload(Payload("check", text, request.parameters, request.task, target)) for text in texts]
        limit = caps * request.timeout_ms
        left_ms = [int(caps * self.total_ms)] * len(texts) if stream else []

        def add(streamed: Sequence[Piece]) -> None:
            for piece in streamed:
                pieces[piece.place] = pieces.get(piece.place, "")[: piece.offset] + piece.text

        try:
            if self._model is None:
                await self.load()
            if self._model is None:
                raise NotLoaded("The model process is gone.")
            if self._has_slots:
                return await self._in_slots(self._model, bodies)
            done = await run_watched(
                self._model, bodies, cap_ms=limit, timeout_ms=limit, budget_ms=limit, on_pieces=add, left_ms=left_ms
            )
        except TierlaneError as error:  # Lost, hung, not loaded, too large to be sent: all of them end this batch.
            await self.close()
            return ProbeAnswer(lost=str(error), hung=isinstance(error, ModelHung))
        return ProbeAnswer(done.gpu_ms, done.results, done.fault, pieces=pieces)

    async def _in_slots(self, model: ModelProcess, bodies: Sequence[bytes]) -> ProbeAnswer:
        """Run each as a request of its own, as many at a time as there are slots. Raises TierlaneError."""
        started, pieces, limit_ms = time.monotonic(), dict[int, str](), self.timeout_ms
        free = asyncio.Semaphore(model.slots)
        watch = Watch(model, self.request.timeout_ms, math.inf, math.inf)

        async def run(place: int, body: bytes) -> Done:
            async with free:
                one = _SlotRun(place, pieces)
                model.start(body, int(limit_ms), one)
                return await one.end

        model.progress_at = started
        try:
            ends = await asyncio.gather(*(run(place, body) for place, body in enumerate(bodies)))
        finally:
            watch.stop()
        fault = next((done.fault for done in ends if done.fault), "")
        results = [done.results[0] for done in ends]
        return ProbeAnswer((time.monotonic() - started) * 1000, results, fault, pieces=pieces)

    async def close(self) -> None:
        """End the process, if there is one."""
        model, self._model = self._model, None
        if model is not None:
            await model.close()
