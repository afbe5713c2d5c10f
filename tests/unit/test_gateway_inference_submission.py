"""What is submitted for a request: limits, tokens, and priority."""

from typing import Any

import pytest

from customer_limits import group_of
from gateway.inference.submission import build_submission
from gateway.inference.token_estimate import token_estimate
from identities import identity
from ratelimit.limits import effective
from ratelimit.request_limits import FUNCTION
from scheduler.payload import Payload, decode_payload

PAYLOAD = Payload("tiny", "hello", {"max_tokens": 5, "stop": ["a", "b"]})


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

    assert build_submission("req_1", customer, payload, group_of(customer, 0.5), FUNCTION).tokens == charged


def test_a_submission_has_the_effective_limits() -> None:
    """It contains all that admission decides by, scaled by the tier's factor."""
    customer = identity(tokens_per_minute=600, quotas=(("1day", 9),), key_rate=1.0, key_burst=4.0)
    payload = Payload("tiny", "hello", {})
    made = build_submission("req_1", customer, payload, group_of(customer, 0.5), FUNCTION, trace="t")

    assert (made.id, made.tier, made.customer_id, made.api_key_id, made.trace_id) == ("req_1", "free", "c", "k", "t")
    assert (made.limits, made.tokens) == (effective(customer, 0.5), 18)
    assert (made.total_ms, made.queue_ms, made.input_bytes) == (4000, 2000, 5)
    assert (made.idempotency, made.fingerprint, made.again) == ("", "", False)
    assert made.body == payload.encode_for("", customer.priority, "c")


def test_the_tiers_priority_is_in_the_body_and_not_in_the_fingerprint() -> None:
    """A backend may order by priority; after a change of tier the same request must have the same fingerprint."""
    paid, free = (
        build_submission("req_1", customer, PAYLOAD, group_of(customer), FUNCTION, key="order-1")
        for customer in (identity(priority=2), identity(priority=3))
    )

    assert [decode_payload(made.body).priority for made in (paid, free)] == [2, 3]
    assert paid.fingerprint == free.fingerprint != ""
    assert paid.idempotency.startswith("c:")
