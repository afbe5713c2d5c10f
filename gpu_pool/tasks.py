"""A batch may hold texts to go on from and texts to embed: each kind runs by itself, and every item gets its own result."""

from collections.abc import Callable, Sequence

from gpu_pool.backends.backend import Item, ItemResult
from scheduler.payload import Task

Run = Callable[[Sequence[Item]], list[ItemResult]]


def by_task(items: Sequence[Item], texts: Run, vectors: Run) -> list[ItemResult]:
    """One result for each item, in order. A kind of which there is none is not run."""
    embedding = [item.task is Task.EMBED for item in items]
    written = [item for item, embeds in zip(items, embedding, strict=True) if not embeds]
    embedded = [item for item, embeds in zip(items, embedding, strict=True) if embeds]
    results = iter(texts(written) if written else []), iter(vectors(embedded) if embedded else [])
    return [next(results[embeds]) for embeds in embedding]
