"""The version of the data in Redis: scripts and roles of another major version reject it."""

from collections.abc import Awaitable, Callable

import pytest

from contract.builders import everything
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


@pytest.mark.parametrize("verb", VERBS)
async def test_a_script_rejects_data_of_another_major_version(pool: Pool, verb: str) -> None:
    """Nothing is changed."""
    await pool.queue(2)
    await pool.form([("free", 1)])
    await pool.client.set(pool.keys.protocol, "2.0")
    before = await everything(pool.client)

    with pytest.raises(RedisUnavailable, match=r"data of protocol 2\.0 and this process uses 1"):
        await VERBS[verb](pool)

    assert await everything(pool.client) == before


@pytest.mark.parametrize("stored", ["1.7", None, "2.0"])
async def test_versions_of_one_major_work_together(pool: Pool, stored: str | None) -> None:
    """So that roles can be replaced one after the other. A claimed batch can be finished in any version."""
    batch = await pool.running(1)
    await pool.client.delete(pool.keys.protocol)
    if stored:
        await pool.client.set(pool.keys.protocol, stored)
    if stored != "2.0":
        await check_server(pool.client)
        await ping(pool.client)
        await pool.queue(1)

    assert await pool.batches.renew(batch.batch_id, batch.token) is True
    assert await pool.batches.finish(batch.batch_id, batch.token, [done(batch.requests[0].id)]) == 0


async def test_a_role_of_another_major_version_does_not_start(pool: Pool) -> None:
    """A running gateway treats this Redis as unavailable. A key of another program is named."""
    await pool.client.set(pool.keys.protocol, "2.0")
    with pytest.raises(StartError, match=r"protocol 2\.0, .* uses 1\.0: .* delete the key"):
        await check_server(pool.client)
    with pytest.raises(RedisUnavailable, match=r"protocol 2\.0"):
        await ping(pool.client)

    await pool.client.delete(pool.keys.protocol)
    await pool.client.lpush(pool.keys.protocol, "x")
    with pytest.raises(StartError, match="a key `protocol` that Tierlane did not write"):
        await check_server(pool.client)


async def test_the_first_heartbeat_stores_the_version(pool: Pool) -> None:
    """Python and Lua have the same version, and a stored one is not changed."""
    assert f"local PROTOCOL = '{PROTOCOL}'" in source("admit")
    await pool.client.flushall()
    await pool.gateway_lives("g1")
    assert await pool.client.get(pool.keys.protocol) == PROTOCOL.encode()

    await pool.client.set(pool.keys.protocol, "1.7")
    await pool.gateway_lives("g1")
    await pool.presence.census()
    assert await pool.client.get(pool.keys.protocol) == b"1.7"
