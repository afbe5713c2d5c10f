"""Whether enterprise notices a flood of free requests: its p99 and the goodput from half of the capacity to ten times it.

Tiers are as they come, with their shares and their shedding; only what would hold single customers is raised. Latency
counts from the scheduled time (open loop), since a flood does not wait for answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cases.outcome import Check, Outcome, at_least, at_most, none_of, over, told
from cases.stand import CUSTOMERS_RAISED, SHADOW, Stand, started

# Few enough requests a second that ten times as many can be made and refused on the machine that also serves them.
WORKERS, BATCH = 12, 2
GPU_S = 0.05
NOMINAL = WORKERS * BATCH / GPU_S
ENTERPRISE_SHARE = 0.2
LOADS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0)
JUDGED = (3.0, 10.0)
MOST_P99 = 1.2
LEAST_GOODPUT = 0.95
MOST_WAITED = 0.01
CONNECTIONS = 2000

# By default a part of the capacity is not given out; here the question is what the flood costs those who have all of it.
SELL_EVERYTHING = "UPDATE models SET target_utilization = 1.0"
KEEP_TIERS = "CREATE TABLE tiers_as_they_came AS SELECT * FROM tiers"
RESTORE_TIERS = """
UPDATE tiers AS t SET requests_per_second = o.requests_per_second, burst = o.burst, max_concurrency = o.max_concurrency,
    tokens_per_minute = o.tokens_per_minute, max_queue_depth = o.max_queue_depth, shed_depth = o.shed_depth,
    shed_wait_ms = o.shed_wait_ms, shadow = o.shadow
FROM tiers_as_they_came AS o WHERE o.name = t.name
"""


def run(*, quick: bool) -> Outcome:
    """Measure the capacity, enterprise alone, then each load."""
    seconds = 6 if quick else 20
    loads = (0.5, 1.0, 3.0, 10.0) if quick else LOADS
    with started(workers=WORKERS, batch=BATCH) as stand:
        capacity = _capacity(stand, seconds)
        rate = ENTERPRISE_SHARE * capacity
        alone = _offered(stand, rate, "enterprise=1", 2 * seconds)
        points = [_point(stand, capacity, rate, load, seconds) for load in loads]
    data = {"capacity": capacity, "nominal": NOMINAL, "alone_p99_ms": _p99(alone), "points": points}
    return Outcome(judge(data), data, doubts(points))


def doubts(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which loads this machine could not make, or not take in, so that their latencies say little of the priorities."""
    return [
        f"At {point['load']:g} x capacity {point['waited'] * 100:.0f} % of the requests found all {CONNECTIONS:,} "
        "connections busy, and latency counts that wait: the processors were the bottleneck, not the GPUs."
        for point in points
        if point["waited"] > MOST_WAITED
    ]


def judge(data: Mapping[str, Any]) -> list[Check]:
    """The two floods; the other loads are for the plot."""
    checks = [
        told(
            "capacity (closed loop, nothing limited)", f"{data['capacity']:,.0f} of {data['nominal']:,.0f} requests/s"
        ),
        told("enterprise p99 alone", f"{data['alone_p99_ms']:.1f} ms"),
    ]
    for point in data["points"]:
        if point["load"] in JUDGED:
            label = f"{point['load']:g} x capacity"
            ratio = over(point["enterprise_p99_ms"], data["alone_p99_ms"])
            share = over(point["goodput"], data["capacity"])
            checks += [
                at_most(f"{label}: enterprise p99 over its own alone", ratio, MOST_P99, " x", 2),
                none_of(f"{label}: enterprise requests refused or failed", point["enterprise_failed"]),
                at_least(f"{label}: goodput", None if share is None else share * 100, LEAST_GOODPUT * 100, " %", 1),
                none_of(f"{label}: accepted requests without an answer", point["unanswered"]),
                told(f"{label}: accepted, then failed", f"{point['failed_after_acceptance']:,}"),
            ]
    return checks


def _capacity(stand: Stand, seconds: int) -> float:
    """What the GPUs can do, with nothing in the way."""
    stand.sql(KEEP_TIERS)
    stand.raise_limits(SHADOW)
    found = stand.bench(mode="closed", connections=256, duration=seconds, warmup=3, mix="paid=1", echo="off")
    stand.sql(RESTORE_TIERS, CUSTOMERS_RAISED, SELL_EVERYTHING)
    return float(found["request_throughput"])


def _point(stand: Stand, capacity: float, enterprise: float, load: float, seconds: int) -> dict[str, Any]:
    total = load * capacity
    found = _offered(stand, total, f"enterprise={enterprise},free={total - enterprise}", seconds)
    tier, audit = found["tiers"]["enterprise"], found["audit"]
    return {
        "load": load,
        "offered": total,
        "enterprise_p50_ms": tier["median_e2el_ms"],
        "enterprise_p99_ms": tier["p99_e2el_ms"],
        "enterprise_failed": tier["failed"],
        "free_p99_ms": found["tiers"]["free"]["p99_e2el_ms"],
        "goodput": found["request_throughput"],
        # An accepted request has a row: what has one and no answer was dropped.
        "unanswered": found["unanswered"] + audit["unexplained"] + audit["missing"],
        "failed_after_acceptance": audit["expected"] - audit["completed_answers"],
        "generator_late_p99_ms": found["lag_ms"]["p99"],
        # Less those that had to open the connections.
        "waited": max(0, found["waited_for_connection"] - CONNECTIONS)
        / max(1, found["scheduled"] + found["warmup"]["scheduled"]),
        "errors": found["errors"],
    }


def _offered(stand: Stand, rate: float, mix: str, seconds: int) -> dict[str, Any]:
    return stand.bench(rate=rate, mix=mix, duration=seconds, warmup=3, connections=CONNECTIONS, echo="off")


def _p99(found: Mapping[str, Any]) -> float:
    return float(found["tiers"]["enterprise"]["p99_e2el_ms"])
