"""A class that answers requests one by one, many at the same time: `async def answer(item)`, or `continuous = True` and a
generator `generate(item)`.

All run on one event loop, which runs inside `step`. `answer` returns the text, or None for the text that it wrote with
`item.emit`; a generator, which may be asynchronous, yields the pieces of its text, and generators take turns after each
piece. A request whose client has left or whose time is over is cancelled. `slots` of the class limits the requests at a
time. `answer` may return a `ModelOutput` instead of a text.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_pool.backends.backend import NO_EMBEDDINGS, TOO_LATE, Item, ItemResult, OutputListener
from gpu_pool.backends.function import FunctionBackend, as_results, as_vectors, plain_text
from gpu_pool.backends.generation import prompt_of
from gpu_pool.backends.stepping import run_all
from scheduler.payload import Task

SLOTS = 32
WAIT_S = 0.05
"""The longest step: deadlines, and whether clients have left, are checked between steps."""


def answers(target: Any) -> bool:
    """Whether the object or class answers requests one by one."""
    method = "generate" if getattr(target, "continuous", False) else "answer"
    return callable(getattr(target, method, None))


class AnswerItem:
    """One request, as the class gets it. `stream`: a client reads the text as it is written."""

    def __init__(self, prompt: str, item: Item, notify: Callable[[], None]) -> None:
        self.input = prompt
        self.parameters = item.parameters
        self.priority = item.priority
        self.stream = item.listener is not None
        self.text = ""
        """What was written so far."""
        self._listener: OutputListener | None = item.listener
        self._notify = notify

    def close(self) -> None:
        """The request has ended: further text is not sent."""
        self._listener = None

    def emit(self, text: str) -> None:
        """Write the next piece of the text. Raises InvalidOutput if it is no text."""
        piece = plain_text(text)
        if piece and self._listener is not None:
            self._listener.emit(len(self.text), piece)
        self.text += piece
        self._notify()


@dataclass(eq=False)
class _Running:
    item: Item
    answer: AnswerItem
    task: "asyncio.Task[ItemResult] | None" = None


class AnswerBackend(FunctionBackend):
    """See `SteppingBackend`; `target` is the result of `find_target`."""

    def __init__(self, spec: str, target: Any, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(spec, target)
        self.slots = int(getattr(target, "slots", SLOTS))
        self._clock = clock
        self._all: dict[int, _Running] = {}
        self._news = asyncio.Event()

    def rejection(self, item: Item) -> ItemResult | None:
        """See `FunctionBackend`. A text reaches the class with its parameters."""
        return super().rejection(item) if item.task is Task.EMBED else None

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """Answer every item, at most `slots` at a time. Raises what the class raises."""
        try:
            return run_all(self, items, progress, self.slots)
        finally:
            for key in list(self._all):
                self.remove(key)

    def add(self, key: int, item: Item) -> None:
        """See `SteppingBackend`."""
        self._all[key] = _Running(item, AnswerItem(prompt_of(item, self._template), item, self._news.set))
        self._news.set()

    def remove(self, key: int) -> int:
        """See `SteppingBackend`."""
        self._cancel([key])
        return 0

    def step(self, progress: Callable[[], None]) -> list[tuple[int, ItemResult | BaseException]]:
        """See `SteppingBackend`. Waits until something happens, at most 50 ms."""
        self._loop.run(self._turn())
        progress()
        ended: list[tuple[int, ItemResult | BaseException]] = []
        now = self._clock()
        for key, running in self._all.items():
            listener, task = running.item.listener, running.task
            if task is not None and task.done():
                failed = asyncio.CancelledError() if task.cancelled() else task.exception()
                ended.append((key, failed or task.result()))
            elif listener is not None and listener.gone:
                ended.append((key, ItemResult(running.answer.text)))
            elif now >= running.item.until:
                ended.append((key, TOO_LATE))
        self._cancel([key for key, _ in ended])
        return ended

    def _cancel(self, keys: Sequence[int]) -> None:
        cancelled = False
        for running in [self._all.pop(key) for key in keys if key in self._all]:
            running.answer.close()
            cancelled |= running.task is not None and running.task.cancel()
        if cancelled:
            self._loop.run(asyncio.sleep(0))  # There may be no other step.

    def interrupt_on(self, descriptor: int) -> None:
        """See `WaitingBackend`."""
        self._loop.get_loop().add_reader(descriptor, self._news.set)

    async def _turn(self) -> None:
        for running in self._all.values():
            if running.task is None:
                running.task = asyncio.create_task(self._answer(running), name="answer")
                running.task.add_done_callback(lambda _: self._news.set())
        await asyncio.sleep(0)  # New tasks start, also if there are other news.
        timer = asyncio.get_running_loop().call_later(WAIT_S, self._news.set)
        await self._news.wait()
        timer.cancel()
        self._news.clear()

    async def _answer(self, running: _Running) -> ItemResult:
        try:
            target, answer = self._target, running.answer
            if running.item.task is Task.EMBED:
                embed = getattr(target, "embed", None)
                if not callable(embed):
                    return NO_EMBEDDINGS
                vectors = embed([running.item.input], **self._parameters("embed", [running.item]))
                return as_vectors(await vectors if inspect.isawaitable(vectors) else vectors, 1)[0]
            written: Any = target.generate(answer) if getattr(target, "continuous", False) else target.answer(answer)
            steps, steps_async = inspect.isgenerator(written), inspect.isasyncgen(written)
            if steps_async:
                async for piece in written:
                    answer.emit(piece)
            elif steps:
                for piece in written:
                    answer.emit(piece)
                    await asyncio.sleep(0)
            else:
                text = await written if inspect.isawaitable(written) else written
                return as_results([answer.text if text is None else text], 1)[0]
            return ItemResult(answer.text)
        except SystemExit as error:  # It would end the event loop.
            raise RuntimeError("The class called sys.exit.") from error
