"""The schedule of faults, a pure function of the seed, and the recovery after each."""

from collections import Counter
from itertools import pairwise

import pytest

from tierlane_tools.chaos.faults.actions import ACTIONS
from tierlane_tools.chaos.faults.catalogue import BY_NAME, KINDS
from tierlane_tools.chaos.faults.fault_kind import Family, FaultTarget, Needs
from tierlane_tools.chaos.faults.schedule import BACK_S, GAP_S, QUIET_S, Planned, schedule
from tierlane_tools.chaos.faults.target import repetitions
from tierlane_tools.chaos.history import Answered, Event, FaultEvent, FaultPhase, Invoked
from tierlane_tools.chaos.recovery import recoveries

TARGETS = {
    FaultTarget.GATEWAY: 3,
    FaultTarget.SCHEDULER: 2,
    FaultTarget.WORKER: 4,
    FaultTarget.MODEL: 4,
    FaultTarget.REDIS: 1,
    FaultTarget.POSTGRES: 1,
    FaultTarget.ENGINE: 1,
    FaultTarget.REDIS_PROXY: 9,
    FaultTarget.POSTGRES_PROXY: 5,
}
ON_SERVERS = tuple(kind for kind in KINDS if kind.is_possible(clustered=False))
SCHEDULES = {seed: schedule(seed, 60, ON_SERVERS, TARGETS) for seed in range(1, 21)}


def test_the_same_seed_gives_the_same_schedule() -> None:
    """Another seed gives another one."""
    assert schedule(7, 60, ON_SERVERS, TARGETS) == SCHEDULES[7] != SCHEDULES[8]


def test_every_fault_can_be_injected() -> None:
    """Each kind that does not repeat another one has an action."""
    assert set(ACTIONS) == {kind.name for kind in KINDS if not kind.repeats}
    assert {kind.repeats for kind in KINDS if kind.repeats} <= set(ACTIONS)


def test_twenty_seeds_have_every_kind_and_target() -> None:
    """Each kind occurs at least twice, some faults overlap, and every single minute has every family."""
    planned = [fault for faults in SCHEDULES.values() for fault in faults]
    kinds = Counter(fault.kind.name for fault in planned)

    assert set(kinds) == {kind.name for kind in ON_SERVERS}
    assert min(kinds.values()) >= 2
    assert {fault.place for fault in planned} == set(TARGETS)
    assert sum(a.at_s + a.length_s > b.at_s for faults in SCHEDULES.values() for a, b in pairwise(faults)) >= 20
    for faults in SCHEDULES.values():
        assert {fault.kind.family for fault in faults} == set(Family)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_times_and_parameters(seed: int) -> None:
    """A fault every 2 to 5 s, quiet ends, lengths and parameters as in the catalogue."""
    planned = SCHEDULES[seed]
    gaps = [late.at_s - early.at_s for early, late in pairwise(planned)]

    assert planned[0].at_s >= QUIET_S
    assert GAP_S[0] <= min(gaps) <= max(gaps) <= 2 * GAP_S[1]  # Twice where a clash was left out.
    for fault in planned:
        assert fault.length_s <= fault.kind.length_s[1]
        assert fault.at_s + fault.length_s <= 60 - QUIET_S + 1e-9
        assert set(fault.parameters) == set(fault.kind.draws)
        assert all(low <= fault.parameters[name] <= high for name, (low, high) in fault.kind.draws.items())
        if fault.kind.repeats:
            end = fault.at_s + fault.length_s + BACK_S
            assert [one for one in planned if one.place is fault.place and fault.at_s <= one.at_s <= end] == [fault]


def test_only_chosen_faults_with_a_target_are_planned() -> None:
    """A kind without a target is left out."""
    chosen = [BY_NAME["flushall"], BY_NAME["cut"]]

    assert {fault.kind.name for fault in schedule(1, 60, chosen, TARGETS)} == {"flushall", "cut"}
    assert {fault.kind.name for fault in schedule(1, 60, chosen, {FaultTarget.REDIS: 1})} == {"flushall"}
    assert schedule(1, 60, chosen, {}) == []


def test_a_cluster_has_faults_of_its_own() -> None:
    """It has no proxies of Redis, and no fault of the clock or the files of one server, or of one gateway's Redis."""
    possible = [kind for kind in KINDS if kind.is_possible(clustered=True)]
    targets = {place: count for place, count in TARGETS.items() if place is not FaultTarget.REDIS_PROXY}
    planned = [fault for seed in range(1, 21) for fault in schedule(seed, 60, possible, targets)]

    assert {kind.name for kind in KINDS} - {fault.kind.name for fault in planned} == {
        *("clock-forward", "clock-backward", "redis-disk-full", "spool-full"),
    }
    assert {fault.place for fault in planned if fault.kind.family is Family.PROXY} == {FaultTarget.POSTGRES_PROXY}
    assert {kind.name for kind in KINDS if kind.needs is Needs.CLUSTER} == {"failover", "migrate-slot"}


def test_repeated_restarts_are_kills_of_one_process() -> None:
    """Each is an event of its own, so that it excuses no more than a kill does."""
    fault = Planned(5.0, BY_NAME["restarts-worker"], FaultTarget.WORKER, 1, 8.9, {})

    assert [(one.at_s, one.kind.name, one.index) for one in repetitions(fault)] == [
        (5.0, "kill-worker", 1),
        (8.0, "kill-worker", 1),
        (11.0, "kill-worker", 1),
    ]


def test_recovery_ends_with_the_first_second_without_a_failure() -> None:
    """Requests fail until 2.5 s after the heal; a fault that was not injected has no recovery."""
    events: list[Event] = []
    for at in [number / 20 for number in range(400)]:
        nonce = f"{at:.3f}"
        events.append(Invoked(at=at, nonce=nonce, turn=0, trace=nonce, gateway="g", tier="paid", customer="c"))
        status = 503 if 9.0 <= at < 12.5 else 200
        events.append(Answered(at=at + 0.1, nonce=nonce, turn=0, seconds=0.1, status=status, code="", id=nonce))
    healed = FaultEvent(10.0, "cut", "gateway-1>redis", FaultPhase.HEAL)
    failed = FaultEvent(11.0, "cut", "gateway-1>redis", FaultPhase.HEAL, error="It is down already.")

    assert [one.seconds for one in recoveries(events, [healed, failed], 20.0)] == [2.5]
    assert [one.seconds for one in recoveries(events, [healed], 12.0)] == [None]
