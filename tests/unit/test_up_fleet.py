"""The pure parts of `up --autoscale`: how many workers to start or drain, and what they are called."""

import pytest

from tierlane.settings.model import SettingsError, load_settings
from tierlane.up.autoscale import PoolAdvice, change, free_names


@pytest.mark.parametrize(
    ("members", "healthy", "recommended", "expected"),
    [
        (2, 2, 2, 0),
        (2, 2, 5, 3),
        (5, 2, 5, 0),  # Three are loading.
        (5, 2, 2, 0),  # They are not drained before they were ever of use.
        (8, 8, 7, -1),
        (7, 8, 7, 0),  # One is leaving.
        (8, 7, 6, -1),  # One died, and is being started again.
        (8, 7, 8, 0),
        (3, 0, 1, 0),  # Redis came back empty.
    ],
)
def test_members_become_what_is_advised(members: int, healthy: int, recommended: int, expected: int) -> None:
    """Only healthy workers are drained, and nothing that was started is started twice."""
    assert change(members, PoolAdvice(healthy, recommended, "")) == expected


@pytest.mark.parametrize(
    ("taken", "count", "names"),
    [
        ([], 2, ["worker-1", "worker-2"]),
        (["worker-1", "worker-3", "gateway-1"], 3, ["worker-2", "worker-4", "worker-5"]),
        (["worker-1"], 0, []),
    ],
)
def test_new_workers_get_the_first_free_names(taken: list[str], count: int, names: list[str]) -> None:
    """A worker that is still leaving keeps its own."""
    assert free_names(taken, count) == names


@pytest.mark.parametrize("value", ["3:1", "0:2", "2", "2:", "a:b", "1:257", "1:2:3", "-1:4"])
def test_bad_bounds_are_one_sentence_that_names_the_flag(value: str) -> None:
    """What they must be, what they were, and where they were set."""
    demand = "must be MIN:MAX, whole numbers with 1 <= MIN <= MAX <= 256"

    with pytest.raises(SettingsError) as error:
        load_settings({"autoscale": value})

    assert str(error.value) == f"TIERLANE_AUTOSCALE: {demand}, got '{value}' (set by --autoscale)"


def test_settings_become_the_rules_of_the_policy() -> None:
    """Milliseconds become seconds; without bounds the advice has those of `--workers`."""
    rules = load_settings({"autoscale": "2:8", "autoscale_calm_ms": "4500", "autoscale_wait_ms": "250"}).scale_rules

    assert (rules.least, rules.most, rules.calm_s, rules.target_wait_s) == (2, 8, 4.5, 0.25)
    assert load_settings().scale_bounds == (1, 256)
