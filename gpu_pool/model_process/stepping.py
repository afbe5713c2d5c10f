"""The loop of a backend with slots inside the model process: requests start and end by themselves at its steps.

An error of one step says nothing about the request that caused it. The requests that joined since the last good step
run again apart from the others, and any group that fails again in halves, until the one that fails alone gets the error;
meanwhile new requests wait. After out-of-memory the number of slots is halved, as for batches, and requests without
output that do not fit any more are handed back.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from gpu_pool.backends.backend import TOO_LATE, Item, ItemResult, SteppingBackend, WaitingBackend
from gpu_pool.model_process.batch_runner import BatchRunner, Report, blame, fault_of, padding_of
from gpu_pool.model_process.device_errors import free_cached_memory, is_out_of_memory, raise_if_lost
from gpu_pool.model_process.inputs import in_time, read_items, reject_of, rejection
from gpu_pool.model_process.listeners import AT_ONCE_S, PIECES_EVERY_S, Listeners, StreamListener
from gpu_pool.model_process.messages import (
    Done,
    Drop,
    ModelLink,
    ModelMessage,
    ProgressCounter,
    Refused,
    Run,
    Slots,
    Withdraw,
    WorkerMessage,
    send_done,
)
from scheduler.errors import ErrorCode

MEMORY = "device memory"
WITHDRAWN = "The request was withdrawn."


def serve_slots(link: ModelLink, backend: SteppingBackend, slots: int, report: Report | None = None) -> NoReturn:
    """Answer the worker's messages; the process exits when the worker is gone. Raises DeviceLost if it must end."""
    serving = SlotServing(link.send, backend, slots, report=report)
    if isinstance(backend, WaitingBackend):
        backend.interrupt_on(link.connection.fileno())
    while True:
        if not serving.busy:
            serving.take(link.receive())
        for message in link.arrived():
            serving.take(message)
        serving.step()


@dataclass(eq=False)
class _SlotRequest:
    """One Run with its results; `left` of them are missing. `listeners`: those of a Run with several bodies."""

    seq: int
    results: list[ItemResult]
    left: int = 0
    listeners: Listeners | None = None
    members: list["_SlotItem"] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    fault: str = ""


@dataclass(eq=False)
class _SlotItem:
    """One item of a request; `key` names it for the backend."""

    key: int
    request: _SlotRequest
    place: int
    item: Item
    ended: bool = False

    @property
    def sent(self) -> bool:
        """Output of it was sent."""
        return isinstance(self.item.listener, StreamListener) and self.item.listener.sent


class SlotServing:
    """Runs requests in at most `slots` slots of `backend`, and sends their results."""

    def __init__(
        self,
        send: Callable[[ModelMessage], None],
        backend: SteppingBackend,
        slots: int,
        clock: Callable[[], float] = time.monotonic,
        report: Report | None = None,
    ) -> None:
        self._send = send
        self._report = report
        self._backend = backend
        self._reject = reject_of(backend)
        self._slots = slots
        self._clock = clock
        self._progress = ProgressCounter(send, clock)
        self._listeners = Listeners(send, AT_ONCE_S, clock)
        self._canary = BatchRunner(backend, self._progress, clock)
        self._keys = itertools.count()
        self._requests: dict[int, _SlotRequest] = {}
        self._waiting: deque[_SlotItem] = deque()
        self._running: dict[int, _SlotItem] = {}
        self._joined: list[_SlotItem] = []
        self._suspects: list[list[_SlotItem]] = []
        self._found = False
        self._apart = False

    @property
    def busy(self) -> bool:
        """There are requests without a result."""
        return bool(self._requests)

    def take(self, message: WorkerMessage) -> None:
        """Process one message of the worker."""
        if isinstance(message, Run):
            self._begin(message)
        elif isinstance(message, Drop) and (request := self._requests.get(message.seq)) is not None:
            # The clients have left: a stream ends at its next step with its text, others now, with the tokens used.
            if request.listeners is not None:
                request.listeners.drop(request.seq, message.places)
            elif 0 in message.places:
                self._listeners.drop(0, [request.seq])
            for member in request.members:
                if member.place in message.places and not member.ended and member.item.listener is None:
                    self._end(member, ItemResult("", self._remove(member), ErrorCode.CANCELLED))
        elif isinstance(message, Withdraw):
            for seq in message.seqs:
                request = self._requests.get(seq)
                if request is not None and not any(member.ended or member.sent for member in request.members):
                    self._hand_back(request, WITHDRAWN)

    def step(self) -> None:
        """Let waiting requests join, advance all by one step, and send what is new."""
        self._admit()
        if self._running:
            try:
                ended = self._backend.step(self._progress)
            # A model that calls sys.exit() must not end the process.
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a model may raise anything
                self._failed(error)
            else:
                self._joined.clear()
                for key, result in ended:
                    member = self._running.pop(key)
                    if isinstance(result, ItemResult):
                        self._end(member, result)
                    elif is_out_of_memory(result) and self._running:  # It runs again, with fewer others.
                        self._limit((len(self._running) + 1) // 2)
                        self._waiting.appendleft(member)
                    else:
                        self._blame(member, result)
        self._listeners.flush()
        for request in self._requests.values():
            if request.listeners is not None:
                request.listeners.flush()

    def _begin(self, run: Run) -> None:
        if not self._requests:
            self._progress.begin()
        request = _SlotRequest(run.seq, [TOO_LATE] * len(run.bodies))
        listen = self._listeners.listen_to(run.seq)
        if len(run.bodies) != 1:
            request.listeners = Listeners(self._send, PIECES_EVERY_S, self._clock)
            request.listeners.begin(run.seq)
            listen = request.listeners.listen
        self._requests[run.seq] = request
        for place, item in enumerate(read_items(run, listen, self._clock())):
            rejected = rejection(item, self._reject)
            if item is not None and rejected is None:
                request.members.append(_SlotItem(next(self._keys), request, place, item))
            else:
                request.results[place] = rejected or TOO_LATE
        request.left = len(request.members)
        self._waiting += request.members
        if not request.left:
            self._finish(request)

    def _hand_back(self, request: _SlotRequest, reason: str) -> None:
        for member in request.members:
            self._remove(member)
            member.ended = True
        self._forget(request)
        self._send(Refused(request.seq, reason))

    def _remove(self, member: _SlotItem) -> int:
        """Take the item from the backend; the tokens it used. One that waits is skipped later."""
        return self._backend.remove(member.key) if self._running.pop(member.key, None) else 0

    def _admit(self) -> None:
        """End waiting items that are late, or whose stream has no client any more; then let others join."""
        now = self._clock()
        for member in itertools.chain(self._waiting, *self._suspects):
            listener = member.item.listener
            if not member.ended and listener is not None and listener.gone:
                self._end(member, ItemResult(""))
            elif not member.ended and now >= member.item.until:
                self._end(member, TOO_LATE)

        while not self._running and self._suspects:
            group = self._suspects.pop()
            self._apart = bool(self._suspects) or not self._found
            for member in group:
                self._start(member)
        if not self._running:
            self._apart = self._found = False
        while self._waiting and not self._apart and len(self._running) < self._slots:
            self._start(self._waiting.popleft())

    def _start(self, member: _SlotItem) -> None:
        if member.ended:
            return
        try:
            self._backend.add(member.key, member.item)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a model may raise anything
            self._blame(member, error)
        else:
            self._running[member.key] = member
            self._joined.append(member)

    def _failed(self, error: BaseException) -> None:
        """A step raised `error`, and all items have left the backend."""
        members, joined = list(self._running.values()), set(self._joined)
        self._running.clear()
        self._joined.clear()
        if self._report is not None:
            self._report(error)
        raise_if_lost(error)
        if is_out_of_memory(error):
            fewer = max(1, len(members) // 2)
            self._limit(fewer)
            free_cached_memory()
        if len(members) == 1:
            self._blame(members[0], error)
            return
        for member in members:
            member.request.fault = member.request.fault or fault_of(error)
        if is_out_of_memory(error):
            # The items that fit into half of the slots run again, those with output first.
            ordered = sorted(members, key=lambda member: not member.sent)
            kept = [m for at, m in enumerate(ordered) if at < fewer or m.sent or m.request.listeners is not None]
            self._waiting.extendleft(reversed(kept))
            for member in ordered:
                if member not in kept:
                    self._hand_back(member.request, MEMORY)
            return
        before = [member for member in members if member not in joined]
        new = [member for member in members if member in joined]
        middle = len(members) // 2
        self._found = self._found and bool(self._suspects)
        self._suspects += [before, new] if before and new else [members[middle:], members[:middle]]

    def _blame(self, member: _SlotItem, error: BaseException) -> None:
        if self._report is not None:
            self._report(error)
        raise_if_lost(error)
        self._found = True
        member.request.fault = member.request.fault or fault_of(error)
        self._end(member, blame(error))

    def _limit(self, slots: int) -> None:
        if slots < self._slots:
            self._slots = slots
            self._send(Slots(slots, MEMORY))

    def _end(self, member: _SlotItem, result: ItemResult) -> None:
        member.ended = True
        request = member.request
        request.results[member.place] = in_time(member.item, result)
        request.left -= 1
        if not request.left:
            self._finish(request)

    def _finish(self, request: _SlotRequest) -> None:
        self._forget(request)
        self._canary.judge(request.results)
        gpu_ms = (time.perf_counter() - request.started) * 1000
        waste = padding_of(self._backend)
        send_done(self._send, Done(request.seq, gpu_ms, request.results, 0, request.fault, waste))

    def _forget(self, request: _SlotRequest) -> None:
        del self._requests[request.seq]
        self._listeners.end(request.seq)
