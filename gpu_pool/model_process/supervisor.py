"""Keeps one model process alive: starts it, restarts it when it is lost, and quarantines a bad model.

A process that worked is followed at once, however often something kills it. One that does not, or that never loads, is
followed ever later: a start costs as much as many batches. A model that returns invalid output (a wrong number of
results, NaN, None) fails fast and would attract all work; so after three such batches in a row its process ends and
stays away for a while, longer each time. Delays are pure arithmetic.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Literal

import structlog

from gpu_pool.backends.backend import ItemResult
from gpu_pool.model_process.handle import ModelLaunch, ModelLost, ModelProcess
from scheduler.errors import ErrorCode, StartError

FIRST_RESPAWN_S, SLOWEST_RESPAWN_S = 0.1, 5.0
HEALTHY_AFTER_S, HEALTHY_AFTER_BATCHES = 10.0, 20
"""A process that lived or answered well for so long has worked."""
LOAD_FAILURES = 5
"""So many failures to load in a row, and the model counts as failed: it is tried rarely, and health says so."""
FAILED_RETRY_S = 30.0


class Respawn:
    """Delays of 0.1 s doubling to 5 s while processes do not work; 30 s once the model has failed to load five times."""

    def __init__(self) -> None:
        self._next_s = FIRST_RESPAWN_S
        self._load_failures = 0

    @property
    def failed(self) -> bool:
        """Whether the model counts as one that does not load."""
        return self._load_failures >= LOAD_FAILURES

    def loaded(self) -> None:
        """A process got ready."""
        self._load_failures = 0

    def ended(self, ready_s: float | None, good_batches: int) -> float:
        """A process ended, `ready_s` seconds after it got ready (None: it never did); seconds until the next."""
        if ready_s is None:
            self._load_failures += 1
            if self.failed:
                return FAILED_RETRY_S
        elif ready_s >= HEALTHY_AFTER_S or good_batches >= HEALTHY_AFTER_BATCHES:
            self._next_s = FIRST_RESPAWN_S
        delay_s, self._next_s = self._next_s, min(SLOWEST_RESPAWN_S, 2 * self._next_s)
        return delay_s


STRIKES = 3
FIRST_QUARANTINE_S, LONGEST_QUARANTINE_S = 5.0, 60.0


class BatchVerdict(Enum):
    """What one batch says of its model."""

    GOOD = "good"  # It answered.
    NONSENSE = "nonsense"  # At least half of the answers are none.
    NEITHER = "neither"  # The inputs may be to blame, or nothing ran.


def judge(results: Sequence[ItemResult]) -> BatchVerdict:
    """One odd input among good ones is no model's fault, and one lucky answer among many bad ones is no proof."""
    nonsense = sum(result.error_code == ErrorCode.INVALID_OUTPUT for result in results)
    if nonsense and 2 * nonsense >= len(results):
        return BatchVerdict.NONSENSE
    return BatchVerdict.GOOD if any(not result.error_code for result in results) else BatchVerdict.NEITHER


class Quarantine:
    """Counts strikes. After a quarantine the model is on probation: one batch of nonsense is enough for the next."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._allowed = STRIKES
        self._next_s = FIRST_QUARANTINE_S

    def after(self, verdict: BatchVerdict) -> float:
        """Seconds for which the model must be put aside after this batch; 0: it may go on."""
        if verdict is BatchVerdict.GOOD:
            self._in_a_row, self._allowed, self._next_s = 0, STRIKES, FIRST_QUARANTINE_S
        if verdict is not BatchVerdict.NONSENSE:
            return 0.0
        self._in_a_row += 1
        if self._in_a_row < self._allowed:
            return 0.0
        seconds, self._next_s = self._next_s, min(LONGEST_QUARANTINE_S, 2 * self._next_s)
        self._in_a_row, self._allowed = 0, 1
        return seconds


REAPED_WITHIN_S = 5.0  # After SIGKILL; what takes longer hangs in the kernel, and its device with it.

ModelStatus = Literal["starting", "ready", "paused", "away", "down", "quarantined", "failed"]
_LOADED = ("ready", "paused", "away")
log = structlog.get_logger()


class ModelSupervisor:
    """Owner of the model process. `changed` is called whenever `status` or `start_error` changed."""

    def __init__(self, launch: ModelLaunch, load_timeout_s: float, changed: Callable[[], None]) -> None:
        self._launch = launch
        self._load_timeout_s = load_timeout_s
        self._changed = changed
        self._process: ModelProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._stopping = False
        self._respawn = Respawn()
        self._quarantine = Quarantine()
        self._aside_s = 0.0
        self._good_batches = 0
        self.status: ModelStatus = "starting"
        self.version = ""
        self.ready = asyncio.Event()
        self.start_error: StartError | None = None

    @property
    def model(self) -> ModelProcess | None:
        """The process, while it is ready for a batch."""
        return self._process if self.ready.is_set() and self._process and not self._process.lost.is_set() else None

    @property
    def pid(self) -> int:
        """Of the process that is there, ready or not; 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> "asyncio.Task[None]":
        """Begin to keep a model alive. Returns the task, which ends by `stop` or with `start_error`."""
        self._task = asyncio.create_task(self._keep(), name="model-keeper")
        return self._task

    def batch_ended(self, verdict: BatchVerdict) -> None:
        """A batch was answered; a model that answers nonsense ends here."""
        self._good_batches += verdict is BatchVerdict.GOOD
        self._aside_s = self._quarantine.after(verdict)
        if self._aside_s and self._process is not None:
            log.error("model answers nonsense; it is put into quarantine", seconds=self._aside_s)
            self._set("quarantined")
            self._process.kill()

    def given_up(self) -> None:
        """Its process was killed or lost in the middle of a batch. Until its end is noticed it must get no other one,
        which would be lost with it and would count that as an attempt.
        """
        if self.status in _LOADED:
            self._set("down")

    def stop(self) -> None:
        """Start no further process."""
        self._stopping = True

    async def close(self) -> None:
        """End the model process and reap it."""
        self.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end_process()

    async def _keep(self) -> None:
        while not self._stopping:
            self._aside_s, self._good_batches = 0.0, 0
            ready_s = await self._live()
            if self.start_error is not None:
                return
            delay_s = self._respawn.ended(ready_s, self._good_batches)
            if self._respawn.failed and self.status != "failed":
                log.error("model does not load; it is tried rarely from now on")
                self._set("failed")
            await asyncio.sleep(self._aside_s or delay_s)

    async def _live(self) -> float | None:
        """Live through one process, from spawn to its end; how long it was ready (s), or None where it never was."""
        ready_at = None
        try:
            process = self._process = await ModelProcess.spawn(self._launch, self._availability_changed)
            async with asyncio.timeout(self._load_timeout_s):
                self.version = await process.ready()
            ready_at = time.monotonic()
            self._respawn.loaded()
            self._set(_availability(process))
            log.info("model ready", backend=self._launch.backend, version=self.version, pid=process.pid)
            await process.lost.wait()
        except StartError as error:
            # Of a model that was ready before, even this is worth another try: a disk may come back.
            self.start_error = None if self.version else error
        except TimeoutError:
            log.warning("model did not load in time", seconds=self._load_timeout_s)
        except OSError as error:
            log.warning("model process cannot be started", error=str(error))
        except ModelLost:
            pass  # Told below, together with how the process ended.
        ready_s = None if ready_at is None else time.monotonic() - ready_at
        self._set(self.status if self._aside_s or self._respawn.failed else "down")
        await self._end_process()
        return ready_s

    async def _end_process(self) -> None:
        process = self._process
        if process is None:
            return
        self._closing = self._closing or asyncio.create_task(process.close())
        if not (await asyncio.wait([self._closing], timeout=REAPED_WITHIN_S))[0]:
            log.error("model process cannot be ended; its device is out of use", pid=process.pid)
            self._set("quarantined")
            if self._stopping:
                return
        await asyncio.shield(self._closing)
        self._process = self._closing = None  # Not before: a stop in the middle of this waits for the same.
        if not self._stopping:
            log.error("model lost", pid=process.pid, reason=process.why_lost)

    def _availability_changed(self) -> None:
        """The model process wants batches, or no more of them for now; before it is ready that is asked there."""
        process = self._process
        if process is None or self.status not in _LOADED:
            return
        log.info("model wants batches" if not process.unavailable else "model pauses", reason=process.unavailable)
        self._set(_availability(process))

    def _set(self, status: ModelStatus) -> None:
        if status == "ready":
            self.ready.set()
        else:
            self.ready.clear()
        self.status = status
        self._changed()


def _availability(process: ModelProcess) -> Literal["ready", "paused", "away"]:
    if not process.unavailable:
        return "ready"
    return "paused" if process.brief else "away"
