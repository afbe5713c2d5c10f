"""Model processes that were replaced in place: who is told, for how long, and who is not."""

from gateway.operations.health_losses import MOST_RESTARTS_NAMED, RESTART_REPORTED_MS, Restart, Restarts, restarted
from scheduler.protocol.pool_view import WorkerView


def worker(name: str, pid: int) -> WorkerView:
    return WorkerView(name, "ready", 0.5, 1, 100.0, bool(pid), 100.0, 50.0, "tiny", "v1", model_pid=pid)


def test_another_process_under_the_same_worker_is_told_for_three_seconds() -> None:
    """Whether or not it was seen to be away in between."""
    restarts = Restarts()
    restarts.update([worker("gpu-1", 10), worker("gpu-2", 20)], 10_000)
    restarts.update([worker("gpu-1", 11), worker("gpu-2", 0)], 10_250)
    restarts.update([worker("gpu-1", 11), worker("gpu-2", 21)], 10_500)

    assert restarts.all == (Restart("gpu-2", 10_500), Restart("gpu-1", 10_250))
    restarts.update([worker("gpu-1", 11), worker("gpu-2", 21)], 10_250 + RESTART_REPORTED_MS)
    assert restarts.all == (Restart("gpu-2", 10_500),)
    restarts.update([worker("gpu-1", 11), worker("gpu-2", 21)], 10_500 + RESTART_REPORTED_MS)
    assert restarts.all == ()


def test_a_worker_that_comes_or_comes_again_has_lost_nothing() -> None:
    """It left in order, or Redis forgot it; one that tells no process id is let be."""
    restarts = Restarts()
    restarts.update([worker("gpu-1", 10)], 10_000)
    restarts.update([worker("gpu-2", 0)], 11_000)
    restarts.update([worker("gpu-1", 11), worker("gpu-2", 20)], 12_000)

    assert restarts.all == ()


def test_the_reason_names_workers_and_times() -> None:
    """The latest first, and not all of very many."""
    one = restarted([Restart("gpu-1", 3_600_000)])
    many = restarted([Restart(f"gpu-{n}", 0) for n in range(MOST_RESTARTS_NAMED + 2)])

    assert (one.level, one.value) == ("degraded", 1)
    assert one.reason == "Another model process than before: gpu-1 (at 01:00:00 UTC)."
    assert (many.reason or "").endswith(" and 2 more.")
    assert restarted([]).level == "healthy"
