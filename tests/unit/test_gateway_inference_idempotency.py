"""Idempotency-Key: its forms, fingerprints, and stored replies; and the header of a retry."""

import re
from hashlib import sha256

import pytest
from msgspec.structs import replace
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.api.inference import read_inference
from gateway.http.retry_header import is_retry
from gateway.inference.idempotency import MAX_KEY_CHARACTERS, idempotency, idempotency_key, stored_reply
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.payload import Payload, decode_payload
from scheduler.protocol.replies import Reply, StoredReply

PAYLOAD = Payload("tiny", "hello", {"max_tokens": 5, "stop": ["a", "b"]})


def headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), ("00", False), ("12", True), ("", False), ("-1", False), ("x", False)]
)
def test_openai_retry_count_marks_a_retry(value: str | None, expected: bool) -> None:
    """A positive `X-Stainless-Retry-Count` is a retry; invalid values are ignored."""
    assert is_retry(headers(*([] if value is None else [("X-Stainless-Retry-Count", value)]))) is expected


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("8e03978e-40d5-43e8-bc93-6894a57f9324", "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        ('"8e03978e-40d5-43e8-bc93-6894a57f9324"', "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        ("!~a=b,c;d", "!~a=b,c;d"),
        (r'"a\"b\\c"', r'a"b\c'),
        ("a" * MAX_KEY_CHARACTERS, "a" * MAX_KEY_CHARACTERS),
        ('"' + "a" * MAX_KEY_CHARACTERS + '"', "a" * MAX_KEY_CHARACTERS),
    ],
)
def test_idempotency_keys_may_be_bare_or_quoted(value: str, key: str) -> None:
    """The structured string of the draft and the common bare form name the same key."""
    assert idempotency_key(headers(("Idempotency-Key", value))) == key
    assert idempotency_key(headers()) is None


@pytest.mark.parametrize(
    "values",
    [
        ("",),
        ('"open',),
        (r'"a\b"',),
        ('"a";p=1',),
        ("ümlaut",),
        ("a" * (MAX_KEY_CHARACTERS + 1),),
        ("a", "a"),
    ],
)
def test_invalid_idempotency_keys_are_rejected(values: tuple[str, ...]) -> None:
    """400 names the header and does not repeat the value."""
    with pytest.raises(RequestError) as error:
        idempotency_key(headers(*(("Idempotency-Key", value) for value in values)))

    assert (error.value.code, error.value.param) == (ErrorCode.INVALID_REQUEST, "Idempotency-Key")
    assert "ümlaut" not in error.value.message


def test_an_idempotency_key_is_stored_as_customer_and_hash() -> None:
    """Equal keys of two customers differ, and the key itself is not stored."""
    mine, theirs = (idempotency(customer, "order-77", PAYLOAD) for customer in ("customer-1", "customer-2"))

    assert re.fullmatch(r"customer-1:[0-9a-f]{32}", mine.value)
    assert re.fullmatch(r"[0-9a-f]{32}", mine.fingerprint)
    assert (mine.value != theirs.value, mine.fingerprint == theirs.fingerprint) == (True, True)
    assert idempotency("customer-1", "order-78", PAYLOAD).value != mine.value


@pytest.mark.parametrize(
    ("body", "equal"),
    [
        (b' { "parameters" : {"b":[1,2],"a":1} ,\n "input" : "x" } ', True),
        (b'{"input":"\\u0078","parameters":{"a":1,"b":[1,2]}}', True),
        (b'{"input":"x","parameters":{"a":1,"b":[2,1]}}', False),
        (b'{"input":"x","parameters":{"a":"1","b":[1,2]}}', False),
    ],
)
def test_the_fingerprint_depends_on_values_only(body: bytes, equal: bool) -> None:
    """White space, escapes and the order of members do not matter; model and every value do, streaming does not."""

    def payload(raw: bytes) -> Payload:
        decoded = read_inference(raw, 1000)
        return Payload("tiny", decoded.input, dict(decoded.parameters))

    first = payload(b'{"input":"x","parameters":{"a":1,"b":[1,2]}}')
    fingerprint = idempotency("c", "k", first).fingerprint

    assert (idempotency("c", "k", payload(body)).fingerprint == fingerprint) is equal
    assert idempotency("c", "k", replace(first, model="other")).fingerprint != fingerprint
    assert idempotency("c", "k", decode_payload(first.encode_for("g n", 3, "c"))).fingerprint == fingerprint


def test_the_fingerprint_is_stable_across_versions() -> None:
    """Fingerprints outlive an update: a repeated request must not become a different one."""
    made = idempotency("c", "k", decode_payload(Payload("m", "a", {"t": 1}).encode_for("", 2, "c")))

    assert made.fingerprint == sha256(b"\x95\xa1m\xa1a\x81\xa1t\x01\x00\xa0").hexdigest()[: len(made.fingerprint)]


REPLY = Reply("req_1", "c", "n", "completed", "", 1, 1.0, "b", 1, "w", 1.0, 1, "v1", "out")


class StoredReplies:
    """The read finds a reply, nothing, or no Redis."""

    def __init__(self, found: StoredReply | RedisUnavailable | None) -> None:
        self.found = found

    async def stored(self, request_id: str) -> StoredReply | None:
        if isinstance(self.found, RedisUnavailable):
            raise self.found
        return self.found


async def test_only_the_same_customer_gets_a_stored_reply() -> None:
    """A reply that is missing, unreadable or of another customer is 503. The nonce is that of the first request."""
    kept = StoredReply(REPLY, 1_700_000_000_000)
    assert await stored_reply(StoredReplies(kept), "req_1", "c") == kept
    for found in (None, RedisUnavailable("away"), kept):
        with pytest.raises(RequestError) as error:
            await stored_reply(StoredReplies(found), "req_1", "other")
        assert error.value.code is ErrorCode.NO_CAPACITY
