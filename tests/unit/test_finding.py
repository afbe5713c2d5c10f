"""The words that findings share."""

from collections.abc import Sequence

import pytest

from gateway.operations.health_model import clock, first_of


@pytest.mark.parametrize(
    ("names", "most", "said"),
    [
        (["a"], 2, "a"),
        (["a", "b"], 2, "a, b"),
        (["a", "b", "c"], 2, "a, b and 1 more"),
        (["a", "b", "c", "d"], 1, "a and 3 more"),
        ([], 2, ""),
    ],
)
def test_a_sentence_names_a_few_and_counts_the_others(names: Sequence[str], most: int, said: str) -> None:
    """So many by name, the rest as a number, which nobody has to scroll through."""
    assert first_of(names, most) == said


def test_a_moment_is_told_as_the_time_of_day_in_utc() -> None:
    """Whoever reads it may live elsewhere: the zone is named."""
    assert clock(1_700_000_000_999) == "22:13:20 UTC"
