"""Lost workers and gateways, restarted model processes, and the checks of schedulers and background tasks."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from gateway.operations.health_losses import (
    GATEWAY_LOSS_KEEP_MS,
    LOSS_KEEP_MS,
    MOST_RESTARTS_NAMED,
    RESTART_REPORTED_MS,
    GatewayLosses,
    Loss,
    Losses,
    LostGateway,
    Restart,
    Restarts,
    ended_tasks,
    lost_gateways,
    repaired_keys,
    restarted,
    scheduling,
    silent_gateways,
)
from gateway.operations.health_model import shortened, time_of_day
from scheduler.protocol.pool_view import GatewayStats, Observation, WorkerView


def worker(
    name: str, *, healthy: bool = True, status: str = "ready", age_ms: float = 100.0, pid: int = 0
) -> WorkerView:
    return WorkerView(name, status, 0.5, 1, age_ms, healthy, 100.0, 50.0, "tiny", "v1", model_pid=pid)


def test_a_silent_worker_is_lost_since_its_last_heartbeat() -> None:
    """Until it is healthy again."""
    losses = Losses()
    losses.update([worker("gpu-1"), worker("gpu-2")], 10_000)
    losses.update([worker("gpu-1"), worker("gpu-2", healthy=False, age_ms=1100.0)], 11_100)
    losses.update([worker("gpu-1"), worker("gpu-2", healthy=False, age_ms=2100.0)], 12_100)

    assert losses.all == (Loss("gpu-2", 10_000),)
    losses.update([worker("gpu-1"), worker("gpu-2")], 13_000)
    assert losses.all == ()


def test_a_starting_worker_is_lost_only_if_it_served_before() -> None:
    """Then its model was lost."""
    losses = Losses()
    losses.update([worker("gpu-1"), worker("gpu-2", healthy=False, status="starting")], 10_000)
    assert losses.all == ()
    losses.update(
        [worker("gpu-1", healthy=False, status="down"), worker("gpu-2", healthy=False, status="starting")], 11_000
    )

    assert losses.all == (Loss("gpu-1", 10_900),)


def test_a_cordoned_worker_is_not_lost() -> None:
    """An operator cordoned it."""
    losses = Losses()
    losses.update([worker("gpu-1"), worker("gpu-2")], 1000)
    losses.update([worker("gpu-1"), worker("gpu-2", healthy=False, status="cordoned")], 2000)

    assert losses.all == ()


def test_a_pausing_worker_is_lost_only_if_it_is_silent() -> None:
    """A brief pause is not a loss."""
    losses = Losses()
    pausing = replace(worker("gpu-1", healthy=False, status="paused"), pausing=True)
    losses.update([worker("gpu-1")], 1000)
    losses.update([pausing], 2000)
    assert losses.all == ()
    losses.update([replace(pausing, pausing=False, age_ms=1100.0)], 3100)

    assert losses.all == (Loss("gpu-1", 2000),)


def test_a_new_gateway_reports_workers_that_were_lost_before() -> None:
    """According to their last status."""
    losses = Losses()
    losses.update([worker("gpu-3", healthy=False, status="busy", age_ms=60_000.0)], 100_000)

    assert losses.all == (Loss("gpu-3", 40_000),)


def test_a_removed_worker_is_reported_for_fifteen_minutes() -> None:
    """The latest loss is first."""
    losses = Losses()
    losses.update([worker("gpu-1"), worker("gpu-2"), worker("gpu-3")], 1000)
    losses.update([worker("gpu-1"), worker("gpu-2")], 2000)
    losses.update([worker("gpu-1")], 3000)

    assert losses.all == (Loss("gpu-2", 3000), Loss("gpu-3", 2000))
    losses.update([worker("gpu-1")], 2000 + LOSS_KEEP_MS)
    assert losses.all == (Loss("gpu-2", 3000),)


def test_a_new_model_process_is_reported_for_three_seconds() -> None:
    """Whether or not the worker was observed without a process."""
    restarts = Restarts()
    restarts.update([worker("gpu-1", pid=10), worker("gpu-2", pid=20)], 10_000)
    restarts.update([worker("gpu-1", pid=11), worker("gpu-2")], 10_250)
    restarts.update([worker("gpu-1", pid=11), worker("gpu-2", pid=21)], 10_500)

    assert restarts.all == (Restart("gpu-2", 10_500), Restart("gpu-1", 10_250))
    restarts.update([worker("gpu-1", pid=11), worker("gpu-2", pid=21)], 10_250 + RESTART_REPORTED_MS)
    assert restarts.all == (Restart("gpu-2", 10_500),)
    restarts.update([worker("gpu-1", pid=11), worker("gpu-2", pid=21)], 10_500 + RESTART_REPORTED_MS)
    assert restarts.all == ()


def test_a_worker_that_was_removed_meanwhile_is_not_a_restart() -> None:
    """Nor is one that reports its first process id."""
    restarts = Restarts()
    restarts.update([worker("gpu-1", pid=10)], 10_000)
    restarts.update([worker("gpu-2")], 11_000)
    restarts.update([worker("gpu-1", pid=11), worker("gpu-2", pid=20)], 12_000)

    assert restarts.all == ()


def test_the_reason_of_restarts_names_workers_and_times() -> None:
    """At most five of them."""
    one = restarted([Restart("gpu-1", 3_600_000)])
    many = restarted([Restart(f"gpu-{n}", 0) for n in range(MOST_RESTARTS_NAMED + 2)])

    assert (one.level, one.value) == ("degraded", 1)
    assert one.reason == "gpu-1's model process restarted at 01:00:00 UTC."
    assert (many.reason or "").startswith("7 model processes restarted: gpu-0 (at 00:00:00 UTC), ")
    assert (many.reason or "").endswith(" and 2 more.")
    assert restarted([]).level == "healthy"


NO_BATCHES = "no batches are formed, and queued requests time out."
GATEWAYS = "gateways form the batches and write the audit meanwhile. Start a scheduler."


def observation(
    scheduler_age_ms: float | None = 50.0, pass_age_ms: float | None = None, **ages_ms: float
) -> Observation:
    gateways = [GatewayStats(name, 0.0, {}) for name in ages_ms]
    return Observation(0, {}, [], gateways, 0, 0, 0, 0, ages_ms, scheduler_age_ms, pass_age_ms)


@pytest.mark.parametrize(
    ("age_ms", "pass_age_ms", "level", "reason"),
    [
        (0.0, None, "healthy", None),
        (999.0, None, "healthy", None),
        (50.0, 50.0, "healthy", None),
        (1000.0, None, "degraded", f"No scheduler has been active for 1.0 s: {NO_BATCHES}"),
        (1999.0, None, "degraded", f"No scheduler has been active for 2.0 s: {NO_BATCHES}"),
        (2000.0, None, "down", f"No scheduler has been active for 2.0 s: {NO_BATCHES}"),
        (None, None, "down", f"No scheduler is known: {NO_BATCHES}"),
        (2500.0, 100.0, "degraded", f"No scheduler has been active for 2.5 s: {GATEWAYS}"),
        (None, 999.0, "degraded", f"No scheduler is known: {GATEWAYS}"),
        (None, 1000.0, "down", f"No scheduler is known: {NO_BATCHES}"),
    ],
)
def test_missing_schedulers(age_ms: float | None, pass_age_ms: float | None, level: str, reason: str | None) -> None:
    """Degraded after one second, down after two, unless gateways do their work."""
    found = scheduling(observation(age_ms, pass_age_ms))

    assert (found.level, found.reason) == (level, reason)


def test_without_an_observation_schedulers_are_not_reported() -> None:
    """The check of Redis reports it."""
    found = scheduling(None)

    assert (found.level, found.value) == ("healthy", None)


def test_lost_gateways_are_named_with_their_last_heartbeat() -> None:
    """At most three of them; the others are counted."""
    one = lost_gateways(observation(g1=0.0, g2=1200.0), [LostGateway("g2", 3_600_000)])
    many = lost_gateways(observation(g9=0.0), [LostGateway(f"g{n}", 0) for n in range(5)]).reason or ""

    assert (one.level, one.value) == ("degraded", 1)
    assert one.reason == "1 gateway is lost: g2 (last heartbeat at 01:00:00 UTC); 1 alive."
    assert many.startswith("5 gateways are lost: g0 (")
    assert many.endswith(" and 2 more; 1 alive.")


def test_gateways_with_heartbeats_are_healthy() -> None:
    """The value is their number."""
    found = lost_gateways(observation(g1=0.0, g2=999.0), [])

    assert (found.level, found.value, found.reason) == ("healthy", 2, None)


def test_a_silent_gateway_is_lost_until_another_replaces_it() -> None:
    """Also after Redis has removed it."""
    losses = GatewayLosses()
    losses.update({"g1": 0.0, "g2": 100.0}, 10_000)
    losses.update({"g1": 0.0, "g2": 1100.0}, 11_000)
    losses.update({"g1": 0.0}, 12_000)
    assert losses.all == (LostGateway("g2", 9_900),)
    losses.update({"g1": 0.0, "g3": 0.0}, 13_000)

    assert losses.all == ()


def test_a_gateway_that_returns_is_not_lost() -> None:
    """It, or Redis, was suspended."""
    losses = GatewayLosses()
    losses.update({"g1": 0.0, "g2": 100.0, "g3": 100.0}, 10_000)
    losses.update({"g1": 0.0, "g2": 3100.0, "g3": 3100.0}, 13_000)
    losses.update({"g1": 0.0, "g2": 100.0, "g3": 3350.0}, 13_250)

    assert losses.all == (LostGateway("g3", 9_900),)


def test_a_replaced_gateway_is_reported_while_it_is_listed() -> None:
    """Its requests were lost. A new gateway replaces one, not two."""
    losses = GatewayLosses()
    losses.update({"g1": 0.0, "g2": 100.0, "g3": 100.0}, 10_000)
    losses.update({"g1": 0.0, "g2": 900.0, "g3": 100.0, "g4": 0.0}, 10_800)
    assert losses.all == ()
    losses.update({"g1": 0.0, "g2": 1900.0, "g3": 1100.0, "g4": 0.0}, 11_800)
    assert losses.all == (LostGateway("g3", 10_700), LostGateway("g2", 9_900))
    losses.update({"g1": 0.0, "g3": 1500.0, "g4": 0.0}, 12_200)
    assert losses.all == (LostGateway("g3", 10_700),)
    losses.update({"g1": 0.0, "g4": 0.0}, 13_000)
    assert losses.all == (LostGateway("g3", 10_700),)
    losses.update({"g1": 0.0, "g4": 0.0, "g5": 0.0}, 14_000)

    assert losses.all == ()


@pytest.mark.parametrize(
    ("age_ms", "lost"),
    [(100.0, [LostGateway("g1", 9_900)]), (250.0, []), (700.0, []), (1500.0, [])],
)
def test_a_gateway_that_replaces_a_lost_one_does_not_report_it(age_ms: float, lost: list[LostGateway]) -> None:
    """It reports only gateways that were alive at its first observation."""
    losses = GatewayLosses()
    losses.update({"g1": age_ms, "g2": 100.0, "g3": 0.0}, 10_000)
    losses.update({"g1": age_ms + 1000.0, "g2": 100.0, "g3": 0.0}, 11_000)
    losses.update({"g2": 100.0, "g3": 0.0}, 12_000)

    assert losses.all == tuple(lost)


def test_a_gateway_that_shuts_down_is_not_lost() -> None:
    """It removes itself from the list before it is silent."""
    losses = GatewayLosses()
    losses.update({"g1": 0.0, "g2": 100.0, "g3": 100.0}, 10_000)
    losses.update({"g1": 0.0, "g3": 100.0}, 11_000)
    assert losses.all == ()
    losses.update({"g1": 0.0, "g3": 1100.0}, 12_000)
    losses.update({"g1": 0.0, "g4": 100.0}, 13_000)

    assert losses.all == ()


def test_a_gateway_that_is_not_replaced_is_reported_for_five_minutes() -> None:
    """Then its removal counts as intended."""
    losses = GatewayLosses()
    losses.update({"g1": 0.0, "g2": 100.0}, 10_000)
    losses.update({"g1": 0.0, "g2": 1000.0}, 11_000)
    losses.update({"g1": 0.0}, 9_999 + GATEWAY_LOSS_KEEP_MS)
    assert len(losses.all) == 1
    losses.update({"g1": 0.0}, 10_001 + GATEWAY_LOSS_KEEP_MS)

    assert losses.all == ()


def test_gateways_are_silent_from_one_second_on() -> None:
    """In the order of their names."""
    assert silent_gateways({"g3": 1000.0, "g2": 999.0, "g1": 5000.0}) == ["g1", "g3"]


def test_a_repaired_key_is_reported_with_an_action() -> None:
    """It does not count as a task that ended."""
    seen = Observation(
        0, {}, [], [], 0, 0, 0, 0, notices=["Redis key leases had a wrong type: it was renamed to bad:leases:1"]
    )
    found = repaired_keys(seen)

    assert (found.level, found.value) == ("degraded", 1)
    assert found.reason == f"{seen.notices[0]}: find the other client that writes to this Redis, and stop it."
    assert ended_tasks((), seen, "g1").level == "healthy"
    assert repaired_keys(None).level == "healthy"


@pytest.mark.parametrize(
    ("names", "most", "expected"),
    [
        (["a"], 2, "a"),
        (["a", "b"], 2, "a, b"),
        (["a", "b", "c"], 2, "a, b and 1 more"),
        (["a", "b", "c", "d"], 1, "a and 3 more"),
        ([], 2, ""),
    ],
)
def test_long_lists_of_names_are_shortened(names: Sequence[str], most: int, expected: str) -> None:
    """The other names are counted."""
    assert shortened(names, most) == expected


def test_times_are_shown_in_utc() -> None:
    """With the zone."""
    assert time_of_day(1_700_000_000_999) == "22:13:20 UTC"
