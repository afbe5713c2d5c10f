"""A model that is slower than the cap of a batch: when its worker stops claiming, and when it may continue.

A batch that reaches the cap is killed with its model process. A model that is always slower would be killed and loaded
again for each request. So after two batches in a row that reached the cap, the model counts as slow: its worker claims
nothing and runs trial batches, each with one short text and a limit of ten caps, so that the real time is measured. A
trial that ends within the cap makes the worker ready again.

The first trial runs at once, so a batch of one decides: an input that hangs, or batches that are slow only because they
are large or long, do not make a model slow. Until this trial reaches the cap, the worker is not reported as slow, so that
the requests of others wait for the trial and do not fail. If requests reach the cap again before any batch has ended in
time, one of them is sufficient, and the trials wait for 10 s, doubling to 60 s.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from scheduler.payload import Payload, Task, decode_payload, encode_payload
from scheduler.prompt_messages import PromptMessage, encode_messages

IN_A_ROW = 2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 60.0
TRIAL_CAPS = 10.0
"""The limit of a trial batch, as a multiple of the cap."""

TRIAL_TEXT = "Once upon a time"

log = structlog.get_logger()

_PLAIN = {Task.CHAT_DOCUMENT: Task.CHAT, Task.COMPLETION_DOCUMENT: Task.COMPLETE}


class SlowModel:
    """Decides whether the model is slow. Pure; times in ms, except `pause_s`. `timeout_ms` is the cap of a batch."""

    def __init__(self, timeout_ms: float) -> None:
        self.timeout_ms = timeout_ms
        self.slow = False
        """The worker claims nothing."""
        self.confirmed = False
        """A trial has reached the cap too, or no trial is typical: the worker reports that its model is slow."""
        self.model_ms = 0.0
        """Time of the last batch that reached the cap, or of the last trial; 0: not measured."""
        self.pause_s = 0.0
        """Seconds until the next trial."""
        self._in_a_row = 0
        self._passed = False  # A trial passed, and no batch has ended in time since.
        self._next_s = FIRST_PAUSE_S

    def ended_in_time(self) -> None:
        """A batch of requests ended before its cap."""
        self._in_a_row, self._passed, self._next_s = 0, False, FIRST_PAUSE_S

    def reached_cap(self, ms: float, *, alone: bool) -> bool:
        """A batch ran for `ms` until it was stopped. `alone`: it was one request in its first attempt. Whether the model
        counts as slow from now on.
        """
        if self.slow:
            return False
        self.model_ms = ms
        self._in_a_row += 1
        again = self._passed and alone
        if self._in_a_row < IN_A_ROW and not again:
            return False
        self.slow, self.confirmed = True, again
        self.pause_s = self._pause() if again else 0.0
        return True

    def trial_over_cap(self) -> None:
        """The running trial has reached the cap; it continues, so that its time is measured."""
        self.slow = self.confirmed = True
        self.model_ms = self.timeout_ms

    def trial_ended(self, ms: float | None) -> None:
        """A trial took `ms`; None: the model process was lost, so nothing is known."""
        if ms is not None:
            self.model_ms = ms
        if ms is not None and ms <= self.timeout_ms:
            self._passed = self._passed or self.slow
            self.slow, self.confirmed, self._in_a_row = False, False, 0
        elif ms is not None or self.slow:
            self.slow, self.confirmed = True, self.confirmed or ms is not None
            self.pause_s = self._pause()

    def _pause(self) -> float:
        pause_s, self._next_s = self._next_s, min(LONGEST_PAUSE_S, 2 * self._next_s)
        return pause_s


def trial_body(body: bytes) -> bytes:
    """A request with a short text, and the task of a request that reached the cap (b"": none).

    Its parameters are not taken over: a `max_tokens` that never fits within the cap would make the model slow for all.
    """
    try:
        known = decode_payload(body)
    except ValueError:
        known = Payload("trial", "", {})
    task = _PLAIN.get(known.task, known.task)
    text = encode_messages([PromptMessage("user", TRIAL_TEXT)]) if task is Task.CHAT else TRIAL_TEXT
    return encode_payload(Payload(known.model, text, {}, task))


class Trials:
    """Runs the trials of one worker. `run(body, limit_ms)` returns the time of a batch in ms, None if it was lost.

    `usable` is set while the worker may claim; with `at_start`, only after a first trial, which measures the model. `ready`
    is set while the model process is. `changed` is called when `usable` or the measured time has changed. `by_silence`: whether
    `run` measures the longest silence, which only its end shows.
    """

    def __init__(
        self,
        model: SlowModel,
        run: Callable[[bytes, float], Awaitable[float | None]],
        ready: asyncio.Event,
        changed: Callable[[], None],
        *,
        at_start: bool,
        by_silence: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model = model
        self._run_batch = run
        self._ready = ready
        self._changed = changed
        self._by_silence = by_silence
        self._body = trial_body(b"")
        self._due = asyncio.Event()
        self.usable = asyncio.Event()
        if at_start:
            self._due.set()
        else:
            self.usable.set()

    def became_slow(self, body: bytes) -> None:
        """The model counts as slow; `body` is a request that reached the cap."""
        self._body = trial_body(body)
        if self._model.confirmed:
            self._warn()
        else:
            log.warning("batches reached the cap; a trial batch measures the model", timeout_ms=self._model.timeout_ms)
        self._update()

    async def run(self) -> None:
        """Run trials while the model is slow; never returns."""
        while True:
            await self._due.wait()
            await asyncio.sleep(self._model.pause_s)
            await self._ready.wait()
            over_cap = asyncio.get_running_loop().call_later(self._model.timeout_ms / 1000, self._over_cap)
            try:
                ms = await self._run_batch(self._body, TRIAL_CAPS * self._model.timeout_ms)
            except Exception as error:
                log.exception("trial batch failed", error=type(error).__name__)
                ms = None
            finally:
                over_cap.cancel()
            self._model.trial_ended(ms)
            if self._model.slow:
                self._warn()
            else:
                log.info("model measured", model_ms=round(self._model.model_ms), timeout_ms=self._model.timeout_ms)
            self._update()

    def _over_cap(self) -> None:
        if self._by_silence():
            return
        self._model.trial_over_cap()
        self._update()

    def _update(self) -> None:
        if self._model.slow:
            self.usable.clear()
            self._due.set()
        else:
            self._due.clear()
            self.usable.set()
        self._changed()

    def _warn(self) -> None:
        limits = "TIERLANE_GPU_TIMEOUT_MS" + ("" if self._by_silence() else " and TIERLANE_TOTAL_REQUEST_MS")
        log.error(
            "model too slow; the worker claims nothing until a trial batch ends in time",
            action=f"Raise {limits}, or give the model a faster device.",
            model_ms=round(self._model.model_ms),
            timeout_ms=self._model.timeout_ms,
            next_trial_s=self._model.pause_s,
        )
