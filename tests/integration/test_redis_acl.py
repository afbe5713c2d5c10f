"""deploy/redis/users.acl in a real server: each role works as its user, and every other command is rejected."""

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from configs import LEASE_MS
from contract.slots import announce, ended, finish
from customer_limits import in_force
from eventually import eventually
from integration.gateway_fixtures import running_stack
from integration.gpu_pool_fixtures import StartWorker, batch, faulty_models, replies, start_worker
from pool import TIERS, Pool, done
from ratelimit.limits import REQUEST_BUCKET, Bucket
from redis_acl import ROLES, SCRIPTS, acl_server, password, touched
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.protocol.audit_outbox import name_of
from scheduler.protocol.batches import HANDED_BACK, FreeSlots, OwnedBatch, lost
from scheduler.protocol.cancellation import DeadLetterList
from scheduler.protocol.handover import ArrivingLimits, LimitsHandover, Wanted
from scheduler.protocol.index_repair import IndexRepair
from scheduler.protocol.limits import (
    REMOVED,
    Allotments,
    Grant,
    LimitState,
    Parts,
    PartsOrder,
    QuotaRestore,
    QuotaSpent,
    recent_rejections,
)
from scheduler.protocol.pool_view import Unfinished
from scheduler.redis_client.connections import blocking_client, blocking_read, check_server, command_client
from scheduler.redis_client.keys import Keys, tag_of

__all__ = ["faulty_models", "start_worker"]

LUA = Path(__file__).resolve().parents[2] / "scheduler" / "lua"
PATIENCE_S = 10.0
NAMES = ("default", "other")
TAGS = (tag_of("redis+cluster://"), tag_of("#c2"))
KEYS_OF = [Keys(), Keys("other"), *(Keys(pool, tag) for tag in TAGS for pool in ("default", "other"))]
"""A pool and another one, without a cell's tag, in the default cell of a cluster, and in another cell."""


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path) -> Iterator[Path]:
    """A server with the users of deploy/redis/."""
    with acl_server(tmp_path_factory.mktemp("acl"), redis_binary) as socket:
        yield socket


def url_of(socket: Path, user: str) -> str:
    return f"unix://{user}:{quote(password(user), safe='')}@{socket}"


@pytest.fixture
async def redis_url(socket: Path) -> AsyncIterator[str]:
    """The URL of the user `root` of an empty Redis, with an empty log of rejected commands."""
    client = command_client(f"unix://root:-@{socket}", PATIENCE_S)

    async def responds() -> bool:
        try:
            return bool(await client.ping())
        except (OSError, RedisError):
            return False

    await eventually(responds, "the server responds")
    await client.flushall()
    await client.execute_command("ACL", "LOG", "RESET")
    yield f"unix://root:-@{socket}"
    await client.aclose()


@pytest.fixture
async def users(socket: Path, redis_url: str) -> AsyncIterator[dict[str, Redis]]:
    """A client of each user."""
    assert redis_url
    clients = {user: command_client(url_of(socket, user), PATIENCE_S) for user in (*ROLES, "scaler", "admin")}
    yield clients
    for client in clients.values():
        await client.aclose()


async def rejected(client: Redis) -> list[Any]:
    """The commands that the server rejected: user, reason, object."""
    log = await client.execute_command("ACL", "LOG")
    return [(row[b"username"], row[b"reason"], row[b"object"]) for row in log] if log else []


def test_every_script_belongs_to_a_role() -> None:
    """A new script must be added to a role in tests/redis_acl.py."""
    assert {path.stem for path in LUA.glob("*.lua")} == {name for names in SCRIPTS.values() for name in names}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("keys_of", KEYS_OF, ids=lambda keys: keys.prefix)
async def test_all_keys_and_commands_of_a_roles_scripts_are_allowed(client: Redis, role: str, keys_of: Keys) -> None:
    """By the text of the scripts, so that rare paths are included."""
    keys, commands = touched(role)
    wrong = []
    for key in keys:
        if key == "/moving" and not keys_of.tag:
            continue
        name = keys_of.tag + key[1:] if key.startswith("/") else keys_of.prefix + key
        name = f"{name}x" if key.endswith(":") else name
        if await client.execute_command("ACL", "DRYRUN", role, "EXISTS", name) != b"OK":
            wrong.append(name)
    for command in commands:
        info = await client.execute_command("COMMAND", "INFO", command)
        arguments = ["leases"] * (abs(info[command.lower()]["arity"]) - 1)
        reply = await client.execute_command("ACL", "DRYRUN", role, command, *arguments)
        if b"no permissions to run" in reply:
            wrong.append(command)

    assert len(keys) > 15
    assert wrong == []


@pytest.mark.parametrize("keys", KEYS_OF, ids=lambda keys: keys.prefix)
async def test_each_role_can_do_its_work(client: Redis, users: dict[str, Redis], keys: Keys) -> None:
    """Every script and command of the protocol by the user of its role; the server rejects none."""
    gateway, scheduler, worker = (Pool(users[role], keys) for role in ROLES)
    for role in ROLES:
        await check_server(users[role])
    await gateway.gateway_lives("g1")
    await gateway.presence.observe(TIERS)
    await scheduler.batches.look(TIERS)
    await worker.worker_beats("w1")
    await scheduler.presence.census()

    await admit_with_limits(gateway)
    await run_a_batch(gateway, scheduler, worker)
    await return_batches(gateway, scheduler, worker)
    await run_in_slots(gateway, scheduler, worker)
    (cancelled,) = await gateway.queue(1)
    await gateway.terminations.cancel([(cancelled, ErrorCode.CANCELLED)])
    await write_the_audit(gateway, scheduler)
    unfinished = Unfinished(scheduler.client)
    await unfinished.note(["left"], ["over"])
    await unfinished.is_empty(scheduler.keys, TIERS)
    assert await Unfinished(gateway.client).pools() == {"left"}
    await worker.presence.worker_gone("w1")
    await gateway.presence.gateway_gone("g1")

    assert await rejected(client) == []


async def admit_with_limits(gateway: Pool) -> None:
    limits: dict[str, Any] = {"quotas": [("1day", 10)], "tokens_per_minute": 1000.0, "max_concurrency": 5}
    submissions = [gateway.submission(**limits, tokens=3), gateway.submission(idempotency="k", fingerprint="f")]
    assert [v.outcome for v in await gateway.admit(submissions)] == ["accepted", "accepted"]
    left = await LimitsHandover(gateway.client, gateway.keys).leave(1, {"moved": Wanted(("key",), ("k",))})
    await LimitsHandover(gateway.client, gateway.keys).arrive(
        2, [ArrivingLimits("moved", in_force(), {}, {"other": left["moved"]})]
    )
    state = LimitState(gateway.client, gateway.keys)
    await state.read("customer", in_force(10.0, 10.0, **limits, key_rate=5.0, key_burst=5.0), "key")


async def run_a_batch(gateway: Pool, scheduler: Pool, worker: Pool) -> None:
    channel = gateway.keys.responses("g1")
    pubsub = gateway.client.pubsub()
    await pubsub.subscribe(channel)
    await pubsub.get_message(timeout=5)
    await scheduler.form([("free", 2)])
    claimed = await worker.claim_next()
    assert await worker.batches.renew(claimed.batch_id, "token")
    assert await worker.batches.finish(claimed.batch_id, "token", [done(each.id) for each in claimed.requests]) == 0
    message = await eventually(lambda: pubsub.get_message(timeout=1), "the reply is published")
    assert message["type"] == "message"
    await worker.client.publish(channel, b"+\x90")
    await pubsub.aclose()
    ids = [each.id for each in claimed.requests]
    assert all(await gateway.results.fetch(ids))
    assert (await gateway.results.request_detail(ids[0])).state == "completed"


async def return_batches(gateway: Pool, scheduler: Pool, worker: Pool) -> None:
    await gateway.queue(6)
    for _ in range(3):
        await scheduler.form([("free", 2)])
    released, lost = await worker.claim_next(), await worker.claim_next()
    assert await worker.batches.release(released.batch_id, "token")
    assert await worker.batches.fail(lost.batch_id, "token", ErrorCode.GPU_TIMEOUT, 0)
    popped = await worker.pop()
    assert popped is not None
    await worker.batches.push_back(popped)
    await scheduler.terminations.reap(0)
    await scheduler.terminations.expire(TIERS)


SINCE_SLOTS = re.compile(r" (?:%R)?~\S*\b(?:slots|unclaimed|stops:\*)(?= )| \+(?:hkeys|hvals)(?= )")


async def test_a_pool_that_runs_batches_needs_no_rules_for_slots(client: Redis, socket: Path) -> None:
    """With the rules of an older release, its requests run as before; only reads of the new keys are rejected."""
    pools = {}
    for line in (LUA.parents[1] / "deploy" / "redis" / "users.acl").read_text().splitlines():
        role = line.split(" ")[1]
        if role in ROLES:
            rules = SINCE_SLOTS.sub("", line.partition(" (")[0]).split(" ")[2:]
            assert len(rules) < len(line.split(" ")) - 6
            rules = [">older" if rule.startswith(">") else rule for rule in rules]
            await client.execute_command("ACL", "SETUSER", f"older-{role}", *rules)
            pools[role] = Pool(command_client(f"unix://older-{role}:older@{socket}", PATIENCE_S), Keys())
    gateway, scheduler, worker = (pools[role] for role in ROLES)
    await gateway.gateway_lives("g1")
    await worker.worker_beats("w1")
    await worker.worker_beats("w1", "paused")
    await worker.worker_beats("w1")
    await scheduler.presence.census()
    await gateway.presence.observe(TIERS)
    await gateway.queue(2)
    await run_a_batch(gateway, scheduler, worker)
    await return_batches(gateway, scheduler, worker)
    (request_id,) = await gateway.queue(1)
    await gateway.terminations.cancel([(request_id, ErrorCode.CANCELLED)])

    assert {what for _, _, what in await rejected(client)} <= {b"hkeys", b"hvals", b"slots", b"unclaimed"}
    for pool in pools.values():
        await pool.client.aclose()


async def run_in_slots(gateway: Pool, scheduler: Pool, worker: Pool) -> None:
    await announce(worker, "w1", 4)
    ids = await gateway.queue(4)
    await scheduler.batches.form("slots", [("free", 4)], 1, TIERS)
    batch_id = (await worker.client.lrange(worker.keys.batch_queue, -1, -1))[0].decode()
    claimed = await worker.batches.claim(batch_id, "w1", "token", FreeSlots(4, 4))
    assert claimed is not None
    await gateway.terminations.cancel([(ids[0], ErrorCode.CANCELLED)])
    assert await worker.client.blpop([worker.keys.stops("w1")], 1)
    ends = zip(range(4), ("cancelled", "", HANDED_BACK, lost(ErrorCode.WORKER_LOST)), strict=True)
    assert await finish(worker, [ended(claimed, at, code) for at, code in ends]) == 0
    assert await worker.batches.renew_all([OwnedBatch(batch_id, "token", 1)]) == [False]
    await announce(worker, "w1", status="draining")


async def write_the_audit(gateway: Pool, scheduler: Pool) -> None:
    assert await gateway.outbox.depth() > 0
    taken = await scheduler.outbox.take(100)
    assert taken.entries
    await scheduler.outbox.take(100, 1, name_of(taken.entries[0]))
    await scheduler.outbox.drop(len(taken.entries), name_of(taken.entries[0]), [b"bad"])
    restore = QuotaRestore(scheduler.client, scheduler.keys)
    await restore.wanted()
    await restore.apply(
        [QuotaSpent("customer", "1day", 1, await scheduler.now_ms() - 1000, await scheduler.now_ms() + 1000, 3)]
    )
    order = PartsOrder("customer", [Bucket(REQUEST_BUCKET, 1.0, 9.0)], Parts(5000, 5000, 5000), [Grant("1day", 10)])
    allotments, ends_ms = Allotments(scheduler.client, scheduler.keys), await scheduler.now_ms() + 3000
    assert (await allotments.allot("one", 1, 1, ends_ms, [order])).accepted
    await allotments.allot("one", 1, 2, ends_ms, [order._replace(parts=REMOVED)])


async def test_a_worker_and_a_waiting_scheduler(
    client: Redis, pool: Pool, socket: Path, start_worker: StartWorker
) -> None:
    """A real worker pops, runs, replies and stops; a scheduler waits for its wake token."""
    blocking = blocking_client(url_of(socket, "scheduler"))
    await pool.client.lpush(pool.keys.wake, "1")
    assert await blocking_read(blocking, b"BLPOP", pool.keys.wake, 1.0, block_s=1.0)
    await blocking.aclose()

    worker = await start_worker("w1", redis_url=url_of(socket, "worker"))
    await worker.reaches("ready")
    assert [reply.output for reply in await replies(pool, await batch(pool, "abc"))] == ["cba"]
    assert await worker.stop() == 0

    assert await rejected(client) == []


async def test_a_gateway(client: Redis, redis_url: str, socket: Path) -> None:
    """A real one: admission, subscription, health and shutdown. The worker is another user."""
    assert redis_url
    async with running_stack(client, url_of(socket, "gateway")) as stack:
        status, body, _ = await stack.infer({"input": "abc"})
        health, _ = await stack.internal("/internal/health")
    assert (status, body["output"], health) == (200, "cba", 200)

    assert await rejected(client) == []


async def test_a_scheduler_can_repair_indexes(client: Redis, users: dict[str, Redis]) -> None:
    """With and without the prefix of a pool."""
    for name in NAMES:
        keys = Keys(name)
        pool = Pool(client, keys)
        await pool.gateway_lives("g1")
        ids = await pool.queue(2)
        await pool.form([("free", 1)])
        for index in ("leases", "queue:free", "gateways", "refusal_lists", "history"):
            await client.delete(keys.prefix + index)
            await client.set(keys.prefix + index, "x")

        assert len(await IndexRepair(users["scheduler"], keys, lease_ms=LEASE_MS).repair(TIERS)) == 5

        assert await client.zcard(keys.leases) == 1
        assert await client.lrange(keys.queue("free"), 0, -1) == [ids[1].encode()]


async def test_an_admin_can_inspect_and_repair(client: Redis, users: dict[str, Redis]) -> None:
    """The commands of `tierlane explain` and `tierlane dlq`, and those of an operator."""
    admin = Pool(users["admin"], Keys())
    await check_server(users["admin"])
    await admin.gateway_lives("small")
    await admin.queue(1)
    await recent_rejections(users["admin"], admin.keys, "customer", 10)
    await DeadLetterList(users["admin"], admin.keys).remove(["req_x"])
    for words in ("SLOWLOG GET", "CLIENT LIST", "INFO", "LLEN queue:free", "ACL LOG", "CONFIG GET maxmemory"):
        await users["admin"].execute_command(*words.split())

    assert await rejected(client) == []


async def test_the_scaler_can_read_lengths(users: dict[str, Redis]) -> None:
    """The trigger of KEDA needs one command."""
    assert await users["scaler"].llen("queue:enterprise") == 0
    assert await users["scaler"].llen("{other}:queue:free") == 0


# Rejected commands

FORBIDDEN = [
    *((role, *words.split()) for role in ROLES for words in (
        "FLUSHALL", "FLUSHDB", "KEYS *", "CONFIG GET *", "CONFIG SET maxmemory 1", "SHUTDOWN NOSAVE", "ACL LIST",
        "CLIENT KILL ID 1", "SCRIPT FLUSH", "GET other", "SET other 1", "PUBLISH other x", "FUNCTION LIST",
    )),
    *((role, "SCAN", "0") for role in ("gateway", "worker")),  # schedulers, to rebuild an index
    *(("gateway", *words.split()) for words in (
        "LPUSH batch_queue b", "SET healthy_gpu_count 9", "HSET gpu:w1 status ready", "LPUSH dlq x", "SET reaped_at 1",
        "SET quotas_told 1", "BLPOP batch_queue 1", "CLIENT UNBLOCK 1", "RPUSH {p}:batch_queue b",
    )),
    *(("scheduler", *words.split()) for words in (
        "SET gateway:g1 x", "SUBSCRIBE responses:g1", "HSET rl:tier:free tokens 9", "CLIENT UNBLOCK 1",
    )),
    *(("worker", *words.split()) for words in (
        "HSET gateway:g1 stats x", "HGET rl:tier:free tokens", "SUBSCRIBE responses:g1", "GET epoch",
        "LPUSH outbox_bad x", "LRANGE outbox:a 0 -1", "SET reaped_at 1", "SET {p}:reaped_at 1", "LRANGE refusals:g1 0 -1",
        "SET quotas_told 1",
    )),
    *(("scaler", *words.split()) for words in ("LRANGE queue:free 0 -1", "LLEN outbox", "EVAL x 0")),
    *(("admin", *words.split()) for words in ("FLUSHALL", "KEYS *", "CONFIG SET maxmemory 1", "SHUTDOWN")),
]  # fmt: skip


@pytest.mark.parametrize("words", FORBIDDEN, ids=" ".join)
async def test_commands_of_other_roles_are_rejected(users: dict[str, Redis], words: tuple[str, ...]) -> None:
    """And commands that no role needs."""
    role, *command = words

    with pytest.raises(NoPermissionError):
        await users[role].execute_command(*command)


@pytest.mark.parametrize(("role", "other"), [("worker", "gateway"), ("scheduler", "gateway"), ("worker", "scheduler")])
async def test_scripts_of_other_roles_are_rejected(users: dict[str, Redis], role: str, other: str) -> None:
    """Scripts run with the permissions of their caller."""
    pool = Pool(users[role], Keys())

    with pytest.raises(
        RedisUnavailable, match="Redis does not allow a command to the user of TIERLANE_REDIS_URL: roles need"
    ):
        await (pool.queue(1) if other == "gateway" else pool.presence.census())


@pytest.mark.parametrize("name", NAMES)
async def test_a_gateway_can_only_remove_from_the_list_of_dead_letters(
    client: Redis, users: dict[str, Redis], name: str
) -> None:
    """For the dashboard: LREM is its only write command on a key of another role."""
    keys = Keys(name)
    await client.lpush(keys.dlq, "req_x", "req_y")
    await DeadLetterList(users["gateway"], keys).remove(["req_x"])
    assert await users["gateway"].lrange(keys.dlq, 0, -1) == [b"req_y"]
    for command, *arguments in (("LPUSH", "req_z"), ("RPUSH", "req_z"), ("DEL",), ("LTRIM", "0", "1")):
        with pytest.raises(NoPermissionError):
            await users["gateway"].execute_command(command, keys.dlq, *arguments)


async def test_unknown_users_are_rejected(socket: Path, redis_url: str) -> None:
    """The default user is disabled, and a wrong password is rejected."""
    assert redis_url
    for login in ("", "gateway:wrong@", "root2:x@"):
        stranger = command_client(f"unix://{login}{socket}", PATIENCE_S)
        with pytest.raises(RedisError, match=r"(?i)already authenticated|invalid username"):
            await stranger.ping()
        await stranger.aclose()
