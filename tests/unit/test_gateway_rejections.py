"""Rejections that still hold: who is told without Redis, for how long, and what makes them forgotten."""

from typing import Any

import pytest
from msgspec.structs import replace

from customer_limits import in_force, remaining
from gateway.limits.rejections import MOST_CUSTOMERS, MOST_S, RejectionCache
from ratelimit.limits import Level
from scheduler.protocol.admission import Submission, Verdict
from scheduler.states import Admission

LIMITS: dict[str, Any] = {
    "rate": 10.0,
    "burst": 20.0,
    "tokens_per_minute": 6000.0,
    "quotas": [("1day", 10)],
    "key_rate": 5.0,
    "key_burst": 5.0,
}
ASKED = Submission(
    id="req_1",
    tier="free",
    customer_id="c",
    api_key_id="k",
    nonce="n",
    model="m",
    input_bytes=1,
    total_ms=4000,
    queue_ms=2000,
    limits=in_force(**LIMITS),
    tokens=100,
    body=b"",
)
OWN_LIMITS = (Admission.KEY_LIMIT, Admission.CUSTOMER_LIMIT, Admission.TOKEN_LIMIT, Admission.QUOTA)


def told(outcome: Admission = Admission.CUSTOMER_LIMIT, retry_after_ms: int = 200) -> Verdict:
    return Verdict(outcome, remaining(0.25, 2000, Level(50.0, 900), quotas=[(0, 60_000)]), retry_after_ms, 3)


def after(seconds: float, outcome: Admission, retry_after_ms: int = 200, **changes: Any) -> Verdict | None:
    """What a request hears so long after another one was rejected."""
    rejections = RejectionCache()
    rejections.note(ASKED, told(outcome, retry_after_ms), 100.0)
    own = {name: changes.pop(name) for name in LIMITS if name in changes}
    return rejections.verdict(replace(ASKED, id="req_2", limits=in_force(**LIMITS | own), **changes), 100.0 + seconds)


@pytest.mark.parametrize("outcome", OWN_LIMITS)
def test_it_holds_until_the_time_that_redis_said(outcome: Admission) -> None:
    """The wait that is told gets shorter meanwhile, and buckets fill."""
    verdict = after(0.1, outcome)

    assert verdict is not None
    assert (verdict.outcome, verdict.retry_after_ms) == (outcome, 100)
    requests = pytest.approx(0.75 if outcome is Admission.KEY_LIMIT else 1.25)
    assert verdict.left.buckets == [(requests, 1900), (pytest.approx(60.0), 800)]
    assert list(verdict.left.quotas) == [(0, 59_900)]
    assert after(0.2, outcome) is None


@pytest.mark.parametrize("outcome", OWN_LIMITS)
def test_it_is_forgotten_soon_whatever_redis_said(outcome: Admission) -> None:
    """What was spent may come back, and a limit may be raised: nobody is kept out for a day by what is remembered here."""
    assert after(MOST_S - 0.01, outcome, 86_400_000) is not None
    assert after(MOST_S, outcome, 86_400_000) is None


@pytest.mark.parametrize(
    ("outcome", "changes"),
    [
        (Admission.KEY_LIMIT, {"api_key_id": "other"}),
        (Admission.KEY_LIMIT, {"key_rate": 6.0}),
        (Admission.CUSTOMER_LIMIT, {"customer_id": "other"}),
        (Admission.CUSTOMER_LIMIT, {"rate": 11.0}),
        (Admission.CUSTOMER_LIMIT, {"burst": 21.0}),
        (Admission.TOKEN_LIMIT, {"tokens": 99}),
        (Admission.TOKEN_LIMIT, {"tokens_per_minute": 6001.0}),
        (Admission.QUOTA, {"quotas": [("1day", 11)]}),
        (Admission.CUSTOMER_LIMIT, {"idempotency": "c:key"}),
        (Admission.CUSTOMER_LIMIT, {"again": True}),
    ],
)
def test_who_is_asked_of_redis_all_the_same(outcome: Admission, changes: dict[str, Any]) -> None:
    """Another customer or key, a changed limit, a smaller cost, and who needs no limit."""
    assert after(0.1, outcome, **changes) is None


@pytest.mark.parametrize(
    ("outcome", "changes"),
    [
        (Admission.CUSTOMER_LIMIT, {"api_key_id": "other", "tokens": 1}),
        (Admission.TOKEN_LIMIT, {"tokens": 101, "rate": 11.0}),
    ],
)
def test_who_is_over_the_same_limit(outcome: Admission, changes: dict[str, Any]) -> None:
    """All keys of a customer, and whoever costs as much or more."""
    assert after(0.1, outcome, **changes) is not None


@pytest.mark.parametrize("outcome", sorted(set(Admission) - set(OWN_LIMITS)))
def test_what_is_not_remembered(outcome: Admission) -> None:
    """Concurrency, of which nobody knows when it ends, and all that is not the customer's own."""
    assert after(0.0, outcome) is None


def test_no_rejection_holds_for_longer_than_redis_said() -> None:
    """A client that waits as it was told is not rejected again from memory, whatever jitter it was told."""
    rejections = RejectionCache()
    rejections.note(ASKED, told(), 100.0)

    assert rejections.verdict(ASKED, 100.199) is not None
    assert rejections.verdict(ASKED, 100.2) is None


def test_an_end_makes_it_forgotten() -> None:
    """It may have given back what the limit counts."""
    rejections = RejectionCache()
    rejections.note(ASKED, told(), 100.0)
    rejections.forget("c")
    rejections.forget("nobody")

    assert rejections.verdict(ASKED, 100.0) is None


def test_what_is_remembered_has_a_bound() -> None:
    """The oldest customers leave."""
    rejections = RejectionCache()
    for i in range(MOST_CUSTOMERS + 5):
        rejections.note(replace(ASKED, customer_id=f"c{i}"), told(), 100.0)

    assert len(rejections.held) == MOST_CUSTOMERS
    assert rejections.verdict(replace(ASKED, customer_id="c0"), 100.0) is None
