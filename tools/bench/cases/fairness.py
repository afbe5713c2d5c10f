"""Customers of one tier whose limits are above what the GPUs can do: a quiet one beside floods, others beside waiting jobs,
saturated ones, and the throughput of fair order.

The time of the model depends on its inputs: ten times the words cost about ten times as much of it.
"""

from collections.abc import Mapping
from typing import Any

from cases.customer_load import Load, prepared
from cases.jobs_backlog import beside_jobs, check_jobs
from cases.outcome import Check, Outcome, figure
from cases.quiet import beside_floods, check_quiet
from cases.saturated import (
    EQUAL,
    SATURATED,
    WEIGHTS,
    check_equal,
    check_turns,
    check_weights,
    doubts,
    errors,
    saturate,
    take_turns,
)
from cases.stack import started

BACKEND, WORKERS, BATCH, GATEWAYS = "simulated:20+0.25", 8, 8, 2
SHORT, LONG = 4, 40
"""Words of a request."""
QUIET_RPS, FLOOD_RPS, QUIET_CUSTOMERS, FLOODS = 6.0, 600.0, 50, 3
CUSTOMERS = QUIET_CUSTOMERS + FLOODS
JOBS = (0, 100, 1000)
"""Without jobs, the others have only the flood beside them."""
LAW = (
    "By the law: a batch is not interrupted, so a quiet request waits for the first of n workers. The p99 of that wait is "
    "T (1 - 0.01^(1/n)) for batches of T that end independently of each other, and at most T/n if they end at even intervals."
)


def run(*, quick: bool) -> Outcome:
    """Measure quiet customers before and beside floods, others beside jobs, then saturated customers and the throughput."""
    seconds = 10 if quick else 30
    with started(workers=WORKERS, batch=BATCH, backend=BACKEND, gateways=GATEWAYS) as stack:
        keys = prepared(stack, CUSTOMERS)

        def floods(count: int) -> list[Load]:
            return [Load(key, LONG, FLOOD_RPS / count) for key in keys[QUIET_CUSTOMERS:][:count]]

        def quiet(count: int) -> list[Load]:
            return [Load(key, SHORT, QUIET_RPS) for key in keys[:count]]

        data = {
            "quiet": beside_floods(stack, WORKERS, quiet(1), floods(1), seconds),
            "many_quiet": beside_floods(stack, WORKERS, quiet(QUIET_CUSTOMERS), floods(FLOODS), seconds),
            "jobs": {str(count): beside_jobs(stack, keys, count) for count in JOBS},
            "equal": saturate(stack, keys, EQUAL, seconds),
            "weights": saturate(stack, keys, WEIGHTS, seconds),
            "order_alone": saturate(stack, keys, WEIGHTS, seconds, shadow=True),
            "turns": take_turns(stack, keys, rounds=2 if quick else 8, seconds=4 if quick else 10),
        }
    doubted = {
        "equal": "equal weights",
        "weights": "weights 1:2:4",
        "order_alone": "order alone",
        "turns": "throughput",
    }
    notes = [note for name, title in doubted.items() for note in doubts(title, data[name])]
    return Outcome(judge(data), data, [LAW, *notes])


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Judge each load."""
    checks = [
        *check_quiet("one quiet customer beside a flood", data["quiet"]),
        *check_quiet(f"{QUIET_CUSTOMERS} beside {FLOODS} floods", data["many_quiet"]),
    ]
    for count, found in data["jobs"].items():
        checks += check_jobs(f"{count} waiting jobs of another", found)
    equal, weights = data["equal"], data["weights"]
    return [
        *checks,
        *check_equal(f"{SATURATED} saturated customers, costs 1:10", equal),
        check_weights("weights 1:2:4", weights),
        errors("weights 1:2:4", weights),
        check_weights("weights 1:2:4, the capacity's limit not enforced", data["order_alone"]),
        figure("requests/s of all", f"{equal['rps']:.0f}, {weights['rps']:.0f}"),
        *check_turns(data["turns"]),
    ]
