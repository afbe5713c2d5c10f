"""Traces: the W3C trace context of a request, and spans as values for an exporter. Pure.

Each process measures its own spans with its monotonic clock; wall clocks of two processes are never compared.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[^\n]*)?")
_SAMPLED = 1


class Context(NamedTuple):
    """The context of one span: ids of 32 and 16 lower-case hexadecimal digits. `sampled`: the trace is recorded."""

    trace_id: str
    span_id: str
    sampled: bool = True

    def traceparent(self) -> str:
        """The header value, 55 characters."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def read_traceparent(text: str) -> Context | None:
    """Parse a header value; None if W3C requires to ignore it. Later versions may contain more than is read here."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return Context(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def new_trace_id() -> str:
    """A random trace id."""
    return f"{random.getrandbits(128) or 1:032x}"


def new_span_id() -> str:
    """A random span id."""
    return f"{random.getrandbits(64) or 1:016x}"


class SpanRole(Enum):
    """The kind of a span in OpenTelemetry: internal, of a server, or of a consumer of a queue."""

    INTERNAL = "internal"
    SERVER = "server"
    CONSUMER = "consumer"


class Span(NamedTuple):
    """Work from `began` to `ended`, in seconds of this process's `time.monotonic`.

    `remote`: the parent is a span of another process. `failed`: because of an internal error, not one of the client.
    """

    name: str
    context: Context
    parent: Context | None
    began: float
    ended: float
    attributes: Mapping[str, str | int | float]
    kind: SpanRole = SpanRole.INTERNAL
    links: Sequence[Context] = ()
    remote: bool = False
    failed: bool = False


Spans = Callable[[Sequence[Span]], None]
"""Told of spans that have ended. Never raises and never waits."""
