"""The limits of one request by the kind of its pool's backend: its time, its wait in the queue, its size.

A function answers a batch within milliseconds, and its inputs are stored in Redis: its limits are tight. A language model
with slots, such as an endpoint, may write one answer for minutes and reads whole repositories: its limits are those of the
usual clients. Settings override both. Everything that needs such a limit takes it from here.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

ENDPOINT = "openai:"
"""Prefix of the backends that pass requests on to a server."""

SERVERS = (ENDPOINT, "oip:")
"""Prefixes of the backends with a model server behind them."""

WITH_SLOTS = (*SERVERS, "hf:", "tiny")
"""Prefixes of the backends whose requests start and end one by one, before a worker of them reports its slots."""


BYTES_PER_TOKEN = 32
"""UTF-8 bytes. Text of any language and code have at most 8 per token on average."""


class RequestLimits(NamedTuple):
    """Times in milliseconds, sizes in bytes. The fields of a kind with longer requests are all larger or equal."""

    total_ms: int
    """From acceptance to the end of the response, retries included."""

    queue_ms: int
    """Wait in the tier queue, where neither the customer nor its tier has a `max_queue_ms`."""

    body_bytes: int
    """The request body."""

    input_bytes: int
    """One text, or the text of one chat."""

    context_tokens: int = 0
    """The most tokens of prompt and output together; 0: not known."""

    def override(self, total_ms: int | None, body_bytes: int | None, input_bytes: int | None = None) -> "RequestLimits":
        """These limits with the values that are set. The part of the body that may be text stays the same."""
        total_ms, body = total_ms or self.total_ms, body_bytes or self.body_bytes
        text = input_bytes or body * self.input_bytes // self.body_bytes
        return RequestLimits(total_ms, min(self.queue_ms, total_ms), body, text, self.context_tokens)

    def with_context(self, tokens: int) -> "RequestLimits":
        """These limits for a model with this context length: a body may be as large as one that can fit."""
        most = tokens * BYTES_PER_TOKEN
        return self._replace(
            body_bytes=max(self.body_bytes, most), input_bytes=max(self.input_bytes, most), context_tokens=tokens
        )

    @property
    def text_bytes(self) -> int:
        """The most text that can fit: of `input_bytes` and the context length the smaller one."""
        return min(self.input_bytes, self.context_tokens * BYTES_PER_TOKEN or self.input_bytes)

    @property
    def wait_scale(self) -> float:
        """The factor by which usual waits exceed those for a function, for which the tiers' `shed_wait_ms` are stated."""
        return max(1.0, self.queue_ms / FUNCTION.queue_ms)


FUNCTION = RequestLimits(total_ms=4000, queue_ms=2000, body_bytes=256 << 10, input_bytes=128 << 10)
LANGUAGE_MODEL = RequestLimits(total_ms=600_000, queue_ms=30_000, body_bytes=8 << 20, input_bytes=8 << 20)
"""The total is the timeout of OpenAI's clients; the size holds a conversation of 4 MB with its tools."""


def limits_of_backend(backend: str) -> RequestLimits:
    """The limits before a backend of this name, where no worker is known."""
    return LANGUAGE_MODEL if backend.startswith(WITH_SLOTS) else FUNCTION


class ReportedWorker(Protocol):
    """What a worker reports of itself."""

    @property
    def backend(self) -> str: ...
    @property
    def slots(self) -> int: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def context_tokens(self) -> int: ...


def limits_of_workers(workers: Sequence[ReportedWorker], before: RequestLimits = LANGUAGE_MODEL) -> RequestLimits:
    """The limits in the pool of these workers. `before`: the last result, which holds until a worker can tell.

    A worker that is still starting has no slots yet: only a healthy one shows that its backend is a function.
    """
    if any(worker.slots > 0 or worker.backend.startswith(SERVERS) for worker in workers):
        known = [worker.context_tokens for worker in workers if worker.context_tokens]
        return LANGUAGE_MODEL.with_context(min(known, default=before.context_tokens))
    return FUNCTION if any(worker.healthy for worker in workers) else before
