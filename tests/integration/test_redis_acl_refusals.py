"""deploy/redis/users.acl in a real server: what is another role's, or nobody's, is refused; admin may look and repair."""

from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from integration.redis_acl_fixtures import PATIENCE_S, redis_url, refused, socket, users
from pool import Pool
from redis_acl import ROLES
from scheduler.errors import RedisUnavailable
from scheduler.protocol.cancellation import DeadLetterList
from scheduler.protocol.limits import recent_refusals
from scheduler.redis_client.connections import check_server, command_client
from scheduler.redis_client.keys import Keys

__all__ = ["redis_url", "socket", "users"]

FORBIDDEN = [
    *((role, *words.split()) for role in ROLES for words in (
        "FLUSHALL", "FLUSHDB", "KEYS *", "CONFIG GET *", "CONFIG SET maxmemory 1", "SHUTDOWN NOSAVE", "ACL LIST",
        "CLIENT KILL ID 1", "SCRIPT FLUSH", "GET other", "SET other 1", "PUBLISH other x", "FUNCTION LIST",
    )),
    *((role, "SCAN", "0") for role in ("gateway", "worker")),  # Schedulers, to build a lost index again.
    *(("gateway", *words.split()) for words in (
        "LPUSH batch_queue b", "SET healthy_gpu_count 9", "HSET gpu:w1 status ready", "LPUSH dlq x", "SET reaped_at 1",
        "SET quotas_told 1", "BLPOP batch_queue 1", "CLIENT UNBLOCK 1", "RPUSH {p}:batch_queue b",
    )),
    *(("scheduler", *words.split()) for words in (
        "SET gateway:g1 x", "SUBSCRIBE responses:g1", "HSET rl:tier:free tokens 9", "CLIENT UNBLOCK 1",
    )),
    *(("worker", *words.split()) for words in (
        "HSET gateway:g1 stats x", "HGET rl:tier:free tokens", "SUBSCRIBE responses:g1", "GET epoch",
        "LPUSH outbox_bad x", "LRANGE outbox:a 0 -1", "SET healthy_gpu_count 9", "SET {p}:healthy_gpu_count 9",
        "LRANGE refusals:g1 0 -1", "SET quotas_told 1",
    )),
    *(("scaler", *words.split()) for words in ("LRANGE queue:free 0 -1", "LLEN outbox", "EVAL x 0")),
    *(("admin", *words.split()) for words in ("FLUSHALL", "KEYS *", "CONFIG SET maxmemory 1", "SHUTDOWN")),
]  # fmt: skip


@pytest.mark.parametrize("words", FORBIDDEN, ids=" ".join)
async def test_nobody_does_anothers(users: dict[str, Redis], words: tuple[str, ...]) -> None:
    """What is another role's, or nobody's, is refused by the server."""
    role, *command = words

    with pytest.raises(NoPermissionError):
        await users[role].execute_command(*command)


@pytest.mark.parametrize(("role", "other"), [("worker", "gateway"), ("scheduler", "gateway"), ("worker", "scheduler")])
async def test_another_roles_verb_is_refused(users: dict[str, Redis], role: str, other: str) -> None:
    """Scripts run with the rights of who calls them: a worker or scheduler cannot admit, a worker cannot count."""
    impostor = Pool(users[role], Keys())

    with pytest.raises(RedisUnavailable, match=r"(?i)acl failure|can't|permission"):
        await (impostor.queue(1) if other == "gateway" else impostor.presence.census())


async def test_admin_looks_and_repairs(client: Redis, users: dict[str, Redis]) -> None:
    """What `tierlane explain` and `tierlane dlq` do, and what a person looks at."""
    admin = Pool(users["admin"], Keys())
    await check_server(users["admin"])
    await admin.gateway_lives("small")
    await admin.queue(1)
    await recent_refusals(users["admin"], admin.keys, "customer", 10)
    await DeadLetterList(users["admin"], admin.keys).remove(["req_x"])
    for words in ("SLOWLOG GET", "CLIENT LIST", "INFO", "LLEN queue:free", "ACL LOG", "CONFIG GET maxmemory"):
        await users["admin"].execute_command(*words.split())

    assert await refused(client) == []


async def test_a_gateway_takes_dead_letters_off_their_list_and_puts_none_there(
    client: Redis, users: dict[str, Redis]
) -> None:
    """For the page for on-call, in every pool: LREM on this one key is all that its user may write of another's."""
    for keys in (Keys(), Keys("other")):
        await client.lpush(keys.dlq, "req_x", "req_y")
        await DeadLetterList(users["gateway"], keys).remove(["req_x"])
        assert await users["gateway"].lrange(keys.dlq, 0, -1) == [b"req_y"]
        for words in ("LPUSH", "RPUSH", "DEL", "LTRIM"):
            with pytest.raises(NoPermissionError):
                await users["gateway"].execute_command(
                    words, keys.dlq, *(("0", "1") if words == "LTRIM" else ("req_z",))
                )


async def test_the_scaler_reads_lengths(users: dict[str, Redis]) -> None:
    """KEDA's trigger needs one command."""
    assert await users["scaler"].llen("queue:enterprise") == 0
    assert await users["scaler"].llen("{other}:queue:free") == 0


async def test_without_a_user_nothing_is_told(socket: Path, redis_url: str) -> None:
    """The default user is off, and a wrong password opens nothing."""
    assert redis_url
    for login in ("", "gateway:wrong@", "root2:x@"):
        stranger = command_client(f"unix://{login}{socket}", PATIENCE_S)
        with pytest.raises(RedisError, match=r"(?i)already authenticated|invalid username"):
            await stranger.ping()
        await stranger.aclose()
