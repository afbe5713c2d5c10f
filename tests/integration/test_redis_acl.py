"""deploy/redis/users.acl in a real server: each role does its job as its user, and nothing is refused."""

from pathlib import Path

import pytest
from redis.asyncio import Redis

from customer_limits import in_force
from eventually import eventually
from integration.gateway_fixtures import running_stack
from integration.gpu_pool_fixtures import StartWorker, batch, faulty_models, replies, start_worker
from integration.redis_acl_fixtures import redis_url, refused, socket, url_of, users
from pool import TIERS, Pool, done
from redis_acl import ROLES, SCRIPTS, touched
from scheduler.errors import ErrorCode
from scheduler.protocol.audit_outbox import name_of
from scheduler.protocol.index_repair import IndexRepair
from scheduler.protocol.limits import LimitState, QuotaRestore, QuotaSpent
from scheduler.protocol.pool_view import Unfinished
from scheduler.redis_client.connections import blocking_client, blocking_read, check_server
from scheduler.redis_client.keys import Keys

__all__ = ["faulty_models", "redis_url", "socket", "start_worker", "users"]

LUA = Path(__file__).resolve().parents[2] / "scheduler" / "lua"


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
        if await client.execute_command("ACL", "DRYRUN", role, "EXISTS", name) != b"OK":
            wrong.append(name)
    arities = {name: await client.execute_command("COMMAND", "INFO", name) for name in commands}
    for command, known in arities.items():
        arguments = ["leases"] * (abs(known[command.lower()]["arity"]) - 1)
        said = await client.execute_command("ACL", "DRYRUN", role, command, *arguments)
        if b"no permissions to run" in said:
            wrong.append(command)

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
    await pools_are_noted(gateway, scheduler)
    await everybody_leaves(gateway, worker)

    assert await refused(client) == []


async def limits_are_charged(gateway: Pool) -> None:
    limits = {"quotas": [("1day", 10)], "tokens_per_minute": 1000.0, "max_concurrency": 5, "tokens": 3}
    submissions = [gateway.submission(**limits), gateway.submission(idempotency="k", fingerprint="f")]
    verdicts = await gateway.admit(submissions)
    assert [v.outcome for v in verdicts] == ["accepted", "accepted"]
    left = LimitState(gateway.client, gateway.keys)
    await left.read(
        "customer",
        in_force(
            10.0,
            10.0,
            tokens_per_minute=1000.0,
            max_concurrency=5,
            quotas=[("1day", 10)],
            key_rate=5.0,
            key_burst=5.0,
        ),
        "key",
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


async def pools_are_noted(gateway: Pool, scheduler: Pool) -> None:
    noted = Unfinished(scheduler.client)
    await noted.note(["left"], ["over"])
    await noted.is_empty(scheduler.keys, TIERS)
    assert await Unfinished(gateway.client).pools() == {"left"}


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
    await scheduler.terminations.reap(0)
    await scheduler.terminations.expire(TIERS)


async def a_gateway_ends_its_own(gateway: Pool) -> None:
    ids = await gateway.queue(2)
    await gateway.terminations.cancel([(ids[0], ErrorCode.CANCELLED)])
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


async def test_a_scheduler_may_repair_an_index(client: Redis, users: dict[str, Redis]) -> None:
    """All of it: look at types, set aside, find the rows, build again; with a pool's prefix as without."""
    for keys in (Keys(), Keys("llm")):
        pool = Pool(client, keys)
        await pool.gateway_lives("g1")
        ids = await pool.queue(2)
        await pool.form([("free", 1)])
        for name in ("leases", "queue:free", "gateways", "refusal_lists", "history"):
            await client.delete(keys.prefix + name)
            await client.set(keys.prefix + name, "x")
        told = await IndexRepair(users["scheduler"], keys).repair(TIERS)

        assert len(told) == 5
        assert await client.zcard(keys.leases) == 1
        assert await client.lrange(keys.queue("free"), 0, -1) == [ids[1].encode()]
