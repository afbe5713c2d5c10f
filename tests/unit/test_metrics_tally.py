"""What a gateway counts: which figures an end adds to, in which bucket, and that names cannot grow without end."""

import pytest

from gateway.limits.rejections import OWN_LIMITS as REFUSED_BY_OWN_LIMITS
from gateway.metrics.counters import BATCHES, BOUNDS_US, MAX_MODELS, MAX_TIERS, SHED, STAGES, Counters
from metrics_figures import reply
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Verdict
from scheduler.states import Admission


@pytest.mark.parametrize(
    ("code", "outcome", "expected"),
    [
        (ErrorCode.SHED_FOR_PRIORITY, Admission.SHED, {("tierlane_shed_total", "shed_for_priority")}),
        (ErrorCode.REDUCED_CAPACITY, Admission.CUSTOMER_LIMIT, {("tierlane_shed_total", "reduced_capacity")}),
        (ErrorCode.RATE_LIMIT_EXCEEDED, Admission.CONCURRENCY, {("tierlane_rate_limited_total", "concurrency")}),
        (ErrorCode.QUOTA_EXCEEDED, Admission.QUOTA, {("tierlane_rate_limited_total", "quota")}),
        (ErrorCode.RATE_LIMIT_EXCEEDED, None, set()),
        (ErrorCode.QUEUE_TIMEOUT, Admission.ACCEPTED, {("tierlane_deadline_exceeded_total", "queue")}),
        (ErrorCode.GPU_TIMEOUT, Admission.ACCEPTED, {("tierlane_deadline_exceeded_total", "gpu")}),
        (ErrorCode.DEADLINE_EXCEEDED, Admission.TOO_LATE, {("tierlane_deadline_exceeded_total", "total")}),
        (ErrorCode.POISON_REQUEST, Admission.ACCEPTED, set()),
    ],
)
def test_what_an_error_counts_as(code: ErrorCode, outcome: Admission | None, expected: set[tuple[str, str]]) -> None:
    """Always as a request with its code; and as shed, limited or late where it is one of these."""
    counters = Counters()

    counters.failed("free", "/v1/inference", code, None if outcome is None else Verdict(outcome))

    counted = {key: numbers for key, numbers in counters.series().items() if len(numbers) == 1 and numbers[0]}
    refused = {(metric, label) for metric, tier, label in (key for key in counted if len(key) == 3)}
    assert counted[("tierlane_requests_total", "free", "/v1/inference", code.value)] == [1]
    assert refused == expected


def test_the_lists_of_codes_are_those_of_admission() -> None:
    """Every refusal by a customer's own limit has a scope, and no code is both shed and late."""
    scopes = {
        key[2]
        for outcome in REFUSED_BY_OWN_LIMITS
        for counters in [Counters()]
        if counters.failed("t", "e", ErrorCode.RATE_LIMIT_EXCEEDED, Verdict(outcome)) is None
        for key in counters.series()
        if key[0] == "tierlane_rate_limited_total"
    }

    assert scopes == {outcome.value for outcome in REFUSED_BY_OWN_LIMITS}
    assert SHED.isdisjoint(STAGES)


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(-1.0, 0), (0.0005, 0), (0.001, 0), (0.0011, 1), (0.05, 5), (61.0, 18)]
)
def test_a_time_falls_into_the_bucket_that_ends_at_or_after_it(seconds: float, bucket: int) -> None:
    """As Prometheus counts: the upper end belongs to its bucket; what is longer than all has one of its own."""
    counters = Counters()

    counters.completed("free", "/v1/inference", seconds)

    *counts, total_us = counters.series()[("tierlane_request_duration_seconds", "free")]
    assert [place for place, count in enumerate(counts) if count] == [bucket]
    assert total_us == max(0, int(seconds * 1e6))
    assert len(counts) == len(BOUNDS_US) + 1


def test_a_run_is_told_by_its_reply() -> None:
    """Wait, run, size beside the full size known then, further attempts; an answer that was kept had no run."""
    counters = Counters()
    counters.ran("paid", "default", "tiny", reply())
    counters.full_batches({("default", "tiny"): 8, ("default", "other"): 2})
    counters.ran("paid", "default", "tiny", reply(attempts=3))
    counters.ran("paid", "default", "tiny", reply(served_from="cache"))

    series = counters.series()

    assert series[(BATCHES, "default", "tiny", "0", "4")] == [1]
    assert series[(BATCHES, "default", "tiny", "8", "4")] == [1]
    assert series[("tierlane_queue_wait_seconds", "paid")][-1] == 40_000
    assert series[("tierlane_inference_duration_seconds", "default", "tiny")][-1] == 100_000
    assert series[("tierlane_retries_total", "batch")] == [2]


def test_names_are_capped() -> None:
    """However often an admin renames tiers and models, what is over the cap is `other`, and nothing is lost."""
    counters = Counters()
    for number in range(100):
        counters.ended(f"tier-{number}", "/v1/inference", "completed")
        counters.ran("tier-0", "default", f"model-{number}", reply())

    series = counters.series()
    tiers = {key[1]: numbers[0] for key, numbers in series.items() if key[0] == "tierlane_requests_total"}
    models = {key[2] for key in series if key[0] == "tierlane_inference_duration_seconds"}

    assert len(tiers) == MAX_TIERS + 1
    assert tiers["other"] == 100 - MAX_TIERS
    assert len(models) == MAX_MODELS + 1
