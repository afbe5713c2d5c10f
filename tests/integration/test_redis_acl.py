"""deploy/redis/users.acl in a real server: each role does its job as its user, and cannot do another's."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from eventually import eventually
from integration.gateway_fixtures import running_stack
from integration.gpu_pool_fixtures import StartWorker, batch, faulty_models, replies, start_worker
from pool import TIERS, Pool, done
from redis_acl import ROLES, SCRIPTS, acl_server, password, touched
from scheduler.connections import blocking_client, blocking_read, check_server, command_client
from scheduler.dead_list import DeadList
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.keys import Keys
from scheduler.limit_state import LimitsInForce, LimitState
from scheduler.outbox import name_of
from scheduler.quota_restore import QuotaRestore, QuotaSpent
from scheduler.refusals import recent_refusals

__all__ = ["faulty_models", "start_worker"]

PATIENCE_S = 10.0
LUA = Path(__file__).resolve().parents[2] / "scheduler" / "lua"


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A server with the users of deploy/redis/."""
    with acl_server(tmp_path_factory.mktemp("acl")) as socket:
        yield socket


def url_of(socket: Path, user: str) -> str:
    return f"unix://{user}:{quote(password(user), safe='')}@{socket}"


@pytest.fixture
async def redis_url(socket: Path) -> AsyncIterator[str]:
    """An empty Redis as `root` sees it; whatever a test was refused is looked for by name in it."""
    client = command_client(f"unix://root:-@{socket}", PATIENCE_S)

    async def answers() -> bool:
        try:
            return bool(await client.ping())
        except (OSError, RedisError):
            return False

    await eventually(answers, "the server with the ACL file answers")
    await client.flushall()
    await client.execute_command("ACL", "LOG", "RESET")
    yield f"unix://root:-@{socket}"
    await client.aclose()


@pytest.fixture
async def users(socket: Path, redis_url: str) -> AsyncIterator[dict[str, Redis]]:
    """A client of each user."""
    clients = {user: command_client(url_of(socket, user), PATIENCE_S) for user in (*ROLES, "scaler", "admin")}
    yield clients
    for client in clients.values():
        await client.aclose()


async def refused(client: Redis) -> list[Any]:
    """What the server refused to anybody: user, reason, object."""
    log = await client.execute_command("ACL", "LOG")
    return [(row[b"username"], row[b"reason"], row[b"object"]) for row in log] if log else []


def test_every_script_is_a_roles() -> None:
    """A new script must be given to a role here, or the file cannot be right."""
    assert {path.stem for path in LUA.glob("*.lua")} == {name for names in SCRIPTS.values() for name in names}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("prefix", ["", "{other}:"])
async def test_every_key_and_command_in_a_roles_scripts_is_allowed(client: Redis, role: str, prefix: str) -> None:
    """Also those on paths that are hardly ever taken: the server is asked about each of them."""
    keys, commands = touched(role)
    wrong = []
    for key in keys:
        name = key if key.startswith("rl:") and key != "rl:tier:" else prefix + key
        name = f"{name}x" if key.endswith(":") else name
        if key != "responses:" and await client.execute_command("ACL", "DRYRUN", role, "EXISTS", name) != b"OK":
            wrong.append(name)
    listed = (await client.execute_command("ACL", "GETUSER", role))[b"commands"].decode().split()
    wrong += [command for command in commands if f"+{command.lower()}" not in listed]

    assert len(keys) > 15
    assert wrong == []


@pytest.mark.parametrize("name", ["default", "other"])
async def test_each_role_does_its_job(client: Redis, users: dict[str, Redis], name: str) -> None:
    """Every verb of the protocol by the user whose verb it is; the server refused nothing."""
    keys = Keys(name)
    gateway, scheduler, worker = (Pool(users[role], keys) for role in ROLES)
    for role in ROLES:
        await check_server(users[role])

    await gateway.gateway_lives("g1")
    await gateway.presence.observe(TIERS)
    await scheduler.batches.look(TIERS)
    await worker.worker_beats("w1")
    await scheduler.presence.census()
    await limits_are_charged(gateway)
    await a_batch_runs(gateway, scheduler, worker)
    await batches_come_back(gateway, scheduler, worker)
    await a_gateway_ends_its_own(gateway)
    await the_audit_is_written(scheduler)
    await everybody_leaves(gateway, worker)

    assert await refused(client) == []


async def limits_are_charged(gateway: Pool) -> None:
    limits = {"quotas": [("1day", 10)], "tokens_per_minute": 1000.0, "max_concurrency": 5, "tokens": 3}
    submissions = [gateway.submission(**limits), gateway.submission(idempotency="k", fingerprint="f")]
    verdicts = await gateway.admit(submissions)
    assert [v.outcome for v in verdicts] == ["accepted", "accepted"]
    left = LimitState(gateway.client, gateway.keys)
    await left.read(
        LimitsInForce(
            customer_id="customer",
            rate=10.0,
            burst=10.0,
            tokens_per_minute=1000.0,
            max_concurrency=5,
            quotas=[("1day", 10)],
            key_id="key",
            key_rate=5.0,
            key_burst=5.0,
        )
    )


async def a_batch_runs(gateway: Pool, scheduler: Pool, worker: Pool) -> None:
    channel = gateway.keys.responses("g1")
    pubsub = gateway.client.pubsub()
    await pubsub.subscribe(channel)
    await pubsub.get_message(timeout=5)
    await scheduler.form([("free", 2)])
    claimed = await worker.claim_next()
    assert await worker.batches.renew(claimed.batch_id, "token")
    assert await worker.batches.finish(claimed.batch_id, "token", [done(each.id) for each in claimed.requests]) == 0
    said = await eventually(lambda: pubsub.get_message(timeout=1), "the answer is published")
    assert said["type"] == "message"
    await worker.client.publish(channel, b"+\x90")
    await pubsub.aclose()  # type: ignore[no-untyped-call]
    ids = [each.id for each in claimed.requests]
    assert all(await gateway.results.fetch(ids))
    assert (await gateway.results.request_detail(ids[0])).state == "completed"  # type: ignore[union-attr]


async def batches_come_back(gateway: Pool, scheduler: Pool, worker: Pool) -> None:
    await gateway.queue(6)
    for _ in range(3):
        await scheduler.form([("free", 2)])
    handed_back, lost = await worker.claim_next(), await worker.claim_next()
    assert await worker.batches.release(handed_back.batch_id, "token")
    assert await worker.batches.fail(lost.batch_id, "token", ErrorCode.GPU_TIMEOUT, 0)
    popped = await worker.pop()
    assert popped is not None
    await worker.batches.push_back(popped)
    await scheduler.endings.reap(0)
    await scheduler.endings.expire(TIERS)


async def a_gateway_ends_its_own(gateway: Pool) -> None:
    ids = await gateway.queue(2)
    await gateway.endings.cancel([(ids[0], ErrorCode.CANCELLED)])
    assert await gateway.outbox.depth() > 0


async def the_audit_is_written(scheduler: Pool) -> None:
    taken = await scheduler.outbox.take(100)
    assert taken.entries
    await scheduler.outbox.take(100, 1, name_of(taken.entries[0]))
    await scheduler.outbox.drop(len(taken.entries), name_of(taken.entries[0]), [b"bad"])
    restore = QuotaRestore(scheduler.client, scheduler.keys)
    await restore.wanted()
    await restore.tell([QuotaSpent("customer", "1day", await scheduler.now_ms(), 3)])


async def everybody_leaves(gateway: Pool, worker: Pool) -> None:
    await worker.presence.worker_gone("w1")
    await gateway.presence.gateway_gone("g1")


async def test_the_loops_of_scheduler_and_worker_run(
    client: Redis, pool: Pool, socket: Path, start_worker: StartWorker
) -> None:
    """A real worker pops, runs, answers and stops at once; a scheduler waits for its token."""
    blocking = blocking_client(url_of(socket, "scheduler"))
    await pool.client.lpush(pool.keys.wake, "1")
    assert await blocking_read(blocking, b"BLPOP", pool.keys.wake, 1.0, block_s=1.0)
    await blocking.aclose()

    worker = await start_worker("w1", redis_url=url_of(socket, "worker"))
    await worker.reaches("ready")
    found = await replies(pool, await batch(pool, "abc"))
    assert [reply.output for reply in found] == ["cba"]
    assert await worker.stop() == 0

    assert await refused(client) == []


async def test_a_real_gateway_serves(client: Redis, redis_url: str, socket: Path) -> None:
    """Admission, subscription, health, and leaving, all as `gateway`; the worker's part is played by `root`."""
    assert redis_url
    async with running_stack(client, url_of(socket, "gateway")) as stack:
        status, body, _ = await stack.infer({"input": "abc"})
        health, _ = await stack.internal("/internal/health")
    assert (status, body["output"], health) == (200, "cba", 200)

    assert await refused(client) == []


FORBIDDEN = [
    *((role, *words.split()) for role in ROLES for words in (
        "FLUSHALL", "FLUSHDB", "KEYS *", "SCAN 0", "CONFIG GET *", "CONFIG SET maxmemory 1", "SHUTDOWN NOSAVE", "ACL LIST",
        "CLIENT KILL ID 1", "SCRIPT FLUSH", "GET other", "SET other 1", "PUBLISH other x", "FUNCTION LIST",
    )),
    *(("gateway", *words.split()) for words in (
        "LPUSH batch_queue b", "SET healthy_gpu_count 9", "HSET gpu:w1 status ready", "LPUSH dlq x", "SET reaped_at 1",
        "SET quotas_told 1", "BLPOP batch_queue 1", "CLIENT UNBLOCK 1", "RPUSH {p}:batch_queue b",
    )),
    *(("scheduler", *words.split()) for words in (
        "SET gateway:g1 x", "SUBSCRIBE responses:g1", "HSET idem:x id y", "HSET rl:tier:free tokens 9", "CLIENT UNBLOCK 1",
    )),
    *(("worker", *words.split()) for words in (
        "HSET gateway:g1 stats x", "HGET idem:x id", "HGET rl:tier:free tokens", "SUBSCRIBE responses:g1", "GET epoch",
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
    await DeadList(users["admin"], admin.keys).remove(["req_x"])
    for words in ("SLOWLOG GET", "CLIENT LIST", "INFO", "LLEN queue:free", "ACL LOG", "CONFIG GET maxmemory"):
        await users["admin"].execute_command(*words.split())

    assert await refused(client) == []


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
