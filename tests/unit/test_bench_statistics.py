"""Latency histograms, objectives, and figures over time of `tierlane bench`."""

import io
import math
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from random import Random

import pytest
from rich.console import Console

from tierlane_tools.bench.measurement.histogram import Histogram
from tierlane_tools.bench.measurement.statistics import TierStatistics, UnansweredCause, new_tallies
from tierlane_tools.bench.plan.objectives import SloError, good_bounds, judge, parse_slo
from tierlane_tools.bench.plan.plan import read_plan
from tierlane_tools.bench.report import document as report
from tierlane_tools.bench.report.tables import show
from tierlane_tools.bench.runner import Measurement, Timeline

TIERS = ("enterprise", "paid")


def filled(samples: list[float]) -> Histogram:
    histogram = Histogram()
    for sample in samples:
        histogram.record(sample)
    return histogram


def test_quantiles_agree_with_the_sorted_samples() -> None:
    """100,000 log-normal times: percentiles within 1 %, by nearest rank; mean, deviation, minimum and maximum exact."""
    random = Random(3)
    samples = [random.lognormvariate(-3, 0.7) for _ in range(100_000)]
    histogram = filled(samples)
    mean = sum(samples) / len(samples)

    for share in (0.5, 0.95, 0.99, 0.999):
        exact = sorted(samples)[math.ceil(share * len(samples)) - 1]
        assert histogram.quantile(share) == pytest.approx(exact, rel=0.01)
    assert histogram.mean == pytest.approx(mean)
    assert histogram.deviation == pytest.approx(math.sqrt(sum((s - mean) ** 2 for s in samples) / len(samples)))
    assert (histogram.least, histogram.largest, histogram.count) == (min(samples), max(samples), len(samples))


def test_samples_outside_the_range_are_counted() -> None:
    """They count at the edge; a histogram without samples has no figures."""
    assert filled([0.0, -0.001, 1e6]).count == 3
    empty = Histogram()
    assert (empty.quantile(0.5), empty.mean, empty.deviation) == (None, None, None)


def test_a_timeline_has_the_difference_of_each_step() -> None:
    """Answers of warm-up and window count alike; a step without answers has no p99."""
    warmup, measured = new_tallies(["paid", "free"], {}), new_tallies(["paid", "free"], {})
    timeline = Timeline(warmup, measured)
    for _ in range(10):
        warmup[0].completed(0.010)
    warmup[1].failed(429, "rate_limit_exceeded", 0.001)
    timeline.step(1.0)
    measured[0].completed(0.500)
    measured[1].unanswered(UnansweredCause.TIMEOUT)
    timeline.step(2.5)
    timeline.step(3.5)

    assert [(step.at_s, step.length_s) for step in timeline.steps] == [(1.0, 1.0), (2.5, 1.5), (3.5, 1.0)]
    assert [[tier.completed for tier in step.tiers] for step in timeline.steps] == [[10, 0], [1, 0], [0, 0]]
    assert [[tier.failed for tier in step.tiers] for step in timeline.steps] == [[0, 1], [0, 1], [0, 0]]
    assert [step.tiers[0].p99_s for step in timeline.steps] == [
        pytest.approx(0.010, rel=0.02),
        pytest.approx(0.500, rel=0.02),
        None,
    ]


@pytest.mark.parametrize(
    ("text", "metric", "bound"),
    [
        ("enterprise.p99.9=1s", "p99.9", 1.0),
        ("enterprise.p50=900us", "p50", 0.0009),
        ("enterprise.success=99.9%", "success", 0.999),
        (" enterprise.p95 = 10ms ", "p95", 0.01),
    ],
)
def test_objectives_are_parsed(text: str, metric: str, bound: float) -> None:
    """Tier, metric, and the bound in seconds or as a share."""
    (objective,) = parse_slo(text, TIERS)

    assert (objective.tier, objective.metric, objective.bound) == ("enterprise", metric, pytest.approx(bound))


@pytest.mark.parametrize(
    "text",
    [
        "enterprise.p99",
        "p99=1s",
        "enterprise.p99=1s,",
        "free.p99=1s",
        "paid.p99=250",
        "paid.q99=1s",
        "paid.p100=1s",
        "paid.success=0.99",
        "paid.success=101%",
    ],
)
def test_wrong_objectives_are_rejected(text: str) -> None:
    """Unknown tiers and metrics, and bounds without a unit."""
    with pytest.raises(SloError):
        parse_slo(text, TIERS)


@pytest.mark.parametrize(
    ("text", "latencies_ms", "unanswered", "met"),
    [
        ("enterprise.p50=11ms", [10, 10, 500], 0, True),
        ("enterprise.max=499ms", [10, 10, 500], 0, False),
        ("enterprise.mean=11ms", [10, 11, 12], 0, True),
        ("enterprise.success=75%", [1, 1, 1], 1, True),
        ("enterprise.success=75.1%", [1, 1, 1], 1, False),
        ("enterprise.p99=1s", [], 5, False),
        ("enterprise.success=1%", [], 0, False),
    ],
)
def test_objectives_are_judged(text: str, latencies_ms: list[float], unanswered: int, *, met: bool) -> None:
    """Unanswered requests lower the success; no sample meets no objective."""
    counters = TierStatistics("enterprise")
    counters.scheduled = len(latencies_ms) + unanswered
    for latency_ms in latencies_ms:
        counters.completed(latency_ms / 1000)
    for _ in range(unanswered):
        counters.unanswered(UnansweredCause.TIMEOUT)
    (judgement,) = judge(parse_slo(text, TIERS), {"enterprise": counters})

    assert judgement.met is met


def test_the_latency_of_a_good_request() -> None:
    """It is the bound of the tier's highest quantile, else that of `all`."""
    objectives = parse_slo("all.p99=1s,enterprise.p50=100ms,enterprise.p99=250ms,paid.success=99%", TIERS)
    assert good_bounds(objectives, TIERS) == pytest.approx({"enterprise": 0.25, "paid": 1.0})


def test_a_checkout_that_was_never_installed_has_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the metadata of its package, the run keeps its figures."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(report, "version", version)
    now = datetime.now(UTC)
    document = report.document(read_plan({}), "http://127.0.0.1:8080", Measurement(now, now, [], []))

    assert (document["passed"], document["versions"]["tierlane"]) == (True, "not installed")


@pytest.mark.parametrize(
    ("errors", "line"),
    [
        (0, "passed: all 3 requests got a 200"),
        (2, "passed: all 5 requests were answered, 2 of them with an error; --max-error-rate fails such a run"),
    ],
)
def test_the_last_line_says_what_passed(errors: int, line: str) -> None:
    """Errors are answers: they fail a run only if their share is limited."""
    now, (paid,) = datetime.now(UTC), new_tallies(["paid"], {})
    paid.scheduled = paid.sent = 3 + errors
    for _ in range(3):
        paid.completed(0.010)
    for _ in range(errors):
        paid.failed(429, "rate_limit_exceeded", 0.001)
    found = Measurement(now, now, [], [paid], window_s=1.0, window_completed=[(3, 3)])
    out = io.StringIO()

    show(Console(file=out, width=200), report.document(read_plan({}), "http://127.0.0.1:8080", found))

    assert out.getvalue().splitlines()[-1] == line
