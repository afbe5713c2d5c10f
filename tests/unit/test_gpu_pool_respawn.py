"""The delay before the next model process, as tables."""

import pytest

from gpu_pool.model_process.supervisor import Respawn

WORKED = (3.0, 20)  # Killed after three seconds in which it answered well.
OLD = (10.0, 0)
CRASHED = (0.5, 3)
NOT_LOADED = (None, 0)


def delays(*ends: tuple[float | None, int]) -> list[float]:
    respawn = Respawn()
    found = []
    for ready_s, good in ends:
        if ready_s is not None:
            respawn.loaded()
        found.append(respawn.ended(ready_s, good))
    return found


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([WORKED] * 6, [0.1] * 6),  # something kills it again and again, and it is back at once
        ([OLD] * 4, [0.1] * 4),
        ([CRASHED] * 8, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]),
        ([(9.9, 19)] * 3, [0.1, 0.2, 0.4]),
        ([CRASHED, CRASHED, WORKED, CRASHED], [0.1, 0.2, 0.1, 0.2]),
        ([NOT_LOADED] * 7, [0.1, 0.2, 0.4, 0.8, 30.0, 30.0, 30.0]),
        ([NOT_LOADED, NOT_LOADED, CRASHED, NOT_LOADED], [0.1, 0.2, 0.4, 0.8]),
        ([*[NOT_LOADED] * 5, WORKED, NOT_LOADED], [0.1, 0.2, 0.4, 0.8, 30.0, 0.1, 0.2]),
    ],
)
def test_a_process_that_worked_is_followed_at_once(ends: list[tuple[float | None, int]], expected: list[float]) -> None:
    """Ten seconds of life or twenty good batches are work; crash loops wait ever longer, failed loads longest."""
    assert delays(*ends) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ends", "failed"), [([NOT_LOADED] * 4, False), ([NOT_LOADED] * 5, True), ([CRASHED] * 9, False)]
)
def test_five_failures_to_load_are_told(ends: list[tuple[float | None, int]], failed: bool) -> None:
    """In a row, and only those of loading: a model that loads and crashes is another trouble."""
    respawn = Respawn()
    for ready_s, good in ends:
        respawn.ended(ready_s, good)

    assert respawn.failed is failed
    respawn.loaded()
    assert not respawn.failed
