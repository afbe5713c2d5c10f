"""`simulated[:MS[+WORD_MS]]`: no model. Sleeps MS milliseconds per batch (default 50) and WORD_MS (default 0) for each word of
its inputs, and returns the inputs reversed.
"""

import time
from collections.abc import Callable, Sequence

from gpu_pool.backends.backend import NO_EMBEDDINGS, Item, ItemResult
from gpu_pool.backends.generation import last_turn, prompt_of
from scheduler.payload import Task

DEFAULT_MS = 50.0


class SimulatedBackend:
    """A GPU whose time per batch is `batch_ms`, and `word_ms` for each word."""

    def __init__(self, batch_ms: float = DEFAULT_MS, word_ms: float = 0.0) -> None:
        self._batch_s, self._word_s = batch_ms / 1000, word_ms / 1000
        self.version = f"simulated-{batch_ms:g}ms"

    def load(self) -> None:
        """Nothing to load."""

    def warmup(self) -> None:
        """Nothing to warm up."""

    def health(self) -> None:
        """Always healthy."""

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:  # noqa: ARG002 - one step
        """Sleep, then reverse each input; a token is a word."""
        results: list[ItemResult] = []
        for item in items:
            if item.task is Task.EMBED:
                results.append(NO_EMBEDDINGS)
            else:
                prompt = prompt_of(item, last_turn)
                results.append(ItemResult(prompt[::-1], len(prompt.split())))
        time.sleep(self._batch_s + self._word_s * sum(result.tokens_used for result in results))
        return results

    def close(self) -> None:
        """Nothing to release."""
