"""The contract of a backend: load, warm up, run a list of items, report health, close.

A backend lives in the model process, is used from one thread, and knows nothing of Redis or leases. A batch for which
`run` raises is bisected (gpu_pool/model_process/batch_runner.py), so a backend need not find the bad item; it may
return a result with an error code for one.

A batch may hold texts to continue and texts to embed; each kind runs separately. Padding is the share of positions
without a token in all positions that were computed; a backend that pads may have an attribute `padding`, which is read
after each batch.
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

MODEL_ERRORS = frozenset({ErrorCode.POISON_REQUEST, ErrorCode.INVALID_OUTPUT})
"""Codes of results that the model, or the input that it was given, caused."""


class OutputListener(Protocol):
    """Receives one item's output as it grows. Backends that produce it in one step do not use it.

    `gone`: the output is not wanted any more, so the item may end now; to be checked while the item has no end. `late`:
    the reason is the stream's deadline.
    """

    @property
    def gone(self) -> bool: ...

    @property
    def late(self) -> bool: ...

    def emit(self, offset: int, text: str) -> None:
        """`text` is final output from character `offset` on; everything before it was sent already.

        An item that is run again begins at 0 again.
        """


@dataclass(frozen=True, slots=True)
class Item:
    """One request's input for the model.

    `until`: its deadline in seconds of `time.monotonic`. Later output is useless, and a batch that takes longer may be
    killed with its process. A backend that works in steps may end the item there, with TOO_LATE. `priority`: the
    tier's, 1 first, 0 if unknown; batches arrive in this order already. `trace`: the span of this run, if its request
    is sampled; for backends that call other services. `customer`: a number that distinguishes customers, 0 if unknown.
    """

    input: str
    parameters: dict[str, Any] = field(default_factory=dict)
    task: Task = Task.COMPLETE
    listener: OutputListener | None = None
    until: float = math.inf
    priority: int = 0
    trace: Context | None = None
    customer: int = 0


class ItemResult(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One request's result: an output, or an error code with a sentence for the client in `output`.

    `tokens_used` counts input and output, `output_tokens` the output alone. `finish_reason` is OpenAI's: `stop` if the
    model ended the text, `length` if a limit did. `by_input`: the output is invalid, which says nothing about the model,
    because the input was unusual.
    """

    output: str
    tokens_used: int = 0
    error_code: str = ""  # "": it completed
    output_tokens: int = 0
    finish_reason: str = "stop"
    by_input: bool = False


NO_EMBEDDINGS = ItemResult("This model makes no embeddings.", 0, ErrorCode.INVALID_REQUEST)
"""The result of a backend without embeddings."""

TOO_LATE = ItemResult("The model took too long.", 0, ErrorCode.GPU_TIMEOUT)
"""The result of an item whose deadline came first."""


class InvalidOutput(TierlaneError):
    """The model's output is not one string for each input."""


class Unwell(TierlaneError):
    """The model failed its canary."""


class Backend(Protocol):
    """A model that runs batches. `version` names the model in responses; known once loaded."""

    @property
    def version(self) -> str: ...

    def load(self) -> None:
        """Load the model into memory. Raises StartError if only other settings can help."""

    def warmup(self) -> None:
        """Run a small known-good batch, so that the first request does not pay for lazy initialization."""

    def health(self) -> None:
        """The canary that tells a broken model from bad inputs: returns if the model is well, else raises.

        Called after batches without a good answer; by default the warm-up.
        """

    def run(self, items: Sequence[Item], progress: Callable[[], None]) -> list[ItemResult]:
        """Answer every item, in order. Calls `progress` after each step; may raise anything."""

    def close(self) -> None:
        """Release what `load` allocated."""


@runtime_checkable
class ServingBackend(Backend, Protocol):
    """A backend for a service that runs several requests at a time, and may accept none for a while."""

    @property
    def slots(self) -> int:
        """The most requests at a time, at first."""

    def report_waiting(self, report: Callable[[str, str], None]) -> None:
        """Call `report` while loading, with the reason for which that waits and its cause, and with "" twice at the end."""

    def resume(self, slots: int) -> None:
        """Begin with as many slots as an earlier process of the worker had."""

    def serve(self, connection: socket.socket) -> None:
        """Once loaded: answer the requests of the worker over `connection` until it is closed."""


@runtime_checkable
class SteppingBackend(Backend, Protocol):
    """A backend whose items join and leave at every step of its loop, each with a result of its own."""

    @property
    def slots(self) -> int:
        """The most items at a time, once loaded; 0: this model runs batches."""

    def add(self, key: int, item: Item) -> None:
        """Let the item join at the next step; an item that cannot run gets its error as the result of that step."""

    def remove(self, key: int) -> int:
        """Let the item leave without a result. Returns the tokens used so far; 0 also if it has ended."""

    def step(self, progress: Callable[[], None]) -> Sequence[tuple[int, ItemResult | BaseException]]:
        """Advance all items by one step; items that are late end with TOO_LATE. Calls `progress` at least once.

        Returns the keys and results of those that ended; an exception if that item alone caused it. May raise anything;
        then all items have left.
        """


@runtime_checkable
class WaitingBackend(SteppingBackend, Protocol):
    """A backend whose `step` waits for something outside the process."""

    def interrupt_on(self, descriptor: int) -> None:
        """From now on `step` returns at once when `descriptor` is readable."""


Run = Callable[[Sequence[Item]], list[ItemResult]]


def by_task(items: Sequence[Item], texts: Run, vectors: Run) -> list[ItemResult]:
    """One result for each item, in order; texts and embeddings are run separately, and only if there are any."""
    embedding = [item.task is Task.EMBED for item in items]
    written = [item for item, embeds in zip(items, embedding, strict=True) if not embeds]
    embedded = [item for item, embeds in zip(items, embedding, strict=True) if embeds]
    results = iter(texts(written) if written else []), iter(vectors(embedded) if embedded else [])
    return [next(results[embeds]) for embeds in embedding]


class Padding:
    """Counts the positions of one batch."""

    def __init__(self) -> None:
        self._real = 0
        self._computed = 0

    def passed(self, lengths: Sequence[int]) -> None:
        """A pass over rows of these lengths, each padded to the longest."""
        self._real += sum(lengths)
        self._computed += max(lengths, default=0) * len(lengths)

    def stepped(self, live: int, rows: int) -> None:
        """A step of one token for each row, needed by `live` of them."""
        self._real += live
        self._computed += rows

    def take(self) -> float:
        """The share of padding (0..1) since the last call; 0 if nothing was computed."""
        share = 1 - self._real / self._computed if self._computed else 0.0
        self._real = self._computed = 0
        return share
