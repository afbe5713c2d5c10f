"""One model process as its worker sees it: start it, give it a batch, watch it, kill it.

Whatever ends the process (exit, signal, a broken frame) is seen at once, by the end of its socket or of the process
itself, whichever is first; then every call under way raises ModelLost.

A hung kernel and a hung interpreter look alike from outside: no progress. So a batch that shows none for its cap is
killed; one that shows progress may go on, but never beyond the timeout of any batch. A batch that writes streams is
bounded by their deadlines instead: the model process ends each of them at its own, and is killed only where it does
not. A watchdog that stood still itself (SIGSTOP, a frozen machine) has seen nothing meanwhile, so the batch gets its
time anew.

The stall detector also serves direct batches, which say how many milliseconds their requests have left, counted from
when they were sent: one that lay in the socket while the worker stood still may be long overdue. It ticks only while
somebody is connected.
"""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from gpu_pool.model_process.frame_socket import FrameConnection
from gpu_pool.model_process.messages import (
    Available,
    Done,
    Drop,
    Fatal,
    Piece,
    Pieces,
    Progress,
    Ready,
    Refused,
    Run,
    Said,
    pack,
    read_said,
)
from scheduler.errors import StartError, TierlaneError
from scheduler.failpoints import armed_directory

_OUR_SETTINGS = "TIERLANE_"  # Connections and tokens: the model has no use for them.
_SERVERS = frozenset({"PGPASSWORD", "PGPASSFILE", "POSTGRES_PASSWORD", "REDISCLI_AUTH", "REDIS_PASSWORD"})
_URLS = ("redis://", "rediss://", "redis+", "rediss+", "postgres://", "postgresql://", "postgresql+")


@dataclass(frozen=True, slots=True)
class ModelLaunch:
    """How a model process is started. `secrets` are added to its environment, which no other user can read."""

    backend: str
    device: str = "cpu"
    torch_threads: int = 1
    dtype: str = "auto"
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def arguments(self, fd: int) -> list[str]:
        """The command line, with `fd` the process's end of the socket."""
        own = ["--fd", str(fd), "--parent", str(os.getpid())]
        model = ["--backend", self.backend, "--device", self.device, "--dtype", self.dtype]
        model += ["--torch-threads", str(self.torch_threads)]
        failpoints = ["--failpoints", directory] if (directory := armed_directory()) else []
        return [sys.executable, "-m", "gpu_pool.model_process.main", *own, *model, *failpoints]

    def environment(self) -> dict[str, str]:
        """Ours, without our settings and what opens Redis or PostgreSQL, and the secrets."""
        inherited = {name: text for name, text in os.environ.items() if not _is_ours(name, text)}
        return {**inherited, **self.secrets}


def _is_ours(name: str, text: str) -> bool:
    return name.startswith(_OUR_SETTINGS) or name in _SERVERS or text.startswith(_URLS)


_WORKER_LOG = 2  # The supervisor's stderr, by number: what a model prints belongs into the worker's log.
_LAST_BREATH_S = 0.1  # From the end of the socket to the end of the process.
LAST_FRAMES_S = 0.02  # From the end of the process to what it said last.


Hear = Callable[[Sequence[Piece]], None]
"""Told what a batch adds to its streams while it runs."""

Begun = Callable[[Callable[[Sequence[int]], None]], None]
"""Told, when a batch begins, how to say that nobody waits any more for some of its places."""


def unheard(_: Callable[[Sequence[int]], None]) -> None:
    """Nobody can leave before the end."""


def hear_nothing(_: Sequence[Piece]) -> None:
    """Nobody reads along."""


class ModelLost(TierlaneError):
    """The model process ended, or cannot be talked to any more."""


class RunRefused(TierlaneError):
    """The model process lives, and hands the batch back; `counted`: as an attempt that was lost."""

    def __init__(self, reason: str, *, counted: bool) -> None:
        super().__init__(reason)
        self.counted = counted


class ModelProcess:
    """A running model process; made by `spawn`, ended by `kill` or `close`. Nobody may give it more than `most` batches at
    a time. `availability` is called when `unavailable` changes.
    """

    def __init__(self, process: asyncio.subprocess.Process, availability: Callable[[], None]) -> None:
        self._process = process
        self._line = FrameConnection(self._take, self._line_ended, read_said)
        self._availability = availability
        self.unavailable = ""
        """Why it wants no batch now; "": it wants them."""
        self.brief = False
        """That it wants none is for a moment only."""
        self._loaded: asyncio.Future[Said] = asyncio.get_running_loop().create_future()
        self._answers: dict[int, asyncio.Future[Said]] = {}
        self._hears: dict[int, Hear] = {}
        self._seq = 0
        self.most = 1
        self._fatal: Fatal | None = None
        self._closing = False
        self.progress_at = time.monotonic()
        self.lost = asyncio.Event()
        self._watchers = [asyncio.create_task(self._await_exit())]

    @classmethod
    async def spawn(cls, launch: ModelLaunch, availability: Callable[[], None] = lambda: None) -> "ModelProcess":
        """Start the process; it is `ready` later. Raises OSError where the machine cannot start one."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *launch.arguments(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=_WORKER_LOG,
                    stderr=_WORKER_LOG,
                    env=launch.environment(),
                )
            model = cls(process, availability)
            await asyncio.get_running_loop().create_unix_connection(lambda: model._line, sock=ours)
        except BaseException:
            ours.close()
            raise
        return model

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def why_lost(self) -> str:
        """One sentence, once `lost` is set."""
        if self._fatal is not None:
            return self._fatal.message
        code = self._process.returncode
        if code is None:
            return "The model process closed its connection."
        return f"The model process {f'was ended by signal {-code}' if code < 0 else f'exited with {code}'}."

    async def ready(self) -> str:
        """Wait for load and warm-up; the model's version. Raises ModelLost, or StartError where a retry is in vain."""
        said = await self._loaded
        if not isinstance(said, Ready):
            raise self._broken("something else than that it is ready")
        self.most = said.most
        return said.version

    async def run(
        self,
        bodies: Sequence[bytes],
        budget_ms: float,
        hear: Hear = hear_nothing,
        left_ms: Sequence[int] = (),
        begun: Begun = unheard,
    ) -> Done:
        """Run one batch of stored requests, each of use for `left_ms` yet. Raises ModelLost, RunRefused, FrameTooLarge."""
        if self.lost.is_set():
            raise ModelLost(self.why_lost)
        self._seq = seq = self._seq + 1
        frame = pack(Run(seq, int(budget_ms), list(bodies), list(left_ms)))
        answer = self._answers[seq] = asyncio.get_running_loop().create_future()
        self._hears[seq] = hear
        self.progress_at = time.monotonic()
        try:
            begun(lambda places: self._drop(seq, places))
            if not self._line.send(frame):  # It is closed already, and `lost` is set in a moment.
                raise ModelLost(self.why_lost)
            said = await answer
        finally:
            del self._answers[seq], self._hears[seq]
        if isinstance(said, Refused):
            raise RunRefused(said.reason, counted=said.counted)
        if not isinstance(said, Done) or len(said.results) != len(bodies):
            raise self._broken("something else than the answer to its batch")
        return said

    def _drop(self, seq: int, places: Sequence[int]) -> None:
        self._line.send(pack(Drop(seq, list(places))))

    def give_up(self, error: TierlaneError) -> None:
        """Kill it, and have all calls under way raise `error` now: the end of a process may be long in coming."""
        self.kill()
        self._fail(error)

    def kill(self) -> None:
        """SIGKILL; works on a hung and on a stopped process too. Harmless when it has ended.

        A process that is ending anyway is better waited for: sending a signal makes subprocess look for the exit code,
        and where it finds it first, asyncio's own watcher is told none.
        """
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self, grace_s: float = 1.0) -> None:
        """Let an idle process end by itself at the end of its socket, kill it after `grace_s`, and reap it."""
        self._closing = True
        self._line.close()
        if not await self._exits_within(grace_s):
            self.kill()
            await self._process.wait()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._lose()

    async def _exits_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def _line_ended(self) -> None:
        self._lose()
        if not self._closing:
            self._watchers.append(asyncio.create_task(self._last_breath()))

    async def _last_breath(self) -> None:
        if not await self._exits_within(_LAST_BREATH_S):
            self.kill()  # With its connection gone or broken it is of no more use.

    async def _await_exit(self) -> None:
        await self._process.wait()
        # What it said last may still be on its way; a grandchild may hold the socket open for ever.
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_FRAMES_S):
                await self._line.over.wait()
        self._lose()

    def _take(self, said: Said) -> None:
        self.progress_at = time.monotonic()
        if isinstance(said, Progress):
            return
        if isinstance(said, Pieces):
            if (hear := self._hears.get(said.seq)) is not None and not self._answers[said.seq].done():
                hear(said.pieces)
        elif isinstance(said, Fatal):
            self._fatal = said
        elif isinstance(said, Available):
            self.unavailable = "" if said.wanted else said.reason or "It does not say why."
            self.brief = said.brief
            self._availability()
        elif not self._loaded.done():
            self._loaded.set_result(said)
        elif isinstance(said, Done | Refused) and said.seq in self._answers:
            if not self._answers[said.seq].done():
                self._answers[said.seq].set_result(said)
        elif self._answers:
            self._fail(self._broken("something else than the answer to its batch"))

    def _lose(self) -> None:
        self.lost.set()
        if self._fatal is not None and self._fatal.start_error:
            self._fail(StartError(self._fatal.message))
        else:
            self._fail(ModelLost(self.why_lost))

    def _fail(self, error: TierlaneError) -> None:
        for answer in (self._loaded, *self._answers.values()):
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # Nobody may be waiting for it: then this is no news to the loop.

    def _broken(self, what: str) -> ModelLost:
        self.kill()
        return ModelLost(f"The model process said {what}.")


TICK_S = 0.05
GAP_S = 0.25
"""A tick that is late by so much was a standstill; a busy loop is late by less."""
DOUBT_S = 0.1
"""What was in the socket is read within so long of going on."""


class StallDetector:
    """`in_doubt()` while it stands still or has just gone on. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen_at = clock()
        self._doubt_until = 0.0
        self._watched = 0
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Tick as long as this lasts; several may overlap."""
        if self._timer is None:
            self._seen_at = self._clock()
            self._tick_on()
        self._watched += 1
        try:
            yield
        finally:
            self._watched -= 1
            if not self._watched and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _tick_on(self) -> None:
        self.tick()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick_on)

    def tick(self) -> None:
        """Note that the process runs now."""
        now = self._clock()
        if now - self._seen_at > GAP_S:
            self._doubt_until = now + DOUBT_S
        self._seen_at = now

    def in_doubt(self) -> bool:
        """Whether what is read now may be older than it looks."""
        now = self._clock()
        return now < self._doubt_until or now - self._seen_at > GAP_S


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
