"""How long beginnings wait for their ends: a table of what is held, and whether the oldest may go on."""

import pytest

from ledger.audit.window import HoldPolicy

POLICY = HoldPolicy(hold_s=1.0, deep_s=60.0, deep_open=1000, most_open=200_000, most_bytes=1_000_000)


@pytest.mark.parametrize(
    ("age_s", "open_", "begun", "size", "keeps"),
    [
        # Few are open: a moment, whatever else.
        (0.9, 1, 1, 100, True),
        (1.0, 1, 1, 100, False),
        (0.9, 1, 50_000, 100, True),
        (1.0, 999, 999, 100, False),
        # A deep queue.
        (1.0, 1000, 1000, 100, True),
        (59.9, 100_000, 100_000, 100, True),
        (60.0, 100_000, 100_000, 100, False),
        # Most of what came since has ended: it is the oldest that is slow.
        (1.0, 1000, 2000, 100, True),
        (1.0, 1000, 2001, 100, False),
        # Room is bounded, also in the first moment.
        (0.1, 200_000, 200_000, 100, True),
        (0.1, 200_001, 200_001, 100, False),
        (0.1, 1, 1, 1_000_000, True),
        (0.1, 1, 1, 1_000_001, False),
    ],
)
def test_the_oldest_may_wait(age_s: float, open_: int, begun: int, size: int, *, keeps: bool) -> None:
    """By its age, by what is open and what is kept behind it."""
    assert POLICY.keeps(age_s, open_, begun, size) is keeps
