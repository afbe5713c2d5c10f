"""The Idempotency-Key: what is taken for one, and what it is called in Redis."""

import re
from collections.abc import Sequence
from hashlib import sha256

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.api.inference import read_inference
from gateway.inference.submission import MAX_CHARACTERS, idempotency, idempotency_key, stored_reply
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.payload import Payload
from scheduler.protocol.replies import Reply


def sent(*values: str) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict([("Idempotency-Key", value) for value in values]))


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("8e03978e-40d5-43e8-bc93-6894a57f9324", "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        ('"8e03978e-40d5-43e8-bc93-6894a57f9324"', "8e03978e-40d5-43e8-bc93-6894a57f9324"),
        ("a", "a"),
        ("!~a=b,c;d", "!~a=b,c;d"),
        (r'"a\"b\\c"', r'a"b\c'),
        ("a" * MAX_CHARACTERS, "a" * MAX_CHARACTERS),
        ('"' + "a" * MAX_CHARACTERS + '"', "a" * MAX_CHARACTERS),
    ],
)
def test_keys_bare_and_quoted(value: str, key: str) -> None:
    """The draft's structured string and the bare form that most clients send name the same key."""
    assert idempotency_key(sent(value)) == key


def test_no_header_is_no_key() -> None:
    """And nothing is asked or stored for it."""
    assert idempotency_key(sent()) is None


@pytest.mark.parametrize(
    "values",
    [
        ("",),
        ('""',),
        ('"open',),
        ('closed"x"', "again"),
        (r'"a\b"',),
        ('"a";p=1',),
        ("a b",),
        ('"a b"',),
        ("tab\there",),
        ("ümlaut",),
        ("\x00",),
        ("a" * (MAX_CHARACTERS + 1),),
        ("a", "a"),
        ("a", "b"),
    ],
)
def test_what_is_no_key_is_refused_by_name(values: tuple[str, ...]) -> None:
    """Empty, too long, invisible, badly quoted, or there twice: 400 that names the header and repeats nothing of it."""
    with pytest.raises(RequestError) as refused:
        idempotency_key(sent(*values))

    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_REQUEST, "Idempotency-Key")
    assert "ümlaut" not in refused.value.message


def payload(body: bytes) -> Payload:
    decoded = read_inference(body, 1000)
    return Payload("tiny", decoded.input, dict(decoded.parameters))


def test_the_name_holds_customer_and_hash_only() -> None:
    """Two customers' equal keys are two; the key itself is stored nowhere."""
    mine = idempotency("customer-1", "order-77", payload(b'{"input":"a"}'))
    theirs = idempotency("customer-2", "order-77", payload(b'{"input":"a"}'))

    assert re.fullmatch(r"customer-1:[0-9a-f]{32}", mine.value)
    assert re.fullmatch(r"[0-9a-f]{32}", mine.fingerprint)
    assert (mine.value != theirs.value, mine.fingerprint == theirs.fingerprint) == (True, True)
    assert idempotency("customer-1", "order-78", payload(b'{"input":"a"}')).value != mine.value


@pytest.mark.parametrize(
    ("body", "same"),
    [
        (b' { "parameters" : {"b":[1,2],"a":1} ,\n "input" : "x" } ', True),
        (b'{"input":"\\u0078","parameters":{"a":1,"b":[1,2]}}', True),
        (b'{"input":"x","parameters":{"a":1,"b":[2,1]}}', False),
        (b'{"input":"x","parameters":{"a":1}}', False),
        (b'{"input":"y","parameters":{"a":1,"b":[1,2]}}', False),
        (b'{"input":"x","parameters":{"a":"1","b":[1,2]}}', False),
    ],
)
def test_the_fingerprint_is_of_what_is_asked(body: bytes, same: bool) -> None:
    """White space, escapes and the order of members do not matter; every value does."""
    first = idempotency("c", "k", payload(b'{"input":"x","parameters":{"a":1,"b":[1,2]}}'))

    assert (idempotency("c", "k", payload(body)).fingerprint == first.fingerprint) is same


def test_another_model_is_another_body() -> None:
    """The model that runs it is a part of what is asked."""
    assert idempotency("c", "k", Payload("a", "x", {})) != idempotency("c", "k", Payload("b", "x", {}))


class Stored:
    """What a fetch finds: a reply, nothing, or no Redis."""

    def __init__(self, found: Reply | RedisUnavailable | None) -> None:
        self.found = found

    async def fetch(self, ids: Sequence[str]) -> list[Reply | None]:
        if isinstance(self.found, RedisUnavailable):
            raise self.found
        return [self.found for _ in ids]


REPLY = Reply("req_1", "c", "n", "completed", "", 1, 1.0, "b", 1, "w", 1.0, 1, "v1", "out")


async def test_the_stored_reply_of_the_same_customer_is_told() -> None:
    """Its nonce is that of the first call and is not compared."""
    assert await stored_reply(Stored(REPLY), "req_1", "c") == REPLY


@pytest.mark.parametrize("found", [None, RedisUnavailable("away"), REPLY])
async def test_an_answer_that_cannot_be_read_is_refused(found: Reply | RedisUnavailable | None) -> None:
    """Gone since admission looked, Redis away, or another customer's: 503 to try again, never somebody else's output."""
    with pytest.raises(RequestError) as refused:
        await stored_reply(Stored(found), "req_1", "other")

    assert refused.value.code is ErrorCode.NO_CAPACITY


def test_a_stream_is_the_same_request() -> None:
    """Where its pieces are wanted is no part of what was asked: a replay may be a stream, and the other way round."""
    asked = Payload("m", "a", {})

    assert idempotency("c", "k", asked.on_its_way("g n", 3)) == idempotency("c", "k", asked)


def test_a_fingerprint_is_what_it_was_before() -> None:
    """They are kept while versions change: a repeated request must not become another one by an update."""
    made = idempotency("c", "k", Payload("m", "a", {"t": 1}).on_its_way("", 2))

    assert made.fingerprint == sha256(b"\x95\xa1m\xa1a\x81\xa1t\x01\x00\xa0").hexdigest()[: len(made.fingerprint)]
