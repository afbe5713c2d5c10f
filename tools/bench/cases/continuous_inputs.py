"""One customer whose requests an engine with continuous batching refuses, fails on, resets or breaks off, or whose clients leave.

All its requests are valid, and within its limits. Enterprise is measured beside it and alone, by turns. Health is read all the
time: no worker may become unavailable, and its checks must name the customer's tier alone.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cases.continuous_setup import CAPACITY, QUICK, Plan, Run, in_thread, run_side, stack_before, through
from cases.continuous_tiers import wait_for_key
from cases.outcome import Check, Outcome, at_least, at_most, figure, none_of, over
from cases.stack import Stack
from chat_load.connection import Answer
from chat_load.figures import latencies
from chat_load.generator import Span
from chat_load.plan import Load, mean_tokens
from engine.process import running_engine

MOST_SLOWER = 1.2
ENTERPRISE = 0.4
RATES = {"!refused": 5.0, "!overflow": 5.0, "!failed": 3.0, "!reset": 2.0, "!broken": 3.0, "left": 3.0, "long": 0.15}
"""Requests/s of the customer: prompts of tools/bench/engine/faults.py, clients that leave, and the longest answers."""
LEAVES_S, LEFT_TOKENS, LONG_TOKENS, BROKEN_TOKENS = 1.0, 400, 2000, 80
CUSTOMER = "INSERT INTO customers (name, tier) VALUES ('inputs', 'free')"
KEY = "SELECT issue_api_key('inputs', 'bench')"
DRAIN_S = 20.0
HEALTH_S = 0.25
LEAST_READINGS = 1.0
"""Per second: without readings the checks of health would show nothing."""


def run(*, quick: bool, plan: Plan | None = None) -> Outcome:
    """Measure enterprise alone and beside the customer, by turns, on one stack."""
    plan = plan or (QUICK if quick else Plan())
    data: dict[str, Any] = {}
    with running_engine() as engine, stack_before(engine, plan, 1, limited=True) as stack:
        stack.sql(CUSTOMER)
        key = str(stack.value(KEY))
        wait_for_key(stack, key)
        side = through(stack, "enterprise")
        good = Load(name="enterprise", rate=ENTERPRISE * CAPACITY / mean_tokens(), stream=True)
        turns: dict[str, list[Run]] = {"alone": [], "beside": []}
        data["health"] = {"alone": [], "beside": []}
        run_side(side, engine, [good], Span(0.0, 10.0, DRAIN_S))  # A stack that has not served yet knows no capacity.
        for _ in range(plan.rounds):
            for name, loads, seconds in (
                ("alone", [good], plan.seconds),
                ("beside", [good, *bad(key)], plan.seconds),
            ):
                with read_health(stack, data["health"][name]):
                    turns[name].append(run_side(side, engine, loads, Span(plan.warm_s, seconds, DRAIN_S)))
    for name, runs in turns.items():
        data[name] = latencies(
            [answer for each in runs for answer in each.answers if answer.chat.load.name == good.name]
        )
    data["codes"] = codes(
        answer for each in turns["beside"] for answer in each.answers if answer.chat.load.name != good.name
    )
    data["engine"] = {name: [each.figures["running"] for each in runs] for name, runs in turns.items()}
    data["seconds"] = plan.rounds * plan.seconds
    return Outcome(judge(data), data, notes(data))


def bad(key: str) -> list[Load]:
    """The loads of the customer. Prompts begin with the name of their load."""
    tokens = {"left": LEFT_TOKENS, "long": LONG_TOKENS}
    return [
        Load(
            name=name,
            key=key,
            rate=rate,
            stream=name in ("!broken", "left", "long"),
            tokens=tokens.get(name, BROKEN_TOKENS),
            leaves_s=LEAVES_S * (name == "left"),
        )
        for name, rate in RATES.items()
    ]


@contextmanager
def read_health(stack: Stack, found: list[dict[str, Any]]) -> Iterator[None]:
    """Add what health says to `found`, several times a second, from a thread."""

    def read(stopped: threading.Event) -> None:
        while not stopped.wait(HEALTH_S):
            health = stack.operator_get("/internal/health")
            checks = [each for name in health["checks"] for each in health["checks"][name]]
            refused = health["checks"].get("tiers:refusals", [{}])[0]
            found.append(
                {
                    "at_s": time.monotonic(),
                    "status": health["status"],
                    "healthy_gpus": health["healthy_gpus"],
                    "codes": sorted({each["code"] for each in checks if "code" in each}),
                    "reasons": health["reasons"],
                    "refused": refused.get("output", ""),
                }
            )

    with in_thread(read):
        yield


def codes(answers: Iterator[Answer]) -> dict[str, dict[str, int]]:
    """How often each load got each end, by status and code."""
    found: dict[str, Counter[str]] = {}
    for answer in answers:
        found.setdefault(answer.chat.load.name, Counter())[f"{answer.status} {answer.code}".strip()] += 1
    return {name: dict(counts) for name, counts in found.items()}


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Compare with the targets."""
    alone, beside, health = data["alone"], data["beside"], data["health"]["beside"]
    checks = [figure("seconds beside the customer", f"{data['seconds']:,.0f}")]
    for name, kind in (("first token", "first_p99_ms"), ("whole answer", "p99_ms")):
        checks += [
            at_most(f"enterprise {name} p99 over alone", over(beside[kind], alone[kind]), MOST_SLOWER, " x", 2),
            figure(f"enterprise {name} p99", _text(beside[kind], alone[kind])),
        ]
    return [
        *checks,
        none_of("enterprise refused or failed", sum(sum(beside[each].values()) for each in ("refused", "errors"))),
        none_of("readings of health without the worker", sum(each["healthy_gpus"] < 1 for each in health)),
        at_least("readings of health", len(health), LEAST_READINGS * data["seconds"], "", 0),
        figure("health", _counted([each["status"] for each in health])),
        figure("of the customer", _counted([each["refused"] or "nothing" for each in health])),
    ]


def _text(value: float | None, base: float | None) -> str:
    return "; alone ".join("not measured" if each is None else f"{each:,.1f} ms" for each in (value, base))


def _counted(values: Sequence[str]) -> str:
    return ", ".join(f"{count:,} x {value}" for value, count in Counter(values).most_common())


def notes(data: Mapping[str, Any]) -> list[str]:
    """The ends of the customer's requests, the reasons of health, and the engine's load."""
    reasons = Counter(reason for each in data["health"]["beside"] for reason in each["reasons"])
    running = {name: ", ".join(f"{each:.0f}" for each in runs) for name, runs in data["engine"].items()}
    return [
        *(
            f"{name}: {', '.join(f'{count:,} x {code}' for code, count in found.items())}"
            for name, found in data["codes"].items()
        ),
        *(f"health, {count:,} times: {reason}" for reason, count in reasons.most_common(10)),
        f"sequences running in the engine: alone {running['alone']}; beside {running['beside']}",
    ]
