"""Hostile bodies at each endpoint that takes a body: a 4xx as described that names the field, and no effect."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from redis.asyncio import Redis

from api_description import Described
from gateway.api.open_inference.endpoints import INFER
from gateway.api.open_inference.tensors import TEXT_INPUT
from gateway.openapi.account_endpoints import ACCOUNT
from gateway.openapi.batch_endpoints import BATCHES
from gateway.openapi.endpoints import ENDPOINTS
from gateway.operations.action_guard import MAX_BODY_BYTES
from gateway.translations.message_endpoints import COUNT
from gateway.translations.response_handlers import INPUT_TOKENS
from gateway.translations.response_output import RESPONSES
from gateway.wiring import API_FORMATS
from integration.gateway_fixtures import SERVICE_TOKEN, Stack, lower, reverse_or_vector, running_stack
from integration.ledger_fixtures import database_url, db, postgres_server
from scheduler.errors import ErrorCode, RequestError

__all__ = ["database_url", "db", "postgres_server"]

VALID = {
    each.path: dict(each.example or {})
    for each in ENDPOINTS
    if each.body is not None and each not in (*BATCHES, *ACCOUNT)
}
ACTIONS = [each.path for each in ENDPOINTS if each.body is not None and each.token == "service"]
INFERENCE = [path for path in VALID if path not in ACTIONS]
WRAPPED = {
    "messages": '[{"role": "user", "content": "@"}]',
    "inputs": '[{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["@"]}]',
}
"""The value that holds the text, for fields that are not a text themselves."""
ALLOWED = {("messages", "no text"), ("tier", "no text"), ("tier", "null as text")}
"""Bodies that are valid for a field: an empty message, dead letters without a known tier, or of any tier."""
TEXT_FIELD = "<text>"
FIELDS = {each.endpoint: each.input_field for each in (*API_FORMATS.values(), COUNT, RESPONSES, INPUT_TOKENS)} | {
    INFER: "inputs"
}
"""Of the endpoints of inference. `POST /v1/keys` is tested with its rights (tests/integration/test_account.py)."""


def text_field(path: str) -> str:
    """Return the field whose text is replaced."""
    if path in ACTIONS:
        return "worker" if "worker" in VALID[path] else "tier"
    return FIELDS[path]


class Hostile(NamedTuple):
    """A body, made from a valid one and its text field, with the expected status and field of the error."""

    name: str
    make: Any
    status: int = 400
    param: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})


def with_text(raw_value: bytes) -> Any:
    """The valid body with these bytes instead of the text."""

    def make(body: dict[str, Any], field: str) -> bytes:
        text = json.loads(WRAPPED.get(field, '"@"'))
        return json.dumps({**body, field: text}).encode().replace(b'"@"', raw_value)

    return make


def also(raw_member: bytes) -> Any:
    """The valid body with one more member."""
    return lambda body, _: json.dumps(body).encode()[:-1] + b", " + raw_member + b"}"


def plain(body: dict[str, Any], _: str = "") -> bytes:
    return json.dumps(body).encode()


BODIES = [
    Hostile("empty", lambda *_: b""),
    Hostile("white space", lambda *_: b" \n\t"),
    Hostile("truncated", lambda body, _: json.dumps(body).encode()[:-1]),
    Hostile("two documents", lambda body, _: json.dumps(body).encode() * 2),
    Hostile("no JSON", lambda *_: b"input=hello"),
    Hostile("single quotes", lambda body, _: str(body).encode()),
    Hostile("trailing comma", lambda body, _: json.dumps(body).encode()[:-1] + b",}"),
    Hostile("comment", lambda body, _: b"/* hello */" + json.dumps(body).encode()),
    Hostile("list", lambda body, _: json.dumps([body]).encode()),
    Hostile("null", lambda *_: b"null"),
    Hostile("byte order mark", lambda body, _: b"\xef\xbb\xbf" + json.dumps(body).encode()),
    Hostile("UTF-16", lambda body, _: json.dumps(body).encode("utf-16")),
    Hostile("zeros", lambda *_: b"\0" * 1000),
    Hostile("bad UTF-8", with_text(b'"\xff"')),
    Hostile("overlong UTF-8", with_text(b'"\xc0\xaf"')),
    Hostile("cut UTF-8", with_text(b'"\xe2\x82"')),
    Hostile("surrogates in UTF-8", with_text(b'"\xed\xa0\x80"')),
    Hostile("lone surrogate", with_text(rb'"\ud800"')),
    Hostile("low surrogate first", with_text(rb'"\udc00\ud800"')),
    Hostile("invalid escape", with_text(rb'"\x41"')),
    Hostile("control character", with_text(b'"a\x00b"')),
    Hostile("no text", with_text(b'""'), param=TEXT_FIELD),
    Hostile("null as text", with_text(b"null"), param=TEXT_FIELD),
    Hostile("number as text", with_text(b"1"), param=TEXT_FIELD),
    Hostile("object as text", with_text(b"{}"), param=TEXT_FIELD),
    Hostile("NaN as text", with_text(b"NaN"), param=TEXT_FIELD),
    Hostile("-Infinity as text", with_text(b"-Infinity"), param=TEXT_FIELD),
    Hostile("huge integer", with_text(b"9" * 5000), param=TEXT_FIELD),
    Hostile("huge exponent", with_text(b"1e999999"), param=TEXT_FIELD),
    Hostile("nested lists", with_text(b"[" * 100_000 + b"]" * 100_000), param=TEXT_FIELD),
    Hostile("nested objects", with_text(b'{"a":' * 40_000 + b"1" + b"}" * 40_000), param=TEXT_FIELD),
    Hostile("nested and not closed", lambda *_: b"[" * 200_000),
    Hostile("nested in an unknown field", also(b'"zzz": ' + b"[" * 50_000 + b"]" * 50_000), param="zzz"),
    Hostile("unknown field", also(b'"zzz": 1'), param="zzz"),
    Hostile("prototype", also(b'"__proto__": {"a": 1}'), param="__proto__"),
    Hostile("text too large", with_text(b'"' + b"x" * 200_000 + b'"'), 413, TEXT_FIELD),
    Hostile("body too large", with_text(b'"' + b"x" * 300_000 + b'"'), 413),
    Hostile("endless white space", lambda body, _: b" " * 300_000 + json.dumps(body).encode(), 413),
    Hostile("text/plain", plain, 415, "Content-Type", {"Content-Type": "text/plain"}),
    Hostile("form", plain, 415, "Content-Type", {"Content-Type": "application/x-www-form-urlencoded"}),
    Hostile("invalid type", plain, 415, "Content-Type", {"Content-Type": ";;;"}),
    Hostile("brotli", plain, 415, "Content-Encoding", {"Content-Encoding": "br"}),
    Hostile("no gzip", plain, 400, "Content-Encoding", {"Content-Encoding": "gzip"}),
]


@pytest.fixture
async def stack(client: Redis, redis_url: str, database_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker and PostgreSQL."""
    async with running_stack(client, redis_url, database_url=database_url) as running:
        running.worker.answerer = reverse_or_vector
        await limits_hold(running)
        yield running


async def limits_hold(stack: Stack) -> None:
    """Wait until the limits of a function hold: the gateway must have seen a worker with one."""
    large = json.dumps({"input": "x" * 300_000}).encode()
    for _ in range(200):
        if (await post(stack, "/v1/inference", large))[0] == 413:
            stack.worker.seen.clear()
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the limits of a function do not hold after ten seconds")


@pytest.fixture
async def described(stack: Stack) -> Described:
    """The description that the gateway serves."""
    async with stack.http.get(stack.url + "/openapi.json") as response:
        return Described(await response.json())


async def post(
    stack: Stack, path: str, raw: bytes, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, dict[str, str], bytes]:
    key = {"Authorization": f"Bearer {SERVICE_TOKEN}"} if path in ACTIONS else stack.key()
    sent = {"Content-Type": "application/json", **key, **headers}
    async with stack.http.post(stack.url + path.replace("{id...}", "tiny"), data=raw, headers=sent) as response:
        return response.status, lower(response.headers), await response.read()


async def error_of(stack: Stack, path: str, raw: bytes) -> tuple[int, str, str | None]:
    """Return status, code and field of the error."""
    status, _, body = await post(stack, path, raw)
    error = error_in(body)
    return status, error["code"], error["param"]


def error_in(body: bytes) -> dict[str, Any]:
    """The error of a response, whose code and field are details in Anthropic's form; in that of tensors it is a text."""
    document = json.loads(body)
    error: dict[str, Any] = document.get("error", {"code": None, "param": None, "message": None})
    if isinstance(error, str):
        return document | {"message": error}
    details = error.get("details", {})
    return error | details | ({"code": details["error_code"]} if details else {})


def test_every_endpoint_with_a_body_is_tested() -> None:
    """The described endpoints are the formats of the API, the count of tokens, and the four actions."""
    assert sorted(INFERENCE) == sorted(FIELDS)
    assert len(ACTIONS) == 4


@pytest.mark.parametrize("path", list(VALID))
async def test_hostile_bodies_are_rejected(stack: Stack, described: Described, db: Any, path: str) -> None:
    """Status, field, headers and form of each error are as described; afterwards the valid body is still served."""
    field = text_field(path)
    wrong = []
    for hostile in (each for each in BODIES if (field, each.name) not in ALLOWED):
        raw = hostile.make(VALID[path], field)
        large = path in ACTIONS and len(raw) > MAX_BODY_BYTES
        status, headers, body = await post(stack, path, raw, hostile.headers)
        error = error_in(body)
        # In JSON that cannot be decoded the field is the nearest one.
        params = {field, "content", "data", TEXT_INPUT} if hostile.param == TEXT_FIELD else {hostile.param}
        expected = (413, {None}) if large else (hostile.status, params)
        if status != expected[0] or error["param"] not in expected[1] or not error["message"]:
            wrong.append((hostile.name, status, error["param"], error["message"]))
        wrong += [
            (hostile.name, fault)
            for fault in described.faults(path.replace("...}", "}"), "POST", status, headers, body)
        ]

    assert wrong == []
    assert stack.worker.seen == []
    assert await db.fetchval("SELECT count(*) FROM config_changes WHERE changed_by LIKE 'dashboard%'") == 0
    status, headers, body = await post(stack, path, plain(VALID[path]))
    assert status in ((404, 409) if path in ACTIONS and not path.endswith("/uncordon") else (200,))
    assert described.faults(path.replace("...}", "}"), "POST", status, headers, body) == []


@pytest.mark.parametrize("path", INFERENCE)
async def test_duplicate_keys_are_rejected(stack: Stack, path: str) -> None:
    """A field that comes twice is named, also with an equal value and where its name is written with escapes."""
    for field, value in VALID[path].items():
        for second in (json.dumps(value), "null", json.dumps("x")):
            for name in (field, f"\\u{ord(field[0]):04x}{field[1:]}"):
                raw = f'{json.dumps(VALID[path])[:-1]}, "{name}": {second}}}'.encode()
                status, _, param = await error_of(stack, path, raw)
                assert (status, param) == (400, field), raw
    assert stack.worker.seen == []


async def test_numbers(stack: Stack) -> None:
    """16.0 is the integer 16, as in JSON Schema. NaN, infinity and numbers that are not JSON are rejected, and named where
    they can be decoded, also in a body with such an integer.
    """
    base = b'{"model": "tiny", "prompt": "a", "max_tokens": 16.0'
    assert (await post(stack, "/v1/completions", base + b"}"))[0] == 200
    for rest, param in (
        (b', "seed": 1.5}', "seed"),
        (b', "max_tokens": 16.0}', "max_tokens"),
        *((b', "top_p": %s}' % raw, "top_p") for raw in (b"NaN", b"Infinity", b"-Infinity")),
        *((b', "top_p": %s}' % raw, None) for raw in (b"1e999", b"1" + b"0" * 400, b"0x10", b"01", b".5")),
        (b"", None),
    ):
        status, code, named = await error_of(stack, "/v1/completions", base + rest)
        assert (status, code) == (400, "invalid_request"), rest
        assert param is None or named == param


@pytest.mark.parametrize("path", ACTIONS)
async def test_control_characters_do_not_reach_postgresql(stack: Stack, path: str) -> None:
    """A control character in any text of an action is rejected, and its field named."""
    fields = {name for name, value in VALID[path].items() if isinstance(value, str)} | {text_field(path)}
    for text in ("a\0b", "\0", "a\x01", "a\n", "a\x7f", "a\x85b"):
        for field in fields:
            raw = json.dumps(VALID[path] | {field: text}).encode()
            assert await error_of(stack, path, raw) == (400, "invalid_request", field)


async def test_data_rejected_by_postgresql_is_an_invalid_request(stack: Stack) -> None:
    """A value that violates a constraint, or that PostgreSQL cannot store, is the request's fault and not an outage."""
    transaction = stack.gateway.actions.dead_letters._transaction
    with pytest.raises(RequestError) as rejected:
        async with transaction.change("test") as connection:
            await connection.execute("INSERT INTO cordons (worker, reason) VALUES ('w', repeat('x', 501))")
    assert rejected.value.code is ErrorCode.INVALID_REQUEST
    with pytest.raises(RequestError) as rejected:
        async with transaction.read() as connection:
            await connection.fetchval("SELECT $1::text", "a\0b")
    assert rejected.value.code is ErrorCode.INVALID_REQUEST
