"""The faults of `tierlane chaos` on real processes and servers: each has its effect and is healed."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import asyncpg
import psutil
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from eventually import eventually
from integration.cluster_fixtures import Cluster, cluster, cluster_client
from scheduler.redis_client.keys import Keys
from tierlane_local.child_process import family
from tierlane_local.embedded import EmbeddedPostgres, EmbeddedRedis
from tierlane_tools.chaos.faults.actions import ACTIONS
from tierlane_tools.chaos.faults.catalogue import BY_NAME
from tierlane_tools.chaos.faults.fault_kind import FaultTarget
from tierlane_tools.chaos.faults.schedule import Planned
from tierlane_tools.chaos.faults.server_clock import ServerClock
from tierlane_tools.chaos.faults.target import StackTargets, inject_fault
from tierlane_tools.chaos.history import FaultEvent, FaultPhase
from tierlane_tools.chaos.stack.servers import chaos_redis

__all__ = ["cluster", "cluster_client"]

LOCKED = ("SET lock_timeout = '100ms'", "SELECT count(*) FROM requests")


class Servers(StackTargets):
    """The targets of faults: one sleeping process for every role, and the servers that a test has set."""

    def __init__(self, sleeper: int) -> None:
        self._sleeper = sleeper
        self.redis: EmbeddedRedis | None = None
        self.postgres: EmbeddedPostgres | None = None
        self.cluster: Cluster | None = None

    @property
    def counts(self) -> Mapping[FaultTarget, int]:
        return dict.fromkeys(FaultTarget, 1)

    @property
    def redis_url(self) -> str:
        if self.cluster:
            return self.cluster.url
        assert self.redis
        return self.redis.url

    @property
    def database_url(self) -> str:
        assert self.postgres
        return self.postgres.url

    def name(self, place: FaultTarget, index: int) -> str:
        return f"{place}-{index + 1}"

    def processes(self, place: FaultTarget, index: int) -> Sequence[psutil.Process]:
        if place is FaultTarget.POSTGRES and self.postgres:
            return family(self.postgres.pid)
        if place is FaultTarget.REDIS and self.redis:
            return family(self.redis.pid)
        return [one for one in family(self._sleeper) if one.status() != psutil.STATUS_ZOMBIE]


class Fault:
    """One fault in progress: `events` were reported of it; `heal` ends it early, as an interrupt does."""

    def __init__(
        self, targets: Servers, name: str, place: FaultTarget, length_s: float = 30.0, **parameters: float
    ) -> None:
        self.events: list[FaultEvent] = []
        planned = Planned(0.0, BY_NAME[name], place, 0, length_s, parameters)
        self._task = asyncio.create_task(inject_fault(targets, planned, ACTIONS, self.events.append))

    async def begun(self) -> FaultEvent:
        return await eventually(lambda: self.events and self.events[0], "the fault has begun")

    async def heal(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        assert [(event.what, event.error) for event in self.events] == [(FaultPhase.START, ""), (FaultPhase.HEAL, "")]


@pytest.fixture
def targets() -> Iterator[Servers]:
    """Targets with a sleeping process."""
    sleeper = subprocess.Popen(["sleep", "60"])
    yield Servers(sleeper.pid)
    sleeper.kill()
    sleeper.wait()


@pytest.fixture
async def redis(tmp_path: Path, targets: Servers) -> AsyncIterator[Redis]:
    """A client of a Redis that is started as that of a chaos stack."""
    targets.redis_clock = ServerClock(tmp_path)
    targets.redis_clock.prepare()
    server = targets.redis = chaos_redis(tmp_path, targets.redis_clock)
    await server.start()
    client = Redis.from_url(server.url)
    yield client
    await client.aclose()
    await server.stop()


@pytest.fixture
async def postgres(tmp_path: Path, targets: Servers) -> AsyncIterator[EmbeddedPostgres]:
    """A PostgreSQL with a table of requests."""
    server = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    targets.postgres = server
    await _execute(server, "CREATE TABLE requests (id text)")
    yield server
    await server.stop()


async def _execute(server: EmbeddedPostgres, *statements: str) -> None:
    connection = await asyncpg.connect(server.dsn, timeout=5)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close(timeout=1)


async def _works(server: EmbeddedPostgres, statement: str) -> bool:
    with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        await _execute(server, "SELECT pg_sleep(0.3)", statement)  # A new session is limited only after the next check.
        return True
    return False


async def test_a_stopped_process_is_resumed(targets: Servers) -> None:
    """Also where the run is interrupted."""
    fault = Fault(targets, "stop-worker", FaultTarget.WORKER)
    await fault.begun()
    (process,) = targets.processes(FaultTarget.WORKER, 0)
    await eventually(lambda: process.status() == psutil.STATUS_STOPPED, "the process is stopped")
    await fault.heal()
    assert process.status() != psutil.STATUS_STOPPED


async def test_a_killed_process_cannot_be_killed_again(targets: Servers) -> None:
    """A fault that cannot be injected is reported with its error."""
    await Fault(targets, "kill-worker", FaultTarget.WORKER, 0.0).begun()
    await eventually(lambda: not targets.processes(FaultTarget.WORKER, 0), "the process is gone")

    again = await Fault(targets, "kill-worker", FaultTarget.WORKER, 0.0).begun()
    assert again.what is FaultPhase.START
    assert again.error


@pytest.mark.parametrize(("name", "step_s"), [("clock-forward", 5.0), ("clock-backward", -5.0)])
async def test_the_clock_of_redis_is_stepped(targets: Servers, redis: Redis, name: str, step_s: float) -> None:
    """TIME and TTLs follow, also after a restart of the server; the clock comes back at the end."""
    assert not targets.redis_clock.why_not
    await redis.set("key", "value", px=60_000)
    fault = Fault(targets, name, FaultTarget.REDIS, step_s=5.0)
    assert (await fault.begun()).details == f"{step_s:+.3f} s"
    await _stepped_to(redis, step_s)
    assert await redis.pttl("key") == pytest.approx(60_000 - step_s * 1000, abs=2000)
    assert targets.redis
    targets.redis.kill()
    await targets.redis.stop()
    await targets.redis.start()
    await _stepped_to(redis, step_s)
    await fault.heal()
    await _stepped_to(redis, 0.0)


async def _stepped_to(redis: Redis, ahead_s: float) -> None:
    async def stepped() -> bool:  # The server caches its time for a moment.
        seconds, microseconds = await redis.time()
        return abs(seconds + microseconds / 1e6 - time.time() - ahead_s) < 0.5

    await eventually(stepped, f"the clock is {ahead_s} s ahead")


async def test_redis_disk_full(targets: Servers, redis: Redis) -> None:
    """Writes are rejected while the append-only file cannot grow; afterwards Redis recovers by itself."""
    await redis.set("key", "before")
    fault = Fault(targets, "redis-disk-full", FaultTarget.REDIS)
    await fault.begun()

    await eventually(lambda: _rejected(redis), "a write is rejected")
    assert await redis.get("key") in {b"before", b"meanwhile"}
    await fault.heal()
    await redis.set("key", "after")
    assert (await redis.config_get("appendonly"))["appendonly"] == "no"


async def _rejected(redis: Redis) -> bool:
    try:
        await redis.set("key", "meanwhile")
    except ResponseError as error:
        return str(error).startswith("MISCONF")
    return False


async def test_postgres_sessions_and_locks(targets: Servers, postgres: EmbeddedPostgres) -> None:
    """One fault terminates all sessions, the other locks the table until it is healed."""
    connection = await asyncpg.connect(postgres.dsn)
    assert (await Fault(targets, "pg-terminate", FaultTarget.POSTGRES, 0.0).begun()).details == "1 backends"
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)):
        await connection.fetchval("SELECT 1")

    fault = Fault(targets, "pg-lock", FaultTarget.POSTGRES)
    await fault.begun()
    with pytest.raises(asyncpg.LockNotAvailableError):
        await _execute(postgres, *LOCKED)
    await fault.heal()
    await _execute(postgres, *LOCKED)


async def test_postgres_disk_full(targets: Servers, postgres: EmbeddedPostgres) -> None:
    """Commits fail, by an error or by a crash; rows that were committed before are kept."""
    await _execute(postgres, "INSERT INTO requests VALUES ('before')")
    fault = Fault(targets, "pg-disk-full", FaultTarget.POSTGRES)
    await fault.begun()

    async def fails() -> bool:
        return not await _works(postgres, "INSERT INTO requests VALUES ('meanwhile')")

    await eventually(fails, "a commit fails")
    await fault.heal()
    await eventually(lambda: _works(postgres, "INSERT INTO requests VALUES ('after')"), "a commit succeeds")
    connection = await asyncpg.connect(postgres.dsn)
    found = {row["id"] for row in await connection.fetch("SELECT id FROM requests")}
    await connection.close()
    assert {"before", "after"} <= found


async def test_a_failover_in_order(targets: Servers, cluster: Cluster, cluster_client: Redis) -> None:
    """The replica takes over with all data."""
    targets.cluster = cluster
    key = f"{Keys.at(cluster.url).prefix}canary"
    await cluster_client.set(key, "1")
    before = await cluster.faults.owner()
    begun = await Fault(targets, "failover", FaultTarget.REDIS, 0.0).begun()

    async def moved() -> bool:
        return await cluster.faults.owner() != before

    await eventually(moved, "the replica has the slot")
    owner = await cluster.faults.owner()
    assert begun.details == f"to redis-{owner + 1}"
    assert await cluster.command(owner, "GET", key) == b"1"


@pytest.mark.parametrize("loses_source", [False, True])
async def test_a_slot_is_moved(targets: Servers, cluster: Cluster, cluster_client: Redis, loses_source: bool) -> None:
    """Key by key, to its end at the heal, also if the source fails over during the move; no key is lost."""
    targets.cluster = cluster
    prefix = Keys.at(cluster.url).prefix
    names = {f"{prefix}{number}".encode() for number in range(300)}
    for name in names:
        await cluster_client.set(name, "1")
    await cluster_client.execute_command("WAIT", 1, 1000)
    source = await cluster.faults.owner()
    fault = Fault(targets, "migrate-slot", FaultTarget.REDIS)
    await fault.begun()
    target = await cluster.faults.other_primary()

    async def some_moved() -> bool:
        return len(await _names(cluster, target)) > 0

    await eventually(some_moved, "keys have been moved")
    if loses_source:
        cluster.nodes[source].kill()
        await cluster.nodes[source].start()
    await fault.heal()

    assert await cluster.faults.owner() == target
    assert set(await _names(cluster, target)) == names


async def _names(cluster: Cluster, number: int) -> list[bytes]:
    return await cluster.command(number, "CLUSTER", "GETKEYSINSLOT", cluster.faults.slot, 1000)
