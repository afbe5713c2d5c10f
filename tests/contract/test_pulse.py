"""Beats that nobody waits for: an idle worker stays known, and whatever goes wrong with one calls for a beat that is awaited."""

import pytest
from redis.asyncio import Redis

from eventually import eventually
from pool import Pool
from scheduler.protocol.pool_view import WorkerReport
from scheduler.protocol.presence import COMPLETE_EVERY_S, AsyncHeartbeat
from scheduler.redis_client.connections import pipelined

BEAT = WorkerReport("w1", "ready", 0.5, 1, 100.0, 50.0, "simulated", "v1")


class Wrongs:
    """Counts what came to nothing."""

    count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def wrongs() -> Wrongs:
    """Who is told."""
    return Wrongs()


@pytest.fixture
async def pulse(pool: Pool, wrongs: Wrongs) -> AsyncHeartbeat:
    """Of a worker that is registered, with a connection."""
    await pool.presence.worker_beat(BEAT)
    return pool.presence.pulse(wrongs)


async def sent(pulse: AsyncHeartbeat, heartbeat: WorkerReport = BEAT) -> None:
    """Send one, and wait for its answer."""
    assert pulse.send(heartbeat)
    await eventually(lambda: not pulse.pending, "it is answered")


async def heard_at(pool: Pool) -> int:
    """The time of the last heartbeat."""
    return int(await pool.client.hget(pool.keys.gpu("w1"), "last_heartbeat"))


async def test_a_worker_that_says_nothing_new_stays_known(pool: Pool, pulse: AsyncHeartbeat, wrongs: Wrongs) -> None:
    """Its time moves on, in the row and in the index; all else stands."""
    await sent(pulse)
    before, at = await pool.client.hgetall(pool.keys.gpu("w1")), await heard_at(pool)
    await eventually(lambda: _later(pool, at), "a millisecond has passed")

    await sent(pulse)

    after = await pool.client.hgetall(pool.keys.gpu("w1"))
    assert int(after.pop(b"last_heartbeat")) > int(before.pop(b"last_heartbeat"))
    assert after == before
    assert await pool.client.zscore(pool.keys.gpus, "w1") == await heard_at(pool)
    assert wrongs.count == 0


async def _later(pool: Pool, than_ms: int) -> bool:
    seconds, microseconds = await pool.client.time()
    return bool(seconds * 1000 + microseconds // 1000 > than_ms)


async def test_what_is_new_is_said(pool: Pool, pulse: AsyncHeartbeat) -> None:
    """Another beat goes whole, and the census counts by it."""
    await sent(pulse)
    await sent(pulse, WorkerReport("w1", "draining", 0.0, 0, 100.0, 50.0, "simulated", "v1"))

    assert await pool.client.hget(pool.keys.gpu("w1"), "status") == b"draining"
    assert await pool.presence.census() == (0, 1)


@pytest.mark.usefixtures("pulse")  # It registers.
async def test_the_row_keeps_its_time_to_live(pool: Pool, wrongs: Wrongs) -> None:
    """Every so often all is said again, so that the row of a living worker never expires."""
    now = [1000.0]
    pulse = AsyncHeartbeat(pool.client, pool.keys, wrongs, lambda: now[0])
    await sent(pulse)
    await pool.client.pexpire(pool.keys.gpu("w1"), 60_000)
    now[0] += COMPLETE_EVERY_S - 0.1
    await sent(pulse)
    assert await pool.client.pttl(pool.keys.gpu("w1")) <= 60_000

    now[0] += 0.2
    await sent(pulse)

    assert await pool.client.pttl(pool.keys.gpu("w1")) > 300_000


async def test_a_redis_that_came_back_empty_is_told_all(pool: Pool, pulse: AsyncHeartbeat, wrongs: Wrongs) -> None:
    """Half a row would be no worker, and would live for ever."""
    await sent(pulse)
    await pool.client.delete(pool.keys.gpu("w1"), pool.keys.gpus)

    await sent(pulse)

    assert wrongs.count == 1
    assert await pool.client.exists(pool.keys.gpu("w1"), pool.keys.gpus) == 0
    pulse.forget()
    await sent(pulse)
    assert await pool.presence.census() == (1, 1)


async def test_a_pulse_does_not_bring_back_who_said_goodbye(pool: Pool, pulse: AsyncHeartbeat) -> None:
    """It may arrive later than the goodbye."""
    await sent(pulse)
    await pool.presence.worker_gone("w1")

    await sent(pulse)

    assert await pool.presence.census() == (0, 0)


async def test_a_script_that_redis_forgot_calls_for_a_beat_that_is_awaited(
    pool: Pool, pulse: AsyncHeartbeat, wrongs: Wrongs
) -> None:
    """That one brings the script; the pulses go on."""
    await pool.client.script_flush()
    await sent(pulse)
    assert wrongs.count == 1

    await pool.presence.worker_beat(BEAT)
    await sent(pulse)

    assert wrongs.count == 1


async def test_without_a_connection_nothing_is_sent(
    client: Redis, pool: Pool, pulse: AsyncHeartbeat, wrongs: Wrongs
) -> None:
    """One that is lost under way is told; then there is none to send the next one on."""
    assert pulse.send(BEAT)
    pipelined(client).close()

    assert (wrongs.count, pulse.pending) == (1, False)
    assert not pulse.send(BEAT)


async def test_one_at_a_time_and_a_late_answer_reaches_nobody(pulse: AsyncHeartbeat, wrongs: Wrongs) -> None:
    """Given up, its connection takes no new calls."""
    assert pulse.send(BEAT)
    assert not pulse.send(BEAT)

    pulse.give_up()

    assert (wrongs.count, pulse.pending) == (0, False)
    assert not pulse.send(BEAT)
