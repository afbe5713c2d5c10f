"""A stack of one's own for chaos: every role several times, each behind proxies of its own, nothing left at the end.

It is kept running by the supervisor of `tierlane up`, and its leash ends it even when this process is killed. Redis
keeps nothing on disk, so a killed one comes back empty; PostgreSQL forgets nothing that it has said to have committed.
"""

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import psutil
from pydantic import SecretStr

from tierlane.chaos.aside import Aside
from tierlane.chaos.echo import RUNS_VARIABLE
from tierlane.chaos.faults.catalogue import Place
from tierlane.chaos.faults.proxy import HOST, FaultProxy
from tierlane.chaos.faults.server_clock import ServerClock
from tierlane.chaos.ground import Stranger
from tierlane.chaos.options import Shape
from tierlane.chaos.plan import Customer, Sources, Target
from tierlane.chaos.readiness import wait_until_whole
from tierlane.chaos.seeding import seed_customers, seed_hostile
from tierlane.chaos.tls_front import TlsFront
from tierlane.child_process import family
from tierlane.embedded import EmbeddedPostgres, EmbeddedRedis
from tierlane.settings.model import Settings
from tierlane.up.data_dir import DataDir
from tierlane.up.demo_data import demo_model, seed_demo
from tierlane.up.errors import StackError
from tierlane.up.log_lines import LogLines
from tierlane.up.members import Member, RoleMember, ServerMember
from tierlane.up.models import ModelProcesses
from tierlane.up.orphan_guard import Leash
from tierlane.up.ports import held_port
from tierlane.up.roles import RoleEnvironment, role_command
from tierlane.up.supervisor import Supervisor

BACKEND = "tierlane.chaos.echo:Echo"
MAX_BATCH_SIZE = 8  # Small, so that at the default rate workers are busy, and a fault on one hits something.
READY_TIMEOUT_S = 120.0
LOOK_S = 0.25
SEE_LOG = "run it again with --keep DIR and look into roles.log there"
# A server whose disk is full shall get an error for that, where the limit of a file's size stands for the disk.
LAUNCHER = ("/bin/sh", "-c", 'trap "" XFSZ; exec "$0" "$@"')


class ChaosStack:
    """One stack in `home`. `start`, then faults, then `stop`; a `Ground`."""

    def __init__(self, home: DataDir, shape: Shape, leash: Leash, lines: LogLines, *, tls: bool = False) -> None:
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
        self._proxies: dict[Place, list[FaultProxy]] = {Place.REDIS_PROXY: [], Place.POSTGRES_PROXY: []}
        self._aside = Aside()
        self._watching: asyncio.Task[None] | None = None
        self._ports = ExitStack()
        self._urls: list[str] = []
        self._customers: tuple[Customer, ...] = ()
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
        await self._add(ServerMember("redis", self._redis))
        await self._add(ServerMember("postgres", self._postgres))
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
    def targets(self) -> Mapping[Place, int]:
        """How many there are of each place."""
        shape, proxies = self._shape, self._proxies
        return {
            Place.GATEWAY: shape.gateways,
            Place.SCHEDULER: shape.schedulers,
            Place.WORKER: shape.workers,
            Place.MODEL: shape.workers,
            Place.REDIS: 1,
            Place.POSTGRES: 1,
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

    def name(self, place: Place, index: int) -> str:
        """What a target is called in events."""
        if place in self._proxies:
            return self._proxies[place][index].name
        return str(place) if place in (Place.REDIS, Place.POSTGRES) else f"{place}-{index + 1}"

    def proxy(self, place: Place, index: int) -> FaultProxy:
        """One proxy."""
        return self._proxies[place][index]

    def redis_proxy_of(self, place: Place, index: int) -> FaultProxy:
        """The proxy between this process and Redis."""
        wanted = _proxy_name(f"{place}-{index + 1}", "redis")
        return next(proxy for proxy in self._proxies[Place.REDIS_PROXY] if proxy.name == wanted)

    def processes(self, place: Place, index: int) -> Sequence[psutil.Process]:
        """The processes that are there now, none where it is down; a server with all its children."""
        if place is Place.MODEL:
            worker = self._member(f"{Place.WORKER}-{index + 1}")
            return self._models.of_worker(worker.name, worker.pid) if worker.alive else []
        member = self._member(self.name(place, index))
        if not member.alive:
            return []
        whole = family(member.pid)
        return whole if place in (Place.REDIS, Place.POSTGRES) else whole[:1]

    @property
    def spools(self) -> list[Path]:
        """The data directories of the gateways."""
        return [self._home.path / f"gateway-{number + 1}" for number in range(self._shape.gateways)]

    def _member(self, name: str) -> Member:
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
            await self._start_role(Place.SCHEDULER, number, database=True)
        for number in range(shape.workers):
            await self._start_role(Place.WORKER, number, database=False)
        for number in range(shape.gateways):
            port = self._ports.enter_context(held_port(HOST, 0))  # Also while it is killed.
            await self._start_role(Place.GATEWAY, number, database=True, port=port)
            self._urls.append(f"http://{HOST}:{port}")

    async def _start_role(self, place: Place, index: int, *, database: bool, **own: object) -> None:
        name = f"{place}-{index + 1}"
        front = self._front
        redis = await self._add_proxy(Place.REDIS_PROXY, name, front.socket if front else self._redis.socket)
        own["redis_url"] = front.url(HOST, redis.port) if front else f"redis://{HOST}:{redis.port}/0"
        if database:
            postgres = await self._add_proxy(Place.POSTGRES_PROXY, name, _postgres_socket(self._postgres))
            own["database_url"] = f"postgresql+asyncpg://tierlane@{HOST}:{postgres.port}/tierlane"
        roles = RoleEnvironment(self.settings.model_copy(update=own))
        member = RoleMember(place, name, role_command(place), roles.for_role(place, name), self._lines)
        await self._add(member)

    async def _add(self, member: Member) -> None:
        await self._aside.run(self._supervisor.add(member))

    async def _add_proxy(self, place: Place, client: str, socket: Path) -> FaultProxy:
        proxy = FaultProxy(_proxy_name(client, "redis" if place is Place.REDIS_PROXY else "postgres"), socket)
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
