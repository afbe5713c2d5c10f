"""Direct batches: what runs together again after a lost model process, as a table."""

import pytest

from gpu_pool.worker.direct_server import parts
from scheduler.protocol.batches import ClaimedRequest


@pytest.mark.parametrize(
    ("names", "losses", "together"),
    [
        ("abcd", 1, ["ab", "cd"]),
        ("abcde", 1, ["abc", "de"]),
        ("ab", 1, ["a", "b"]),
        ("a", 1, ["a"]),
        ("abcd", 2, ["a", "b", "c", "d"]),
        ("a", 2, ["a"]),
    ],
)
def test_what_was_lost_runs_in_halves_then_alone(names: str, losses: int, together: list[str]) -> None:
    """So whoever kills the model process is alone in its third and last run."""
    requests = [ClaimedRequest(name, 1000, 1, b"") for name in names]

    assert ["".join(request.id for request in part) for part in parts(requests, losses)] == together
