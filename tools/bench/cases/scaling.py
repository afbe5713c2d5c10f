"""Autoscaling under a load of 200 -> 1,500 -> 200 requests/s with `--autoscale 2:8`.

The load is a sum of generators that start and end one after another, so it has no gap. The durations of the policy are
shortened, as the defaults are made for hours; thresholds are the defaults.
"""

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cases.outcome import Check, Outcome, at_least, at_most, figure, none_of
from cases.stack import CUSTOMERS_RAISED, Stack, started

LEAST, MOST = 2, 8
BASE, LAYERS, LAYER = 200, 5, 260
SERVICE_MS, BATCH = 50, 12
COOLDOWN_S = 4.0
MOST_P95_MS = 250.0
LOOK_S = 0.5
RULES = {
    "autoscale": f"{LEAST}:{MOST}",
    "autoscale_need_ms": 2000,
    "autoscale_deep_ms": 2000,
    "autoscale_long_ms": 4000,
    "autoscale_busy_ms": 8000,
    "autoscale_calm_ms": 8000,
    "autoscale_cooldown_ms": int(COOLDOWN_S * 1000),
}


def run(*, quick: bool) -> Outcome:
    """Add generators to the base load one by one, and remove them again."""
    stair, height, tail = (4, 10, 50) if quick else (6, 25, 60)
    up_s = LAYERS * stair
    with started(workers=LEAST, batch=BATCH, gateways=1, backend=f"simulated:{SERVICE_MS}", **RULES) as stack:
        stack.sql(CUSTOMERS_RAISED)
        watch = Watch(stack)
        with ThreadPoolExecutor(LAYERS + 1) as beside:
            base = beside.submit(_load, stack, BASE, stair + up_s + height + up_s + tail)
            layers = []
            for n in range(LAYERS):
                time.sleep(stair)
                layers.append(beside.submit(_load, stack, LAYER, (LAYERS - 1 - n) * 2 * stair + stair + height))
            found = [base.result(), *(layer.result() for layer in layers)]
        looks, steps = watch.end()
    data = {"looks": looks, "steps": steps, "loads": [_figures(each) for each in found]}
    return Outcome(judge(data), data, [])


def judge(data: Mapping[str, Any]) -> list[Check]:
    """No loss, enterprise in time, all workers at the peak and the fewest at the end, no flapping."""
    loads, looks, steps = data["loads"], data["looks"], data["steps"]
    refused = sum(each["refused"] for each in loads)
    total = sum(each["scheduled"] for each in loads)
    # The base load covers the whole time, so rows that are not its own belong to the other generators, or to no answer.
    nobodys = loads[0]["rows_of_others"] - sum(each["accepted"] for each in loads[1:])
    return [
        none_of("requests without an answer, or without their one audit row", sum(each["lost"] for each in loads)),
        none_of("audit rows that no answer names", nobodys),
        none_of("requests that were accepted and then failed", sum(each["failed_after"] for each in loads)),
        none_of("enterprise requests refused or failed", sum(each["enterprise_failed"] for each in loads)),
        at_most("enterprise p95, the worst of all parts", max(each["p95_ms"] for each in loads), MOST_P95_MS, " ms"),
        at_least("workers at the height", max(look["workers"] for look in looks), MOST),
        at_most("workers in the end", looks[-1]["workers"], LEAST),
        at_most("changes of direction within one cooldown, at the most", most_turns(steps, COOLDOWN_S), 1),
        figure("changes of direction", f"{len(turns(steps))} in {len(steps)} steps"),
        figure("refused while workers were on their way", f"{refused:,} of {total:,} ({refused / total:.1%})"),
    ]


def turns(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """The times of changes of direction, in seconds."""
    pairs = itertools.pairwise(steps)
    return [later["at_s"] for early, later in pairs if early["direction"] != later["direction"]]


def most_turns(steps: Sequence[Mapping[str, Any]], cooldown_s: float) -> int:
    """The largest number of changes of direction within one cooldown."""
    when = turns(steps)
    return max((sum(begin <= at < begin + cooldown_s for at in when) for begin in when), default=0)


class Watch:
    """Records the scale advice and the number of workers until it is ended."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._began = time.monotonic()
        self._over = threading.Event()
        self._looks: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Stop; returns the observations, and the steps of the advice."""
        self._over.set()
        self._thread.join()
        return self._looks, self._steps

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                self._look()
            except (OSError, ValueError):
                continue

    def _look(self) -> None:
        advice = self._stack.operator_get("/internal/autoscale")
        at_s = round(time.monotonic() - self._began, 1)
        workers = sum(process.role == "worker" for process in self._stack.info.processes)
        kept = ("current_workers", "recommended_workers", "reason")
        self._looks.append({"at_s": at_s, "workers": workers, **{name: advice[name] for name in kept}})
        step = advice["last_step"]
        if step and (not self._steps or self._steps[-1]["after"] != step["after"]):
            self._steps.append({**step, "at_s": round(at_s - step["age_s"], 1)})


def _load(stack: Stack, rate: float, seconds: float) -> dict[str, Any]:
    return stack.bench(rate=rate, duration=seconds, warmup=0, connections=256, echo="off")


def _figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one load. `rows_of_others`: rows of the same keys from other loads."""
    audit, enterprise = found["audit"], found["tiers"]["enterprise"]
    failed_after = audit["expected"] - audit["completed_answers"]
    return {
        "scheduled": found["scheduled"],
        "lost": found["unanswered"] + audit["missing"] + audit["duplicated"] + audit["wrong_status"],
        "accepted": audit["expected"],
        "rows_of_others": audit["unexplained"],
        "failed_after": failed_after,
        "refused": found["failed"] - failed_after,
        "enterprise_failed": enterprise["failed"],
        "p95_ms": enterprise["p95_e2el_ms"],
        "errors": found["errors"],
    }
