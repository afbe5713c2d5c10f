"""What health says of schedulers and of other gateways: from which age on, how bad it is, and who is missed for how long."""

import pytest

from gateway.operations.health_losses import (
    GATEWAY_LOSS_KEEP_MS,
    GatewayLosses,
    LostGateway,
    ended_tasks,
    other_gateways,
    repaired_keys,
    scheduling,
    silent,
)
from scheduler.protocol.pool_view import GatewayStats, Observation

STOPPED = "no batches are formed, and requests wait until their time is up."


STOOD_IN = "gateways form the batches and write the audit meanwhile; start a scheduler."


def looking(scheduler_age_ms: float | None = 50.0, pass_age_ms: float | None = None, **ages_ms: float) -> Observation:
    gateways = [GatewayStats(name, 0.0, {}) for name in ages_ms]
    return Observation(0, {}, [], gateways, 0, 0, 0, 0, ages_ms, scheduler_age_ms, pass_age_ms)


@pytest.mark.parametrize(
    ("age_ms", "level", "reason"),
    [
        (0.0, "healthy", None),
        (999.0, "healthy", None),
        (1000.0, "degraded", f"No scheduler has passed for 1.0 s: {STOPPED}"),
        (1999.0, "degraded", f"No scheduler has passed for 2.0 s: {STOPPED}"),
        (2000.0, "down", f"No scheduler has passed for 2.0 s: {STOPPED}"),
        (None, "down", f"No scheduler is known: {STOPPED}"),
    ],
)
def test_a_scheduler_that_stopped_is_told(age_ms: float | None, level: str, reason: str | None) -> None:
    """After a second, since it passes ten times in one; after two whatever waited has run out of time."""
    found = scheduling(looking(age_ms))

    assert (found.level, found.reason) == (level, reason)


@pytest.mark.parametrize(
    ("age_ms", "pass_age_ms", "level", "reason"),
    [
        (2500.0, 100.0, "degraded", f"No scheduler has passed for 2.5 s: {STOOD_IN}"),
        (None, 999.0, "degraded", f"No scheduler is known: {STOOD_IN}"),
        (None, 1000.0, "down", f"No scheduler is known: {STOPPED}"),
        (50.0, 50.0, "healthy", None),
    ],
)
def test_while_gateways_do_the_work_nothing_is_down(
    age_ms: float | None, pass_age_ms: float, level: str, reason: str | None
) -> None:
    """But it is told that no scheduler runs, and what to do."""
    found = scheduling(looking(age_ms, pass_age_ms))

    assert (found.level, found.reason) == (level, reason)


def test_where_nothing_was_seen_nothing_is_said_of_schedulers() -> None:
    """Redis has a check of its own."""
    found = scheduling(None)

    assert (found.level, found.value) == ("healthy", None)


def test_a_lost_gateway_is_named_with_its_last_heartbeat() -> None:
    """And those that are left are counted."""
    found = other_gateways(looking(g1=0.0, g2=1200.0), [LostGateway("g2", 3_600_000)])

    assert (found.level, found.value) == ("degraded", 1)
    assert found.reason == "1 gateway is lost: g2 (last heard at 01:00:00 UTC); 1 beat."


def test_of_many_lost_gateways_three_are_named() -> None:
    """A sentence has an end."""
    lost = [LostGateway(f"g{n}", 0) for n in range(5)]
    reason = other_gateways(looking(g9=0.0), lost).reason or ""

    assert reason.startswith("5 gateways are lost: g0 (")
    assert reason.endswith(" and 2 more; 1 beat.")


def test_all_gateways_that_beat_are_well() -> None:
    """However many there are."""
    found = other_gateways(looking(g1=0.0, g2=999.0), [])

    assert (found.level, found.value, found.reason) == ("healthy", 2, None)


def test_a_gateway_that_falls_silent_is_lost_until_another_takes_its_place() -> None:
    """Redis forgets it after two seconds; that explains nothing, so it stays lost."""
    losses = GatewayLosses()
    losses.note({"g1": 0.0, "g2": 100.0}, 10_000)
    losses.note({"g1": 0.0, "g2": 1100.0}, 11_000)
    losses.note({"g1": 0.0}, 12_000)
    assert losses.all == (LostGateway("g2", 9_900),)
    losses.note({"g1": 0.0, "g3": 0.0}, 13_000)

    assert losses.all == ()


def test_a_gateway_that_comes_back_is_lost_no_more() -> None:
    """It, or Redis, stood still for a moment."""
    losses = GatewayLosses()
    losses.note({"g1": 0.0, "g2": 100.0, "g3": 100.0}, 10_000)
    losses.note({"g1": 0.0, "g2": 3100.0, "g3": 3100.0}, 13_000)
    losses.note({"g1": 0.0, "g2": 100.0, "g3": 3350.0}, 13_250)

    assert losses.all == (LostGateway("g3", 9_900),)


def test_one_that_was_replaced_at_once_is_told_until_it_is_off_the_list() -> None:
    """Though as many beat as before: its requests were lost with it. A newcomer takes one place, not two."""
    losses = GatewayLosses()
    losses.note({"g1": 0.0, "g2": 100.0, "g3": 100.0}, 10_000)
    losses.note({"g1": 0.0, "g2": 900.0, "g3": 100.0, "g4": 0.0}, 10_800)
    assert losses.all == ()
    losses.note({"g1": 0.0, "g2": 1900.0, "g3": 1100.0, "g4": 0.0}, 11_800)
    assert losses.all == (LostGateway("g3", 10_700), LostGateway("g2", 9_900))
    losses.note({"g1": 0.0, "g3": 1500.0, "g4": 0.0}, 12_200)
    assert losses.all == (LostGateway("g3", 10_700),)
    losses.note({"g1": 0.0, "g4": 0.0}, 13_000)
    assert losses.all == (LostGateway("g3", 10_700),)
    losses.note({"g1": 0.0, "g4": 0.0, "g5": 0.0}, 14_000)

    assert losses.all == ()


@pytest.mark.parametrize(
    ("age_ms", "lost"),
    [(100.0, [LostGateway("g1", 9_900)]), (250.0, []), (700.0, []), (1500.0, [])],
)
def test_a_gateway_started_in_place_of_a_lost_one_reports_no_loss(age_ms: float, lost: list[LostGateway]) -> None:
    """The lost one is on the list until Redis forgets it; one that was alive at the first look is lost afterwards."""
    losses = GatewayLosses()
    losses.note({"g1": age_ms, "g2": 100.0, "g3": 0.0}, 10_000)
    losses.note({"g1": age_ms + 1000.0, "g2": 100.0, "g3": 0.0}, 11_000)
    losses.note({"g2": 100.0, "g3": 0.0}, 12_000)

    assert losses.all == tuple(lost)


def test_a_gateway_that_leaves_in_order_is_not_lost() -> None:
    """It takes itself off the list, and is never seen silent; then one less is all there are."""
    losses = GatewayLosses()
    losses.note({"g1": 0.0, "g2": 100.0, "g3": 100.0}, 10_000)
    losses.note({"g1": 0.0, "g3": 100.0}, 11_000)
    assert losses.all == ()
    losses.note({"g1": 0.0, "g3": 1100.0}, 12_000)
    losses.note({"g1": 0.0, "g4": 100.0}, 13_000)

    assert losses.all == ()


def test_a_gateway_that_nobody_replaces_is_forgotten_after_five_minutes() -> None:
    """Whoever took it away wanted so."""
    losses = GatewayLosses()
    losses.note({"g1": 0.0, "g2": 100.0}, 10_000)
    losses.note({"g1": 0.0, "g2": 1000.0}, 11_000)
    losses.note({"g1": 0.0}, 9_999 + GATEWAY_LOSS_KEEP_MS)
    assert len(losses.all) == 1
    losses.note({"g1": 0.0}, 10_001 + GATEWAY_LOSS_KEEP_MS)

    assert losses.all == ()


def test_who_is_silent_is_told_in_order() -> None:
    """From a second on."""
    assert silent({"g3": 1000.0, "g2": 999.0, "g1": 5000.0}) == ["g1", "g3"]


def test_a_repaired_key_is_told_with_what_to_do() -> None:
    """And is not counted as a task that ended."""
    seen = Observation(
        0, {}, [], [], 0, 0, 0, 0, notices=["Redis key leases had a wrong type: it was renamed to bad:leases:1"]
    )
    found = repaired_keys(seen)

    assert (found.level, found.value) == ("degraded", 1)
    assert found.reason == f"{seen.notices[0]}: find out who else writes to this Redis, and keep it out."
    assert ended_tasks((), seen, "g1").level == "healthy"
    assert repaired_keys(None).level == "healthy"
