"""The schedule of `tierlane chaos`: a pure function of the seed that leaves no fault out for long."""

from collections import Counter
from itertools import pairwise

import pytest

from tierlane.chaos.faults.catalogue import (
    BACK_S,
    BY_NAME,
    GAP_S,
    KINDS,
    QUIET_S,
    Family,
    FaultTarget,
    Planned,
    schedule,
)
from tierlane.chaos.faults.target import blows

TARGETS = {
    FaultTarget.GATEWAY: 3,
    FaultTarget.SCHEDULER: 2,
    FaultTarget.WORKER: 4,
    FaultTarget.MODEL: 4,
    FaultTarget.REDIS: 1,
    FaultTarget.POSTGRES: 1,
    FaultTarget.REDIS_PROXY: 9,
    FaultTarget.POSTGRES_PROXY: 5,
}
SEEDS = range(1, 21)


def test_the_same_seed_gives_the_same_schedule() -> None:
    """A breach is looked for again with its seed; another seed gives another schedule."""
    assert schedule(7, 60, KINDS, TARGETS) == schedule(7, 60, KINDS, TARGETS)
    assert schedule(7, 60, KINDS, TARGETS) != schedule(8, 60, KINDS, TARGETS)


def test_twenty_minutes_have_every_kind() -> None:
    """Over 20 seeds of 60 s no kind of fault is missing, on either of its places."""
    planned = [fault for seed in SEEDS for fault in schedule(seed, 60, KINDS, TARGETS)]
    seen = Counter(fault.kind.name for fault in planned)

    assert set(seen) == set(BY_NAME)
    assert min(seen.values()) >= 2
    assert {fault.place for fault in planned} == set(TARGETS)
    assert {fault.index for fault in planned if fault.place is FaultTarget.WORKER} == {0, 1, 2, 3}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_minute_has_every_family(seed: int) -> None:
    """Processes, Redis, the network and PostgreSQL: a run of 60 s has at least one fault of each."""
    assert {fault.kind.family for fault in schedule(seed, 60, KINDS, TARGETS)} == set(Family)


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_come_every_few_seconds_and_the_ends_are_quiet(seed: int) -> None:
    """Every 2 to 5 s one, in order; nothing begins in the first 3 s, nothing lasts into the last 3 s."""
    planned = schedule(seed, 60, KINDS, TARGETS)
    times = [fault.at_s for fault in planned]
    gaps = [late - early for early, late in pairwise(times)]

    assert times[0] >= QUIET_S
    assert all(fault.at_s + fault.length_s <= 60 - QUIET_S + 1e-9 for fault in planned)
    assert min(gaps) >= GAP_S[0]
    assert max(gaps) <= 2 * GAP_S[1]  # Twice where one was left out, because it would have met its like.


def test_some_faults_overlap() -> None:
    """The worst cases are two faults at once."""
    overlaps = sum(
        early.at_s + early.length_s > late.at_s
        for seed in SEEDS
        for early, late in pairwise(schedule(seed, 60, KINDS, TARGETS))
    )
    assert overlaps >= 20


def test_nothing_else_hits_a_role_that_is_restarted_in_a_row() -> None:
    """The others of the role carry its work meanwhile, and until it is back."""
    for seed in SEEDS:
        planned = schedule(seed, 60, KINDS, TARGETS)
        for series in (fault for fault in planned if fault.kind.repeats):
            end = series.at_s + series.length_s + BACK_S
            meanwhile = [one for one in planned if one.place is series.place and series.at_s <= one.at_s <= end]
            assert meanwhile == [series]


def test_lengths_and_parameters_are_within_their_ranges() -> None:
    """What is drawn is what the catalogue allows, apart from what the end of the run cuts short."""
    for seed in SEEDS:
        for fault in schedule(seed, 60, KINDS, TARGETS):
            assert fault.length_s <= fault.kind.length_s[1]
            assert set(fault.parameters) == set(fault.kind.draws)
            for name, value in fault.parameters.items():
                low, high = fault.kind.draws[name]
                assert low <= value <= high


def test_chosen_faults_on_what_there_is() -> None:
    """Only the named faults, and only those that have a target; without any the run is a plain load."""
    chosen = [BY_NAME["flushall"], BY_NAME["cut"]]
    without_proxies = {FaultTarget.REDIS: 1}

    assert {fault.kind.name for fault in schedule(1, 60, chosen, TARGETS)} == {"flushall", "cut"}
    assert {fault.kind.name for fault in schedule(1, 60, chosen, without_proxies)} == {"flushall"}
    assert schedule(1, 60, chosen, {}) == []


def test_a_short_run_has_faults_too() -> None:
    """In 12 s there is time for at least two."""
    assert min(len(schedule(seed, 12, KINDS, TARGETS)) for seed in SEEDS) >= 2


def test_a_fault_reads_well() -> None:
    """A line tells when, what, on whom and for how long."""
    planned = schedule(1, 60, [BY_NAME["delay"]], {FaultTarget.REDIS_PROXY: 1})
    lines = [fault.told("gateway-1>redis") for fault in planned]
    assert all(" s  delay gateway-1>redis for " in line and "delay_ms" in line for line in lines)


@pytest.mark.parametrize("role", [FaultTarget.GATEWAY, FaultTarget.SCHEDULER, FaultTarget.WORKER])
def test_restarts_in_a_row_are_kills_of_one_process(role: FaultTarget) -> None:
    """Every 3 s while it lasts, each told as a kill, so that each excuses no more than a kill does."""
    fault = Planned(5.0, BY_NAME[f"restarts-{role}"], role, 1, 8.9, {})

    assert [(one.at_s, one.kind.name, one.index) for one in blows(fault)] == [
        (5.0, f"kill-{role}", 1),
        (8.0, f"kill-{role}", 1),
        (11.0, f"kill-{role}", 1),
    ]
