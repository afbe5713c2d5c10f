"""A stack for chaos: every role several times, each behind proxies of its own, nothing left at the end.

It is kept running by the supervisor of `tierlane up`, and its orphan guard ends it even when this process is killed.
Redis keeps nothing on disk, so a killed one comes back empty; PostgreSQL keeps whatever it has said to have committed.
The stack is ready when each gateway says so and counts every worker healthy. Servers are started from an event loop in
a thread of its own, since that would hold up the load for a tenth of a second.

Its customers are ten in each tier, with limits so wide that the load itself is never rejected, and one for the hostile
client. The shed rules, the queue times and the capacity of the GPUs stay what they are.
"""

import asyncio
import os
import secrets
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import aiohttp
import asyncpg
import psutil
from pydantic import SecretStr

from ledger.postgres import asyncpg_dsn
from tierlane.chaos.command import StackShape
from tierlane.chaos.echo import MEAN_S, RUNS_VARIABLE
from tierlane.chaos.faults.catalogue import FaultTarget
from tierlane.chaos.faults.proxy import HOST, FaultProxy
from tierlane.chaos.faults.server_clock import ServerClock
from tierlane.chaos.faults.target import Stranger
from tierlane.chaos.history import LoadCustomer, Sources, Target
from tierlane.chaos.tls_front import TlsFront
from tierlane.child_process import ChildProcess, family
from tierlane.embedded import EmbeddedPostgres, EmbeddedRedis
from tierlane.settings.model import Settings
from tierlane.up.data_dir import DataDir, LogLines, StackError, held_port
from tierlane.up.demo_data import TIERS, demo_model, seed_demo
from tierlane.up.members import ModelProcesses, RoleEnvironment, RoleMember, role_command
from tierlane.up.orphan_guard import OrphanGuard
from tierlane.up.supervisor import Supervisor

CUSTOMERS_PER_TIER = 10
WIDE = 100_000.0

WIDEN = """
UPDATE tiers SET requests_per_second = $1::float8, burst = $1::float8, max_concurrency = $1::int,
    max_queue_depth = $1::int, tokens_per_minute = NULL
"""
# What the model does: measured, it would be the same after some seconds of load.
RATE_MODELS = "UPDATE models SET rps_per_gpu = max_batch_size / $1::float8"
ADD_CUSTOMERS = """
INSERT INTO customers (name, tier)
SELECT 'chaos-' || tier || '-' || number, tier
FROM unnest($1::text[]) AS tier, generate_series(1, $2::int) AS number
"""
ISSUE_KEYS = """
SELECT id::text, name, tier, issue_api_key(name, 'chaos') AS key
FROM customers WHERE name LIKE 'chaos-%' ORDER BY name
"""
ADD_HOSTILE = "INSERT INTO customers (name, tier) VALUES ('hostile', $1)"


async def seed_customers(database_url: str, per_tier: int = CUSTOMERS_PER_TIER) -> tuple[LoadCustomer, ...]:
    """Widen the tiers, make the customers and issue a key to each."""
    connection = await asyncpg.connect(asyncpg_dsn(database_url), timeout=10)
    try:
        await connection.execute(WIDEN, WIDE)
        await connection.execute(RATE_MODELS, MEAN_S)
        await connection.execute(ADD_CUSTOMERS, list(TIERS), per_tier)
        rows = await connection.fetch(ISSUE_KEYS)
    finally:
        await connection.close()
    return tuple(LoadCustomer(tier=row["tier"], id=row["id"], name=row["name"], key=row["key"]) for row in rows)


async def seed_hostile(database_url: str) -> str:
    """Make the customer of the hostile client, in the lowest tier; the key."""
    connection = await asyncpg.connect(asyncpg_dsn(database_url), timeout=10)
    try:
        await connection.execute(ADD_HOSTILE, TIERS[-1])
        return str(await connection.fetchval("SELECT issue_api_key('hostile', 'chaos')"))
    finally:
        await connection.close()


T = TypeVar("T")


class Aside:
    """Runs coroutines on that loop while the caller's loop goes on."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a process that is on its way out never waits for it.
        self._thread = threading.Thread(target=self._loop.run_forever, name="stack", daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there, and return or raise what it does; a cancel reaches it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        """End the thread; nothing may run there any more."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


POLL_S = 0.1
CALL_TIMEOUT_S = 1.0


async def wait_until_whole(http_urls: Sequence[str], service_token: str, workers: int) -> None:
    """Return when it is; the caller sets the deadline."""
    headers = {"Authorization": f"Bearer {service_token}"}
    timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        while not all([await _is_whole(session, url, workers) for url in http_urls]):  # noqa: ASYNC110 - a poll over HTTP
            await asyncio.sleep(POLL_S)


async def _is_whole(session: aiohttp.ClientSession, url: str, workers: int) -> bool:
    try:
        async with session.get(f"{url}/readyz") as ready:
            if ready.status != 200:
                return False
        async with session.get(f"{url}/internal/health") as answer:
            health = await answer.json(content_type=None)
        return bool(health["healthy_gpus"] >= workers and health["status"] == "healthy")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
        return False


BACKEND = "tierlane.chaos.echo:Echo"
MAX_BATCH_SIZE = 8  # Small, so that at the default rate workers are busy, and a fault on one hits something.
READY_TIMEOUT_S = 120.0
LOOK_S = 0.25
SEE_LOG = "run it again with --keep DIR and look into roles.log there"
# A server whose disk is full shall get an error for that, where the limit of a file's size stands for the disk.
LAUNCHER = ("/bin/sh", "-c", 'trap "" XFSZ; exec "$0" "$@"')


class ChaosStack:
    """One stack in `home`. `start`, then faults, then `stop`; a `Ground`."""

    def __init__(
        self, home: DataDir, shape: StackShape, leash: OrphanGuard, lines: LogLines, *, tls: bool = False
    ) -> None:
        """`tls`: the roles talk TLS to Redis, through the proxies."""
        self._home = home
        self._shape = shape
        self._leash = leash
        self._lines = lines
        self._supervisor = Supervisor(leash, lines, lambda: None)
        self._models = ModelProcesses()
        self.redis_clock = ServerClock(home.path)
        self.redis_clock.prepare()
        self._redis = chaos_redis(home.path, self.redis_clock)
        self._front = TlsFront(home.path / "certificates", self._redis.socket) if tls else None
        self._postgres = EmbeddedPostgres(home.path, home.path / "run", ephemeral=True)
        self._proxies: dict[FaultTarget, list[FaultProxy]] = {
            FaultTarget.REDIS_PROXY: [],
            FaultTarget.POSTGRES_PROXY: [],
        }
        self._aside = Aside()
        self._watching: asyncio.Task[None] | None = None
        self._ports = ExitStack()
        self._urls: list[str] = []
        self._customers: tuple[LoadCustomer, ...] = ()
        self._hostile_key = self._model = ""
        self.runs = home.path / "runs"
        self.settings = Settings.model_validate(
            {
                "redis_url": self._redis.url,
                "database_url": self._postgres.url,
                "service_token": SecretStr(secrets.token_urlsafe(32)),
                "data_dir": home.path,
                "host": HOST,
                "backend": BACKEND,
                "max_batch_size": MAX_BATCH_SIZE,
                "gateways": shape.gateways,
                "workers": shape.workers,
                "log_format": "json",
            }
        )

    async def start(self) -> None:
        """Start everything and wait until all of it works. Raises StackError or EmbeddedServerError."""
        self.runs.mkdir()
        os.environ[RUNS_VARIABLE] = str(self.runs)
        self._watching = asyncio.create_task(self._watch(), name="leash")
        self._leash.hold_servers_of(self._redis.home)
        self._leash.hold_servers_of(self._postgres.home)
        await self._add(self._redis)
        await self._add(self._postgres)
        await self._fill_database()
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._start_front()
                await self._start_roles()
                await self._aside.run(self._supervisor.settle(self.whole()))
        except TimeoutError:
            raise StackError(f"Not ready after {READY_TIMEOUT_S:.0f} s; {SEE_LOG}.") from None

    async def whole(self) -> None:
        """Wait until every gateway counts every worker healthy; the caller sets the deadline."""
        token = self.settings.service_token.get_secret_value()
        await wait_until_whole(self._urls, token, self._shape.workers)

    async def stop(self) -> None:
        """Stop everything in the reverse order; what resists is killed."""
        await self._aside.run(self._supervisor.stop())
        for proxies in self._proxies.values():
            for proxy in proxies:
                await proxy.stop()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._aside.close()
        self._ports.close()

    def kill(self) -> None:
        """Kill everything at once."""
        self._supervisor.kill()

    @property
    def target(self) -> Target:
        """Where the load goes."""
        return Target(tuple(self._urls), self._customers)

    def sources(self, started_at: float) -> Sources:
        """Where evidence lies; `started_at` is wall-clock seconds before the first request."""
        token = self.settings.service_token.get_secret_value()
        return Sources(self.database_url, self.redis_url, self.runs, started_at, tuple(self._urls), token)

    @property
    def targets(self) -> Mapping[FaultTarget, int]:
        """How many there are of each place."""
        shape, proxies = self._shape, self._proxies
        return {
            FaultTarget.GATEWAY: shape.gateways,
            FaultTarget.SCHEDULER: shape.schedulers,
            FaultTarget.WORKER: shape.workers,
            FaultTarget.MODEL: shape.workers,
            FaultTarget.REDIS: 1,
            FaultTarget.POSTGRES: 1,
            **{place: len(several) for place, several in proxies.items()},
        }

    @property
    def redis_url(self) -> str:
        """Redis itself."""
        return self._redis.url

    @property
    def database_url(self) -> str:
        """PostgreSQL itself."""
        return self._postgres.url

    def stranger(self, index: int) -> Stranger:
        """At this gateway."""
        where = urlsplit(self._urls[index])
        return Stranger(where.hostname or HOST, where.port or 0, self._hostile_key, self._model)

    def name(self, place: FaultTarget, index: int) -> str:
        """What a target is called in events."""
        if place in self._proxies:
            return self._proxies[place][index].name
        return str(place) if place in (FaultTarget.REDIS, FaultTarget.POSTGRES) else f"{place}-{index + 1}"

    def proxy(self, place: FaultTarget, index: int) -> FaultProxy:
        """One proxy."""
        return self._proxies[place][index]

    def redis_proxy_of(self, place: FaultTarget, index: int) -> FaultProxy:
        """The proxy between this process and Redis."""
        wanted = _proxy_name(f"{place}-{index + 1}", "redis")
        return next(proxy for proxy in self._proxies[FaultTarget.REDIS_PROXY] if proxy.name == wanted)

    def processes(self, place: FaultTarget, index: int) -> Sequence[psutil.Process]:
        """The processes that are there now, none where it is down; a server with all its children."""
        if place is FaultTarget.MODEL:
            worker = self._member(f"{FaultTarget.WORKER}-{index + 1}")
            return self._models.of_worker(worker.name, worker.pid) if worker.alive else []
        member = self._member(self.name(place, index))
        if not member.alive:
            return []
        whole = family(member.pid)
        return whole if place in (FaultTarget.REDIS, FaultTarget.POSTGRES) else whole[:1]

    @property
    def spools(self) -> list[Path]:
        """The data directories of the gateways."""
        return [self._home.path / f"gateway-{number + 1}" for number in range(self._shape.gateways)]

    def _member(self, name: str) -> ChildProcess:
        return next(member for member in self._supervisor.members if member.name == name)

    async def _fill_database(self) -> None:
        settings = self.settings
        migrate = RoleMember(
            "migrate",
            "migrate",
            role_command("migrate"),
            RoleEnvironment(settings).for_role("migrate", "migrate"),
            self._lines,
        )
        if await self._aside.run(self._supervisor.run_once(migrate)) != 0:
            raise StackError(f"The migrations failed; {SEE_LOG}.")
        model = demo_model(BACKEND, settings.pool, settings.gpu_timeout_ms, settings.max_batch_size)
        self._model = model.name
        await seed_demo(settings.database_url, self._home, [model])
        self._customers = await seed_customers(settings.database_url)
        self._hostile_key = await seed_hostile(settings.database_url)

    async def _start_front(self) -> None:
        if self._front is not None:
            await self._add(RoleMember("tls", "tls", self._front.command(), dict(os.environ), self._lines))
            await self._front.ready()

    async def _start_roles(self) -> None:
        shape = self._shape
        for number in range(shape.schedulers):
            await self._start_role(FaultTarget.SCHEDULER, number, database=True)
        for number in range(shape.workers):
            await self._start_role(FaultTarget.WORKER, number, database=False)
        for number in range(shape.gateways):
            port = self._ports.enter_context(held_port(HOST, 0))  # Also while it is killed.
            await self._start_role(FaultTarget.GATEWAY, number, database=True, port=port)
            self._urls.append(f"http://{HOST}:{port}")

    async def _start_role(self, place: FaultTarget, index: int, *, database: bool, **own: object) -> None:
        name = f"{place}-{index + 1}"
        front = self._front
        redis = await self._add_proxy(FaultTarget.REDIS_PROXY, name, front.socket if front else self._redis.socket)
        own["redis_url"] = front.url(HOST, redis.port) if front else f"redis://{HOST}:{redis.port}/0"
        if database:
            postgres = await self._add_proxy(FaultTarget.POSTGRES_PROXY, name, _postgres_socket(self._postgres))
            own["database_url"] = f"postgresql+asyncpg://tierlane@{HOST}:{postgres.port}/tierlane"
        roles = RoleEnvironment(self.settings.model_copy(update=own))
        member = RoleMember(place, name, role_command(place), roles.for_role(place, name), self._lines)
        await self._add(member)

    async def _add(self, member: ChildProcess) -> None:
        await self._aside.run(self._supervisor.add(member))

    async def _add_proxy(self, place: FaultTarget, client: str, socket: Path) -> FaultProxy:
        proxy = FaultProxy(_proxy_name(client, "redis" if place is FaultTarget.REDIS_PROXY else "postgres"), socket)
        await proxy.start()
        self._proxies[place].append(proxy)
        return proxy

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._leash.check()


def _postgres_socket(server: EmbeddedPostgres) -> Path:
    where = dict(parse_qsl(urlsplit(server.url).query))
    return Path(where["host"], f".s.PGSQL.{where['port']}")


def _proxy_name(client: str, server: str) -> str:
    return f"{client}>{server}"


def chaos_redis(home: Path, clock: ServerClock) -> EmbeddedRedis:
    """A server that keeps nothing, whose clock can be moved and whose disk can be full."""
    return EmbeddedRedis(home, home / "run", ephemeral=True, launcher=LAUNCHER, environment=clock.environment)
