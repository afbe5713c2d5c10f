"""Trace contexts: parsing of traceparents, and contexts at the end of stored bodies."""

import msgspec
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.inference.traces import caller_of
from scheduler.payload import Payload, Task, add_context, context_in, decode_payload, encode_payload
from scheduler.tracing import Context, new_span_id, new_trace_id, read_traceparent

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
PAYLOADS = [
    Payload("tiny", "hello", {}),
    Payload("tiny", "é" * 70_000, {"seed": 1, "stop": ["a"]}, Task.CHAT, "gw 0123"),
    Payload("tiny", "", {"traceparent": f"00-{TRACE}-{SPAN}-01"}, Task.EMBED, "", 3),
    Payload("tiny", f"00-{TRACE}-{SPAN}-01", {}, Task.COMPLETE, "gw 0123", 200),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", Context(TRACE, SPAN, sampled=True)),
        (f"00-{TRACE}-{SPAN}-00", Context(TRACE, SPAN, sampled=False)),
        (f"00-{TRACE}-{SPAN}-ff", Context(TRACE, SPAN, sampled=True)),
        (f"00-{TRACE}-{SPAN}-02", Context(TRACE, SPAN, sampled=False)),
        (f"cc-{TRACE}-{SPAN}-01", Context(TRACE, SPAN, sampled=True)),
        (f"cc-{TRACE}-{SPAN}-01-future", Context(TRACE, SPAN, sampled=True)),
        (f"cc-{TRACE}-{SPAN}-01.future", None),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"00-{TRACE}-{SPAN}-01-", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-1", None),
        (f"0-{TRACE}-{SPAN}-01", None),
        (f"00-{TRACE[:-1]}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}g-01", None),
        (f" 00-{TRACE}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-01\n", None),
        (f"\u0660\u0660-{TRACE}-{SPAN}-01", None),
        ("nonsense", None),
        ("", None),
    ],
)
def test_traceparents_are_parsed_by_the_w3c_specification(text: str, expected: Context | None) -> None:
    """Version 00 strictly, later versions as far as they are compatible; other values are ignored."""
    assert read_traceparent(text) == expected


@pytest.mark.parametrize("context", [Context(new_trace_id(), new_span_id()), Context(TRACE, SPAN, sampled=False)])
def test_a_formatted_context_is_parsed_again(context: Context) -> None:
    """In 55 characters."""
    assert read_traceparent(context.traceparent()) == context
    assert len(context.traceparent()) == 55


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([""], None),
        ([f"00-{TRACE}-{SPAN}-01"], Context(TRACE, SPAN)),
        ([f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"], None),
    ],
)
def test_a_repeated_header_is_ignored(values: list[str], expected: Context | None) -> None:
    """Also if both values are equal."""
    headers = CIMultiDictProxy(CIMultiDict([("TraceParent", value) for value in values]))
    assert caller_of(headers) == expected


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_context_does_not_change_the_payload(payload: Payload) -> None:
    """It adds 57 bytes, and a new context replaces it."""
    body = encode_payload(payload)
    first, second = Context(TRACE, SPAN), Context(TRACE, "f" * 16, sampled=False)

    traced = add_context(body, first)

    assert context_in(body) is None
    assert context_in(traced) == first
    assert len(traced) == len(body) + 57
    assert decode_payload(traced) == payload
    assert add_context(traced, second) == add_context(body, second)
    assert context_in(add_context(traced, second)) == second


def test_a_body_of_another_version_can_have_a_context() -> None:
    """One more element, for every number of elements."""
    older = msgspec.msgpack.encode(["tiny", "hello", {}, 0, ""])

    traced = add_context(older, Context(TRACE, SPAN))

    assert context_in(traced) == Context(TRACE, SPAN)
    assert msgspec.msgpack.decode(traced)[:5] == msgspec.msgpack.decode(older)
    assert len(msgspec.msgpack.decode(traced)) == 6


@pytest.mark.parametrize("body", [b"", b"\x96", b"junk", b"\x97\xd9\x37" + b"\xff" * 55, b"\x97" + b"x" * 90])
def test_an_invalid_body_has_no_context(body: bytes) -> None:
    """The decoder of the payload reports the error."""
    assert context_in(body) is None


@pytest.mark.parametrize("body", [b"", b"junk", b"\xc1", b"\x9f" + b"x" * 90])
def test_an_invalid_body_gets_no_context(body: bytes) -> None:
    """It is not changed."""
    assert add_context(body, Context(TRACE, SPAN)) == body
