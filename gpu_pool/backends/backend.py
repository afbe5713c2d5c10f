"""The contract of a backend: load, warm up, run a list of items, report health, close.

A backend lives in the model process, is used from one thread, and knows nothing of Redis or leases. What it raises from
`run` is bisected (gpu_pool/model_process/batch_runner.py): it need not find the bad item itself, but may return a
result with an error code for one.

A batch may hold texts to continue and texts to embed: each kind runs by itself. Padding is the positions that hold no
token, against all that the passes computed; a backend that pads may have an attribute `padding`, which is read after
each batch.
"""

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import msgspec

from scheduler.errors import ErrorCode, TierlaneError
from scheduler.payload import Task
from scheduler.tracing import Context


class OutputListener(Protocol):
    """Whoever wants one item's output as it grows. A backend that makes it in one step leaves it alone.

    `gone`: nobody wants it any more, so the item may be ended as it is; to be asked while the item has no end.
    `late`: that is so because the stream's time is over.
    """

    @property
    def gone(self) -> bool: ...

    @property
    def late(self) -> bool: ...

    def say(self, offset: int, text: str) -> None:
        """`text` is in the output for good, from character `offset` on. All before it has been said already.

        An item that is run again begins at 0 again.
        """


@dataclass(frozen=True, slots=True)
class Item:
    """One request's input, as the model gets it.

    `until`: its deadline in seconds of `time.monotonic`. What is not done by then is of no use to anybody, and a batch
    that takes longer may be ended with its process. A backend that works in steps may end the item there, with TOO_LATE.
    `priority`: its tier's, 1 first, 0 where it is not known; the order in which batches come here obeys it already.
    `trace`: the span that this run is, where its request is sampled; for a backend that asks others.
    """

    input: str
    parameters: dict[str, Any] = field(default_factory=dict)
    task: Task = Task.COMPLETE
    listener: OutputListener | None = None
    until: float = math.inf
    priority: int = 0
    trace: Context | None = None


class ItemResult(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One request's end: an output, or an error code with a sentence for the client in `output`.

    `tokens_used` counts those read and written, `output_tokens` the latter alone. `finish_reason` is OpenAI's: `stop` where
    the model came to an end, `length` where it was not let on.
    """

    output: str
    tokens_used: int = 0
    error_code: str = ""  # "": it completed
    output_tokens: int = 0
    finish_reason: str = "stop"


NO_EMBEDDINGS = ItemResult("This model makes no embeddings.", 0, ErrorCode.INVALID_REQUEST)
"""The answer of a backend that knows texts alone."""

TOO_LATE = ItemResult("The model took too long.", 0, ErrorCode.GPU_TIMEOUT)
"""The answer for an item whose deadline came first."""


class InvalidOutput(TierlaneError):
    """The model answered with something that is not one string for each input."""


class Unwell(TierlaneError):
    """The model failed its canary."""


class Backend(Protocol):
    """A model that runs batches. `version` names what runs, for the answer's metadata; known once loaded."""

    @property
    def version(self) -> str: ...

    def load(self) -> None:
        """Bring the model into memory. Raises StartError where only a change of settings can help."""

    def warmup(self) -> None:
        """Run a small known-good batch, so that the first request does not pay for what is made on first use."""

    def health(self) -> None:
        """The canary that tells a broken model from broken inputs: returns where the model is well, raises anything else.

        Asked after batches without one good answer; where nothing better is known, the warm-up once more.
        """

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """Answer every item, in order. Calls `progress` whenever a step is done; may raise anything."""

    def close(self) -> None:
        """Let go of what `load` took."""


@runtime_checkable
class ServingBackend(Backend, Protocol):
    """A backend that stands before something that takes several batches at a time, and may want none for a while."""

    most: int
    """Batches that it takes at a time, at most."""

    def serve(self, connection: socket.socket) -> None:
        """Once loaded: take what the supervisor asks over `connection` (gpu_pool/model_process/messages.py), until it goes."""


Run = Callable[[Sequence[Item]], list[ItemResult]]


def by_task(items: Sequence[Item], texts: Run, vectors: Run) -> list[ItemResult]:
    """One result for each item, in order. A kind of which there is none is not run."""
    embedding = [item.task is Task.EMBED for item in items]
    written = [item for item, embeds in zip(items, embedding, strict=True) if not embeds]
    embedded = [item for item, embeds in zip(items, embedding, strict=True) if embeds]
    results = iter(texts(written) if written else []), iter(vectors(embedded) if embedded else [])
    return [next(results[embeds]) for embeds in embedding]


class Padding:
    """Counts one batch's positions."""

    def __init__(self) -> None:
        self._real = 0
        self._computed = 0

    def passed(self, lengths: Sequence[int]) -> None:
        """A pass over rows of these lengths, each padded to the longest."""
        self._real += sum(lengths)
        self._computed += max(lengths, default=0) * len(lengths)

    def stepped(self, live: int, rows: int) -> None:
        """A step of one token a row, of which only `live` still need one."""
        self._real += live
        self._computed += rows

    def take(self) -> float:
        """The share of padding (0..1) since this was last asked; 0 where nothing was computed."""
        share = 1 - self._real / self._computed if self._computed else 0.0
        self._real = self._computed = 0
        return share
