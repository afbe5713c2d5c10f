"""Figures of the engine's record, and how the bench judges whether a stack follows a change."""

import pytest
from cases.continuous_changes import Phase, followed, reached_s
from cases.continuous_closed import ratios
from cases.continuous_setup import medians
from chat_load.figures import engine_figures, percentile, tokens_at
from engine.steps import Sample

STEP_S = 0.1
SLOTS = 64
ALL = Phase("all", {})


def record(*parts: tuple[float, int, int]) -> list[Sample]:
    """Steps of 0.1 s: parts of so many seconds with so many running and waiting sequences."""
    found, tokens = [], 0
    for seconds, running, waiting in parts:
        for _ in range(round(seconds / STEP_S)):
            found.append(Sample(len(found) * STEP_S, running, waiting, tokens))
            tokens += running
    return found


def test_figures_are_means_over_time() -> None:
    """Tokens, sequences, and the longest time with a queue of more than a tenth of the slots."""
    found = engine_figures(record((2, 64, 0), (1, 64, 7), (3, 32, 0)), 0.0, 5.0, SLOTS)
    assert found["running"] == pytest.approx((3 * 64 + 2 * 32) / 5)
    assert found["tokens_per_s"] == pytest.approx((30 * 64 + 20 * 32) / 5, rel=0.01)
    assert found["queue_s"] == pytest.approx(1.0)
    assert (found["waiting_max"], found["waiting_p99"]) == (7, 7)


def test_tokens_between_two_steps_are_in_proportion() -> None:
    """Before the first and after the last step they are those of that step."""
    samples = record((1, 10, 0))
    assert [tokens_at(samples, at) for at in (-1.0, 0.05, 0.1, 9.0)] == pytest.approx([0, 5, 10, 90])


def test_a_burst_is_not_a_reached_rate() -> None:
    """Three seconds in a row count."""
    samples = record((2, 10, 0), (2, 64, 0), (2, 10, 0), (6, 64, 0))
    assert reached_s(samples, 0.0, 12.0, 600) == 6.0
    assert reached_s(samples, 0.0, 8.0, 600) is None


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(10, 64, 0)], 0.0),
        ([(2, 20, 0), (8, 64, 0)], 2.0),
        ([(3, 64, 30), (7, 64, 1)], 3.0),
        ([(10, 64, 30)], None),
        ([(10, 40, 0)], None),
    ],
)
def test_following_needs_running_sequences_and_no_queue(
    parts: list[tuple[float, int, int]], expected: float | None
) -> None:
    """From when the engine is full and its queue is short."""
    found = followed(record(*parts), 0.0, 10.0, ALL)["followed_s"]
    assert found == (None if expected is None else pytest.approx(expected, abs=0.5))


def test_oscillation_is_the_largest_deviation_from_the_mean() -> None:
    """Per cent of the mean of the seconds after the fifth."""
    parts = [(5, 64, 0), *[(1, 64, 0), (1, 32, 0)] * 2]
    assert followed(record(*parts), 0.0, 9.0, ALL)["oscillation"] == pytest.approx(100 / 3, abs=1)


def test_medians_of_rounds() -> None:
    """Numbers have their median, roles each, refusals are added up."""
    rounds = [{"p50_ms": value, "cpu_ms": {"redis": value}, "refused": {"429 x": 1}} for value in (1.0, 9.0, 2.0)]
    assert medians(rounds) == {"p50_ms": 2.0, "cpu_ms": {"redis": 2.0}, "refused": {"429 x": 3}}
    assert medians([{"p50_ms": None}]) == {"p50_ms": None}


def test_ratios_of_missing_figures_are_missing() -> None:
    """Chats that are not streamed have no first token."""
    names = ("tokens_per_s", "short_p50_ms", "p50_ms", "first_p50_ms", "first_p99_ms")
    alone = dict(zip(names, (100.0, 10.0, 20.0, None, None), strict=True))
    found = ratios({"direct": alone, "tierlane": alone | {"tokens_per_s": 50.0}})
    assert (found["tokens"], found["short"], found["first_ms"]) == (0.5, 1.0, None)
    assert percentile([], 50) is None
