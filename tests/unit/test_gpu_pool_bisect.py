"""Bisection: one bad item fails alone, and everything else completes."""

import math
from collections.abc import Sequence

import pytest

from gpu_pool.model_process.batch_runner import run_apart


class Lost(Exception):
    """Stands for a model that cannot go on."""


class Model:
    """Upper-cases texts; raises on a batch that holds a bad one, and counts its runs."""

    def __init__(self, most_runs: float = math.inf, error: BaseException | None = None) -> None:
        self.runs = 0
        self._most_runs = most_runs
        self._error = error or ValueError("bad")

    def run(self, items: Sequence[str]) -> list[str]:
        self.runs += 1
        if any(item.startswith("bad") for item in items):
            raise self._error
        return [item.upper() for item in items]

    def apart(self, items: Sequence[str]) -> list[str]:
        return run_apart(
            self.run,
            items,
            blame=lambda error: f"blamed for {type(error).__name__}",
            unfinished=lambda: "unfinished",
            time_left=lambda: self.runs < self._most_runs,
            fatal=Lost,
        )


@pytest.mark.parametrize(
    ("items", "expected", "runs"),
    [
        ([], [], 1),
        (["a"], ["A"], 1),
        (["a", "b", "c"], ["A", "B", "C"], 1),
        (["bad"], ["blamed for ValueError"], 1),
        (["a", "bad", "c"], ["A", "blamed for ValueError", "C"], 5),
        (["bad", "b", "c", "d"], ["blamed for ValueError", "B", "C", "D"], 5),
        (["bad1", "b", "c", "bad2"], ["blamed for ValueError", "B", "C", "blamed for ValueError"], 7),
        (["bad1", "bad2"], ["blamed for ValueError"] * 2, 3),
    ],
)
def test_bad_items_fail_alone(items: list[str], expected: list[str], runs: int) -> None:
    """Results stand in the order of the items, and it takes so many runs."""
    model = Model()

    assert (expected, runs) == (model.apart(items), model.runs)


@pytest.mark.parametrize("position", range(64))
def test_one_bad_item_of_64_costs_two_runs_a_level(position: int) -> None:
    """1 + 2 x log2(64) runs, wherever the bad one stands."""
    items = [f"item {i}" for i in range(64)]
    items[position] = "bad"
    model = Model()

    results = model.apart(items)

    assert (
        results.count("blamed for ValueError"),
        sum(r.startswith("ITEM") for r in results),
        model.runs,
    ) == (1, 63, 13)


def test_without_time_the_rest_is_unfinished_not_blamed() -> None:
    """After three runs the time is up: what was not found innocent or guilty is neither."""
    model = Model(most_runs=3)

    assert model.apart(["a", "b", "c", "bad"]) == ["A", "B", "unfinished", "unfinished"]


def test_a_lost_model_is_not_bisected() -> None:
    """A fatal exception passes through after the first run."""
    model = Model(error=Lost())

    with pytest.raises(Lost):
        model.apart(["a", "bad"])
    assert model.runs == 1


def test_sys_exit_is_an_item_s_fault() -> None:
    """A model that calls sys.exit() on one input keeps running for the others."""
    assert Model(error=SystemExit(3)).apart(["a", "bad"]) == ["A", "blamed for SystemExit"]
