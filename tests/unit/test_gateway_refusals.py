"""The gateway's buffer of refusals: bounded, various, and true to what was in force."""

import pytest

from customer_limits import remaining
from gateway.http.errors import RejectionError as Told
from gateway.limits.rejections import RejectionLog
from ledger.catalog.snapshot import Identity
from ratelimit.limits import Level
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.admission import Verdict
from scheduler.protocol.limits import RejectionRecord
from scheduler.request_id import new_request_id
from scheduler.states import Admission

RATE = ErrorCode.RATE_LIMIT_EXCEEDED


def identity(customer_id: str = "acme", quotas: tuple[tuple[str, int], ...] = ()) -> Identity:
    return Identity("k1", customer_id, customer_id, "free", (100.0, 20.0, 5, 60_000), 2000, quotas, 10.0, 1.5)


def verdict(outcome: Admission, quotas: tuple[tuple[int, int], ...] = ()) -> Verdict:
    return Verdict(outcome, remaining(0.25, 2000, Level(-3.0, 100), 5, quotas), 75, 12)


def note(refusals: RejectionLog, customer_id: str, times: int = 1, code: ErrorCode = RATE) -> None:
    for _ in range(times):
        refusals.note(new_request_id(), identity(customer_id), RequestError(code), None, 1.0)


def counted(drained: list[RejectionRecord]) -> dict[str, tuple[int, int]]:
    """Customer -> how many were kept, and how many more are told of."""
    customers = {refusal.customer_id for refusal in drained}
    of = {name: [refusal for refusal in drained if refusal.customer_id == name] for name in customers}
    return {name: (len(rows), sum(row.more for row in rows)) for name, rows in of.items()}


def test_what_was_in_force_is_kept() -> None:
    """The base limits by the factor, a burst of at least one, and the state that admission answered with."""
    refusals = RejectionLog()
    request_id = new_request_id()
    error = RequestError(ErrorCode.REDUCED_CAPACITY)
    refusals.note(request_id, identity(), error, verdict(Admission.CUSTOMER_LIMIT), 0.4)

    assert refusals.drain() == [
        RejectionRecord(
            id=request_id,
            customer_id="acme",
            key_id="k1",
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
            retry_after_ms=75,
            limit="40 requests/s (burst 8)",
            left=0.25,
        )
    ]


@pytest.mark.parametrize(
    ("outcome", "left", "said"),
    [
        (Admission.QUOTA, ((0, 5000), (0, 90_000)), ("1day", 10)),
        (Admission.QUOTA, ((1, 5000), (0, 90_000)), ("1month", 99)),
        (Admission.QUOTA, ((-4, 5000),), ("1day", 10)),
        (Admission.QUOTA, (), ("", 0)),
        (Admission.SHED, ((0, 5000), (0, 90_000)), ("", 0)),
    ],
)
def test_the_quota_that_refused_is_named(
    outcome: Admission, left: tuple[tuple[int, int], ...], said: tuple[str, int]
) -> None:
    """The first one with nothing left, as admission judges; none where no quota refused."""
    refusals = RejectionLog()
    customer = identity(quotas=(("1day", 10), ("1month", 99)))
    refusals.note(new_request_id(), customer, RequestError(ErrorCode.QUOTA_EXCEEDED), verdict(outcome, left), 1.0)

    (kept,) = refusals.drain()

    assert (kept.quota, kept.quota_amount) == said


def test_a_refusal_without_a_verdict_is_kept_too() -> None:
    """Where admission was not even asked."""
    refusals = RejectionLog()
    note(refusals, "acme", code=ErrorCode.NO_CAPACITY)

    (kept,) = refusals.drain()

    assert (kept.code, kept.outcome, kept.rate) == ("no_capacity", "", 100.0)


def test_the_first_few_of_a_kind_are_kept_and_the_rest_counted() -> None:
    """Another reason of the same customer is another kind."""
    refusals = RejectionLog(most=256, same=8)
    note(refusals, "acme", 1000)
    note(refusals, "acme", 3, ErrorCode.QUOTA_EXCEEDED)

    drained = refusals.drain()

    assert [refusal.more for refusal in drained] == [0] * 7 + [992, 0, 0, 0]
    assert [refusal.code for refusal in drained].count("quota_exceeded") == 3


def test_a_full_buffer_makes_room_for_others() -> None:
    """Who floods first does not hide who comes later; nothing is lost from the count."""
    refusals = RejectionLog(most=10, same=8)
    note(refusals, "a", 20)
    for name in "bcdefghi":
        note(refusals, name, 2)

    assert counted(refusals.drain()) == {"a": (2, 18)} | dict.fromkeys("bcdefghi", (1, 1))


def test_nothing_grows_beyond_its_bound() -> None:
    """With nobody to give up for others, the others are counted and no more."""
    refusals = RejectionLog(most=4, same=8)
    for number in range(100):
        note(refusals, f"c{number}", 3)

    assert counted(refusals.drain()) == {f"c{number}": (1, 2) for number in range(4)}
    assert refusals.left_out == 96 * 3


def test_draining_leaves_nothing_behind() -> None:
    """Oldest first, and the next beat starts anew."""
    refusals = RejectionLog()
    note(refusals, "b", 2)
    note(refusals, "a", 1)
    note(refusals, "b", 1)

    drained = refusals.drain()

    assert drained == sorted(drained, key=lambda refusal: refusal.id)
    assert refusals.drain() == []
    note(refusals, "b", 8)
    assert counted(refusals.drain()) == {"b": (8, 0)}


def test_the_wait_is_the_one_that_the_client_was_told() -> None:
    """Not the raw one of admission, which the gateway may have made longer."""
    refusals = RejectionLog()
    told = Told(ErrorCode.REDUCED_CAPACITY, retry_after_ms=2500)
    refusals.note(new_request_id(), identity(), told, verdict(Admission.TIER_LIMIT), 0.4)

    (kept,) = refusals.drain()
    assert kept.retry_after_ms == 2500
