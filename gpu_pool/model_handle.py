"""One model process, as its supervisor sees it: start it, give it a batch, watch it, kill it.

Whatever ends the process (exit, signal, a broken frame) is seen at once, by the end of its socket or of the process
itself, whichever is first; then every call under way raises ModelLost.
"""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gpu_pool.frame_line import FrameLine
from gpu_pool.frames import Done, Drop, Fatal, Piece, Pieces, Progress, Ready, Run, Said, pack
from scheduler.errors import StartError, TierlaneError
from scheduler.failpoints import armed_directory

_WORKER_LOG = 2  # The supervisor's stderr, by number: what a model prints belongs into the worker's log.
_LAST_BREATH_S = 0.1  # From the end of the socket to the end of the process.
LAST_FRAMES_S = 0.02  # From the end of the process to what it said last.
_OUR_SETTINGS = "TIERLANE_"  # Connections and tokens: the model has no use for them.


Hear = Callable[[Sequence[Piece]], None]
"""Told what a batch adds to its streams while it runs."""


def hear_nothing(_: Sequence[Piece]) -> None:
    """Nobody reads along."""


class ModelLost(TierlaneError):
    """The model process ended, or cannot be talked to any more."""


@dataclass(frozen=True, slots=True)
class ModelLaunch:
    """How a model process is started."""

    backend: str
    device: str = "cpu"
    torch_threads: int = 1
    dtype: str = "auto"

    def arguments(self, fd: int) -> list[str]:
        """The command line, with `fd` the process's end of the socket."""
        own = ["--fd", str(fd), "--parent", str(os.getpid())]
        model = ["--backend", self.backend, "--device", self.device, "--dtype", self.dtype]
        model += ["--torch-threads", str(self.torch_threads)]
        failpoints = ["--failpoints", directory] if (directory := armed_directory()) else []
        return [sys.executable, "-m", "gpu_pool.model_process", *own, *model, *failpoints]


class ModelProcess:
    """A running model process. One batch at a time; made by `spawn`, ended by `kill` or `close`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._line = FrameLine(self._take, self._line_ended)
        self._answer: asyncio.Future[Said] = asyncio.get_running_loop().create_future()
        self._seq = 0
        self._hear: Hear = hear_nothing
        self._fatal: Fatal | None = None
        self._closing = False
        self.progress_at = time.monotonic()
        self.lost = asyncio.Event()
        self._watchers = [asyncio.create_task(self._await_exit())]

    @classmethod
    async def spawn(cls, launch: ModelLaunch) -> "ModelProcess":
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
                    env={name: text for name, text in os.environ.items() if not name.startswith(_OUR_SETTINGS)},
                )
            model = cls(process)
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
        said = await self._answer
        if not isinstance(said, Ready):
            raise self._broken("something else than that it is ready")
        return said.version

    async def run(
        self, bodies: Sequence[bytes], budget_ms: float, hear: Hear = hear_nothing, left_ms: Sequence[int] = ()
    ) -> Done:
        """Run one batch of stored requests, each of use for so many ms yet. Raises ModelLost; FrameTooLarge where the batch cannot be sent."""
        if self.lost.is_set():
            raise ModelLost(self.why_lost)
        self._seq += 1
        frame = pack(Run(self._seq, int(budget_ms), list(bodies), list(left_ms)))
        self._answer = asyncio.get_running_loop().create_future()
        self._hear = hear
        self.progress_at = time.monotonic()
        if not self._line.send(frame):  # It is closed already, and `lost` is set in a moment.
            raise ModelLost(self.why_lost)
        said = await self._answer
        if not isinstance(said, Done) or said.seq != self._seq or len(said.results) != len(bodies):
            raise self._broken("something else than the answer to its batch")
        return said

    def drop(self, places: Sequence[int]) -> None:
        """Nobody waits any more for these of the batch that runs: the model may leave them as they are."""
        self._line.send(pack(Drop(self._seq, list(places))))

    def give_up(self, error: TierlaneError) -> None:
        """Kill it, and have the call under way raise `error` now: the end of a process may be long in coming."""
        self.kill()
        if not self._answer.done():
            self._answer.set_exception(error)

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
            if said.seq == self._seq and not self._answer.done():
                self._hear(said.pieces)
        elif isinstance(said, Fatal):
            self._fatal = said
        elif not self._answer.done():
            self._answer.set_result(said)

    def _lose(self) -> None:
        self.lost.set()
        if self._answer.done():
            return
        if self._fatal is not None and self._fatal.start_error:
            self._answer.set_exception(StartError(self._fatal.message))
        else:
            self._answer.set_exception(ModelLost(self.why_lost))
        self._answer.exception()  # Nobody may be waiting for it: then this is no news to the loop.

    def _broken(self, what: str) -> ModelLost:
        self.kill()
        return ModelLost(f"The model process said {what}.")
