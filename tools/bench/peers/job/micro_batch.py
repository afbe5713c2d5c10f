"""A hand-written micro-batcher: a deque, a timer, and as many concurrent batches as GPUs.

A GPU is a timer of the event loop, which costs less than a process that computes.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import asyncio
from collections import deque

from reversal import BATCH, SERVICE_S, WINDOW_S, reversed_all

Entry = tuple[str, "asyncio.Future[str]"]


class MicroBatcher:
    """Batches for one event loop."""

    def __init__(self, gpus: int) -> None:
        self._free = gpus
        self._waiting: deque[Entry] = deque()
        self._window: asyncio.TimerHandle | None = None
        self._due = False

    def submit(self, text: str) -> "asyncio.Future[str]":
        """Queue an input; returns the future of its output."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, future))
        self._advance()
        return future

    def _advance(self) -> None:
        while self._free and self._waiting and (self._due or len(self._waiting) >= BATCH):
            self._start([self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))])
        if self._waiting and self._window is None:
            self._window = asyncio.get_running_loop().call_later(WINDOW_S, self._close_window)

    def _start(self, batch: list[Entry]) -> None:
        self._free -= 1
        self._due = False
        if self._window is not None:
            self._window.cancel()
            self._window = None
        asyncio.get_running_loop().call_later(SERVICE_S, self._finish, batch)

    def _finish(self, batch: list[Entry]) -> None:
        self._free += 1
        for (_, future), output in zip(batch, reversed_all([text for text, _ in batch]), strict=True):
            if not future.done():
                future.set_result(output)
        self._advance()

    def _close_window(self) -> None:
        # The handle is kept while the batch waits for a GPU, so that no second window begins.
        self._due = True
        self._advance()
