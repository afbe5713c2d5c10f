"""`simulated[:MS]`: a model without a model. Sleeps a fixed time per batch and returns the inputs reversed."""

import time
from collections.abc import Callable, Sequence

from gpu_pool.backends.backend import NO_EMBEDDINGS, Item, ItemResult
from gpu_pool.backends.generation import last_turn, prompt_of
from scheduler.payload import Task

DEFAULT_MS = 50.0


class SimulatedBackend:
    """Stands for a GPU whose time does not depend on the batch size; `batch_ms` is that time."""

    def __init__(self, batch_ms: float = DEFAULT_MS) -> None:
        self._batch_s = batch_ms / 1000
        self.version = f"simulated-{batch_ms:g}ms"

    def load(self) -> None:
        """There is nothing to load."""

    def warmup(self) -> None:
        """There is nothing to warm."""

    def health(self) -> None:
        """It is always well."""

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:  # noqa: ARG002 - one step
        """Sleep, then reverse each input; a token is a word."""
        time.sleep(self._batch_s)
        return [_reversed(item) for item in items]

    def close(self) -> None:
        """There is nothing to close."""


def _reversed(item: Item) -> ItemResult:
    if item.task is Task.EMBED:
        return NO_EMBEDDINGS
    prompt = prompt_of(item, last_turn)
    return ItemResult(prompt[::-1], len(prompt.split()))
