"""The faults of `tierlane chaos` on real processes and servers: each does what its name says, and heals."""

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
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ResponseError

from eventually import eventually
from tierlane.chaos.faults.actions import DOING
from tierlane.chaos.faults.catalogue import BY_NAME, FaultTarget, Planned
from tierlane.chaos.faults.hostile_client import CONNECTIONS_OF_A_SORT, SORTS
from tierlane.chaos.faults.proxy import FaultProxy
from tierlane.chaos.faults.server_clock import ServerClock
from tierlane.chaos.faults.target import Stranger, do_fault
from tierlane.chaos.history import FaultEvent, What
from tierlane.chaos.stack import chaos_redis
from tierlane.child_process import family
from tierlane.embedded import EmbeddedPostgres, EmbeddedRedis

LOCKED = ("SET lock_timeout = '100ms'", "SELECT count(*) FROM requests")


class Servers:
    """A `Ground` with one process that sleeps, standing for every role, and the servers that a test has set."""

    def __init__(self, sleeper: int) -> None:
        self._sleeper = sleeper
        self.redis_url = ""
        self.http_port = 0
        self.redis: EmbeddedRedis | None = None
        self.postgres: EmbeddedPostgres | None = None
        self.redis_clock = ServerClock(Path())

    @property
    def targets(self) -> Mapping[FaultTarget, int]:
        return dict.fromkeys(FaultTarget, 1)

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

    def stranger(self, index: int) -> Stranger:
        return Stranger("127.0.0.1", self.http_port, "key", "model")

    def proxy(self, place: FaultTarget, index: int) -> FaultProxy:
        raise LookupError

    def redis_proxy_of(self, place: FaultTarget, index: int) -> FaultProxy:
        raise LookupError


class Doing:
    """One fault under way: `events` is what was told; `end` ends its length early, as a cancel does."""

    def __init__(
        self, ground: Servers, name: str, place: FaultTarget, length_s: float = 30.0, **parameters: float
    ) -> None:
        self.events: list[FaultEvent] = []
        planned = Planned(0.0, BY_NAME[name], place, 0, length_s, parameters)
        self._task = asyncio.create_task(do_fault(ground, planned, DOING, self.events.append))

    async def begun(self) -> FaultEvent:
        return await eventually(lambda: self.events and self.events[0], "the begin of the fault")

    async def end(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        assert [(event.what, event.error) for event in self.events] == [(What.START, ""), (What.HEAL, "")]


@pytest.fixture
def ground() -> Iterator[Servers]:
    """With a process that does nothing."""
    sleeper = subprocess.Popen(["sleep", "60"])
    yield Servers(sleeper.pid)
    sleeper.kill()
    sleeper.wait()


@pytest.fixture
async def redis(tmp_path: Path, ground: Servers) -> AsyncIterator[Redis]:
    """A client of a server of the test's own, started as that of a chaos stack is."""
    ground.redis_clock = ServerClock(tmp_path)
    ground.redis_clock.prepare()
    server = ground.redis = chaos_redis(tmp_path, ground.redis_clock)
    await server.start()
    ground.redis_url = server.url
    client = Redis.from_url(server.url)
    yield client
    await client.aclose()
    await server.stop()


@pytest.fixture
async def postgres(tmp_path: Path, ground: Servers) -> AsyncIterator[EmbeddedPostgres]:
    """A server of the test's own, with the table that is locked."""
    server = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    ground.postgres = server
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
        await _execute(server, "SELECT pg_sleep(0.3)", statement)  # A new session is limited after the next look only.
        return True
    return False


async def _fails(server: EmbeddedPostgres, statement: str) -> bool:
    return not await _works(server, statement)


async def test_a_stopped_process_goes_on_afterwards(ground: Servers) -> None:
    """Also when the run is interrupted in the middle."""
    doing = Doing(ground, "stop-worker", FaultTarget.WORKER)
    await doing.begun()
    (process,) = ground.processes(FaultTarget.WORKER, 0)
    await eventually(lambda: process.status() == psutil.STATUS_STOPPED, "it is stopped")
    await doing.end()
    assert process.status() != psutil.STATUS_STOPPED


async def test_a_killed_process_is_gone_and_cannot_be_killed_again(ground: Servers) -> None:
    """What cannot be done is told, and is no fault."""
    await Doing(ground, "kill-worker", FaultTarget.WORKER, 0.0).begun()
    await eventually(lambda: not ground.processes(FaultTarget.WORKER, 0), "it is gone")

    again = await Doing(ground, "kill-worker", FaultTarget.WORKER, 0.0).begun()
    assert (again.what, again.error) == (What.START, "FaultImpossible: It is down already.")


async def test_memory_is_short_and_then_not(ground: Servers, redis: Redis) -> None:
    """A write that needs more than what is spare is refused; afterwards the old limit is back."""
    before = (await redis.config_get("maxmemory"))["maxmemory"]
    doing = Doing(ground, "maxmemory", FaultTarget.REDIS, spare_kib=0.0)
    await doing.begun()
    with pytest.raises(OutOfMemoryError):
        await redis.mset({f"key-{number}": "x" * 10_000 for number in range(10)})
    await doing.end()
    await redis.set("key", "x" * 10_000)
    assert (await redis.config_get("maxmemory"))["maxmemory"] == before


async def test_redis_forgets_data_and_scripts(ground: Servers, redis: Redis) -> None:
    """FLUSHALL and SCRIPT FLUSH."""
    await redis.set("key", "value")
    script = await redis.script_load("return 1")
    assert (await Doing(ground, "flushall", FaultTarget.REDIS, 0.0).begun()).details == "1 keys"
    await Doing(ground, "script-flush", FaultTarget.REDIS, 0.0).begun()
    assert await redis.dbsize() == 0
    assert await redis.script_exists(script) == [False]


async def test_clients_of_redis_are_cut_off(ground: Servers, redis: Redis) -> None:
    """Command connections by one fault, subscribers by the other."""
    subscription = redis.pubsub()
    await subscription.subscribe("channel")
    await subscription.get_message(timeout=1)
    before = await redis.client_id()

    assert (await Doing(ground, "client-kill-pubsub", FaultTarget.REDIS, 0.0).begun()).details == "1 connections"
    with pytest.raises(RedisConnectionError):
        await subscription.connection.read_response()
    await Doing(ground, "client-kill-normal", FaultTarget.REDIS, 0.0).begun()
    assert await redis.client_id() != before
    await subscription.aclose()


@pytest.mark.parametrize(("name", "step_s"), [("clock-forward", 5.0), ("clock-backward", -5.0)])
async def test_the_clock_of_redis_steps_and_comes_back(ground: Servers, redis: Redis, name: str, step_s: float) -> None:
    """TIME, and with it what is left of a key's life; at the end all is as before. Also after a restart of the server."""
    assert not ground.redis_clock.why_not
    await redis.set("key", "value", px=60_000)
    doing = Doing(ground, name, FaultTarget.REDIS, step_s=5.0)
    assert (await doing.begun()).details == f"{step_s:+.3f} s"
    await _stepped_to(redis, step_s)
    assert await redis.pttl("key") == pytest.approx(60_000 - step_s * 1000, abs=2000)
    assert ground.redis
    ground.redis.kill()
    await ground.redis.stop()
    await ground.redis.start()
    await _stepped_to(redis, step_s)
    await doing.end()
    await _stepped_to(redis, 0.0)


async def _stepped_to(redis: Redis, ahead_s: float) -> None:
    """The server keeps the time that it read last for a moment, so the first command may see the one before."""

    async def stepped() -> bool:
        return abs(await _ahead_s(redis) - ahead_s) < 0.5

    await eventually(stepped, f"the clock is {ahead_s} s ahead")


async def _ahead_s(redis: Redis) -> float:
    seconds, microseconds = await redis.time()
    return float(seconds + microseconds / 1e6 - time.time())


async def test_a_clock_that_cannot_be_moved_is_no_fault(ground: Servers) -> None:
    """Where there is no compiler, say: the event tells why."""
    ground.redis_clock.why_not = "There is no C compiler."
    told = await Doing(ground, "clock-forward", FaultTarget.REDIS, step_s=5.0).begun()
    assert (told.what, told.error) == (What.START, "FaultImpossible: There is no C compiler.")


async def test_redis_can_write_nothing_and_then_goes_on(ground: Servers, redis: Redis) -> None:
    """While the disk of its append-only file is full every write is refused; with room again it recovers by itself."""
    await redis.set("key", "before")
    doing = Doing(ground, "redis-disk-full", FaultTarget.REDIS)
    await doing.begun()

    await eventually(lambda: _refused(redis), "a write that is refused")
    assert await redis.get("key") in {b"before", b"meanwhile"}
    await doing.end()
    await redis.set("key", "after")
    assert (await redis.config_get("appendonly"))["appendonly"] == "no"


async def _refused(redis: Redis) -> bool:
    try:
        await redis.set("key", "meanwhile")
    except ResponseError as error:
        return str(error).startswith("MISCONF")
    return False


async def test_redis_pauses(ground: Servers, redis: Redis) -> None:
    """Commands wait until the pause is over."""
    loop = asyncio.get_running_loop()
    await Doing(ground, "client-pause", FaultTarget.REDIS, 0.4).begun()
    began = loop.time()
    await redis.ping()
    assert 0.2 <= loop.time() - began < 2.0


async def test_sessions_are_terminated_and_the_table_is_locked(ground: Servers, postgres: EmbeddedPostgres) -> None:
    """pg_terminate_backend of everybody; LOCK TABLE until the heal."""
    connection = await asyncpg.connect(postgres.dsn)
    assert (await Doing(ground, "pg-terminate", FaultTarget.POSTGRES, 0.0).begun()).details == "1 backends"
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
        await connection.fetchval("SELECT 1")

    doing = Doing(ground, "pg-lock", FaultTarget.POSTGRES)
    await doing.begun()
    with pytest.raises(asyncpg.LockNotAvailableError):
        await _execute(postgres, *LOCKED)
    await doing.end()
    await _execute(postgres, *LOCKED)


async def test_postgres_can_write_nothing_and_then_goes_on(ground: Servers, postgres: EmbeddedPostgres) -> None:
    """Commits fail while the disk is full, by an error or by a crash; what was committed before is there afterwards."""
    await _execute(postgres, "INSERT INTO requests VALUES ('before')")
    doing = Doing(ground, "pg-disk-full", FaultTarget.POSTGRES)
    await doing.begun()

    await eventually(lambda: _fails(postgres, "INSERT INTO requests VALUES ('meanwhile')"), "a commit that fails")
    await doing.end()
    await eventually(lambda: _works(postgres, "INSERT INTO requests VALUES ('after')"), "a commit that succeeds")
    connection = await asyncpg.connect(postgres.dsn)
    found = {row["id"] for row in await connection.fetch("SELECT id FROM requests")}
    await connection.close()
    assert {"before", "after"} <= found


async def test_a_hostile_client_comes_again_and_goes_at_the_end(ground: Servers) -> None:
    """Every sort on its few connections, never more at once, also where each is ended at once; none is left."""
    here: set[asyncio.StreamWriter] = set()
    came, most = 0, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came, most
        here.add(writer)
        came, most = came + 1, max(most, len(here))
        with suppress(OSError):
            if came > len(SORTS) * CONNECTIONS_OF_A_SORT or came % 2:
                while await reader.read(1 << 16):
                    pass
        here.discard(writer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        ground.http_port = server.sockets[0].getsockname()[1]
        doing = Doing(ground, "hostile-client", FaultTarget.GATEWAY)
        told = await doing.begun()
        assert told.details == f"{len(SORTS) * CONNECTIONS_OF_A_SORT} connections"
        await eventually(lambda: came > len(SORTS) * CONNECTIONS_OF_A_SORT, "some came again")
        await doing.end()
        await eventually(lambda: not here, "all are gone")
    assert most <= len(SORTS) * CONNECTIONS_OF_A_SORT
