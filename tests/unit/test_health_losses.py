"""Lost workers and gateways, replaced model processes, missing schedulers and restarted tasks in the health document."""

import pytest
from msgspec.structs import replace

from gateway.operations.health.gateway_losses import GATEWAY_LOSS_KEEP_MS, GatewayLosses, LostGateway
from gateway.operations.health.restarts import RESTART_REPORTED_MS, Restart, Restarts
from gateway.operations.health.role_checks import (
    ended_tasks,
    lost_gateways,
    repaired_keys,
    restarted,
    scheduling,
    scheduling_level,
)
from gateway.operations.health.worker_losses import WORKER_LOSS_KEEP_MS, LostWorker, WorkerLosses
from scheduler.protocol.pool_view import GatewayStats, Observation, WorkerView
from scheduler.tasks import EndedTask


def worker(
    name: str, *, healthy: bool = True, status: str = "ready", age_ms: float = 100.0, pid: int = 0
) -> WorkerView:
    return WorkerView(name, status, 0.5, 1, 100.0, 50.0, "tiny", "v1", age_ms=age_ms, healthy=healthy, model_pid=pid)


ONE, TWO = worker("gpu-1"), worker("gpu-2")
PAUSING = replace(worker("gpu-2", healthy=False, status="paused"), pausing=True)


@pytest.mark.parametrize(
    ("looks", "lost"),
    [
        # Silent, since its last heartbeat.
        ([(10_000, [ONE, TWO]), (12_100, [ONE, worker("gpu-2", healthy=False, age_ms=2100.0)])], {"gpu-2": 10_000}),
        # Healthy again.
        ([(11_000, [worker("gpu-2", healthy=False, age_ms=2000.0)]), (13_000, [TWO])], {}),
        # Starting: lost only if it was healthy before.
        ([(10_000, [ONE, worker("gpu-2", healthy=False, status="starting")])], {}),
        ([(10_000, [TWO]), (11_000, [worker("gpu-2", healthy=False, status="starting")])], {"gpu-2": 10_900}),
        # Cordoned by an operator; too slow.
        ([(1000, [TWO]), (2000, [worker("gpu-2", healthy=False, status="slow")])], {}),
        ([(1000, [TWO]), (2000, [worker("gpu-2", healthy=False, status="cordoned")])], {}),
        # A brief pause, and a pause without heartbeats.
        ([(1000, [TWO]), (2000, [PAUSING])], {}),
        ([(1000, [TWO]), (2000, [PAUSING]), (3100, [replace(PAUSING, pausing=False, age_ms=1100.0)])], {"gpu-2": 2000}),
        # Lost before this gateway started.
        ([(100_000, [worker("gpu-3", healthy=False, status="busy", age_ms=60_000.0)])], {"gpu-3": 40_000}),
        # Removed from Redis: reported for 15 minutes, the latest first.
        (
            [(1000, [ONE, TWO, worker("gpu-3")]), (2000, [ONE, TWO]), (3000, [ONE])],
            {"gpu-2": 3000, "gpu-3": 2000},
        ),
        ([(1000, [ONE, TWO]), (2000, [ONE]), (2000 + WORKER_LOSS_KEEP_MS, [ONE])], {}),
    ],
)
def test_lost_workers(looks: list[tuple[int, list[WorkerView]]], lost: dict[str, int]) -> None:
    """A worker is lost from its last heartbeat until it is healthy again, unless an operator took it away."""
    losses = WorkerLosses()
    for now_ms, workers in looks:
        losses.update(workers, now_ms)

    assert losses.all == tuple(LostWorker(name, at_ms) for name, at_ms in lost.items())


def test_a_failed_start_is_not_reported_once_the_worker_was_started_again() -> None:
    """A worker without a name has another id at each start; one with a name has the same, and stays until it starts."""
    failed = replace(worker("host-7", healthy=False, status="failed", age_ms=3000.0), host="host", pid=7)
    named = replace(failed, id="gpu-7")
    elder = replace(worker("host-2"), host="host", pid=2)
    again = replace(worker("host-9", healthy=False, status="starting"), host="host", pid=9)
    losses, shown = WorkerLosses(), []
    for now_ms, workers in (
        (10_000, [elder]),
        (13_000, [elder, failed, named]),
        (14_000, [elder, failed, named, again]),
    ):
        losses.update(workers, now_ms)
        seen = losses.without_replaced(Observation(now_ms, {}, workers, [], 0, 0, 0, 0))
        shown.append([each.id for each in seen.workers])

    assert shown == [["host-2"], ["host-2", "host-7", "gpu-7"], ["host-2", "gpu-7", "host-9"]]


def test_a_lost_worker_with_a_replacement_is_not_reported() -> None:
    """Redis lists it for five minutes. A replacement serves, was first observed after the loss, and replaces one worker."""
    losses, gone = WorkerLosses(), worker("gpu-2", healthy=False, age_ms=2000.0)
    for now_ms, workers, shown, lost in (
        (10_000, [ONE, TWO], ["gpu-1", "gpu-2"], []),
        (12_000, [ONE, gone], ["gpu-1", "gpu-2"], ["gpu-2"]),
        (
            13_000,
            [ONE, gone, worker("gpu-3", healthy=False, status="starting")],
            ["gpu-1", "gpu-2", "gpu-3"],
            ["gpu-2"],
        ),
        (14_000, [ONE, gone, worker("gpu-3")], ["gpu-1", "gpu-3"], []),
        (15_000, [ONE, worker("gpu-3")], ["gpu-1", "gpu-3"], []),
        (16_000, [worker("gpu-1", healthy=False), worker("gpu-3")], ["gpu-1", "gpu-3"], ["gpu-1"]),
    ):
        losses.update(workers, now_ms)
        seen = losses.without_replaced(Observation(0, {}, list(workers), [], 0, 0, 0, 0))
        assert ([each.id for each in seen.workers], [each.worker for each in losses.all]) == (shown, lost)


def test_a_worker_that_serves_another_cell_is_not_lost() -> None:
    """It may leave within one observation; a row that it could not remove is not shown; it may return and be lost."""
    losses = WorkerLosses()
    for now_ms, workers, elsewhere, shown, lost in (
        (10_000, [ONE, TWO], [], ["gpu-1", "gpu-2"], []),
        (11_000, [ONE], [], ["gpu-1"], ["gpu-2"]),  # The other cell is observed a little later.
        (11_250, [ONE], ["gpu-2"], ["gpu-1"], []),
        (12_000, [ONE, worker("gpu-2", healthy=False)], ["gpu-2"], ["gpu-1"], []),
        (13_000, [ONE, TWO], ["gpu-2"], ["gpu-1", "gpu-2"], []),
        (14_000, [ONE, worker("gpu-2", healthy=False)], [], ["gpu-1", "gpu-2"], ["gpu-2"]),
    ):
        losses.update(workers, now_ms, elsewhere)
        seen = losses.without_replaced(Observation(0, {}, list(workers), [], 0, 0, 0, 0), elsewhere)
        assert ([each.id for each in seen.workers], [each.worker for each in losses.all]) == (shown, lost)


def test_a_replacement_may_start_when_no_worker_is_listed() -> None:
    """The last worker was lost, and Redis does not list it any more when another one starts."""
    losses = WorkerLosses()
    for now_ms, workers, lost in ((10_000, [ONE], []), (11_000, [], ["gpu-1"]), (12_000, [TWO], [])):
        losses.update(workers, now_ms)
        assert [each.worker for each in losses.all] == lost


def test_a_new_model_process_is_reported_for_three_seconds() -> None:
    """Whether or not the worker was observed without a process; not if the worker itself was away."""
    restarts = Restarts()
    restarts.update([worker("gpu-1", pid=10), worker("gpu-2", pid=20), worker("gpu-3", pid=30)], 10_000)
    restarts.update([worker("gpu-1", pid=11), TWO], 10_250)
    restarts.update([worker("gpu-1", pid=11), worker("gpu-2", pid=21), worker("gpu-3", pid=31)], 10_500)

    assert restarts.all == (Restart("gpu-2", 10_500), Restart("gpu-1", 10_250))
    assert restarts.last_minute == 2
    for now_ms, left in ((10_250, (Restart("gpu-2", 10_500),)), (10_500, ())):
        restarts.update([worker("gpu-1", pid=11), worker("gpu-2", pid=21)], now_ms + RESTART_REPORTED_MS)
        assert restarts.all == left


def test_restarts_are_a_finding_with_names_and_times() -> None:
    """At most five model processes are named."""
    one = restarted([Restart("gpu-1", 3_600_000)])
    reason = restarted([Restart(f"gpu-{n}", 0) for n in range(7)]).reason or ""

    assert (one.level, one.value) == ("degraded", 1)
    assert "gpu-1" in (one.reason or "")
    assert "01:00:00 UTC" in (one.reason or "")
    assert [f"gpu-{n} " in reason for n in range(7)] == [True] * 5 + [False] * 2
    assert reason.endswith("and 2 more.")
    assert restarted([]).level == "healthy"


def observation(scheduler_age_ms: float | None = 50.0, pass_age_ms: float | None = None, **ages: float) -> Observation:
    gateways = [GatewayStats(name, 0.0, {}) for name in ages]
    return Observation(0, {}, [], gateways, 0, 0, 0, 0, ages, scheduler_age_ms, pass_age_ms)


@pytest.mark.parametrize(
    ("age_ms", "pass_age_ms", "level"),
    [
        (999.0, None, "healthy"),
        (50.0, 50.0, "healthy"),
        (1000.0, None, "degraded"),
        (1999.0, None, "degraded"),
        (2000.0, None, "down"),
        (None, None, "down"),
        (2500.0, 100.0, "degraded"),
        (None, 999.0, "degraded"),
        (None, 1000.0, "down"),
    ],
)
def test_missing_schedulers(age_ms: float | None, pass_age_ms: float | None, level: str) -> None:
    """Degraded after one second, down after two, unless gateways do the work of a scheduler."""
    finding = scheduling(observation(age_ms, pass_age_ms))

    assert finding.level == level
    assert bool(finding.reason) == (level != "healthy")
    assert scheduling(None).level == "healthy"  # The check of Redis reports it.
    registering = scheduling(observation(age_ms, pass_age_ms), registering=True)
    assert registering.level == ("degraded" if age_ms is None else level)


@pytest.mark.parametrize(
    ("age_ms", "pass_age_ms", "level"),
    [
        (None, 50.0, "healthy"),
        (9000.0, 999.0, "healthy"),
        (50.0, 50.0, "healthy"),
        (None, 1000.0, "degraded"),
        (None, 2000.0, "down"),
        (None, None, "down"),
    ],
)
def test_gateways_schedule_where_no_schedulers_are_deployed(
    age_ms: float | None, pass_age_ms: float | None, level: str
) -> None:
    """The missing schedulers are no problem; gateways that do not schedule either are."""
    finding = scheduling(observation(age_ms, pass_age_ms), expected=False)

    assert finding.level == scheduling_level(observation(age_ms, pass_age_ms), expected=False) == level
    assert bool(finding.reason) == (level != "healthy")


def test_lost_gateways_are_a_finding_with_names_and_times() -> None:
    """At most three gateways are named; the value counts those alive."""
    one = lost_gateways(observation(g1=0.0, g2=1200.0), [LostGateway("g2", 3_600_000)])
    many = lost_gateways(observation(g9=0.0), [LostGateway(f"g{n}", 0) for n in range(5)]).reason or ""
    none = lost_gateways(observation(g1=0.0, g2=999.0), [])

    assert (one.level, one.value) == ("degraded", 1)
    assert "g2 (last heartbeat at 01:00:00 UTC)" in (one.reason or "")
    assert [f"g{n} " in many for n in range(5)] == [True] * 3 + [False] * 2
    assert (none.level, none.value, none.reason) == ("healthy", 2, None)


@pytest.mark.parametrize(
    ("looks", "lost"),
    [
        # Silent, also after Redis has removed it, until another replaces it.
        ([(10_000, {"g2": 100.0}), (11_000, {"g2": 1100.0}), (12_000, {})], {"g2": 9_900}),
        ([(10_000, {"g2": 100.0}), (11_000, {"g2": 1100.0}), (12_000, {}), (13_000, {"g3": 0.0})], {}),
        # One of two that were suspended returns.
        (
            [
                (10_000, {"g2": 100.0, "g3": 100.0}),
                (13_000, {"g2": 3100.0, "g3": 3100.0}),
                (13_250, {"g2": 100.0, "g3": 3350.0}),
            ],
            {"g3": 9_900},
        ),
        # Shuts down: it leaves the list before it is silent.
        ([(10_000, {"g2": 100.0, "g3": 100.0}), (11_000, {"g3": 100.0})], {}),
        # Not replaced: its removal counts as intended after five minutes.
        ([(10_000, {"g2": 0.0}), (11_000, {"g2": 1000.0}), (9_999 + GATEWAY_LOSS_KEEP_MS, {})], {"g2": 10_000}),
        ([(10_000, {"g2": 0.0}), (11_000, {"g2": 1000.0}), (10_001 + GATEWAY_LOSS_KEEP_MS, {})], {}),
    ],
)
def test_lost_gateways(looks: list[tuple[int, dict[str, float]]], lost: dict[str, int]) -> None:
    """A gateway is lost from its last heartbeat until it returns, is replaced, or five minutes have passed."""
    losses = GatewayLosses()
    for now_ms, ages in looks:
        losses.update({"g1": 0.0} | ages, now_ms)

    assert losses.all == tuple(LostGateway(name, at_ms) for name, at_ms in lost.items())


def test_a_new_gateway_replaces_one_lost_gateway_once_it_is_unlisted() -> None:
    """While it is listed it is reported, since its requests were lost."""
    losses, g2, g3 = GatewayLosses(), LostGateway("g2", 9_900), LostGateway("g3", 10_700)
    for now_ms, ages, lost in (
        (10_000, {"g2": 100.0, "g3": 100.0}, ()),
        (10_800, {"g2": 900.0, "g3": 100.0, "g4": 0.0}, ()),
        (11_800, {"g2": 1900.0, "g3": 1100.0, "g4": 0.0}, (g3, g2)),
        (12_200, {"g3": 1500.0, "g4": 0.0}, (g3,)),
        (13_000, {"g4": 0.0}, (g3,)),
        (14_000, {"g4": 0.0, "g5": 0.0}, ()),
    ):
        losses.update({"g1": 0.0} | ages, now_ms)
        assert losses.all == lost


@pytest.mark.parametrize(("age_ms", "lost"), [(100.0, (LostGateway("g1", 9_900),)), (250.0, ()), (1500.0, ())])
def test_a_gateway_that_replaces_a_lost_one_does_not_report_it(age_ms: float, lost: tuple[LostGateway, ...]) -> None:
    """A gateway reports only those that were alive at its first observation."""
    losses = GatewayLosses()
    for now_ms, ages in ((10_000, {"g1": age_ms}), (11_000, {"g1": age_ms + 1000.0}), (12_000, {})):
        losses.update(ages | {"g2": 100.0, "g3": 0.0}, now_ms)

    assert losses.all == lost


def test_ended_tasks_and_repaired_keys_of_all_processes() -> None:
    """Tasks of this gateway, of another one and of a scheduler count once; a repaired key has a check of its own."""
    own = EndedTask("callbacks", "UnicodeError", 3, 0.0)
    others = [GatewayStats(name, 0.0, {}, ended_tasks=["the task 'beat' returned"]) for name in ("g1", "g2")]
    notices = ["scheduler s-1: the task 'dispatcher' returned", "Redis key leases had a wrong type: it was renamed"]
    seen = Observation(0, {}, [], others, 0, 0, 0, 0, notices=notices)
    ended, repaired = ended_tasks((own,), seen, "g1"), repaired_keys(seen)

    assert (ended.level, ended.value) == ("degraded", 3)
    assert all(name in (ended.reason or "") for name in ("callbacks", "UnicodeError", "g2: the task", "scheduler s-1"))
    assert (repaired.level, repaired.value) == ("degraded", 1)
    for empty in (None, Observation(0, {}, [], [], 0, 0, 0, 0)):
        assert ended_tasks((), empty, "g1").level == repaired_keys(empty).level == "healthy"
