"""Tiers and customers before an engine with continuous batching, while free customers send more than it serves.

Enterprise alone on an idle engine has shorter steps than any system can give it in a full one. So the base is also measured
with the step of a full engine (`step_as_if`): the difference to that is what the others cost it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cases.continuous_setup import (
    CAPACITY,
    PACE,
    QUICK,
    SELL_EVERYTHING,
    Plan,
    Run,
    Side,
    direct,
    run_side,
    stack_before,
    through,
)
from cases.outcome import Check, Outcome, at_least, at_most, figure, none_of, over
from cases.stack import Stack
from chat_load.connection import Answer
from chat_load.figures import latencies
from chat_load.generator import Span
from chat_load.plan import Load, mean_tokens
from engine.process import RunningEngine, running_engine

SHARES = {"enterprise": 0.1, "paid": 0.2, "free": 2.0}
QUIET, NOISY = 0.2, 3.0
LEAST_GOODPUT = 0.97
MOST_TIERS, MOST_QUIET = 1.15, 1.2
MOST_QUEUE = 2
DRAIN_S, DRAIN_QUICK_S = 45.0, 15.0
TIERS_RAISED = (
    "UPDATE tiers SET requests_per_second = 1e6, burst = 1e6, max_concurrency = 100000, tokens_per_minute = 1e12"
)
CUSTOMERS = "INSERT INTO customers (name, tier) VALUES ('quiet', 'free'), ('noisy', 'free')"
KEYS = "SELECT issue_api_key('quiet', 'bench') || ' ' || issue_api_key('noisy', 'bench')"


def run(*, quick: bool, plan: Plan | None = None) -> Outcome:
    """Measure the tiers, then two customers of one tier, on one stack."""
    plan = plan or (QUICK if quick else Plan())
    span = Span(plan.warm_s, plan.seconds, DRAIN_QUICK_S if quick else DRAIN_S)
    with running_engine() as engine, stack_before(engine, plan, 1, limited=True) as stack:
        side = through(stack)
        full = Load(clients=2 * PACE.slots)
        alone = run_side(direct(engine), engine, [full], Span(3.0, min(20.0, plan.seconds))).figures["tokens_per_s"]
        # A stack that has not served yet knows no capacity.
        run_side(side, engine, [full], Span(0.0, 10.0))
        data = {"capacity": alone, "tiers": tiers(stack, engine, side, span)}
        data["customers"] = customers(stack, engine, side, span)
    return Outcome(judge(data), data, notes(data))


def tiers(stack: Stack, engine: RunningEngine, side: Side, span: Span) -> dict[str, Any]:
    """Enterprise alone, alone with the step of a full engine, and all tiers."""
    keys = stack.info.keys
    loads = [Load(name=tier, key=keys[tier], rate=_rate(share), stream=True) for tier, share in SHARES.items()]
    return _beside(engine, side, loads, span)


def customers(stack: Stack, engine: RunningEngine, side: Side, span: Span) -> dict[str, Any]:
    """The quiet customer alone, alone with the step of a full engine, and beside the noisy one."""
    stack.sql(TIERS_RAISED, SELL_EVERYTHING, CUSTOMERS)
    quiet, noisy = str(stack.value(KEYS)).split()
    loads = [
        Load(name="quiet", key=quiet, rate=_rate(QUIET), stream=True),
        Load(name="noisy", key=noisy, rate=_rate(NOISY), stream=True),
    ]
    wait_for_key(stack, noisy)
    return _beside(engine, side, loads, span)


def wait_for_key(stack: Stack, key: str) -> None:
    """Wait until the gateways know a key."""
    stack.sql("SELECT 1")  # Waits until changes are applied.
    if stack.status_of(key) == 401:
        raise RuntimeError("The gateway does not know the new key.")


def _rate(share: float) -> float:
    return share * CAPACITY / mean_tokens()


def _beside(engine: RunningEngine, side: Side, loads: Sequence[Load], span: Span) -> dict[str, Any]:
    """The first load alone, then beside the others."""
    alone = run_side(side, engine, loads[:1], span)
    engine.control(step_as_if=PACE.slots)
    try:
        alone_full = run_side(side, engine, loads[:1], span)
    finally:
        engine.control(step_as_if=0)
    # What waits for a slot at the end of the window is not waited for.
    beside = run_side(side, engine, loads, replace(span, drain_s=span.drain_s / 3))
    return {
        "alone": alone.figures,
        "alone_full": alone_full.figures,
        "all": beside.figures,
        "each": {load.name: latencies(_of(beside, load)) for load in loads},
    }


def _of(run: Run, load: Load) -> list[Answer]:
    return [answer for answer in run.answers if answer.chat.load.name == load.name]


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Compare with the targets."""
    flood, pair = data["tiers"], data["customers"]
    enterprise, quiet = flood["each"]["enterprise"], pair["each"]["quiet"]
    checks = [
        at_least(
            "tiers: goodput over the engine's alone",
            over(_goodput(flood["all"]), data["capacity"]),
            LEAST_GOODPUT,
            " x",
            2,
        ),
        none_of("tiers: enterprise refused", sum(enterprise["refused"].values())),
        none_of("tiers: enterprise errors", sum(enterprise["errors"].values())),
    ]
    for name, kind in (("first token", "first_p99_ms"), ("time per token", "token_p99_ms")):
        checks += _beside_alone(f"tiers: enterprise {name} p99", enterprise[kind], flood, kind, MOST_TIERS)
    checks += [
        at_most("tiers: engine queue p99", flood["all"]["waiting_p99"], MOST_QUEUE),
        at_least(
            "customers: goodput over the engine's alone",
            over(_goodput(pair["all"]), data["capacity"]),
            LEAST_GOODPUT,
            " x",
            2,
        ),
        none_of("customers: quiet one refused", sum(quiet["refused"].values())),
        none_of("customers: quiet one errors", sum(quiet["errors"].values())),
        *_beside_alone("customers: quiet one p99", quiet["p99_ms"], pair, "p99_ms", MOST_QUIET),
        figure("customers: quiet one first token p99", _over_text(quiet["first_p99_ms"], pair, "first_p99_ms")),
        at_most("customers: engine queue p99", pair["all"]["waiting_p99"], MOST_QUEUE),
    ]
    return checks


def _beside_alone(name: str, value: float | None, found: Mapping[str, Any], kind: str, most: float) -> list[Check]:
    return [
        at_most(f"{name} over alone", over(value, found["alone"][kind]), most, " x", 2),
        at_most(
            f"{name} over alone at the step of a full engine", over(value, found["alone_full"][kind]), most, " x", 2
        ),
        figure(f"{name}", _over_text(value, found, kind)),
    ]


def _over_text(value: float | None, found: Mapping[str, Any], kind: str) -> str:
    values = (value, found["alone"][kind], found["alone_full"][kind])
    texts = ["not measured" if each is None else f"{each:,.1f} ms" for each in values]
    return f"{texts[0]}; alone {texts[1]}; alone at the full step {texts[2]}"


def _goodput(found: Mapping[str, Any]) -> float:
    """Tokens/s without those of requests whose client left."""
    return float(found["tokens_per_s"] - found["wasted_per_s"])


def notes(data: Mapping[str, Any]) -> list[str]:
    """Answers, refusals and errors of each load."""
    return [
        f"{kind}, {name}: {found['answers']} answers, first token p50 {found['first_p50_ms'] or 0:,.0f} ms, p99 "
        f"{found['first_p99_ms'] or 0:,.0f} ms; refused {found['refused']}, errors {found['errors']}"
        for kind in ("tiers", "customers")
        for name, found in data[kind]["each"].items()
    ]
