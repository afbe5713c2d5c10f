"""Objectives: how they are read, and when they are met."""

import pytest

from tierlane.bench.statistics import (
    SloError,
    TierStatistics,
    UnansweredCause,
    good_bounds,
    judge,
    parse_share,
    parse_slo,
)

TIERS = ("enterprise", "paid")


def counters(latencies_ms: list[float], *, silent: int = 0) -> TierStatistics:
    counted = TierStatistics("enterprise")
    counted.scheduled = len(latencies_ms) + silent
    for latency_ms in latencies_ms:
        counted.completed(latency_ms / 1000)
    for _ in range(silent):
        counted.unanswered(UnansweredCause.TIMEOUT)
    return counted


@pytest.mark.parametrize(
    ("text", "metric", "bound"),
    [
        ("enterprise.p99=250ms", "p99", 0.25),
        ("enterprise.p99.9=1s", "p99.9", 1.0),
        ("enterprise.p50=900us", "p50", 0.0009),
        ("enterprise.mean=1.5s", "mean", 1.5),
        ("enterprise.max=2s", "max", 2.0),
        ("enterprise.success=99.9%", "success", 0.999),
        (" enterprise.p95 = 10ms ", "p95", 0.01),
    ],
)
def test_objectives_that_can_be_read(text: str, metric: str, bound: float) -> None:
    """Tier, metric, and the bound in seconds or as a share."""
    (objective,) = parse_slo(text, TIERS)

    assert (objective.tier, objective.metric, objective.bound) == ("enterprise", metric, pytest.approx(bound))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("enterprise.p99", "TIER.METRIC=BOUND, got 'enterprise.p99'"),
        ("p99=1s", "TIER.METRIC=BOUND, got 'p99=1s'"),
        ("enterprise.p99=1s,", "got ''"),
        ("free.p99=1s", "'free.p99=1s' names a tier that is not in the mix; use enterprise, paid or all"),
        ("paid.p99=250", "needs a time with its unit (us, ms or s)"),
        ("paid.p99=fast", "needs a time"),
        ("paid.q99=1s", "unknown metric 'q99'"),
        ("paid.p100=1s", "unknown metric 'p100'"),
        ("paid.success=0.99", "needs a percentage"),
        ("paid.success=101%", "needs a percentage"),
    ],
)
def test_objectives_that_cannot_be_read_are_told_why(text: str, fault: str) -> None:
    """The error names the part at fault and what is wanted."""
    with pytest.raises(SloError) as caught:
        parse_slo(text, TIERS)

    assert fault in str(caught.value)


def test_no_objectives() -> None:
    """An empty text means none."""
    assert parse_slo("", TIERS) == ()


@pytest.mark.parametrize(
    ("text", "latencies_ms", "silent", "met"),
    [
        ("enterprise.p50=11ms", [10, 10, 500], 0, True),
        ("enterprise.max=499ms", [10, 10, 500], 0, False),
        ("enterprise.max=500ms", [10, 10, 500], 0, True),
        ("enterprise.mean=11ms", [10, 11, 12], 0, True),
        ("enterprise.success=75%", [1, 1, 1], 1, True),
        ("enterprise.success=75.1%", [1, 1, 1], 1, False),
        ("enterprise.success=99.9%", [1] * 999, 1, True),
        ("enterprise.success=99.9%", [1] * 998, 2, False),
        ("enterprise.p99=1s", [], 5, False),
        ("enterprise.success=1%", [], 0, False),
    ],
)
def test_when_an_objective_is_met(text: str, latencies_ms: list[float], silent: int, met: bool) -> None:
    """Unanswered requests lower the success, and no sample is no success."""
    (judgement,) = judge(parse_slo(text, TIERS), {"enterprise": counters(latencies_ms, silent=silent)})

    assert judgement.met is met


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("enterprise.p99=250ms", {"enterprise": 0.25}),
        ("enterprise.p50=100ms,enterprise.p99=250ms", {"enterprise": 0.25}),
        ("enterprise.success=99%", {}),
        ("all.p99=1s", {"enterprise": 1.0, "paid": 1.0}),
        ("all.p99=1s,paid.max=2s", {"enterprise": 1.0, "paid": 2.0}),
    ],
)
def test_which_latency_is_good(text: str, expected: dict[str, float]) -> None:
    """The bound of the tier's highest quantile; a tier without its own has that of `all`."""
    assert good_bounds(parse_slo(text, TIERS), TIERS) == pytest.approx(expected)


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.01", 0.01), ("0", 0.0), ("100%", 1.0)])
def test_shares_that_can_be_read(text: str, share: float) -> None:
    """Per cent or a plain number."""
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "x", "101%", "1.5", "-1%", "nan"])
def test_shares_that_cannot_be_read(text: str) -> None:
    """Anything outside 0 to 1 is told."""
    with pytest.raises(SloError, match="must be a share"):
        parse_share(text)
