"""Which workers are missed: who counts as lost, since when, and when it is forgotten."""

from msgspec.structs import replace

from gateway.operations.health_losses import LOSS_KEEP_MS, Loss, Losses
from scheduler.protocol.pool_view import WorkerView


def worker(name: str, *, healthy: bool = True, status: str = "ready", age_ms: float = 100.0) -> WorkerView:
    return WorkerView(name, status, 0.5, 1, age_ms, healthy, 100.0, 50.0, "tiny", "v1")


def test_a_worker_that_falls_silent_is_lost_from_its_last_heartbeat_on() -> None:
    """However often it is looked at again; when it is back it is missed no more."""
    losses = Losses()
    losses.note([worker("gpu-1"), worker("gpu-2")], 10_000)
    losses.note([worker("gpu-1"), worker("gpu-2", healthy=False, age_ms=1100.0)], 11_100)
    losses.note([worker("gpu-1"), worker("gpu-2", healthy=False, age_ms=2100.0)], 12_100)

    assert losses.all == (Loss("gpu-2", 10_000),)
    losses.note([worker("gpu-1"), worker("gpu-2")], 13_000)
    assert losses.all == ()


def test_a_worker_that_starts_was_not_lost() -> None:
    """Unless it served before: then its model is what was lost."""
    losses = Losses()
    losses.note([worker("gpu-1"), worker("gpu-2", healthy=False, status="starting")], 10_000)
    assert losses.all == ()
    losses.note(
        [worker("gpu-1", healthy=False, status="down"), worker("gpu-2", healthy=False, status="starting")], 11_000
    )

    assert losses.all == (Loss("gpu-1", 10_900),)


def test_one_that_was_cordoned_is_not_lost() -> None:
    """Somebody wanted it so, and knows."""
    losses = Losses()
    losses.note([worker("gpu-1"), worker("gpu-2")], 1000)
    losses.note([worker("gpu-1"), worker("gpu-2", healthy=False, status="cordoned")], 2000)

    assert losses.all == ()


def test_one_that_pauses_for_a_moment_is_not_lost() -> None:
    """Unless it falls silent meanwhile."""
    losses = Losses()
    pausing = replace(worker("gpu-1", healthy=False, status="paused"), pausing=True)
    losses.note([worker("gpu-1")], 1000)
    losses.note([pausing], 2000)
    assert losses.all == ()
    losses.note([replace(pausing, pausing=False, age_ms=1100.0)], 3100)

    assert losses.all == (Loss("gpu-1", 2000),)


def test_who_came_later_sees_the_loss_as_well() -> None:
    """A gateway that starts knows the silent one by its last word."""
    losses = Losses()
    losses.note([worker("gpu-3", healthy=False, status="busy", age_ms=60_000.0)], 100_000)

    assert losses.all == (Loss("gpu-3", 40_000),)


def test_one_that_left_is_missed_for_a_quarter_of_an_hour() -> None:
    """Redis forgets it at once; the latest loss comes first."""
    losses = Losses()
    losses.note([worker("gpu-1"), worker("gpu-2"), worker("gpu-3")], 1000)
    losses.note([worker("gpu-1"), worker("gpu-2")], 2000)
    losses.note([worker("gpu-1")], 3000)

    assert losses.all == (Loss("gpu-2", 3000), Loss("gpu-3", 2000))
    losses.note([worker("gpu-1")], 2000 + LOSS_KEEP_MS)
    assert losses.all == (Loss("gpu-2", 3000),)
