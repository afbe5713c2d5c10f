"""The version of what is stored: who speaks another one touches nothing, and says so in one sentence."""

from collections.abc import Awaitable, Callable

import pytest

from gateway.circuit_breaker import ping
from pool import TIERS, Pool, done
from scheduler.errors import RedisUnavailable, StartError
from scheduler.redis_client.connections import check_server
from scheduler.redis_client.keys import PROTOCOL
from scheduler.redis_client.scripts import source

VERBS: dict[str, Callable[[Pool], Awaitable[object]]] = {
    "admit": lambda pool: pool.admit([pool.submission()]),
    "form_batch": lambda pool: pool.form([("free", 1)]),
    "look": lambda pool: pool.batches.look(TIERS),
    "claim": lambda pool: pool.batches.claim("b1", "w1", "token"),
    "reap": lambda pool: pool.terminations.reap(0),
    "expire": lambda pool: pool.terminations.expire(TIERS),
    "census": lambda pool: pool.presence.census(),
    "worker_beat": lambda pool: pool.worker_beats("w1"),
    "gateway_beat": lambda pool: pool.gateway_lives("g1"),
}


async def everything(pool: Pool) -> dict[bytes, bytes]:
    return {key: await pool.client.dump(key) async for key in pool.client.scan_iter()}


@pytest.mark.parametrize("verb", VERBS)
async def test_a_verb_of_another_major_version_changes_nothing(pool: Pool, verb: str) -> None:
    """Whoever admits, hands out or looks after what others wrote would not understand it."""
    await pool.queue(2)
    await pool.form([("free", 1)])
    await pool.client.set(pool.keys.protocol, "2.0")
    before = await everything(pool)

    with pytest.raises(RedisUnavailable, match=r"data of protocol 2\.0 and this process speaks 1"):
        await VERBS[verb](pool)

    assert await everything(pool) == before


@pytest.mark.parametrize("stored", ["1.7", None])
async def test_versions_of_one_major_work_together(pool: Pool, stored: str | None) -> None:
    """So that roles can be replaced one after the other; a version that is missing is nobody's."""
    await pool.client.delete(pool.keys.protocol)
    if stored:
        await pool.client.set(pool.keys.protocol, stored)
    await check_server(pool.client)
    await ping(pool.client)

    batch = await pool.running(1)
    assert await pool.batches.finish(batch.batch_id, batch.token, [done(batch.requests[0].id)]) == 0


async def test_what_runs_is_still_ended(pool: Pool) -> None:
    """The rows of a batch that was claimed are of the version that claimed it."""
    batch = await pool.running(1)
    await pool.client.set(pool.keys.protocol, "2.0")

    assert await pool.batches.renew(batch.batch_id, batch.token) is True
    assert await pool.batches.finish(batch.batch_id, batch.token, [done(batch.requests[0].id)]) == 0


async def test_a_role_of_another_version_does_not_start(pool: Pool) -> None:
    """It says what to do; a gateway that runs takes this Redis for one that is away."""
    await pool.client.set(pool.keys.protocol, "2.0")

    with pytest.raises(StartError, match=r"protocol 2\.0, .* uses 1\.0: .* delete the key"):
        await check_server(pool.client)
    with pytest.raises(RedisUnavailable, match=r"protocol 2\.0"):
        await ping(pool.client)


async def test_a_key_of_another_program_is_named(pool: Pool) -> None:
    """Redis answers well; it is not said to be away."""
    await pool.client.delete(pool.keys.protocol)
    await pool.client.lpush(pool.keys.protocol, "x")

    with pytest.raises(StartError, match="a key `protocol` that Tierlane did not write"):
        await check_server(pool.client)


async def test_a_redis_that_was_emptied_is_of_the_version_that_beats(pool: Pool) -> None:
    """The first beat notes it, and no later one changes it."""
    await pool.client.flushall()
    await pool.gateway_lives("g1")
    assert await pool.client.get(pool.keys.protocol) == PROTOCOL.encode()

    await pool.client.set(pool.keys.protocol, "1.7")
    await pool.gateway_lives("g1")
    await pool.presence.census()
    assert await pool.client.get(pool.keys.protocol) == b"1.7"


def test_scripts_and_roles_speak_one_version() -> None:
    """It is written in two places."""
    assert f"local PROTOCOL = '{PROTOCOL}'" in source("admit")
