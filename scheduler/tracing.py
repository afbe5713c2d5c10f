"""Traces: a request's context in the form of W3C, and spans as plain values for whoever exports them. Pure.

Each process times its own spans by its monotonic clock; two wall clocks are never compared.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[^\n]*)?")
_SAMPLED = 1


class Context(NamedTuple):
    """Of one span: 32 and 16 lower-case hexadecimal digits. `sampled`: its trace is recorded."""

    trace_id: str
    span_id: str
    sampled: bool = True

    def traceparent(self) -> str:
        """Its 55 characters on the wire."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def read_traceparent(text: str) -> Context | None:
    """None for what W3C tells to ignore. Versions that are not known yet may say more than we read."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return Context(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def new_trace_id() -> str:
    """An id that no other trace has."""
    return f"{random.getrandbits(128) or 1:032x}"


def new_span_id() -> str:
    """An id that no other span of its trace has."""
    return f"{random.getrandbits(64) or 1:016x}"


class SpanRole(Enum):
    """Who is at the other end of a span: nobody, who asked and waits, or who left work and went on."""

    INTERNAL = "internal"
    SERVER = "server"
    CONSUMER = "consumer"


class Span(NamedTuple):
    """What was done from `began` to `ended`, in seconds of this process's `time.monotonic`.

    `remote`: the parent is a span of another process. `failed`: by a fault of ours, so not by one of the client's.
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
