"""Who is cordoned, from the scheduler that knows it to the worker that obeys: told to Redis, read in answers to heartbeats."""

from collections.abc import Sequence

import pytest

from eventually import eventually
from pool import Pool
from scheduler.protocol.pool_view import WorkerReport
from scheduler.protocol.presence import REWRITE_S, Cordons, CordonStatus, CordonSync


def heartbeat(worker: str = "w1", status: str = "ready") -> WorkerReport:
    return WorkerReport(worker, status, 0.5, 1, 100.0, 50.0, "simulated", "v1")


@pytest.fixture
async def cordons(pool: Pool) -> Cordons:
    return Cordons(pool.client, pool.keys)


async def test_a_worker_hears_it_in_the_answer_to_its_beat(pool: Pool, cordons: Cordons) -> None:
    """Whoever is named is cordoned, nobody else; the last word holds."""
    assert await cordons.write(["w1", "w3"]) == 2
    assert await pool.presence.worker_beat(heartbeat("w1")) is CordonStatus.CORDONED
    assert await pool.presence.worker_beat(heartbeat("w2")) is CordonStatus.FREE

    assert await cordons.write(["w2", "w3"]) == 2
    assert await pool.presence.worker_beat(heartbeat("w1")) is CordonStatus.FREE
    assert await pool.presence.worker_beat(heartbeat("w2")) is CordonStatus.CORDONED

    assert await cordons.write(["w2", "w3"]) == 0


async def test_a_pulse_hears_it_too(pool: Pool, cordons: Cordons) -> None:
    """An idle worker beats that way."""
    heard: list[CordonStatus] = []
    await pool.presence.worker_beat(heartbeat())
    pulse = pool.presence.pulse(lambda: None, heard.append)

    for named in (["w1"], []):
        await cordons.write(named)
        assert pulse.send(heartbeat())
        await eventually(lambda: not pulse.pending, "it is answered")

    assert heard == [CordonStatus.CORDONED, CordonStatus.FREE]


async def test_an_emptied_redis_frees_nobody(pool: Pool, cordons: Cordons) -> None:
    """Until somebody has told it, it says that it does not know; that nobody is cordoned must be said, too."""
    await cordons.write(["w1"])
    await pool.client.flushall()

    assert await pool.presence.worker_beat(heartbeat()) is CordonStatus.UNKNOWN
    await cordons.write([])
    assert await pool.presence.worker_beat(heartbeat()) is CordonStatus.FREE


async def test_a_cordoned_worker_is_seen_and_not_counted(pool: Pool) -> None:
    """It says so with its next beat; then capacity is that of the others."""
    await pool.presence.worker_beat(heartbeat("w1", "cordoned"))
    await pool.presence.worker_beat(heartbeat("w2"))

    seen = await pool.presence.observe([])

    assert await pool.presence.census() == (1, 2)
    assert {worker.id: (worker.status, worker.healthy) for worker in seen.workers} == {
        "w1": ("cordoned", False),
        "w2": ("ready", True),
    }


class Told(Cordons):
    """Remembers what it was asked to tell."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []

    async def write(self, workers: Sequence[str]) -> int:  # type: ignore[override]
        self.told.append(sorted(workers))
        return 0


async def test_the_keeper_tells_changes_at_once_and_all_again_each_second() -> None:
    """What is not known is not told: a scheduler that is cut off from PostgreSQL does not speak against the others."""
    told, now, wanted = Told(), [0.0], [frozenset({"w1"})]
    supervisor = CordonSync(told, lambda: wanted[0], lambda: now[0])
    table: list[tuple[float, frozenset[str] | None, list[list[str]]]] = [
        (0.0, frozenset({"w1"}), [["w1"]]),
        (REWRITE_S / 2, frozenset({"w1"}), []),
        (REWRITE_S / 2, frozenset({"w1", "w2"}), [["w1", "w2"]]),
        (REWRITE_S, frozenset({"w1", "w2"}), []),
        (REWRITE_S * 1.5, frozenset({"w1", "w2"}), [["w1", "w2"]]),
        (REWRITE_S * 9, None, []),
        (REWRITE_S * 9, frozenset(), [[]]),
    ]

    for at, known, expected in table:
        told.told.clear()
        now[0], wanted[0] = at, known  # type: ignore[assignment]
        await supervisor.sync()
        assert told.told == expected, at
