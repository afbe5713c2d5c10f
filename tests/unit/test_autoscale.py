"""The policy of the fleet's size: when it goes up, when down, by how much, and that it never flaps."""

import itertools
import math

import pytest

from scheduler.autoscale import Advice, Autoscaler, Sample, ScaleRules, ScaleStep, needed

RULES = ScaleRules(least=1, most=20)


def sample(
    healthy: int = 4, *, waiting: int = 0, demand: float = 200.0, used: float = 0.6, known: int | None = None
) -> Sample:
    """Workers of 100 requests/s each, of which 80 % are given out."""
    backlog = {"enterprise": 0, "free": waiting}
    return Sample(healthy, healthy if known is None else known, backlog, demand, 100.0, 0.8, used)


def shown(policy: Autoscaler, seen: Sample, seconds: int, start: int = 0) -> list[Advice]:
    """The same look once a second, from `start` to `start + seconds`, both included."""
    return [policy.update(seen, float(now)) for now in range(start, start + seconds + 1)]


def steps(advices: list[Advice]) -> list[ScaleStep]:
    """Every step in a row of advices, once."""
    return list(dict.fromkeys(advice.last for advice in advices if advice.last is not None))


@pytest.mark.parametrize(
    ("waiting", "demand", "workers"),
    [
        (0, 0.0, 0),
        (0, 80.0, 1),
        (0, 80.1, 2),
        (0, 800.0, 10),
        (50, 10.0, 1),
        (51, 10.0, 2),
        (500, 100.0, 10),
        (500, 1200.0, 15),
    ],
)
def test_the_need_is_the_larger_of_demand_and_backlog(waiting: int, demand: float, workers: int) -> None:
    """Demand over 80 of each worker's 100 requests/s; what waits over 100 requests/s x 0.5 s."""
    assert needed(sample(waiting=waiting, demand=demand), RULES).workers == workers


def test_without_a_rate_nothing_is_needed() -> None:
    """A pool whose models have no rate cannot be sized by it."""
    assert needed(sample(demand=900.0)._replace(worker_rps=0.0), RULES).workers == 0


@pytest.mark.parametrize(
    ("seen", "after_s", "step", "words"),
    [
        (sample(waiting=500, demand=0.0, healthy=10), 30, 3, "500 queued, 500 or more for 30 s: 3 more"),
        (sample(waiting=100, demand=0.0), 60, 1, "100 queued, 100 or more for 60 s: 1 more"),
        (sample(used=0.86), 300, 1, "86% used, over 85% for 300 s: 1 more"),
        (sample(demand=500.0), 10, 3, "a demand of 500/s requires 7 at 80/s per worker: 7 or more for 10 s"),
        (
            sample(waiting=300),
            10,
            2,
            "300 queued, to be finished in 0.5 s at 100/s per worker, require 6: 6 or more for 10 s",
        ),
        (sample(used=0.39, demand=100.0), 900, -1, "39% used, under 40% for 900 s: 1 fewer"),
        (sample(used=0.39, demand=100.0, healthy=12), 900, -2, "39% used, under 40% for 900 s: 2 fewer"),
    ],
)
def test_what_lasts_is_a_step(seen: Sample, after_s: int, step: int, words: str) -> None:
    """Not a second before its time, and with the reason in words."""
    advices = shown(Autoscaler(RULES), seen, after_s)

    assert {advice.recommended for advice in advices[:-1]} == {seen.healthy}
    assert advices[-1].recommended == seen.healthy + step
    assert advices[-1].reason == words
    assert steps(advices)[0].direction == ("up" if step > 0 else "down")


@pytest.mark.parametrize(
    "seen",
    [
        sample(waiting=99, demand=320.0),
        sample(used=0.85, demand=320.0),
        sample(used=0.40),
        sample(used=0.2, demand=320.0),
    ],
)
def test_just_under_every_bound_nothing_changes(seen: Sample) -> None:
    """99 wait, 85 % are used, 40 % are used, or fewer would not do for the demand: an hour long."""
    advices = shown(Autoscaler(RULES), seen, 3600)

    assert {advice.recommended for advice in advices} == {4}
    assert steps(advices) == []


@pytest.mark.parametrize(("seen", "after_s"), [(sample(waiting=100, demand=0.0), 60), (sample(demand=500.0), 10)])
def test_a_break_starts_the_time_anew(seen: Sample, after_s: int) -> None:
    """One calm second in between, and nothing has lasted."""
    policy = Autoscaler(RULES)
    shown(policy, seen, after_s - 1)
    policy.update(sample(), float(after_s))

    again = shown(policy, seen, after_s, after_s + 1)

    assert {advice.recommended for advice in again[:-1]} == {4}
    assert again[-1].recommended > 4


def test_a_time_in_which_nobody_looked_was_not_seen_to_last() -> None:
    """After six seconds without a look every condition begins anew."""
    policy = Autoscaler(RULES)
    shown(policy, sample(waiting=100, demand=0.0), 59)

    late = shown(policy, sample(waiting=100, demand=0.0), 59, 65)

    assert {advice.recommended for advice in late} == {4}


def test_a_sign_waits_for_the_cooldown_and_counts_from_the_workers_there() -> None:
    """Three more that have not come yet are not asked for again; three that came and did not help are."""
    policy = Autoscaler(RULES)
    first = shown(policy, sample(10, waiting=500, demand=0.0), 30)
    waiting = shown(policy, sample(10, waiting=500, demand=0.0), 300, 31)
    assert (first[-1].recommended, {advice.recommended for advice in waiting}) == (13, {13})

    came = shown(policy, sample(13, waiting=500, demand=0.0), 0, 332)

    assert came[-1].recommended == 16


def test_a_need_that_grows_is_followed_at_once() -> None:
    """It is a figure, not a guess: a second step up needs no cooldown."""
    policy = Autoscaler(RULES)
    assert shown(policy, sample(demand=500.0), 10)[-1].recommended == 7

    grown = shown(policy, sample(demand=900.0), 11, 11)

    assert grown[-1].recommended == 12
    assert [step.after for step in steps(grown)] == [7, 12]


def test_a_change_of_direction_waits_for_the_cooldown() -> None:
    """Down at 900 s; a need right after it is obeyed 60 s later, not sooner."""
    policy = Autoscaler(RULES)
    assert shown(policy, sample(used=0.1, demand=10.0), 900)[-1].recommended == 3

    advices = shown(policy, sample(3, demand=400.0), 60, 901)

    assert {advice.recommended for advice in advices[:-2]} == {3}
    assert [step.at_s for step in steps(advices)] == [900.0, 960.0]


def test_a_calm_fleet_shrinks_step_by_step_to_the_least() -> None:
    """A fifth at the most each cooldown, one worker at least, until the least."""
    policy, healthy, now = Autoscaler(ScaleRules(least=2, most=20)), 15, 0
    seen = []
    while now <= 2000:
        advice = policy.update(sample(healthy, used=0.1, demand=20.0), float(now))
        seen.append(advice)
        healthy, now = advice.recommended, now + 1

    found = steps(seen)
    assert [step.after for step in found] == [12, 10, 8, 7, 6, 5, 4, 3, 2]
    assert [step.at_s for step in found] == [900.0 + 60 * n for n in range(9)]


def test_the_bounds_hold() -> None:
    """Whatever is needed; and the reason says so."""
    policy = Autoscaler(ScaleRules(least=3, most=6))

    assert policy.update(sample(1), 0.0).recommended == 3
    advice = shown(policy, sample(demand=5000.0), 10, 1)[-1]

    assert advice.recommended == 6
    assert advice.reason.endswith("; limited to the maximum, 6")


def test_a_worker_that_died_is_to_be_replaced() -> None:
    """It stays in the advice, and in the reason, for as long as it is known."""
    policy = Autoscaler(RULES)
    shown(policy, sample(), 20)

    advice = shown(policy, sample(3, known=4), 100, 21)[-1]

    assert (advice.healthy, advice.recommended) == (3, 4)
    assert advice.reason == "1 of 4 workers are not healthy and are being replaced"


def test_what_others_take_away_or_add_is_followed() -> None:
    """Another gateway's advice was obeyed first, or a person did it: that is no step of ours."""
    policy = Autoscaler(RULES)
    shown(policy, sample(6), 20)

    less = shown(policy, sample(4), 12, 21)
    more = shown(policy, sample(7), 2, 34)

    assert (less[5].recommended, less[-1].recommended, more[-1].recommended) == (6, 4, 7)
    assert steps([*less, *more]) == []


def test_a_redis_that_came_back_empty_takes_no_worker_away() -> None:
    """Workers are known again one after the other, within seconds."""
    policy = Autoscaler(RULES)
    shown(policy, sample(8), 20)

    back = [policy.update(sample(n, used=0.0), 21.0 + n) for n in (0, 0, 3, 5, 8)]

    assert {advice.recommended for advice in back} == {8}


def test_what_cannot_be_seen_changes_nothing() -> None:
    """The last advice stands; before the first look there is none."""
    policy = Autoscaler(RULES)
    assert policy.hold("Redis is away") is None
    shown(policy, sample(demand=500.0), 10)

    held = policy.hold("Redis is away")

    assert held is not None
    assert held.recommended == 7


def simulated(curve: list[float], rules: ScaleRules, start_s: int = 5) -> tuple[list[ScaleStep], list[int], float]:
    """A fleet that obeys: workers of 100 requests/s that take `start_s` to load. Steps, workers by second, the most that waits."""
    policy, workers, waiting, worst = Autoscaler(rules), rules.least, 0.0, 0.0
    coming: list[int] = []
    advices, counts = [], []
    for now, demand in enumerate(curve):
        workers += sum(at == now for at in coming)
        coming = [at for at in coming if at > now]
        capacity = 100.0 * workers
        served = min(capacity, waiting + demand)
        waiting += demand - served
        worst = max(worst, waiting)
        seen = Sample(workers, workers, {"free": int(waiting)}, demand, 100.0, 0.8, served / capacity)
        advices.append(policy.update(seen, float(now)))
        missing = advices[-1].recommended - workers - len(coming)
        coming += [now + start_s] * max(0, missing)
        workers += min(0, missing)
        counts.append(workers)
    return steps(advices), counts, worst


def turns(found: list[ScaleStep]) -> list[float]:
    """When the direction changed."""
    return [later.at_s for early, later in itertools.pairwise(found) if early.direction != later.direction]


SHORT = ScaleRules(least=2, most=16, need_s=3, calm_s=60, cooldown_s=20, deep_s=10, long_s=20, busy_s=60)
RAMP = [150 + min(t, 120) / 120 * 1050 for t in range(400)]
SPIKE = [300.0 if 100 <= t < 102 else 100.0 for t in range(400)]
SURGE = [900.0 if 100 <= t < 200 else 100.0 for t in range(600)]
SAWTOOTH = [100 + (t % 40) * 20.0 for t in range(1200)]
STEP_DOWN = [1000.0 if t < 200 else 100.0 for t in range(800)]
WAVES = [500 - 400 * math.cos(t / 50) for t in range(2000)]


@pytest.mark.parametrize(
    ("curve", "most", "last", "most_turns"),
    [
        (RAMP, 15, 15, 0),
        (SPIKE, 2, 2, 0),
        (SURGE, 16, 2, 1),
        (SAWTOOTH, 13, None, 0),
        (STEP_DOWN, 16, 2, 1),
        (WAVES, 12, None, 13),
    ],
    ids=["ramp", "spike", "surge", "sawtooth", "step down", "waves"],
)
def test_load_curves_are_followed_without_flapping(
    curve: list[float], most: int, last: int | None, most_turns: int
) -> None:
    """Enough workers at the height, the least in the end, and never two changes of direction within a cooldown."""
    found, counts, _ = simulated(curve, SHORT)
    changes = turns(found)

    assert max(counts) <= most
    assert last is None or counts[-1] == last
    assert len(changes) <= most_turns
    assert all(later - early >= SHORT.cooldown_s for early, later in itertools.pairwise(changes))
    assert all(
        later.at_s - early.at_s >= SHORT.cooldown_s or later.direction == early.direction == "up"
        for early, later in itertools.pairwise(found)
    )


def test_the_ramp_is_never_behind_for_long() -> None:
    """Its queue stays under what a tenth of a second of the height brings."""
    _, counts, worst = simulated(RAMP, SHORT)

    assert counts[-1] == 15
    assert worst < 100
