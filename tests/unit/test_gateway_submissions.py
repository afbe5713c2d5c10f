"""What admission is asked for a request: the estimate of its tokens and the limits it is judged by."""

from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.inference.submission import build_submission, is_retry, token_estimate
from identities import identity
from ratelimit.limits import effective
from scheduler.payload import Payload, decode_payload


@pytest.mark.parametrize(
    ("text", "parameters", "expected"),
    [
        ("abcd", {}, 17),
        ("abcde", {"max_tokens": 100}, 102),
        ("abcd", {"max_new_tokens": 5}, 6),
        ("abcd", {"max_tokens": 3, "max_new_tokens": 5}, 4),
        ("abcd", {"max_tokens": True, "max_new_tokens": 5}, 6),
        ("abcd", {"max_tokens": 500.0}, 501),
        ("abcd", {"max_tokens": 1e3}, 1001),
        ("abcd", {"max_tokens": 2.5}, 4),
        ("abcd", {"max_tokens": -1.5}, 1),
        ("abcd", {"max_tokens": 1e300}, 2**31 + 1),
        ("abcd", {"max_tokens": "many"}, 17),
        ("abcd", {"max_tokens": "500"}, 501),
        ("abcd", {"max_tokens": "\u00b2"}, 17),
        ("abcd", {"max_tokens": -4}, 1),
        ("abcd", {"max_tokens": 2**63 - 1}, 2**31 + 1),
        ("\u20ac", {}, 17),
    ],
)
def test_tokens_are_estimated_from_bytes_and_wishes(text: str, parameters: dict[str, Any], expected: int) -> None:
    """A quarter of the input's bytes, rounded up, and what the client lets the model write; 16 where it says nothing."""
    assert token_estimate(Payload("tiny", text, parameters), len(text.encode())) == expected


def test_a_submission_carries_the_limits_in_force() -> None:
    """Everything that `admit` judges by is in it, lowered by the factor where that lowers it."""
    who = identity(tokens_per_minute=600, quotas=(("1day", 9),), key_rate=1.0, key_burst=4.0)
    payload = Payload("tiny", "hello", {})
    asked = build_submission("req_1", who, payload, effective(who, 0.5), total_ms=4000, trace="t")

    assert (asked.id, asked.tier, asked.customer_id, asked.api_key_id, asked.trace_id) == (
        "req_1",
        "free",
        "c",
        "k",
        "t",
    )
    assert (asked.limits, asked.tokens) == (effective(who, 0.5), 18)
    assert (asked.total_ms, asked.queue_ms, asked.input_bytes) == (4000, 2000, 5)
    assert (asked.idempotency, asked.fingerprint, asked.again) == ("", "", False)
    assert decode_payload(asked.body) == payload


@pytest.mark.parametrize(("tokens_per_minute", "charged"), [(600, 300), (None, 2**31 + 2), (1, 1)])
def test_a_wish_for_all_there_is_costs_a_minute_at_most(tokens_per_minute: int | None, charged: int) -> None:
    """A request that is cancelled stays charged: its customer is out for a minute then, not for days."""
    who, greedy = identity(tokens_per_minute=tokens_per_minute), Payload("tiny", "hello", {"max_tokens": 10**18})

    assert build_submission("req_1", who, greedy, effective(who, 0.5), total_ms=1).tokens == charged


def test_an_idempotency_key_is_named_within_its_customer() -> None:
    """What it is called begins with the customer, so that nobody meets another's."""
    who = identity()
    asked = build_submission("req_1", who, Payload("tiny", "a", {}), effective(who), total_ms=1, key="order-1")

    assert asked.idempotency.startswith("c:")
    assert asked.fingerprint


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, False), ("0", False), ("00", False), ("1", True), ("12", True), ("", False), ("-1", False), ("x", False)],
)
def test_a_retry_says_that_it_is_one(value: str | None, expected: bool) -> None:
    """OpenAI's clients count in a header; nonsense there is no retry."""
    pairs = [] if value is None else [("X-Stainless-Retry-Count", value)]
    assert is_retry(CIMultiDictProxy(CIMultiDict(pairs))) is expected


def test_the_body_tells_the_tiers_priority_and_the_fingerprint_does_not() -> None:
    """A backend may order by it; a customer whose tier changed repeats the same request."""
    payload = Payload("tiny", "a", {})
    paid, free = (
        build_submission("req_1", who, payload, effective(who), total_ms=1, key="order-1")
        for who in (identity(priority=2), identity(priority=3))
    )

    assert [decode_payload(asked.body).priority for asked in (paid, free)] == [2, 3]
    assert paid.fingerprint == free.fingerprint
