"""A sequence of faults under load: health and the dashboard report each within two seconds of its detection, with what to do.

The table has the documented time until a fault can be detected. The time since the fault itself is printed.
"""

import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from admin import sql
from eventually import eventually
from fault_scenario import FaultScenario, Heal, fault_scenario
from health_observers import Document
from stack import start_stack

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
STACK = ("--backend", "simulated:100", "--workers", "4", "--max-batch-size", "4")
WORKERS = 4
REPORTED_S = 2.0
HEALED_S = 30.0

GONE_S = 1.0
"""TIERLANE_GONE_MS: a worker, gateway or scheduler without a heartbeat for so long is lost."""

HEARTBEAT_S = 0.25
"""Of workers and gateways, and of the observations of gateways."""

BREAKER_S = 0.5
"""The time until an unresponsive Redis is detected (docs/guarantees.md)."""

POLLS_S = 3.0
"""Three polls of the catalog; a closed connection is detected at once."""

RATES_S = 2.0
"""The window of the rates of gateways."""

GPU_CAP_S = 3.0
"""The hard cap of a batch until twenty of its size were measured; then it is four times their p99."""


class Fault(NamedTuple):
    """One fault: how it is injected, after how many seconds it can be detected, and the expected health.

    `codes`: a failing check has one of these, an action, and a runbook that exists. `reason`: also on the dashboard.
    """

    name: str
    inject: Callable[[FaultScenario], Awaitable[Heal]]
    detectable_s: float
    status: str
    healthy_gpus: int | None  # None: any, since the fault heals itself.
    reason: str
    codes: tuple[str, ...]


RESTARTS = ("gpu_lost", "model_restarted", "model_failed", "worker_starting")
"""While a worker or its model process is replaced."""

REDIS_LOST = ("redis_not_responding", "direct_mode", "workers_registering")
OVERLOAD = ("capacity_exceeded", "queues_too_long")

FAULTS = (
    Fault("a worker is killed", lambda s: s.kill("worker", "worker-1"), GONE_S, "degraded", None, "worker-1", RESTARTS),
    Fault(
        "two of four workers are suspended",
        lambda s: s.suspend("worker", "worker-1", "worker-2"),
        GONE_S,
        "degraded",
        2,
        "2 of 4 GPUs are not healthy: worker-[12].*; worker-[12]",
        ("gpu_lost",),
    ),
    Fault(
        "all workers are suspended",
        lambda s: s.suspend("worker"),
        GONE_S,
        "down",
        0,
        "4 of 4 GPUs .*All requests get 503 no_capacity",
        ("gpu_lost",),
    ),
    Fault(
        "a model hangs",
        lambda s: s.suspend("model", "worker-3-model"),
        GPU_CAP_S,
        "degraded",
        None,
        "worker-3",
        RESTARTS,
    ),
    Fault(
        "the scheduler is suspended",
        lambda s: s.suspend("scheduler"),
        GONE_S,
        "degraded",
        4,
        "[Nn]o scheduler",
        ("no_scheduler",),
    ),
    Fault(
        "Redis is suspended",
        lambda s: s.suspend("redis"),
        BREAKER_S,
        "degraded",
        4,
        "Redis is not responding",
        ("direct_mode",),
    ),
    Fault("Redis is killed", lambda s: s.kill("redis", "redis"), HEARTBEAT_S, "degraded", None, "Redis", REDIS_LOST),
    Fault(
        "PostgreSQL is suspended",
        lambda s: s.suspend("postgres"),
        POLLS_S,
        "degraded",
        4,
        "PostgreSQL.*catalog|catalog.*PostgreSQL",
        ("catalog_stale",),
    ),
    Fault(
        "a gateway is killed",
        FaultScenario.kill_second_gateway,
        GONE_S,
        "degraded",
        4,
        "1 gateway is lost",
        ("gateway_lost",),
    ),
    Fault(
        "a tier is paused",
        lambda s: s.execute(
            "UPDATE tiers SET paused = true WHERE name = 'paid'", "UPDATE tiers SET paused = false WHERE name = 'paid'"
        ),
        0.0,
        "degraded",
        4,
        "paused tiers: paid",
        ("tier_paused",),
    ),
    Fault(
        "a worker is cordoned",
        lambda s: s.execute(
            "INSERT INTO cordons (worker, reason) VALUES ('worker-4', 'a test')",
            "DELETE FROM cordons WHERE worker = 'worker-4'",
        ),
        HEARTBEAT_S,
        "degraded",
        3,
        "worker-4 is cordoned",
        ("worker_cordoned",),
    ),
    Fault("free is flooded", FaultScenario.flood, RATES_S, "degraded", 4, "Rejecting .* of free requests", OVERLOAD),
)


def reports(fault: Fault) -> Callable[[Document], bool]:
    """Whether a document reports the fault: status, healthy GPUs, and a reason that names it."""

    def matches(document: Document) -> bool:
        counted = fault.healthy_gpus is None or document["healthy_gpus"] == fault.healthy_gpus
        named = any(re.search(fault.reason, reason) for reason in document["reasons"])
        advised = "checks" not in document or any(has_advice(check, fault.codes) for check in checks(document))
        return document["status"] == fault.status and counted and named and advised

    return matches


def checks(document: Document) -> list[Document]:
    return [check for several in document["checks"].values() for check in several]


def has_advice(check: Document, codes: tuple[str, ...]) -> bool:
    """Whether a check has one of these codes, with an action and a runbook that exists."""
    return check.get("code") in codes and bool(check["action"]) and (ROOT / check["runbook"]).is_file()


def healthy(document: Document) -> bool:
    return document["status"] == "healthy" and document["healthy_gpus"] == WORKERS


async def observed(scenario: FaultScenario, fault: Fault) -> dict[str, float]:
    """Inject the fault, wait until all observers report it, and heal it; returns the seconds until then by observer."""
    began = time.monotonic()
    heal = await fault.inject(scenario)
    watching = scenario.observers

    def reported() -> dict[str, float]:
        found = {each.name: each.first(began, reports(fault)) for each in watching}
        known = {name: seconds for name, seconds in found.items() if seconds is not None}
        return known if len(known) == len(watching) else {}

    def agreed() -> bool:
        return fault.healthy_gpus is None or all(each.shows(reports(fault)) for each in watching)

    try:
        found = await eventually(reported, f"{fault.name}: reported by all", fault.detectable_s + 10.0)
        await eventually(agreed, f"{fault.name}: reported by all at one time", REPORTED_S)
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *(each.log(began) for each in watching)])) from error
    finally:
        await heal()
    return found


async def healed(scenario: FaultScenario) -> float:
    """The seconds until all observers report a healthy stack at one time."""
    began = time.monotonic()

    def all_healthy() -> bool:
        return all(each.shows(healthy) for each in scenario.observers)

    try:
        await eventually(all_healthy, "all observers report a healthy stack", HEALED_S)
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *(each.log(began) for each in scenario.observers)])) from error
    return time.monotonic() - began


def line(fault: Fault, reported: dict[str, float], healed_s: float) -> str:
    health = max(seconds for name, seconds in reported.items() if name.endswith("health"))
    page = max(seconds for name, seconds in reported.items() if name.endswith("page"))
    late = " LATE" if max(health, page) > fault.detectable_s + REPORTED_S else ""
    return f"{fault.name:32} detectable {fault.detectable_s:4.2f}  health {health:5.2f}  page {page:5.2f}  healed {healed_s:5.1f}{late}"


async def test_health_and_dashboard_report_every_fault_in_time(tmp_path: Path) -> None:
    """Both gateways report each fault and the return to health, and no accepted request is lost."""
    late: list[str] = []
    with start_stack(tmp_path / "stack", *STACK) as stack:
        await stack.healthy(WORKERS)
        async with fault_scenario(stack, tmp_path) as scenario:
            await healed(scenario)
            for fault in FAULTS:
                reported = await observed(scenario, fault)
                result = line(fault, reported, await healed(scenario))
                print(result, flush=True)
                late += [result] if "LATE" in result else []
            await scenario.stop_load()
            await nothing_lost(scenario)
    assert late == []


async def nothing_lost(scenario: FaultScenario) -> None:
    """Every accepted request has ended, and its audit row has the status that the client got."""
    answers = [answer for several in scenario.answers.values() for answer in several]
    status = {answer.request_id: answer.status for answer in answers if answer.request_id}
    print(
        f"{len(answers)} requests, {sum(a.status == 200 for a in answers)} with their output, {scenario.without_response} without a response"
    )

    async def all_ended() -> bool:
        """Requests in direct mode are audited from the spool of their gateway."""
        not_ended = await sql(scenario.stack, "SELECT id FROM requests WHERE status IN ('queued', 'processing')")
        rows = await scenario.stack.rows([i for i in status if status[i] == 200])
        return not not_ended and all(rows.values())

    await eventually(all_ended, "every accepted request has ended", 30.0)
    rows = {i: found for i, found in (await scenario.stack.rows(list(status))).items() if found}

    assert len(status) + scenario.without_response == len(answers)  # No id is returned twice.
    assert [a for a in scenario.answers[scenario.stack.url] if a.request_id is None] == []
    assert [a for a in answers if a.status == 200 and not a.echoed] == []
    assert [i for i, found in rows.items() if len(found) > 1] == []
    assert {i: found[0]["http_status"] for i, found in rows.items()} == {i: status[i] for i in rows}
