"""The scheduler of the stand-in engine: slots, order of waiting sequences, aborts, and the time of a step."""

from engine.calls import output_text
from engine.faults import Change, Faults
from engine.steps import Pace, Scheduler, Sequence


def sequence(length: int = 3) -> Sequence:
    """A sequence without a call."""
    return Sequence(None, length, prompt_tokens=10)


def steps(scheduler: Scheduler, number: int) -> list[int]:
    """Run steps; returns how many sequences got a token in each."""
    counts = []
    for _ in range(number):
        scheduler.begin_step()
        counts.append(len(scheduler.end_step()))
    return counts


def test_a_sequence_joins_and_leaves_at_every_step() -> None:
    """A free slot is filled at the next step, whatever the others do."""
    scheduler = Scheduler(Pace(slots=2))
    for length in (1, 3, 2):
        scheduler.add(sequence(length))
    assert steps(scheduler, 4) == [2, 2, 2, 0]
    assert (scheduler.totals.finished, scheduler.totals.generated_tokens) == (3, 6)


def test_a_step_takes_longer_with_each_sequence() -> None:
    """Seconds of a step: its base, each sequence, and the factor."""
    pace = Pace(step_ms=12, sequence_ms=0.15, slots=64)
    assert pace.duration_s(64) == 0.0216
    pace.factor, pace.step_as_if = 4, 100
    assert pace.duration_s(1) == 0.108


def test_waiting_sequences_are_ordered_by_priority_if_it_is_enabled() -> None:
    """The lower first; without the policy in the order of arrival."""
    for priority, expected in ((True, "b a c"), (False, "a b c")):
        scheduler = Scheduler(Pace(slots=1, priority=priority))
        for name, value in (("a", 2), ("b", 1), ("c", 2)):
            scheduler.add(Sequence(name, 1, 1), value)
        found = []
        for _ in range(3):
            scheduler.begin_step()
            found += [each.call for each in scheduler.end_step()]
        assert " ".join(found) == expected


def test_a_client_that_leaves_frees_its_slot_at_the_next_step() -> None:
    """Running or waiting; its tokens are counted as wasted, a second abort changes nothing."""
    scheduler = Scheduler(Pace(slots=1))
    running, waiting, last = sequence(), sequence(), sequence(1)
    for each in (running, waiting, last):
        scheduler.add(each)
    steps(scheduler, 1)
    assert scheduler.waiting == 2
    for each in (running, waiting, waiting):
        scheduler.abort(each)
    assert scheduler.waiting == 1
    assert steps(scheduler, 2) == [1, 0]
    assert last.done == 1
    assert (scheduler.totals.aborted, scheduler.totals.wasted_tokens) == (2, 1)


def test_fewer_slots_let_running_sequences_end() -> None:
    """No sequence is stopped; new ones start when there are fewer than the new number."""
    pace = Pace(slots=3)
    scheduler = Scheduler(pace)
    for length in (1, 2, 3, 1):
        scheduler.add(sequence(length))
    assert steps(scheduler, 1) == [3]
    pace.slots = 1
    assert steps(scheduler, 4) == [2, 1, 1, 0]


def test_refusals_last_for_their_time_and_above_their_number() -> None:
    """A refusal by time ends by itself; one above a number holds until it is changed."""
    now = 100.0
    faults = Faults(Pace(), lambda: now)
    faults.apply(Change(refuse=429, refuse_for_s=2.0))
    assert faults.refusal(0) == 429
    now = 102.0
    assert faults.refusal(0) == 0
    faults.apply(Change(refuse=503, refuse_above=32))
    assert [faults.refusal(present) for present in (32, 33)] == [0, 503]
    faults.apply(Change(refuse=0))
    assert faults.refusal(33) == 0


def test_an_output_has_a_token_for_each_of_its_length() -> None:
    """The first token depends on the prompt; a long output continues as a short one."""
    assert output_text("a", 4) == "e8b7be43 2 3 4"
    assert output_text("b", 1) == "71beeff9"
    assert len(output_text("a", 5000).split()) == 5000
