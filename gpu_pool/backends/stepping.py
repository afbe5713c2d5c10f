"""Continuous batching of rows: a row joins and leaves at every step, and ends by itself.

Without torch. A decoder keeps the rows' state on the device and adds their tokens; `RowLoop` decides which rows take part
in a step. New rows read their prompts in the step in which they join, at most `PROMPT_TOKENS` in one step, so that long
prompts do not stop the others for long.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from gpu_pool.backends.backend import TOO_LATE, Item, ItemResult, SteppingBackend
from gpu_pool.backends.generation import Generation
from scheduler.payload import Task

PROMPT_TOKENS = 2048
"""Prompt tokens read in one step, padding included; a longer prompt is read alone."""
VECTORS = 64
"""Texts embedded in one step."""

Vectors = Callable[[Sequence[Item], Callable[[], None]], list[ItemResult]]


class Row(Protocol):
    """One continuation. `tokens` are the prompt and the new ones, `used` counts them; `finished` is set at its end."""

    tokens: list[int]

    @property
    def finished(self) -> str | None: ...

    @property
    def used(self) -> int: ...

    def stream(self) -> None: ...

    def result(self) -> Generation: ...


R = TypeVar("R", bound=Row)
R_contra = TypeVar("R_contra", bound=Row, contravariant=True)


class Decoder(Protocol[R_contra]):
    """The rows on the device. `progress` is called after each pass."""

    def advance(self, progress: Callable[[], None]) -> None:
        """Add one token to each row."""

    def join(self, rows: Sequence[R_contra], progress: Callable[[], None]) -> None:
        """Read the prompts of new rows, and add the first token to each."""

    def leave(self, rows: Sequence[R_contra]) -> None:
        """Remove these rows."""

    def reset(self) -> None:
        """Remove all rows, whatever state a failed pass left."""


class RowLoop(Generic[R]):
    """See `SteppingBackend`. `prepare` makes the row of an item or rejects it, `vectors` embeds items in one step."""

    def __init__(
        self,
        decoder: Decoder[R],
        prepare: Callable[[Item], R | ItemResult],
        vectors: Vectors,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decoder = decoder
        self._prepare = prepare
        self._vectors = vectors
        self._clock = clock
        self._rejected: list[tuple[int, ItemResult]] = []
        self._embedding: dict[int, Item] = {}
        self._waiting: dict[int, R] = {}
        self._running: dict[int, R] = {}
        self._until: dict[int, float] = {}

    def add(self, key: int, item: Item) -> None:
        """See `SteppingBackend`."""
        if item.task is Task.EMBED:
            self._embedding[key] = item
            return
        row = self._prepare(item)
        if isinstance(row, ItemResult):
            self._rejected.append((key, row))
        else:
            self.add_row(key, row, item.until)

    def add_row(self, key: int, row: R, until: float = math.inf) -> None:
        """Let this row join; it is late at `until`."""
        self._waiting[key], self._until[key] = row, until

    def remove(self, key: int) -> int:
        """See `SteppingBackend`."""
        self._until.pop(key, None)
        self._embedding.pop(key, None)
        if self._waiting.pop(key, None) is not None or (row := self._running.pop(key, None)) is None:
            return 0
        self._decoder.leave([row])
        return row.used

    def step(self, progress: Callable[[], None]) -> list[tuple[int, ItemResult]]:
        """See `SteppingBackend`."""
        try:
            ended, self._rejected = self._rejected, []
            if self._embedding:
                keys = list(self._embedding)[:VECTORS]
                items = [self._embedding.pop(key) for key in keys]
                ended += zip(keys, self._vectors(items, progress), strict=True)
            if self._running:
                self._decoder.advance(progress)
            joining: dict[int, R] = {}
            longest = 0
            for key, row in self._waiting.items():
                longest = max(longest, len(row.tokens))
                if joining and (len(joining) + 1) * longest > PROMPT_TOKENS:
                    break
                joining[key] = row
            if joining:
                for key in joining:
                    del self._waiting[key]
                self._decoder.join(list(joining.values()), progress)
                self._running |= joining
        except BaseException:
            self._decoder.reset()
            for kept in (self._rejected, self._embedding, self._waiting, self._running, self._until):
                kept.clear()
            raise
        progress()
        return ended + self._ended()

    def _ended(self) -> list[tuple[int, ItemResult]]:
        now = self._clock()
        ended = [(key, TOO_LATE) for key in self._waiting if now >= self._until[key]]
        for key, row in self._running.items():
            if not row.finished and now >= self._until[key]:
                ended.append((key, TOO_LATE))
                continue
            row.stream()
            if row.finished:
                done = row.result()
                tokens = done.tokens_in + done.tokens_out
                ended.append((key, ItemResult(done.text, tokens, "", done.tokens_out, done.finish_reason)))
        leaving = [self._running.pop(key) for key, _ in ended if key in self._running]
        if leaving:
            self._decoder.leave(leaving)
        for key, _ in ended:
            self._waiting.pop(key, None)
            del self._until[key]
        return ended


def run_all(
    loop: RowLoop[Any] | SteppingBackend, items: Sequence[Item], progress: Callable[[], None], most: int
) -> list[ItemResult]:
    """One result for each item, in order; at most `most` run at a time. `loop` has no other items.

    Raises the exception of an item.
    """
    results: dict[int, ItemResult] = {}
    begun = 0
    while len(results) < len(items):
        while begun < len(items) and begun - len(results) < most:
            loop.add(begun, items[begun])
            begun += 1
        for key, result in loop.step(progress):
            if isinstance(result, BaseException):
                raise result
            results[key] = result
    return [results[place] for place in range(len(items))]
