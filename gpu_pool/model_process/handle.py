"""The worker's handle of one model process: start it, run a batch, kill it.

Any end of the process (exit, signal, malformed frame) is detected at once, by the end of its socket or of the process
itself, whichever is first; then every call in progress raises ModelLost.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from gpu_pool.model_process.frame_socket import FrameConnection
from gpu_pool.model_process.launch import ModelLaunch
from gpu_pool.model_process.messages import (
    Available,
    Done,
    Drop,
    Fatal,
    ModelMessage,
    Piece,
    Pieces,
    Progress,
    Ready,
    Refused,
    Run,
    Slots,
    TokenObjective,
    Withdraw,
    decode_model_message,
    pack,
)
from scheduler.errors import StartError, TierlaneError

_WORKER_LOG = 2  # The worker's stderr: what a model prints goes to the worker's log.
_EXIT_GRACE_S = 0.1  # Grace time from the end of the socket to the end of the process.
LAST_FRAMES_S = 0.02  # Time for the last frames after the end of the process.
MOST_REASON = 300  # Characters of the reason for which a model is not available.

PiecesCallback = Callable[[Sequence[Piece]], None]
"""Called with the pieces that a batch adds to its streams while it runs."""

StartCallback = Callable[[Callable[[Sequence[int]], None]], None]
"""Called when a batch begins, with a function that cancels positions of the batch."""


def ignore_start(_: Callable[[Sequence[int]], None]) -> None:
    """The default: positions are not cancelled."""


def ignore_pieces(_: Sequence[Piece]) -> None:
    """The default: pieces are ignored."""


class RunListener(Protocol):
    """One request that runs in a slot. `over` is called once."""

    def on_piece(self, piece: Piece) -> None:
        """The model added text to its stream."""

    def over(self, answer: "Done | Refused | TierlaneError") -> None:
        """The model answered, or handed it back, or its process ended with this error."""


class ModelLost(TierlaneError):
    """The model process ended or its connection is broken."""


class RunRefused(TierlaneError):
    """The model process goes on and hands the batch back; `counted`: as a lost attempt."""

    def __init__(self, reason: str, *, counted: bool) -> None:
        super().__init__(reason)
        self.counted = counted


class ModelProcess:
    """A model process made by `spawn`, for one batch at a time, or for `slots` requests, each by itself.

    `availability` is called when `unavailable` changed.
    """

    def __init__(self, process: asyncio.subprocess.Process, availability: Callable[[], None]) -> None:
        self._process = process
        self._line = FrameConnection(self._receive, self._connection_ended, decode_model_message)
        self._availability = availability
        self.unavailable = ""
        """Why it accepts no batch now; "" if it does."""
        self.note = ""
        """The same, or what is wrong although it accepts batches."""
        self.cause = ""
        """The cause of `note`, as in WorkerReport."""
        self.brief = False
        """Whether it is unavailable for a short time only."""
        self._loaded: asyncio.Future[ModelMessage] = asyncio.get_running_loop().create_future()
        self._answers: dict[int, asyncio.Future[ModelMessage]] = {}
        self._piece_callbacks: dict[int, PiecesCallback] = {}
        self._slot_runs: dict[int, RunListener] = {}
        self._seq = 0
        self.context_tokens = 0
        self.slots = 0
        """Requests that may run at a time now, each by itself; 0: it runs batches."""
        self.slots_source = ""
        self._tpot_ms = 0.0
        self.resized: Callable[[], None] = lambda: None
        """Called when the number of slots changed."""
        self._fatal: Fatal | None = None
        self._given_up = ""  # Why the worker killed it.
        self._closing = False
        self.progress_at = time.monotonic()
        self.lost = asyncio.Event()
        self._watchers = [asyncio.create_task(self._await_exit())]

    @classmethod
    async def spawn(cls, launch: ModelLaunch, availability: Callable[[], None] = lambda: None) -> "ModelProcess":
        """Start the process; `ready` waits for the model. Raises OSError if the machine cannot start a process."""
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
        if self._given_up:
            return self._given_up
        code = self._process.returncode
        if code is None:
            return "The model process closed its connection."
        return f"The model process {f'was ended by signal {-code}' if code < 0 else f'exited with {code}'}."

    async def ready(self) -> str:
        """Wait for load and warm-up; the model's version. Raises ModelLost, or StartError if a retry cannot help."""
        message = await self._loaded
        if not isinstance(message, Ready):
            raise self._protocol_error("an unexpected message instead of Ready")
        self.slots, self.context_tokens = message.slots, message.context_tokens
        return message.version

    async def run(
        self,
        bodies: Sequence[bytes],
        budget_ms: float,
        on_pieces: PiecesCallback = ignore_pieces,
        left_ms: Sequence[int] = (),
        on_start: StartCallback = ignore_start,
    ) -> Done:
        """Run one batch of stored requests with these times left. Raises ModelLost, RunRefused, FrameTooLarge."""
        if self.lost.is_set():
            raise ModelLost(self.why_lost)
        self._seq = seq = self._seq + 1
        frame = pack(Run(seq, int(budget_ms), list(bodies), list(left_ms)))
        answer = self._answers[seq] = asyncio.get_running_loop().create_future()
        self._piece_callbacks[seq] = on_pieces
        self.progress_at = time.monotonic()
        try:
            on_start(lambda places: self.drop(seq, places))
            if not self._line.send(frame):  # Already closed; `lost` will be set in a moment.
                raise ModelLost(self.why_lost)
            message = await answer
        finally:
            del self._answers[seq], self._piece_callbacks[seq]
        if isinstance(message, Refused):
            raise RunRefused(message.reason, counted=message.counted)
        if not isinstance(message, Done) or len(message.results) != len(bodies):
            raise self._protocol_error("an unexpected message instead of Done")
        return message

    def start(self, body: bytes, left_ms: int, run: RunListener) -> int:
        """Start one stored request with this time left in a slot; the number of its run. Raises ModelLost, FrameTooLarge."""
        seq = self._seq + 1
        frame = pack(Run(seq, left_ms, [body], [left_ms]))
        if self.lost.is_set() or not self._line.send(frame):
            raise ModelLost(self.why_lost)
        if not self._slot_runs:
            self.progress_at = time.monotonic()
        self._seq, self._slot_runs[seq] = seq, run
        return seq

    def drop(self, seq: int, places: Sequence[int] = (0,)) -> None:
        """The clients of these positions of a run have left; the model answers with what it used."""
        self._line.send(pack(Drop(seq, list(places))))

    def withdraw(self, seqs: Sequence[int]) -> None:
        """Ask for these runs in slots back; those that have sent nothing are refused, uncounted."""
        self._line.send(pack(Withdraw(list(seqs))))

    def set_objective(self, tpot_ms: float) -> None:
        """Report the objective for the milliseconds per token, once the model is ready."""
        if self.slots and tpot_ms != self._tpot_ms:
            self._tpot_ms = tpot_ms
            self._line.send(pack(TokenObjective(tpot_ms)))

    def give_up(self, error: TierlaneError) -> None:
        """Kill it, and make all calls in progress raise `error` now: the end of the process may take long."""
        self._given_up = str(error)
        self.kill()
        self._fail(error)

    def kill(self) -> None:
        """Send SIGKILL, which also ends a hung or stopped process. Does nothing if the process has ended.

        Wait instead for a process that is ending anyway: sending a signal makes subprocess poll the exit code, and if
        it gets it first, asyncio's own watcher does not.
        """
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self, grace_s: float = 1.0) -> None:
        """Let an idle process end at the end of its socket, kill it after `grace_s`, and reap it."""
        self._closing = True
        self._line.close()
        await self._end_within(grace_s)
        await self._process.wait()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._mark_lost()

    async def _end_within(self, seconds: float) -> None:
        """Kill the process if it does not end by itself."""
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            self.kill()

    def _connection_ended(self) -> None:
        self._mark_lost()
        if not self._closing:  # Without its connection it is useless.
            self._watchers.append(asyncio.create_task(self._end_within(_EXIT_GRACE_S)))

    async def _await_exit(self) -> None:
        await self._process.wait()
        # Its last frames may still be in transit; a grandchild may hold the socket open forever.
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_FRAMES_S):
                await self._line.over.wait()
        self._mark_lost()

    def _receive(self, message: ModelMessage) -> None:
        self.progress_at = time.monotonic()
        if isinstance(message, Progress) or self._is_of_slots(message):
            return
        if isinstance(message, Pieces):
            if message.seq in self._answers and not self._answers[message.seq].done():
                self._piece_callbacks[message.seq](message.pieces)
        elif isinstance(message, Fatal):
            self._fatal = message
        elif isinstance(message, Available):
            self.unavailable = "" if message.wanted else message.reason or "No reason given."
            self.note, self.brief, self.cause = message.reason[:MOST_REASON], message.brief, message.cause
            self._availability()
        elif not self._loaded.done():
            self._loaded.set_result(message)
        elif isinstance(message, Done | Refused) and message.seq in self._answers:
            if not self._answers[message.seq].done():
                self._answers[message.seq].set_result(message)
        elif self._answers:
            self._fail(self._protocol_error("an unexpected message instead of Done"))

    def _is_of_slots(self, message: ModelMessage) -> bool:
        """Whether the message is about requests in slots; then it is processed here."""
        if isinstance(message, Pieces) and not message.seq:
            for piece in message.pieces:
                if (listener := self._slot_runs.get(piece.place)) is not None:
                    listener.on_piece(piece)
        elif isinstance(message, Slots):
            self.slots, self.slots_source = message.count, message.source
            self.resized()
        elif isinstance(message, Done | Refused) and message.seq in self._slot_runs:
            bad = isinstance(message, Done) and len(message.results) != 1
            answer = self._protocol_error("a wrong number of results") if bad else message
            self._slot_runs.pop(message.seq).over(answer)
        else:
            return False
        return True

    def _mark_lost(self) -> None:
        self.lost.set()
        if self._fatal is not None and self._fatal.start_error:
            self._fail(StartError(self._fatal.message))
        else:
            self._fail(ModelLost(self.why_lost))

    def _fail(self, error: TierlaneError) -> None:
        for answer in (self._loaded, *self._answers.values()):
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # Marks it as retrieved if nothing awaits it.
        runs, self._slot_runs = self._slot_runs, {}
        for run in runs.values():
            run.over(error)

    def _protocol_error(self, what: str) -> ModelLost:
        self.kill()
        return ModelLost(f"The model process sent {what}.")
