"""Enterprise during a flood of free requests: its p99 and the goodput at half to ten times the capacity.

Tiers have their default shares and shedding; only limits of customers are raised. The load is an open loop, so latency
counts from the scheduled time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cases.outcome import Check, Outcome, at_least, at_most, figure, none_of, over
from cases.stack import CUSTOMERS_RAISED, SHADOW, Stack, started

# A small capacity, so that one machine can send and reject ten times as many requests.
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

# By default limits give out only a part of the capacity.
SELL_EVERYTHING = "UPDATE models SET target_utilization = 1.0"
KEEP_TIERS = "CREATE TABLE tiers_as_they_came AS SELECT * FROM tiers"
RESTORE_TIERS = """
UPDATE tiers AS t SET requests_per_second = o.requests_per_second, burst = o.burst, max_concurrency = o.max_concurrency,
    tokens_per_minute = o.tokens_per_minute, max_queue_depth = o.max_queue_depth, shed_depth = o.shed_depth,
    shed_wait_ms = o.shed_wait_ms, shadow = o.shadow
FROM tiers_as_they_came AS o WHERE o.name = t.name
"""


def run(*, quick: bool) -> Outcome:
    """Measure the capacity, then enterprise alone, then each load."""
    seconds = 6 if quick else 20
    loads = (0.5, 1.0, 3.0, 10.0) if quick else LOADS
    with started(workers=WORKERS, batch=BATCH) as stack:
        capacity = _capacity(stack, seconds)
        rate = ENTERPRISE_SHARE * capacity
        alone = _offered(stack, rate, "enterprise=1", 2 * seconds)
        points = [_point(stack, capacity, rate, load, seconds) for load in loads]
    data = {"capacity": capacity, "nominal": NOMINAL, "alone_p99_ms": _p99(alone), "points": points}
    return Outcome(judge(data), data, doubts(points))


def doubts(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Notes on loads that this machine could not send or accept, whose latencies show little of the priorities."""
    return [
        f"At {point['load']:g} x capacity {point['waited'] * 100:.0f} % of the requests found all {CONNECTIONS:,} "
        "connections busy, and latency counts that wait: the processors were the bottleneck, not the GPUs."
        for point in points
        if point["waited"] > MOST_WAITED
    ]


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Judge the two floods; the other loads are for the plot."""
    checks = [
        figure(
            "capacity (closed loop, nothing limited)", f"{data['capacity']:,.0f} of {data['nominal']:,.0f} requests/s"
        ),
        figure("enterprise p99 alone", f"{data['alone_p99_ms']:.1f} ms"),
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
                figure(f"{label}: accepted, then failed", f"{point['failed_after_acceptance']:,}"),
            ]
    return checks


def _capacity(stack: Stack, seconds: int) -> float:
    """The throughput of the GPUs without limits."""
    stack.sql(KEEP_TIERS)
    stack.raise_limits(SHADOW)
    found = stack.bench(mode="closed", connections=256, duration=seconds, warmup=3, mix="paid=1", echo="off")
    stack.sql(RESTORE_TIERS, CUSTOMERS_RAISED, SELL_EVERYTHING)
    return float(found["request_throughput"])


def _point(stack: Stack, capacity: float, enterprise: float, load: float, seconds: int) -> dict[str, Any]:
    total = load * capacity
    found = _offered(stack, total, f"enterprise={enterprise},free={total - enterprise}", seconds)
    tier, audit = found["tiers"]["enterprise"], found["audit"]
    return {
        "load": load,
        "offered": total,
        "enterprise_p50_ms": tier["median_e2el_ms"],
        "enterprise_p99_ms": tier["p99_e2el_ms"],
        "enterprise_failed": tier["failed"],
        "free_p99_ms": found["tiers"]["free"]["p99_e2el_ms"],
        "goodput": found["request_throughput"],
        # Accepted requests have a row; those without a response were dropped.
        "unanswered": found["unanswered"] + audit["unexplained"] + audit["missing"],
        "failed_after_acceptance": audit["expected"] - audit["completed_answers"],
        "generator_late_p99_ms": found["lag_ms"]["p99"],
        # Without the requests that opened the connections.
        "waited": max(0, found["waited_for_connection"] - CONNECTIONS)
        / max(1, found["scheduled"] + found["warmup"]["scheduled"]),
        "errors": found["errors"],
    }


def _offered(stack: Stack, rate: float, mix: str, seconds: int) -> dict[str, Any]:
    return stack.bench(rate=rate, mix=mix, duration=seconds, warmup=3, connections=CONNECTIONS, echo="off")


def _p99(found: Mapping[str, Any]) -> float:
    return float(found["tiers"]["enterprise"]["p99_e2el_ms"])
