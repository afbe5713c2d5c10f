"""The policy that recommends a number of workers: when it changes, by how much, and without flapping."""

import itertools
import math

import pytest

from configs import scale_rules
from scheduler.autoscale import Advice, Autoscaler, Sample, ScaleRules, ScaleStep, needed

RULES = scale_rules(least=1, most=20)


def sample(
    healthy: int = 4, *, waiting: int = 0, demand: float = 200.0, used: float = 0.6, known: int | None = None
) -> Sample:
    """Workers of 100 requests/s each, of which 80 % are sold."""
    backlog = {"enterprise": 0, "free": waiting}
    return Sample(healthy, healthy if known is None else known, backlog, demand, 100.0, 0.8, used)


def advised(policy: Autoscaler, seen: Sample, seconds: int, start: int = 0) -> list[Advice]:
    """The advice for the same sample once a second, from `start` to `start + seconds`, both included."""
    return [policy.update(seen, float(now)) for now in range(start, start + seconds + 1)]


def steps(advices: list[Advice]) -> list[ScaleStep]:
    """Every step of a series of advices, once."""
    return list(dict.fromkeys(advice.last for advice in advices if advice.last is not None))


@pytest.mark.parametrize(
    ("waiting", "demand", "workers"),
    [(0, 0.0, 0), (0, 80.0, 1), (0, 80.1, 2), (50, 10.0, 1), (51, 10.0, 2), (500, 100.0, 10), (500, 1200.0, 15)],
)
def test_the_need_is_the_larger_of_demand_and_backlog(waiting: int, demand: float, workers: int) -> None:
    """Demand over 80 requests/s of each worker; waiting requests over 100 requests/s x 0.5 s. 0 without a rate."""
    seen = sample(waiting=waiting, demand=demand)

    assert needed(seen, RULES).workers == workers
    assert needed(seen._replace(worker_rps=0.0), RULES).workers == 0


@pytest.mark.parametrize(
    ("seen", "after_s", "step", "reason"),
    [
        (sample(waiting=500, demand=0.0, healthy=10), 30, 3, "500 queued, 500 or more for 30 s"),
        (sample(waiting=100, demand=0.0), 60, 1, "100 queued, 100 or more for 60 s"),
        (sample(used=0.86), 300, 1, "86% used, over 85% for 300 s"),
        (sample(demand=500.0), 10, 3, "a demand of 500/s requires 7 at 80/s per worker"),
        (sample(waiting=300), 10, 2, "300 queued, to be finished in 0.5 s at 100/s per worker, require 6"),
        (sample(used=0.39, demand=100.0), 900, -1, "39% used, under 40% for 900 s"),
        (sample(used=0.39, demand=100.0, healthy=12), 900, -2, "39% used, under 40% for 900 s"),
    ],
)
def test_a_condition_that_lasts_is_a_step(seen: Sample, after_s: int, step: int, reason: str) -> None:
    """Exactly after its time, with the figures in the reason."""
    advices = advised(Autoscaler(RULES), seen, after_s)

    assert {advice.recommended for advice in advices[:-1]} == {seen.healthy}
    assert advices[-1].recommended == seen.healthy + step
    assert advices[-1].reason.startswith(reason)
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
    """99 wait, 85 % or 40 % are used, or fewer workers would not do for the demand: for an hour."""
    advices = advised(Autoscaler(RULES), seen, 3600)

    assert {advice.recommended for advice in advices} == {4}
    assert steps(advices) == []


@pytest.mark.parametrize(("seen", "after_s"), [(sample(waiting=100, demand=0.0), 60), (sample(demand=500.0), 10)])
def test_an_interruption_restarts_the_time(seen: Sample, after_s: int) -> None:
    """One sample without the condition, or six seconds without a sample."""
    policy, silent = Autoscaler(RULES), Autoscaler(RULES)
    for each in (policy, silent):
        advised(each, seen, after_s - 1)
    policy.update(sample(), float(after_s))

    again = advised(policy, seen, after_s, after_s + 1)
    late = advised(silent, seen, after_s - 1, after_s + 5)

    assert {advice.recommended for advice in (*again[:-1], *late)} == {4}
    assert again[-1].recommended > 4


def test_a_backlog_waits_for_the_cooldown_and_for_the_workers_of_the_last_step() -> None:
    """Workers that were recommended and have not started are not recommended again."""
    policy = Autoscaler(RULES)
    first = advised(policy, sample(10, waiting=500, demand=0.0), 30)
    waiting = advised(policy, sample(10, waiting=500, demand=0.0), 300, 31)
    assert (first[-1].recommended, {advice.recommended for advice in waiting}) == (13, {13})

    assert advised(policy, sample(13, waiting=500, demand=0.0), 0, 332)[-1].recommended == 16


def test_a_growing_need_is_followed_at_once() -> None:
    """It is measured, so a second step up needs no cooldown."""
    policy = Autoscaler(RULES)
    assert advised(policy, sample(demand=500.0), 10)[-1].recommended == 7

    grown = advised(policy, sample(demand=900.0), 11, 11)

    assert [step.after for step in steps(grown)] == [7, 12]


def test_a_change_of_direction_waits_for_the_cooldown() -> None:
    """Down at 900 s; a need right after it is followed 60 s later, not sooner."""
    policy = Autoscaler(RULES)
    assert advised(policy, sample(used=0.1, demand=10.0), 900)[-1].recommended == 3

    advices = advised(policy, sample(3, demand=400.0), 60, 901)

    assert {advice.recommended for advice in advices[:-2]} == {3}
    assert [step.at_s for step in steps(advices)] == [900.0, 960.0]


def test_an_idle_pool_shrinks_step_by_step_to_the_minimum() -> None:
    """By a fifth, but at least one worker, each cooldown."""
    policy, healthy, advices = Autoscaler(scale_rules(least=2, most=20)), 15, []
    for now in range(2001):
        advices.append(policy.update(sample(healthy, used=0.1, demand=20.0), float(now)))
        healthy = advices[-1].recommended

    assert [step.after for step in steps(advices)] == [12, 10, 8, 7, 6, 5, 4, 3, 2]
    assert [step.at_s for step in steps(advices)] == [900.0 + 60 * n for n in range(9)]


def test_the_bounds_hold() -> None:
    """Whatever is needed; the reason names the bound."""
    policy = Autoscaler(scale_rules(least=3, most=6))

    assert policy.update(sample(1), 0.0).recommended == 3
    advice = advised(policy, sample(demand=5000.0), 10, 1)[-1]

    assert advice.recommended == 6
    assert advice.reason.endswith("; limited to the maximum, 6")


def test_a_dead_worker_stays_in_the_advice() -> None:
    """For as long as it is known, since it is replaced."""
    policy = Autoscaler(RULES)
    advised(policy, sample(), 20)

    advice = advised(policy, sample(3, known=4), 100, 21)[-1]

    assert (advice.healthy, advice.recommended) == (3, 4)
    assert advice.reason.startswith("1 of 4 workers are not healthy")


def test_changes_by_others_are_followed() -> None:
    """By another gateway's advice or by a person: these are no steps of this policy."""
    policy = Autoscaler(RULES)
    advised(policy, sample(6), 20)

    less = advised(policy, sample(4), 12, 21)
    more = advised(policy, sample(7), 2, 34)

    assert (less[5].recommended, less[-1].recommended, more[-1].recommended) == (6, 4, 7)
    assert steps([*less, *more]) == []


def test_without_data_the_last_advice_is_kept() -> None:
    """After Redis lost its data, while workers register again; and while it does not respond."""
    policy = Autoscaler(RULES)
    assert policy.hold("Redis is away") is None
    advised(policy, sample(8), 20)

    back = [policy.update(sample(n, used=0.0), 21.0 + n) for n in (0, 0, 3, 5, 8)]
    held = policy.hold("Redis is away")

    assert {advice.recommended for advice in back} == {8}
    assert held is not None
    assert held.recommended == 8


def simulated(curve: list[float], rules: ScaleRules, start_s: int = 5) -> tuple[list[ScaleStep], list[int], float]:
    """A pool that follows the advice, with workers that take `start_s` to load: steps, workers by second, longest queue."""
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


SHORT = scale_rules(least=2, most=16, need_s=3, calm_s=60, cooldown_s=20, deep_s=10, long_s=20, busy_s=60)
RAMP = [150 + min(t, 120) / 120 * 1050 for t in range(400)]
SPIKE = [300.0 if 100 <= t < 102 else 100.0 for t in range(400)]
SURGE = [900.0 if 100 <= t < 200 else 100.0 for t in range(600)]
SAWTOOTH = [100 + (t % 40) * 20.0 for t in range(1200)]
STEP_DOWN = [1000.0 if t < 200 else 100.0 for t in range(800)]
WAVES = [500 - 400 * math.cos(t / 50) for t in range(2000)]


@pytest.mark.parametrize(
    ("curve", "most", "last", "most_turns", "longest_queue"),
    [
        (RAMP, 15, 15, 0, 100),  # A tenth of a second at the highest demand.
        (SPIKE, 2, 2, 0, math.inf),
        (SURGE, 16, 2, 1, math.inf),
        (SAWTOOTH, 13, None, 0, math.inf),
        (STEP_DOWN, 16, 2, 1, math.inf),
        (WAVES, 12, None, 13, math.inf),
    ],
    ids=["ramp", "spike", "surge", "sawtooth", "step down", "waves"],
)
def test_load_curves_are_followed_without_flapping(
    curve: list[float], most: int, last: int | None, most_turns: int, longest_queue: float
) -> None:
    """Enough workers at the maximum, the minimum at the end, and never two changes of direction within a cooldown."""
    found, counts, worst = simulated(curve, SHORT)
    turns = [later.at_s for early, later in itertools.pairwise(found) if early.direction != later.direction]

    assert max(counts) <= most
    assert last is None or counts[-1] == last
    assert worst < longest_queue
    assert len(turns) <= most_turns
    assert all(later - early >= SHORT.cooldown_s for early, later in itertools.pairwise(turns))
    assert all(
        later.at_s - early.at_s >= SHORT.cooldown_s or later.direction == early.direction == "up"
        for early, later in itertools.pairwise(found)
    )


def test_a_step_down_keeps_the_workers_that_were_needed_a_moment_ago() -> None:
    """A demand that varies between 1 and 9 workers, at a low use: the step down from 10 stops at 9."""
    policy = Autoscaler(RULES)
    for now in range(901):
        advice = policy.update(sample(10, used=0.2, demand=720.0 if now % 5 == 0 else 80.0), float(now))

    assert advice.recommended == 9
