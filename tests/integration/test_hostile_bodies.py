"""Whatever is sent as a body, at every door of customers that takes one: a 4xx that names the fault, as described, and never a 500."""

import json
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from redis.asyncio import Redis

from api_description import Described
from gateway.openapi.endpoints import ENDPOINTS
from gateway.wiring import API_FORMATS
from integration.gateway_fixtures import Stack, reverse_or_vector, running_stack

ASKED = {door.path: dict(door.example or {}) for door in ENDPOINTS if door.body is not None and door.token == "key"}
TEXT = {path: api_format.input_field for path, api_format in API_FORMATS.items()}
WRAPPED = {"messages": '[{"role": "user", "content": "@"}]'}
"""What a text stands in, by the field that is no text itself."""

UNMINDED = {("messages", "no text")}
"""What is no fault there: a message may be empty."""


class Hostile(NamedTuple):
    """One body: how it is made from a valid one and its text field, and what the answer must be."""

    name: str
    make: Any
    status: int = 400
    param: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})


def with_text(raw_value: bytes) -> Any:
    """The valid body with these bytes in the place of the text."""

    def make(body: dict[str, Any], field: str) -> bytes:
        text = json.loads(WRAPPED.get(field, '"@"'))
        return json.dumps({**body, field: text}).encode().replace(b'"@"', raw_value)

    return make


def also(raw_member: bytes) -> Any:
    """The valid body with one more member."""
    return lambda body, _: json.dumps(body).encode()[:-1] + b", " + raw_member + b"}"


def plain(body: dict[str, Any], _: str) -> bytes:
    return json.dumps(body).encode()


def number(raw: bytes) -> Any:
    """The valid body with a number that is none, where the door takes numbers and where it does not."""
    return lambda body, field: also(b'"parameters": {"t": ' + raw + b"}")(
        {k: v for k, v in body.items() if k != "parameters"}, field
    )


TEXT_FIELD = "<text>"
BODIES = [
    Hostile("nothing", lambda *_: b""),
    Hostile("white space", lambda *_: b" \n\t"),
    Hostile("half of it", lambda body, _: json.dumps(body).encode()[:-1]),
    Hostile("two documents", lambda body, _: json.dumps(body).encode() * 2),
    Hostile("no JSON", lambda *_: b"input=hello"),
    Hostile("single quotes", lambda body, _: str(body).encode()),
    Hostile("a comma too many", lambda body, _: json.dumps(body).encode()[:-1] + b",}"),
    Hostile("a comment", lambda body, _: b"/* hello */" + json.dumps(body).encode()),
    Hostile("a list", lambda body, _: json.dumps([body]).encode()),
    Hostile("null", lambda *_: b"null"),
    Hostile("a byte order mark", lambda body, _: b"\xef\xbb\xbf" + json.dumps(body).encode()),
    Hostile("UTF-16", lambda body, _: json.dumps(body).encode("utf-16")),
    Hostile("zeros", lambda *_: b"\0" * 1000),
    Hostile("bad UTF-8", with_text(b'"\xff"')),
    Hostile("overlong UTF-8", with_text(b'"\xc0\xaf"')),
    Hostile("cut UTF-8", with_text(b'"\xe2\x82"')),
    Hostile("surrogates in UTF-8", with_text(b'"\xed\xa0\x80"')),
    Hostile("a lone surrogate", with_text(rb'"\ud800"')),
    Hostile("a low surrogate first", with_text(rb'"\udc00\ud800"')),
    Hostile("an escape that is none", with_text(rb'"\x41"')),
    Hostile("a control character", with_text(b'"a\x00b"')),
    Hostile("no text", with_text(b'""'), param=TEXT_FIELD),
    Hostile("null as text", with_text(b"null"), param=TEXT_FIELD),
    Hostile("a number as text", with_text(b"1"), param=TEXT_FIELD),
    Hostile("an object as text", with_text(b"{}"), param=TEXT_FIELD),
    Hostile("NaN as text", with_text(b"NaN"), param=TEXT_FIELD),
    Hostile("-Infinity as text", with_text(b"-Infinity"), param=TEXT_FIELD),
    Hostile("a huge integer", with_text(b"9" * 5000), param=TEXT_FIELD),
    Hostile("a huge exponent", with_text(b"1e999999"), param=TEXT_FIELD),
    Hostile("nested lists", with_text(b"[" * 100_000 + b"]" * 100_000), param=TEXT_FIELD),
    Hostile("nested objects", with_text(b'{"a":' * 40_000 + b"1" + b"}" * 40_000), param=TEXT_FIELD),
    Hostile("nested and never closed", lambda *_: b"[" * 200_000),
    Hostile("nested in a field that is not known", also(b'"zzz": ' + b"[" * 50_000 + b"]" * 50_000), param="zzz"),
    Hostile("a field that is not known", also(b'"zzz": 1'), param="zzz"),
    Hostile("the prototype", also(b'"__proto__": {"a": 1}'), param="__proto__"),
    Hostile("a text too large", with_text(b'"' + b"x" * 200_000 + b'"'), 413, TEXT_FIELD),
    Hostile("a body too large", with_text(b'"' + b"x" * 300_000 + b'"'), 413),
    Hostile("white space without end", lambda body, _: b" " * 300_000 + json.dumps(body).encode(), 413),
    Hostile("text/plain", plain, 415, "Content-Type", {"Content-Type": "text/plain"}),
    Hostile("a form", plain, 415, "Content-Type", {"Content-Type": "application/x-www-form-urlencoded"}),
    Hostile("a type that is none", plain, 415, "Content-Type", {"Content-Type": ";;;"}),
    Hostile("gzip", plain, 415, "Content-Encoding", {"Content-Encoding": "gzip"}),
]


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker behind it."""
    async with running_stack(client, redis_url) as running:
        running.worker.answerer = reverse_or_vector
        yield running


@pytest.fixture
async def described(stack: Stack) -> Described:
    """The description that this gateway serves."""
    async with stack.http.get(stack.url + "/openapi.json") as answer:
        return Described(await answer.json())


async def post(stack: Stack, path: str, raw: bytes, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
    sent = {"Content-Type": "application/json", **stack.key(), **headers}
    async with stack.http.post(stack.url + path, data=raw, headers=sent) as answer:
        return answer.status, {n.lower(): v for n, v in answer.headers.items()}, await answer.read()


def test_every_door_that_takes_a_body_is_here() -> None:
    """Those that are described are those that speak, and each is tried with everything."""
    assert sorted(set(ASKED) ^ set(TEXT)) == []


@pytest.mark.parametrize("path", list(ASKED))
async def test_the_valid_body_is_answered(stack: Stack, described: Described, path: str) -> None:
    """What the description gives as an example works, and is answered as described."""
    status, headers, body = await post(stack, path, plain(ASKED[path], ""), {})

    assert status == 200
    assert described.faults(path, "POST", status, headers, body) == []


@pytest.mark.parametrize("path", list(ASKED))
async def test_hostile_bodies_are_named(stack: Stack, described: Described, path: str) -> None:
    """Status, code and field of each; headers and form as described; nothing reaches a worker, and the gateway is well."""
    field = TEXT[path]
    wrong = []
    for hostile in (each for each in BODIES if (field, each.name) not in UNMINDED):
        raw = hostile.make(ASKED[path], field)
        status, headers, body = await post(stack, path, raw, hostile.headers)
        error = json.loads(body).get("error", {"param": None, "message": None})
        # Where it is no JSON at all, the field is the one next to it.
        named = {field, "content"} if hostile.param == TEXT_FIELD else {hostile.param}
        if status != hostile.status or error["param"] not in named or not error["message"]:
            wrong.append((hostile.name, status, error["param"], error["message"]))
        wrong += [(hostile.name, fault) for fault in described.faults(path, "POST", status, headers, body)]

    assert wrong == []
    assert stack.worker.seen == []
    assert (await post(stack, path, plain(ASKED[path], ""), {}))[0] == 200


@pytest.mark.parametrize("path", list(ASKED))
async def test_a_key_twice_is_named(stack: Stack, path: str) -> None:
    """Each field of the body, the second time with the same value or another; also where it is written with escapes."""
    for field, value in ASKED[path].items():
        for second in (json.dumps(value), "null", json.dumps("x")):
            for name in (field, f"\\u{ord(field[0]):04x}{field[1:]}"):
                raw = f'{json.dumps(ASKED[path])[:-1]}, "{name}": {second}}}'.encode()
                status, _, body = await post(stack, path, raw, {})
                error = json.loads(body)["error"]
                assert (status, error["param"]) == (400, field), raw

    assert stack.worker.seen == []


@pytest.mark.parametrize("raw", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1" + b"0" * 400, b"0x10", b"01", b".5"])
async def test_numbers_that_are_none(stack: Stack, raw: bytes) -> None:
    """Wherever a door takes numbers: 400, and NaN and its like with the field."""
    named = raw in (b"NaN", b"Infinity", b"-Infinity")
    places = [("/v1/inference", number(raw)), ("/v1/completions", also(b'"temperature": ' + raw))]
    for path, make in places:
        status, _, body = await post(stack, path, make(ASKED[path], ""), {})
        error = json.loads(body)["error"]
        assert status == 400, (path, body)
        assert not named or error["param"] in ("t", "temperature")

    assert stack.worker.seen == []


async def test_whole_numbers_may_be_written_with_a_fraction(stack: Stack) -> None:
    """16.0 is 16, as it is to JSON Schema; 16.5 is named, and so is what is wrong elsewhere in such a body."""
    base = b'{"model": "tiny", "prompt": "a", "max_tokens": 16.0'
    answers = [
        await post(stack, "/v1/completions", base + rest, {})
        for rest in (b"}", b', "seed": 1.5}', b', "top_p": NaN}', b', "top_p": 1e999}', b', "max_tokens": 16.0}', b"")
    ]

    assert [status for status, _, _ in answers] == [200, 400, 400, 400, 400, 400]
    assert [json.loads(body)["error"]["param"] for _, _, body in answers[1:]] == [
        "seed",
        "top_p",
        None,
        "max_tokens",
        None,
    ]
