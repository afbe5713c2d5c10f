"""`simulated[:MS]`: a model without a model. Sleeps a fixed time per batch and returns the inputs reversed."""

import time
from collections.abc import Callable, Sequence

from gpu_pool.backend import Item, ItemResult

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

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:  # noqa: ARG002 - one step
        """Sleep, then reverse each input; a token is a word."""
        time.sleep(self._batch_s)
        return [ItemResult(item.input[::-1], len(item.input.split())) for item in items]

    def close(self) -> None:
        """There is nothing to close."""
