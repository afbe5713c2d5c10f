"""What `tierlane explain` says: pure functions with literal values."""

import pytest
from msgspec.structs import replace

from scheduler.protocol.limits import RejectionRecord
from tierlane.explain.factor import GatewayPart, PoolCapacity, TierPart, apart, capacity_words, why
from tierlane.explain.figures import columns, count, listed, number, percent, span
from tierlane.explain.request import advice, limit_words, lowered_words, meaning, more_words

HALF = PoolCapacity(320.0, 4, 8, (100.0, 100.0, 100.0, 100.0), 0.8, 50.0)


def part(name: str, priority: int, demand: float, allocated: float, factor: float = 1.0) -> TierPart:
    share = {"enterprise": 0.05, "paid": 0.25, "free": 0.10}[name]
    return TierPart(name, priority, share, share * 320, demand, allocated, factor)


def parts(free: tuple[float, float, float], paid: tuple[float, float, float], top: float = 200.0) -> list[TierPart]:
    return [part("enterprise", 1, top, top), part("paid", 2, *paid), part("free", 3, *free)]


@pytest.mark.parametrize(
    ("tier", "seen", "capacity", "said"),
    [
        (
            "free",
            parts(free=(84.0, 32.0, 0.381), paid=(88.0, 88.0, 1.0)),
            HALF,
            (
                "free has 38 % of its base limits: 4 of 8 GPUs are healthy, capacity 320/s; enterprise 200/s and paid 88/s are "
                "served first; the demand of free is 84/s, and it gets 32/s (its guaranteed share)."
            ),
        ),
        (
            "free",
            parts(free=(84.0, 64.0, 0.762), paid=(56.0, 56.0, 1.0)),
            HALF,
            (
                "free has 76 % of its base limits: 4 of 8 GPUs are healthy, capacity 320/s; enterprise 200/s and paid 56/s are "
                "served first; the demand of free is 84/s, and it gets 64/s (32/s of it guaranteed)."
            ),
        ),
        (
            "paid",
            parts(free=(84.0, 32.0, 0.38), paid=(176.0, 88.0, 0.5)),
            HALF,
            (
                "paid has 50 % of its base limits: 4 of 8 GPUs are healthy, capacity 320/s; enterprise 200/s and 32/s guaranteed "
                "to free are served first; the demand of paid is 176/s, and it gets 88/s (80/s of it guaranteed)."
            ),
        ),
        (
            "paid",
            parts(free=(0.0, 0.0, 1.0), paid=(400.0, 320.0, 0.8), top=0.0),
            HALF,
            (
                "paid has 80 % of its base limits: 4 of 8 GPUs are healthy, capacity 320/s; the demand of paid is 400/s, and it gets 320/s "
                "(80/s of it guaranteed)."
            ),
        ),
        (
            "free",
            parts(free=(10.0, 10.0, 0.6), paid=(0.0, 0.0, 1.0), top=50.0),
            HALF,
            (
                "free has 60 % of its base limits: 4 of 8 GPUs are healthy, capacity 320/s; enterprise 50/s is served first; the "
                "demand of free is 10/s, and it gets 10/s; its limits are rising to 100 %, slowly, so that they do not oscillate."
            ),
        ),
        (
            "free",
            parts(free=(12.0, 12.0, 1.0), paid=(88.0, 88.0, 1.0)),
            PoolCapacity(640.0, 8, 8, (100.0,) * 8, 0.8, 50.0),
            "free has its full base limits: 8 of 8 GPUs are healthy, capacity 640/s; the demand of all tiers is 300/s.",
        ),
        (
            "free",
            parts(free=(12.0, 12.0, 1.0), paid=(0.0, 0.0, 1.0)),
            PoolCapacity(80.0, 1, 1, (100.0,), 0.8, 50.0),
            "free has its full base limits: 1 of 1 GPU is healthy, capacity 80/s; the demand of all tiers is 212/s.",
        ),
        (
            "free",
            parts(free=(84.0, 32.0, 0.38), paid=(88.0, 88.0, 1.0)),
            PoolCapacity(320.0, 0, 8, (), 0.8, 50.0),
            (
                "free has 38 % of its base limits: 0 of 8 GPUs are healthy, capacity 320/s as last measured; until a GPU is "
                "back, requests are rejected with no_capacity."
            ),
        ),
    ],
)
def test_why_a_factor_is_what_it_is(tier: str, seen: list[TierPart], capacity: PoolCapacity, said: str) -> None:
    """Capacity, who comes first, what the tier asks for and gets."""
    assert why(tier, seen, capacity) == said


@pytest.mark.parametrize(
    ("capacity", "said"),
    [
        (
            HALF,
            (
                "Capacity 320/s is 80 % (target_utilization) of what 4 healthy GPUs do with full batches, measured at 100/s "
                "each."
            ),
        ),
        (
            replace(HALF, rates=(90.0, 110.0), correction=0.5, target_utilization=None),
            (
                "Capacity 320/s is what 4 healthy GPUs do with full batches, measured at 90/s to 110/s. Only 50 % of that "
                "was served under backlog, so that is the capacity."
            ),
        ),
        (
            replace(HALF, evidence="probing", confidence=0.25),
            (
                "Capacity 320/s is 80 % (target_utilization) of an estimate from batches of 25 % of the full size on 4 healthy "
                "GPUs; it rises while requests are rejected and none wait."
            ),
        ),
        (
            replace(HALF, evidence="prior"),
            ("Capacity 320/s is a guess (rps_per_gpu): no batch was measured yet, so no request is rejected for it."),
        ),
        (
            replace(HALF, evidence="fixed"),
            (
                "Capacity 320/s is fixed: 80 % (target_utilization) of 50/s for each of 4 healthy GPUs (rps_per_gpu_fixed)."
            ),
        ),
        (PoolCapacity(80.0, 0, 2, ()), "No GPU is healthy, so no rate is measured now."),
    ],
)
def test_how_a_capacity_is_made(capacity: PoolCapacity, said: str) -> None:
    """What it is derived from, and how sure it is."""
    assert capacity_words(capacity) == said


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ((0.3, 0.38), "Gateways differ: free has 30 % to 38 %; the lowest is shown here."),
        ((0.38, 0.385), None),
        ((1.0,), None),
        ((), None),
    ],
)
def test_gateways_that_disagree_are_told(factors: tuple[float, ...], said: str | None) -> None:
    """Each looks for itself; a hair's breadth is no difference."""
    assert apart("free", [GatewayPart(f"g{i}", factor, 1.0, 1.0) for i, factor in enumerate(factors)]) == said


def refused(outcome: str, code: str = "rate_limit_exceeded", **fields: object) -> RejectionRecord:
    known: dict[str, object] = {"customer_id": "c", "key_id": "k1", "tier": "free", "factor": 0.385, "rate": 38.5}
    known |= {"burst": 7.7, "tokens_per_minute": 924_000.0, "max_concurrency": 50, "key_rate": 3.85, "key_burst": 1.0}
    known |= {"remaining": 0.25, "tokens_left": -12.0, "in_use": 50, "depth": 512}
    return RejectionRecord(id="req_1", code=code, outcome=outcome, **(known | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (
            refused("key_limit", limit="3.85 requests/s (burst 1)", left=0.25),
            "the limit of key k1: 3.85 requests/s (burst 1) in force, 0.25 left",
        ),
        (
            refused("token_limit", limit="924000 tokens per minute", left=-12.0),
            "the customer's limit over all its keys: 924000 tokens per minute in force, -12 left",
        ),
        (refused("customer_limit"), "the customer's limit over all its keys"),  # Of a version that did not keep it.
        (refused("concurrency"), "the customer's concurrency: 50 of 50 requests under way"),
        (
            refused("quota", "quota_exceeded", quota="1day", quota_amount=10_000),
            "the customer's quota of 10,000 requests per day, which was used up",
        ),
        (refused("quota", "quota_exceeded"), "a quota of the customer, which was used up"),
        (
            refused("tier_limit", "reduced_capacity"),
            "the share of tier free in the present capacity, which was used up",
        ),
        (refused("shed", "shed_for_priority"), "shedding: 512 requests waited in tier free"),
        (refused("queue_full", "queue_full"), "the queue cap of tier free: 512 requests waited in it"),
        (
            refused("", "queue_full"),
            "the gateway's own queue, since more requests arrived than it could submit",
        ),
        (refused("", "no_capacity"), "no limit: no GPU was healthy"),
        (refused("", "model_not_found"), "model_not_found: There is no such model."),
        (refused("", "of_the_future"), "of_the_future: this version does not know the code."),
    ],
)
def test_the_limit_that_refused_is_named_with_its_figures(refusal: RejectionRecord, said: str) -> None:
    """As they were then."""
    assert limit_words(refusal) == said


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (
            refused("customer_limit", "reduced_capacity"),
            "The limits of tier free were at 38 % of their base; its base limit would have accepted the request.",
        ),
        (
            refused("customer_limit"),
            "The limits of tier free were at 38 % of their base; its base limit would have rejected it as well.",
        ),
        (refused("customer_limit", factor=1.0), None),
        (refused("concurrency"), None),
        (refused("shed", "shed_for_priority"), None),
    ],
)
def test_what_the_factor_had_to_do_with_it(refusal: RejectionRecord, said: str | None) -> None:
    """Only where a lowered limit refused."""
    assert lowered_words(refusal) == said


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (
            refused("customer_limit", retry_after_ms=75),
            "Send slower, or raise the customer's requests_per_second or burst. The response said to retry after 75 ms.",
        ),
        (
            refused("customer_limit", "reduced_capacity"),
            "The customer did nothing wrong: its limits rise again with more GPUs or less demand.",
        ),
        (
            refused("quota", "quota_exceeded", retry_after_ms=10_920_000),
            (
                "Wait until the quota resets, or raise it; what was used stays counted. The response said to retry after "
                "3 h 2 min."
            ),
        ),
        (refused("", "draining"), "Retry: another gateway accepts it."),
        (refused("", "model_not_found"), "Correct the request before it is sent again."),
    ],
)
def test_what_to_do(refusal: RejectionRecord, said: str) -> None:
    """One or two sentences, whoever is at fault."""
    assert advice(refusal) == said


def test_every_outcome_that_refuses_has_words_and_advice() -> None:
    """A new limit must not be explained with a bare code."""
    from scheduler.states import Admission  # noqa: PLC0415

    entered = {Admission.ACCEPTED, Admission.DUPLICATE, Admission.REPLAYED}
    unsaid = [o for o in Admission if o not in entered and "of_the_future" in limit_words(refused(o, "of_the_future"))]
    unadvised = [o for o in Admission if o not in entered and "Correct" in advice(refused(o, "of_the_future"))]

    assert (unsaid, unadvised) == ([], [])


def test_that_it_was_not_alone() -> None:
    """A flood is told as a number."""
    assert more_words(refused("key_limit")) is None
    assert (
        more_words(refused("key_limit", more=1))
        == "1 more request of the customer rejected for the same reason within a quarter of a second."
    )


def test_what_a_code_means() -> None:
    """As the client was told."""
    assert meaning("worker_lost") == "The workers that ran this request were lost."


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (-0.001, "0"), (0.25, "0.25"), (7.7, "7.7"), (38.46, "38.5"), (320.0, "320"), (2_400_000, "2,400,000")],
)
def test_numbers(value: float, text: str) -> None:
    """Three digits where there are."""
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 %"), (0.001, "under 1 %"), (0.385, "38 %"), (0.999, "99 %"), (1, "100 %")]
)
def test_percents(value: float, text: str) -> None:
    """Not quite all is not all."""
    assert percent(value) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (75, "75 ms"),
        (1500, "1.5 s"),
        (60_000, "1 min"),
        (600_000, "10 min"),
        (10_920_000, "3 h 2 min"),
        (90_061_000, "1 d 1 h"),
    ],
)
def test_spans(ms: float, text: str) -> None:
    """In two units at the most."""
    assert span(ms) == text


def test_lists_and_columns() -> None:
    """As in a sentence, and as in a table."""
    assert [listed([]), listed(["a"]), listed(["a", "b", "c"])] == ["", "a", "a, b and c"]
    assert [count(1, "run"), count(2, "run"), count(2, "row of x", "rows of x")] == ["1 run", "2 runs", "2 rows of x"]
    assert columns([("A", "LONG"), ("longer", "b")]) == ["A       LONG", "longer  b"]
