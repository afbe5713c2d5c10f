"""Quotas outlive Redis: what the audit counted is told to one that came back empty."""

from pathlib import Path
from typing import Any

from pool import Pool
from scheduler.protocol.limits import QuotaRestore, QuotaSpent
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from tierlane.embedded.redis import EmbeddedRedis

YEAR = [("1year", 10)]


async def outcomes(pool: Pool, count: int, **limits: Any) -> list[str]:
    verdicts = await pool.admit([pool.submission(**limits) for _ in range(count)])
    return [verdict.outcome.value for verdict in verdicts]


async def test_a_redis_that_came_back_empty_wants_to_be_told_once(pool: Pool) -> None:
    """And again when it is empty again; whatever was told."""
    restore = QuotaRestore(pool.client, pool.keys)
    assert await restore.wanted()

    assert await restore.tell([]) == 0
    assert not await restore.wanted()

    await pool.client.flushall()
    assert not await restore.wanted()  # Nobody uses it yet.
    await pool.gateway_lives("g1")
    assert await restore.wanted()


async def test_what_was_spent_before_is_held(pool: Pool) -> None:
    """Eight of ten are gone already: two enter."""
    restore, now = QuotaRestore(pool.client, pool.keys), await pool.now_ms()

    assert await restore.tell([QuotaSpent("customer", "1year", now, 8)]) == 1

    assert await outcomes(pool, 3, quotas=YEAR) == ["accepted", "accepted", "quota"]
    assert await pool.client.pttl("rl:customer:customer") > 0


async def test_what_was_counted_since_is_not_lowered(pool: Pool) -> None:
    """The audit lags; the higher count is the truth."""
    restore, now = QuotaRestore(pool.client, pool.keys), await pool.now_ms()
    assert await outcomes(pool, 9, quotas=YEAR) == ["accepted"] * 9

    assert await restore.tell([QuotaSpent("customer", "1year", now, 5)]) == 0

    assert await outcomes(pool, 2, quotas=YEAR) == ["accepted", "quota"]


async def test_a_past_window_says_nothing(pool: Pool) -> None:
    """What was counted just before midnight is not held against the new day."""
    restore, now = QuotaRestore(pool.client, pool.keys), await pool.now_ms()

    assert await restore.tell([QuotaSpent("customer", "1day", now - 86_400_000, 10)]) == 0

    assert await outcomes(pool, 1, quotas=[("1day", 1)]) == ["accepted"]


async def test_many_are_told_in_parts(pool: Pool) -> None:
    """Each part is one short script, and only the last says that it was all."""
    now = await pool.now_ms()
    spent = [QuotaSpent(f"c{n}", "1year", now, 1) for n in range(2500)]

    assert await QuotaRestore(pool.client, pool.keys).tell(spent) == 2500

    assert await outcomes(pool, 1, customer_id="c2499", quotas=[("1year", 1)]) == ["quota"]


async def test_a_server_that_took_over_wants_to_be_told(pool: Pool) -> None:
    """A restart from an older dump, or a replica: the epoch came with what it keeps, but its run_id is another one."""
    restore = QuotaRestore(pool.client, pool.keys)
    await restore.tell([])
    before = (await pool.gateway_lives("g1")).epoch_us
    assert not await restore.wanted()

    await pool.client.set(pool.keys.epoch_run, "0" * 40)  # As the dump of another server has it.
    after = (await pool.gateway_lives("g1")).epoch_us

    assert after > before
    assert await restore.wanted()
    assert (await pool.gateway_lives("g1")).epoch_us == after


async def test_an_epoch_without_a_server_is_kept(pool: Pool) -> None:
    """An older version wrote it: that is no loss."""
    before = (await pool.gateway_lives("g1")).epoch_us
    await pool.client.delete(pool.keys.epoch_run)

    assert (await pool.gateway_lives("g1")).epoch_us == before


async def test_quotas_spent_since_the_dump_are_held(tmp_path: Path) -> None:
    """A real server that begins again from a dump that is older than its last requests: what the audit counted is told,
    and the quota holds.
    """
    home = tmp_path / "redis"
    save = ("--appendonly", "no")
    server = EmbeddedRedis(home, home / "socket", extra_args=save)
    await server.start()
    client = command_client(server.url, 5.0)
    pool = Pool(client, Keys())
    first = await pool.gateway_lives("g1")
    restore = QuotaRestore(client, pool.keys)
    await restore.tell([])
    assert await outcomes(pool, 2, quotas=YEAR) == ["accepted"] * 2
    await client.save()
    assert await outcomes(pool, 6, quotas=YEAR) == ["accepted"] * 6
    now = await pool.now_ms()
    await client.aclose()
    server.kill()

    again = EmbeddedRedis(home, home / "socket", extra_args=save)
    await again.start()
    client = command_client(again.url, 5.0)
    pool = Pool(client, Keys())
    try:
        assert (await pool.gateway_lives("g1")).epoch_us != first.epoch_us
        restore = QuotaRestore(client, pool.keys)
        assert await restore.wanted()
        assert await restore.tell([QuotaSpent("customer", "1year", now, 8)]) == 1
        assert await outcomes(pool, 3, quotas=YEAR) == ["accepted", "accepted", "quota"]
    finally:
        await client.aclose()
        await again.stop()
