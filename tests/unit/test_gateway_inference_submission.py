"""What is submitted for a request: token estimate, limits, Idempotency-Key, and the key of request coalescing."""

import re
from hashlib import sha256
from typing import Any

import pytest
from msgspec.structs import replace
from multidict import CIMultiDict, CIMultiDictProxy

from direct_parts import submission
from gateway.api.inference import read_inference
from gateway.http.retry_header import is_retry
from gateway.inference.coalescing import coalescing_key, deterministic, set_coalescing_key
from gateway.inference.idempotency import MAX_KEY_CHARACTERS, idempotency, idempotency_key, stored_reply
from gateway.inference.submission import build_submission
from gateway.inference.token_estimate import token_estimate
from gateway.inference.worker_views import SAMPLING_BACKENDS, greedy_by_default, one_version
from gpu_pool.backends.openai_endpoint.settings import PREFIX
from identities import identity
from ledger.catalog.snapshot import Model
from ratelimit.limits import effective
from ratelimit.request_limits import FUNCTION
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError
from scheduler.payload import Payload, Task, decode_payload
from scheduler.protocol.pool_view import WorkerView
from scheduler.protocol.replies import Reply, StoredReply

CACHED = Model("tiny", "default", 32, None, 40, 50.0, 0.8, 60, enabled=True)
PAYLOAD = Payload("tiny", "hello", {"max_tokens": 5, "stop": ["a", "b"]})


def headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


@pytest.mark.parametrize(
    ("text", "parameters", "expected"),
    [
        ("abcd", {}, 17),
        ("\u20ac", {}, 17),
        ("abcde", {"max_tokens": 100}, 102),
        ("abcd", {"max_tokens": 3, "max_new_tokens": 5}, 4),
        ("abcd", {"max_tokens": True, "max_new_tokens": 5}, 6),
        ("abcd", {"max_tokens": -1.5}, 1),
        ("abcd", {"max_tokens": 2**63 - 1}, 2**31 + 1),
        ("abcd", {"max_tokens": "500"}, 501),
        ("abcd", {"max_tokens": "\u00b2"}, 17),
    ],
)
def test_tokens_are_estimated_from_input_and_parameters(text: str, parameters: dict[str, Any], expected: int) -> None:
    """A quarter of the input's bytes, rounded up, plus the requested maximum of output tokens (default 16)."""
    assert token_estimate(Payload("tiny", text, parameters), len(text.encode())) == expected


@pytest.mark.parametrize(("tokens_per_minute", "charged"), [(600, 300), (None, 2**31 + 2), (1, 1)])
def test_a_request_is_charged_a_minute_of_tokens_at_most(tokens_per_minute: int | None, charged: int) -> None:
    """A cancelled request stays charged: it may block its customer for a minute, not for days."""
    customer, payload = identity(tokens_per_minute=tokens_per_minute), Payload("tiny", "hello", {"max_tokens": 10**18})

    assert build_submission("req_1", customer, payload, effective(customer, 0.5), within=FUNCTION).tokens == charged


def test_a_submission_has_the_effective_limits() -> None:
    """It contains all that admission decides by, scaled by the tier's factor."""
    customer = identity(tokens_per_minute=600, quotas=(("1day", 9),), key_rate=1.0, key_burst=4.0)
    payload = Payload("tiny", "hello", {})
    made = build_submission("req_1", customer, payload, effective(customer, 0.5), within=FUNCTION, trace="t")

    assert (made.id, made.tier, made.customer_id, made.api_key_id, made.trace_id) == ("req_1", "free", "c", "k", "t")
    assert (made.limits, made.tokens) == (effective(customer, 0.5), 18)
    assert (made.total_ms, made.queue_ms, made.input_bytes) == (4000, 2000, 5)
    assert (made.idempotency, made.fingerprint, made.again) == ("", "", False)
    assert decode_payload(made.body) == payload.with_target("", customer.priority, "c")


def test_the_tiers_priority_is_in_the_body_and_not_in_the_fingerprint() -> None:
    """A backend may order by priority; after a change of tier the same request must have the same fingerprint."""
    paid, free = (
        build_submission("req_1", customer, PAYLOAD, effective(customer), within=FUNCTION, key="order-1")
        for customer in (identity(priority=2), identity(priority=3))
    )

    assert [decode_payload(made.body).priority for made in (paid, free)] == [2, 3]
    assert paid.fingerprint == free.fingerprint != ""
    assert paid.idempotency.startswith("c:")


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
    assert idempotency("c", "k", first.with_target("g n", 3, "c")).fingerprint == fingerprint


def test_the_fingerprint_is_stable_across_versions() -> None:
    """Fingerprints outlive an update: a repeated request must not become a different one."""
    made = idempotency("c", "k", Payload("m", "a", {"t": 1}).with_target("", 2, "c"))

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


@pytest.mark.parametrize(
    ("parameters", "greedy", "behind_endpoint"),
    [
        ({}, True, False),
        ({"temperature": 0}, True, True),
        ({"temperature": 0.0, "seed": 7}, True, True),
        ({"temperature": 0.7}, False, False),
        ({"temperature": 0.7, "seed": True}, False, False),
        ({"temperature": 0.7, "seed": 0}, True, False),
        ({"seed": 7}, True, False),
        ({"temperature": "0"}, False, False),
        ({"do_sample": True}, False, False),
        ({"temperature": 0, "do_sample": True}, False, False),
        ({"do_sample": True, "seed": 7}, True, False),
    ],
)
def test_deterministic_requests(parameters: dict[str, Any], greedy: bool, behind_endpoint: bool) -> None:
    """Greedy, or sampled with a seed. An endpoint has its own defaults and seeds: there temperature 0 must be explicit."""
    assert deterministic(parameters, greedy=True) is greedy
    assert deterministic(parameters, greedy=False) is behind_endpoint


@pytest.mark.parametrize(
    "other",
    [
        ("c2", PAYLOAD, "v1"),
        ("c1", PAYLOAD, "v2"),
        ("c1", replace(PAYLOAD, model="big"), "v1"),
        ("c1", replace(PAYLOAD, input="hello "), "v1"),
        ("c1", replace(PAYLOAD, task=Task.EMBED), "v1"),
        ("c1", replace(PAYLOAD, parameters={"max_tokens": 6, "stop": ["a", "b"]}), "v1"),
        ("c1", replace(PAYLOAD, parameters={"max_tokens": 5, "stop": ["b", "a"]}), "v1"),
        ("c1t", replace(PAYLOAD, model="iny"), "v1"),
    ],
)
def test_the_coalescing_key_covers_all_inputs(other: tuple[str, Payload, str]) -> None:
    """Customer, model, version, task, input and each parameter, unambiguously; not the order of parameters or the stream."""
    key = coalescing_key("c1", PAYLOAD, "v1")
    reordered = replace(PAYLOAD, parameters={"stop": ["a", "b"], "max_tokens": 5}, stream="g n")

    assert coalescing_key(*other) != key
    assert coalescing_key("c1", reordered, "v1") == key
    assert len(key) == 32


@pytest.mark.parametrize(
    ("payload", "model", "version", "greedy", "expected"),
    [
        (PAYLOAD, CACHED, "v1", True, (coalescing_key("c", PAYLOAD, "v1"), 60_000, "v1")),
        (PAYLOAD, replace(CACHED, cache_scope="global"), "v1", True, (coalescing_key("", PAYLOAD, "v1"), 60_000, "v1")),
        # Nothing is kept without a known version.
        (PAYLOAD, CACHED, "", True, (coalescing_key("c", PAYLOAD, ""), 0, "")),
        (PAYLOAD, CACHED, "v1", False, ("", 0, "")),
        (replace(PAYLOAD, stream="g n"), CACHED, "v1", True, ("", 0, "")),
        (replace(PAYLOAD, parameters={"temperature": 1}), CACHED, "v1", True, ("", 0, "")),
        (
            replace(PAYLOAD, task=Task.EMBED),
            CACHED,
            "v1",
            False,  # Nothing is sampled for a vector.
            (coalescing_key("c", replace(PAYLOAD, task=Task.EMBED), "v1"), 60_000, "v1"),
        ),
    ],
)
def test_which_requests_are_coalesced(
    payload: Payload, model: Model, version: str, greedy: bool, expected: tuple[str, int, str]
) -> None:
    """Deterministic requests of one customer, or of all customers where the model's cache is global; no streams."""
    made = submission("req_1")
    set_coalescing_key(made, payload, model, version, greedy=greedy)

    assert (made.same, made.keep_answer_ms, made.model_version) == expected


def worker(version: str, *, healthy: bool = True, backend: str = "tiny") -> WorkerView:
    return WorkerView("w", "ready", 0.0, 0, 1.0, healthy, 1.0, 1.0, backend, version)


@pytest.mark.parametrize(
    ("backends", "greedy"),
    [
        ([], False),
        (["tiny", "hf:/models/a", "simulated:50"], True),
        (["tiny", f"{PREFIX}http://127.0.0.1:8000/v1#m"], False),
    ],
)
def test_a_pool_with_an_endpoint_is_not_greedy(backends: list[str], greedy: bool) -> None:
    """One endpoint backend is enough, healthy or not; an unknown pool may have one."""
    assert greedy_by_default([worker("v1", healthy=False, backend=each) for each in backends]) is greedy
    assert PREFIX in SAMPLING_BACKENDS


@pytest.mark.parametrize(
    ("workers", "version"),
    [
        ([], ""),
        ([worker("v1"), worker("v1")], "v1"),
        ([worker("v1"), worker("v2")], ""),
        ([worker("v1"), worker("v2", healthy=False)], "v1"),
        ([worker("v1", healthy=False)], ""),
    ],
)
def test_the_model_version_of_a_pool(workers: list[WorkerView], version: str) -> None:
    """The version that all healthy workers run, if it is one."""
    assert one_version(workers) == version
