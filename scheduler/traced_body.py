"""The trace context of a sampled request travels at the end of its stored body. Bodies of all others hold nothing of it.

An encoded payload is an array; one element more, always the last, is the traceparent. Whoever decodes a payload passes it over,
and whoever wants it finds it without decoding. No payload ends like one by itself: its own last elements are numbers, and
texts that no client writes.
"""

from scheduler.tracing import Context, read_traceparent

_ARRAYS = range(0x91, 0x9F)  # Of one to fourteen elements, which may get one more.
_TEXT_OF_55 = b"\xd9\x37"  # A str of msgpack and its length.
_LENGTH = 55
_ADDED = len(_TEXT_OF_55) + _LENGTH


def add_context(body: bytes, context: Context) -> bytes:
    """The body with a context, in place of the one that it may have. One that is no payload stays what it is."""
    if not body or body[0] not in _ARRAYS:
        return body
    text = _TEXT_OF_55 + context.traceparent().encode()
    if context_in(body) is not None:
        return body[:-_ADDED] + text
    return bytes((body[0] + 1,)) + body[1:] + text


def context_in(body: bytes) -> Context | None:
    """The context of a stored body; None for a request that nobody traces."""
    if body[-_ADDED:-_LENGTH] != _TEXT_OF_55:
        return None
    return read_traceparent(body[-_LENGTH:].decode("ascii", "replace"))
