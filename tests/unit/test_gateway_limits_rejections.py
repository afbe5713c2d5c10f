"""Rejections: error code and wait of each verdict, the log of rejections, and verdicts that are reused without Redis."""

import math
from typing import Any

import pytest

from customer_limits import in_force, remaining
from direct_parts import submission
from gateway.http.errors import RejectionError
from gateway.limits.rejection_cache import MAX_CUSTOMERS, MAX_KEPT_S, RejectionCache
from gateway.limits.rejection_log import RejectionLog
from gateway.limits.rejections import rejection_error
from identities import identity
from ratelimit.limits import Level
from ratelimit.quotas import Meter
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.admission import Submission, Verdict
from scheduler.protocol.limits import RejectionRecord
from scheduler.request_id import new_request_id
from scheduler.states import Admission

RATE = ErrorCode.RATE_LIMIT_EXCEEDED
LIMITS = in_force(
    50.0,
    20.0,
    tokens_per_minute=6000.0,
    max_concurrency=7,
    quotas=(("1day", 1000), ("1month", 20_000)),
    key_rate=2.5,
    key_burst=5.0,
)


@pytest.mark.parametrize(
    ("outcome", "base_limit_allows", "code", "retry_ms"),
    [
        (Admission.KEY_LIMIT, False, RATE, 70),
        (Admission.KEY_LIMIT, True, ErrorCode.REDUCED_CAPACITY, 70),
        (Admission.CUSTOMER_LIMIT, False, RATE, 70),
        (Admission.CUSTOMER_LIMIT, True, ErrorCode.REDUCED_CAPACITY, 70),
        (Admission.TOKEN_LIMIT, False, RATE, 70),
        (Admission.TOKEN_LIMIT, True, ErrorCode.REDUCED_CAPACITY, 70),
        (Admission.CONCURRENCY, True, RATE, 250),  # The factor does not reduce it.
        (Admission.QUOTA, True, ErrorCode.QUOTA_EXCEEDED, 70),
        (Admission.TIER_LIMIT, False, ErrorCode.REDUCED_CAPACITY, 250),
        (Admission.SHED, False, ErrorCode.SHED_FOR_PRIORITY, 100),  # A minimum, so that jitter spreads the retries.
        (Admission.QUEUE_FULL, True, ErrorCode.QUEUE_FULL, 100),
        (Admission.WAIT, True, ErrorCode.QUEUE_FULL, 100),
        (Admission.BACKPRESSURE, False, ErrorCode.BACKPRESSURE, 70),
    ],
)
def test_each_verdict_has_its_code(outcome: Admission, base_limit_allows: bool, code: ErrorCode, retry_ms: int) -> None:
    """A request that only a reduced limit rejects gets `reduced_capacity`, not 429."""
    error = rejection_error(Verdict(outcome, retry_after_ms=70, depth=3), base_limit_allows=base_limit_allows)

    assert (error.code, error.retry_after_ms) == (code, retry_ms)


@pytest.mark.parametrize("outcome", [Admission.SHED, Admission.QUEUE_FULL, Admission.WAIT, Admission.TIER_LIMIT])
def test_the_wait_for_a_queue_is_its_drain_time(outcome: Admission) -> None:
    """20 waiting requests at 10 responses a second are two seconds."""
    verdict = Verdict(outcome, retry_after_ms=70, depth=20)

    assert rejection_error(verdict, base_limit_allows=False, drain_rps=10.0).retry_after_ms == 2000


@pytest.mark.parametrize(("pressure", "retry_ms"), [(0.5, 250), (2.0, 500), (10.0, 2500), (math.inf, 30_000)])
def test_the_wait_for_a_tier_grows_with_its_overload(pressure: float, retry_ms: int) -> None:
    """Otherwise all clients would retry four times a second."""
    error = rejection_error(Verdict(Admission.TIER_LIMIT, retry_after_ms=5), base_limit_allows=False, pressure=pressure)

    assert error.retry_after_ms == retry_ms


@pytest.mark.parametrize(("factor", "retry_ms"), [(0.01, 60_000), (1.0, 3_000_000)])
def test_the_wait_for_a_reduced_limit_is_a_minute_at_most(factor: float, retry_ms: int) -> None:
    """A reduced rate is temporary; the wait for a base limit is returned whole."""
    verdict = Verdict(Admission.CUSTOMER_LIMIT, retry_after_ms=3_000_000, depth=3)

    assert rejection_error(verdict, base_limit_allows=False, factor=factor).retry_after_ms == retry_ms


@pytest.mark.parametrize(
    ("outcome", "numbers", "violated"),
    [
        (Admission.KEY_LIMIT, ["2.5 requests/s", "burst 5"], ("requests",)),
        (Admission.CUSTOMER_LIMIT, ["50 requests/s", "burst 20"], ("requests",)),
        (Admission.TOKEN_LIMIT, ["6000 tokens per minute"], ("tokens",)),
        (Admission.CONCURRENCY, ["7 requests at a time"], ("concurrency",)),
        (Admission.QUOTA, ["20000 requests per month"], ("month",)),
        (Admission.TIER_LIMIT, [], ()),
        (Admission.WAIT, ["predicted wait"], ()),
    ],
)
def test_a_rejection_names_the_limit(outcome: Admission, numbers: list[str], violated: tuple[str, ...]) -> None:
    """With its present numbers, the policy of the headers, and a note where it is reduced."""
    verdict = Verdict(outcome, remaining(quotas=((12, 1000), (0, 9000))), 70, 3)
    error = rejection_error(verdict, base_limit_allows=False, limits=LIMITS)
    reduced = rejection_error(verdict, base_limit_allows=True, limits=LIMITS, factor=0.25)

    assert [number for number in numbers if number not in error.message] == []
    assert error.violated == violated
    if outcome in (Admission.KEY_LIMIT, Admission.CUSTOMER_LIMIT, Admission.TOKEN_LIMIT):
        assert "reduced" in reduced.message
        assert "reduced" not in error.message


@pytest.mark.parametrize(
    ("left", "wait_ms", "words"),
    [
        (0, 59_001, "is used up; it resets in 1 min."),
        (0, 60_001, "is used up; it resets in 2 min."),
        (1, 74_579_814, "has too little left for this request; it resets in 20 h 43 min."),
        (0, 86_399_999, "is used up; it resets in 1 d 0 h."),
        (0, 90_061_000, "is used up; it resets in 1 d 2 h."),
    ],
)
def test_a_used_up_quota_says_when_it_resets(left: int, wait_ms: int, words: str) -> None:
    """In two units, rounded up; with something left, a list of texts had no room."""
    verdict = Verdict(Admission.QUOTA, remaining(quotas=((left, wait_ms),)), wait_ms, quotas=("1day",))

    error = rejection_error(verdict, base_limit_allows=False, limits=in_force(quotas=(("1day", 20),)))

    assert error.message == f"The quota of this account, 20 requests per day, {words}"


def test_a_rejection_names_the_metered_quota_without_room() -> None:
    """Something may be left of it; others are not named."""
    limits = in_force(quotas=(("1day", 9), ("1day:gpu", 3_600_000_000), ("1month:usd", 500_000_000)))
    verdict = Verdict(Admission.QUOTA, remaining(quotas=((9, 1), (5000, 1), (10**8, 2))), 70, quotas=("1month:usd",))
    error = rejection_error(verdict, base_limit_allows=False, limits=limits)

    assert error.message == (
        "The quota of this account, 0.5 usd per month, has too little left for this request; it resets in 1 s."
    )
    assert error.violated == ("month-usd",)


def verdict_of(outcome: Admission, quotas: tuple[tuple[int, int], ...] = ()) -> Verdict:
    return Verdict(outcome, remaining(0.25, 2000, Level(-3.0, 100), 5, quotas), 75, 12)


def note(log: RejectionLog, customer: str, times: int = 1, code: ErrorCode = RATE) -> None:
    for _ in range(times):
        log.note(submission(), identity(customer_id=customer), RequestError(code), None, 1.0)


def counts(records: list[RejectionRecord]) -> dict[str, tuple[int, int]]:
    """Customer -> number of records, and of further rejections that they stand for."""
    result: dict[str, tuple[int, int]] = {}
    for record in records:
        kept, more = result.get(record.customer_id, (0, 0))
        result[record.customer_id] = (kept + 1, more + record.more)
    return result


def test_the_log_records_the_effective_limits() -> None:
    """Base limits times the factor, a burst of at least one, the state that admission returned, and the wait as sent."""
    log, request_id = RejectionLog(), new_request_id()
    customer = identity(requests_per_second=100.0, burst=20.0, tokens_per_minute=60_000, key_rate=10.0, key_burst=1.5)
    error = RejectionError(ErrorCode.REDUCED_CAPACITY, retry_after_ms=2500)
    sent = submission(id=request_id, endpoint="/v1/messages")
    log.note(sent, customer, error, verdict_of(Admission.CUSTOMER_LIMIT), 0.4)

    assert log.drain() == [
        RejectionRecord(
            id=request_id,
            customer_id="c",
            key_id="k",
            tier="free",
            code="reduced_capacity",
            outcome="customer_limit",
            factor=0.4,
            rate=40.0,
            burst=8.0,
            tokens_per_minute=24_000.0,
            max_concurrency=5,
            key_rate=4.0,
            key_burst=1.0,
            remaining=0.25,
            tokens_left=-3.0,
            in_use=5,
            depth=12,
            retry_after_ms=2500,
            limit="40 requests/s (burst 8)",
            left=0.25,
            endpoint="/v1/messages",
        )
    ]


@pytest.mark.parametrize(
    ("outcome", "left", "quota"),
    [
        (Admission.QUOTA, ((0, 5000), (0, 90_000)), ("1day", 10)),
        (Admission.QUOTA, ((1, 5000), (0, 90_000)), ("1month", 99)),
        (Admission.QUOTA, ((-4, 5000),), ("1day", 10)),
        (Admission.QUOTA, (), ("", 0)),
        (Admission.SHED, ((0, 5000), (0, 90_000)), ("", 0)),
    ],
)
def test_the_log_names_the_exhausted_quota(
    outcome: Admission, left: tuple[tuple[int, int], ...], quota: tuple[str, int]
) -> None:
    """The first one without remaining requests, and only for a rejection by quota."""
    log = RejectionLog()
    customer = identity(quotas=(("1day", 10), ("1month", 99)))
    log.note(submission(), customer, RequestError(ErrorCode.QUOTA_EXCEEDED), verdict_of(outcome, left), 1.0)

    (record,) = log.drain()
    assert (record.quota, record.quota_amount) == quota


def test_the_log_keeps_a_few_records_of_each_kind() -> None:
    """The rest of a customer's rejections with the same code is counted. Draining returns the oldest first, once."""
    log = RejectionLog(most=256, same=8)
    note(log, "acme", 1000)
    note(log, "acme", 3, ErrorCode.QUOTA_EXCEEDED)
    records = log.drain()

    assert [record.more for record in records] == [0] * 7 + [992, 0, 0, 0]
    assert [record.code for record in records].count("quota_exceeded") == 3
    assert records == sorted(records, key=lambda record: record.id)
    assert log.drain() == []


def test_a_full_log_is_shared_by_customers() -> None:
    """Records of frequent customers make room for others, and their rejections stay counted; the size is bounded."""
    log = RejectionLog(most=10, same=8)
    note(log, "a", 20)
    for name in "bcdefghi":
        note(log, name, 2)
    assert counts(log.drain()) == {"a": (2, 18)} | dict.fromkeys("bcdefghi", (1, 1))

    log = RejectionLog(most=4, same=8)
    for number in range(100):
        note(log, f"c{number}", 3)
    assert counts(log.drain()) == {f"c{number}": (1, 2) for number in range(4)}
    assert log.left_out == 96 * 3


REUSED = (Admission.KEY_LIMIT, Admission.CUSTOMER_LIMIT, Admission.TOKEN_LIMIT, Admission.QUOTA)
OWN: dict[str, Any] = {
    "rate": 10.0,
    "burst": 20.0,
    "tokens_per_minute": 6000.0,
    "quotas": [("1day", 10)],
    "key_rate": 5.0,
    "key_burst": 5.0,
}


def request(**changes: Any) -> Submission:
    return submission(**{"tokens": 100} | OWN | changes)


def cached(outcome: Admission, seconds: float, retry_after_ms: int = 200, **changes: Any) -> Verdict | None:
    """The reused verdict for a request so long after another one was rejected."""
    cache = RejectionCache()
    left = remaining(0.25, 2000, Level(50.0, 900), quotas=[(0, 60_000)])
    cache.note(request(), Verdict(outcome, left, retry_after_ms, 3), 100.0)
    return cache.verdict(request(**changes), 100.0 + seconds)


@pytest.mark.parametrize("outcome", REUSED)
def test_a_verdict_is_reused_until_its_wait_is_over(outcome: Admission) -> None:
    """Wait and buckets are updated. It is dropped soon, since a limit may be raised or a request refunded."""
    verdict = cached(outcome, 0.1)

    assert verdict is not None
    assert (verdict.outcome, verdict.retry_after_ms) == (outcome, 100)
    requests = pytest.approx(0.75 if outcome is Admission.KEY_LIMIT else 1.25)
    assert verdict.left.buckets == [(requests, 1900), (pytest.approx(60.0), 800)]
    assert list(verdict.left.quotas) == [(0, 59_900)]
    assert cached(outcome, 0.199) is not None
    assert cached(outcome, 0.2) is None
    assert cached(outcome, MAX_KEPT_S - 0.01, 86_400_000) is not None
    assert cached(outcome, MAX_KEPT_S, 86_400_000) is None


@pytest.mark.parametrize(
    ("outcome", "changes", "reused"),
    [
        (Admission.KEY_LIMIT, {"api_key_id": "other"}, False),
        (Admission.KEY_LIMIT, {"key_rate": 6.0}, False),
        (Admission.CUSTOMER_LIMIT, {"customer_id": "other"}, False),
        (Admission.CUSTOMER_LIMIT, {"rate": 11.0}, False),
        (Admission.CUSTOMER_LIMIT, {"burst": 21.0}, False),
        (Admission.CUSTOMER_LIMIT, {"idempotency": "c:key"}, False),
        (Admission.CUSTOMER_LIMIT, {"again": True}, False),
        (Admission.CUSTOMER_LIMIT, {"api_key_id": "other", "tokens": 1}, True),
        (Admission.TOKEN_LIMIT, {"tokens": 99}, False),
        (Admission.TOKEN_LIMIT, {"tokens_per_minute": 6001.0}, False),
        (Admission.TOKEN_LIMIT, {"tokens": 101, "rate": 11.0}, True),
        (Admission.QUOTA, {"quotas": [("1day", 11)]}, False),
        (Admission.QUOTA, {"meter": Meter(1, 1.0)}, False),  # Of a model with another price.
        *((outcome, {}, False) for outcome in sorted(set(Admission) - set(REUSED))),
    ],
)
def test_which_requests_a_verdict_applies_to(outcome: Admission, changes: dict[str, Any], reused: bool) -> None:
    """Requests over the same limit that cost as much or more; not after a change, and only for the customer's own limits."""
    assert (cached(outcome, 0.1, **changes) is not None) is reused


@pytest.mark.parametrize(("outcome", "known"), [(Admission.CUSTOMER_LIMIT, True), (Admission.TOKEN_LIMIT, False)])
def test_a_rejection_of_any_request(outcome: Admission, known: bool) -> None:
    """What is rejected whatever it costs is known before there is a submission; another customer is not concerned."""
    cache, limits = RejectionCache(), request().limits
    who = identity(customer_id=request().customer_id, key_id=request().api_key_id)
    cache.note(request(), Verdict(outcome, remaining(0.25, 2000), 200, 3), 100.0)

    assert (cache.verdict_of(who, limits, 100.1) is not None) is known
    assert cache.verdict_of(identity(customer_id="other"), limits, 100.1) is None


def test_the_rejection_cache_is_bounded_and_cleared_by_an_end() -> None:
    """An ended request may have returned what its limit counts. The oldest customers are dropped first."""
    cache, verdict = RejectionCache(), Verdict(Admission.CUSTOMER_LIMIT, remaining(0.25, 2000), 200, 3)
    for number in range(MAX_CUSTOMERS + 5):
        cache.note(request(customer_id=f"c{number}"), verdict, 100.0)
    newest = request(customer_id=f"c{MAX_CUSTOMERS + 4}")

    assert len(cache.held) == MAX_CUSTOMERS
    assert cache.verdict(request(customer_id="c0"), 100.0) is None
    assert cache.verdict(newest, 100.0) is not None
    cache.forget(newest.customer_id)
    cache.forget("nobody")
    assert cache.verdict(newest, 100.0) is None
