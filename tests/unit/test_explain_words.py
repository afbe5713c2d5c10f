"""Sentences of `tierlane explain`: factor and capacity of a tier, rejections, numbers and times."""

import pytest
from msgspec.structs import replace

from ratelimit.limits import REDUCED_OUTCOMES
from scheduler.protocol.limits import RejectionRecord
from scheduler.request_id import new_request_id
from scheduler.states import Admission
from tierlane.explain.factor import PoolCapacity, TierPart, capacity_words, why
from tierlane.explain.figures import columns, count, listed, number, percent, span
from tierlane.explain.request import explain_request, limit_words

HALF = PoolCapacity(320.0, 4, 8, (100.0, 100.0, 100.0, 100.0), 0.8, 50.0)


def part(name: str, priority: int, demand: float, allocated: float, factor: float = 1.0) -> TierPart:
    share = {"enterprise": 0.05, "paid": 0.25, "free": 0.10}[name]
    return TierPart(name, priority, share, share * 320, demand, allocated, factor)


def parts(free: tuple[float, float, float], paid: tuple[float, float, float], top: float = 200.0) -> list[TierPart]:
    return [part("enterprise", 1, top, top), part("paid", 2, *paid), part("free", 3, *free)]


FULL, IDLE = (88.0, 88.0, 1.0), (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("tier", "tiers", "capacity", "expected"),
    [
        ("free", parts((84.0, 32.0, 0.381), FULL), HALF, "38 % ; enterprise 200/s and paid 88/s; guaranteed share"),
        ("free", parts((84.0, 64.0, 0.762), FULL), HALF, "76 % ; 32/s of it guaranteed"),
        ("paid", parts((84.0, 32.0, 0.38), (176.0, 88.0, 0.5)), HALF, "50 % ; 32/s guaranteed to free"),
        ("paid", parts(IDLE, (400.0, 320.0, 0.8), 0.0), HALF, "80 % ; 80/s of it guaranteed"),
        ("free", parts((10.0, 10.0, 0.6), IDLE, 50.0), HALF, "60 % ; rising to 100 %"),
        (
            "free",
            parts((12.0, 12.0, 1.0), FULL),
            PoolCapacity(640.0, 8, 8, (100.0,) * 8, 0.8, 50.0),
            "full base limits; 8 of 8 GPUs are healthy; 640/s; demand of all tiers is 300/s",
        ),
        (
            "free",
            parts((84.0, 32.0, 0.38), FULL),
            PoolCapacity(320.0, 0, 8, (), 0.8, 50.0),
            "38 % ; 0 of 8 GPUs; as last measured; no_capacity",
        ),
    ],
)
def test_the_reason_of_a_factor_has_its_figures(
    tier: str, tiers: list[TierPart], capacity: PoolCapacity, expected: str
) -> None:
    """The factor, the tiers served first, and how much the tier gets of its demand."""
    sentence = why(tier, tiers, capacity)

    assert sentence.startswith(f"{tier} has ")
    assert [fragment for fragment in expected.split("; ") if fragment not in sentence] == []


def test_a_capacity_names_its_evidence() -> None:
    """Each kind of evidence has its own sentence with its figures."""
    corrected = replace(HALF, rates=(90.0, 110.0), correction=0.5, target_utilization=None)

    assert "measured at 100/s each" in capacity_words(HALF)
    assert "90/s to 110/s. Only 50 % " in capacity_words(corrected)
    assert "25 % of the full size" in capacity_words(replace(HALF, evidence="probing", confidence=0.25))
    slots = replace(HALF, slots=64, running=20, slots_source="64 sequences in /metrics", evidence="probing")
    assert "is 64 slots (64 sequences in /metrics) of 4 healthy GPUs" in capacity_words(slots)
    assert "20 requests are running, so no request is rejected" in capacity_words(slots)
    assert "rejected" not in capacity_words(replace(slots, running=60))
    assert "a guess" in capacity_words(replace(HALF, evidence="prior"))
    assert "50/s for each of 4 healthy GPUs" in capacity_words(replace(HALF, evidence="fixed"))
    assert capacity_words(PoolCapacity(80.0, 0, 2, ())).startswith("No GPU is healthy")


def rejected(outcome: str, code: str = "rate_limit_exceeded", **fields: object) -> RejectionRecord:
    known: dict[str, object] = {"customer_id": "c", "key_id": "k1", "tier": "free", "factor": 0.385, "rate": 38.5}
    known |= {"max_concurrency": 50, "remaining": 0.25, "in_use": 50, "depth": 512}
    return RejectionRecord(id=new_request_id(), code=code, outcome=outcome, **(known | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            rejected("key_limit", limit="3.85 requests/s (burst 1)", left=0.25, retry_after_ms=75, more=1),
            "key k1: 3.85 requests/s; 0.25 left; at 38 %; would have rejected it; 1 more request; raise the key's; 75 ms",
        ),
        (rejected("customer_limit", "reduced_capacity"), "over all its keys; would have accepted; did nothing wrong"),
        (rejected("token_limit", limit="924000 tokens per minute", left=-12.0), "924000 tokens per minute; -12 left"),
        (rejected("concurrency"), "50 of 50 requests under way; max_concurrency"),
        (
            rejected("quota", "quota_exceeded", quota="1day", quota_amount=10_000, retry_after_ms=10_920_000),
            "10,000 requests per day, which was used up; until the quota resets; after 3 h 2 min",
        ),
        (
            rejected("quota", "quota_exceeded", quota="1month:usd", quota_amount=500_000_000),
            "0.5 usd per month, which had too little left for this request; until the quota resets",
        ),
        (rejected("tier_limit", "reduced_capacity"), "the share of tier free; more GPUs"),
        (rejected("shed", "shed_for_priority"), "shedding: 512 requests; a higher tier"),
        (rejected("queue_full", "queue_full"), "the queue cap of tier free: 512 requests; max_queue_depth"),
        (rejected("", "queue_full"), "the gateway's own queue"),
        (rejected("", "no_capacity"), "no GPU was healthy"),
        (rejected("", "draining"), "another gateway"),
        (rejected("", "model_not_found"), "model_not_found: There is no such model.; Correct the request"),
        (rejected("", "of_the_future"), "of_the_future: this version does not know the code."),
    ],
)
def test_a_rejection_has_its_limit_figures_and_advice(record: RejectionRecord, expected: str) -> None:
    """The figures are those of the time of the rejection; a reduced limit is compared with its base limit."""
    text = " ".join(explain_request(record.id, None, None, record, []).said)

    assert [fragment for fragment in expected.split("; ") if fragment not in text] == []
    assert ("its base limit would" in text) is (record.outcome in REDUCED_OUTCOMES)


def test_every_outcome_that_rejects_has_words_and_advice() -> None:
    """A new limit must not be explained with a bare code."""
    entered = {Admission.ACCEPTED, Admission.DUPLICATE, Admission.REPLAYED}
    records = [rejected(outcome, "of_the_future") for outcome in Admission if outcome not in entered]
    texts = {
        record.outcome: " ".join(explain_request(record.id, None, None, record, []).said[1:]) for record in records
    }

    assert [record.outcome for record in records if "of_the_future" in limit_words(record)] == []
    assert [outcome for outcome, text in texts.items() if "Correct the request" in text] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[(number(value), text) for value, text in ((0, "0"), (-0.001, "0"), (0.25, "0.25"), (38.46, "38.5"))],
        *[(number(value), text) for value, text in ((320.0, "320"), (2_400_000, "2,400,000"))],
        *[(percent(part), text) for part, text in ((0, "0 %"), (0.001, "under 1 %"), (0.999, "99 %"), (1, "100 %"))],
        *[(span(ms), text) for ms, text in ((75, "75 ms"), (1500, "1.5 s"), (60_000, "1 min"))],
        *[(span(ms), text) for ms, text in ((10_920_000, "3 h 2 min"), (90_061_000, "1 d 1 h"))],
        *[(listed(names), text) for names, text in (([], ""), (["a"], "a"), (["a", "b", "c"], "a, b and c"))],
        *[(count(n, "row of x", "rows of x"), text) for n, text in ((1, "1 row of x"), (2, "2 rows of x"))],
        (columns([("A", "LONG"), ("longer", "b")]), ["A       LONG", "longer  b"]),
    ],
)
def test_numbers_times_lists_and_columns(text: object, expected: object) -> None:
    """Three significant digits; percentages other than 0 and 100 are never shown as these; two units of time."""
    assert text == expected
