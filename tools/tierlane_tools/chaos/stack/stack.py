"""The stack of a chaos run: several processes of every role, each behind its own proxies.

The supervisor of `tierlane up` restarts its processes, and the orphan guard ends them even when this process is killed.
Redis has no persistence, so it restarts empty; PostgreSQL keeps committed rows. The stack is ready when every gateway is
ready and counts every worker healthy. Servers are started from the event loop of a second thread, because that would stall
the load for a tenth of a second.

With several cells, each has a Redis of its own, and all roles connect to it through one proxy, so that a cell can be cut off.
With a cluster (`servers`), they connect to its servers without proxies.
"""

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import aiohttp
import psutil
from pydantic import SecretStr

from tierlane.settings.model import Settings
from tierlane_local.child_process import ChildProcess, family
from tierlane_local.embedded import EmbeddedPostgres
from tierlane_local.up.cells import cell_names
from tierlane_local.up.data_dir import DataDir, LogLines, StackError, held_port
from tierlane_local.up.demo_data import demo_model, seed_demo
from tierlane_local.up.members import RoleEnvironment, RoleMember
from tierlane_local.up.model_processes import ModelProcesses
from tierlane_local.up.orphan_guard import OrphanGuard
from tierlane_local.up.supervisor import Supervisor
from tierlane_tools.chaos.echo import RUNS_VARIABLE
from tierlane_tools.chaos.faults.engine import MODEL, engine_command
from tierlane_tools.chaos.faults.fault_kind import ALL_ROLES, FaultTarget
from tierlane_tools.chaos.faults.proxy import HOST, FaultProxy
from tierlane_tools.chaos.faults.server_clock import ServerClock
from tierlane_tools.chaos.faults.target import HostileAccess, StackTargets
from tierlane_tools.chaos.history import LoadCustomer, Sources, Target
from tierlane_tools.chaos.options import StackShape
from tierlane_tools.chaos.stack.customers import seed_batch_customers, seed_cells, seed_customers, seed_hostile
from tierlane_tools.chaos.stack.servers import ClusterServers, SingleServers
from tierlane_tools.chaos.stack.side_loop import SideLoop
from tierlane_tools.chaos.stack.tls_front import TlsFront

DRAIN_MS = 1500  # What the load left open is not waited for.

POLL_S = 0.1
CALL_TIMEOUT_S = 1.0

BACKEND = "tierlane_tools.chaos.echo:Echo"
TOTAL_REQUEST_MS = 4000  # Also before a worker is known: the checks count with it.
MAX_BATCH_SIZE = 8  # Small, so that workers are busy at the default rate, and a fault of one affects requests.
READY_TIMEOUT_S = 120.0
GUARD_POLL_S = 0.25
SEE_LOG = "run it again with --keep DIR and read roles.log there"


async def _is_healthy(session: aiohttp.ClientSession, url: str, workers: int) -> bool:
    try:
        async with session.get(f"{url}/readyz") as ready:
            if ready.status != 200:
                return False
        async with session.get(f"{url}/internal/health") as answer:
            health = await answer.json(content_type=None)
        return bool(health["healthy_gpus"] >= workers and health["status"] == "healthy")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
        return False


class ChaosStack(StackTargets):
    """One stack in `home`, with the targets of faults: `start`, then faults, then `stop`."""

    def __init__(
        self,
        home: DataDir,
        shape: StackShape,
        guard: OrphanGuard,
        lines: LogLines,
        *,
        tls: bool = False,
        engine: Path | None = None,
    ) -> None:
        """`tls`: the roles use TLS to Redis, through the proxies. `engine`: the program behind the workers."""
        self._home = home
        self._shape = shape
        self._guard = guard
        self._lines = lines
        self._supervisor = Supervisor(guard, lines, lambda: None)
        self._models = ModelProcesses()
        self.redis_clock = ServerClock(home.path)
        self.redis_clock.prepare()
        self._servers = (
            ClusterServers(home.path, shape.cluster, shape.cells)
            if shape.cluster
            else SingleServers(home.path, self.redis_clock, shape.cells)
        )
        self._tls_front = TlsFront(home.path / "certificates", self._servers.sockets[0]) if tls else None
        self._postgres = EmbeddedPostgres(home.path, home.path / "run", ephemeral=True)
        self._proxies: dict[FaultTarget, list[FaultProxy]] = {
            FaultTarget.REDIS_PROXY: [],
            FaultTarget.POSTGRES_PROXY: [],
        }
        self._side_loop = SideLoop()
        self._watching: asyncio.Task[None] | None = None
        self._ports = ExitStack()
        self._engine = engine
        port = self._ports.enter_context(held_port(HOST, 0)) if engine else 0  # Also while the engine is down.
        self._engine_url = f"http://{HOST}:{port}" if engine else ""
        self._backend = f"openai:{self._engine_url}/v1#{MODEL}" if engine else BACKEND
        self._urls: list[str] = []
        self._cell_rows: dict[str, str | None] = {}  # The URLs of their proxies.
        self._customers: tuple[LoadCustomer, ...] = ()
        self._batch_customers: tuple[LoadCustomer, ...] = ()
        self._hostile_key = self._model = ""
        self.runs = home.path / "runs"
        self.settings = Settings.model_validate(
            {
                "redis_url": self.redis_url,
                "database_url": self._postgres.url,
                "service_token": SecretStr(secrets.token_urlsafe(32)),
                "data_dir": home.path,
                "host": HOST,
                "backend": self._backend,
                "total_request_ms": TOTAL_REQUEST_MS,
                "drain_ms": DRAIN_MS,
                "max_batch_size": MAX_BATCH_SIZE,
                "gateways": shape.gateways,
                "workers": shape.workers,
                "schedulers": shape.schedulers,
                "log_format": "json",
            }
        )

    async def start(self) -> None:
        """Start all processes and wait until they are healthy. Raises StackError or EmbeddedServerError."""
        self.runs.mkdir()
        os.environ[RUNS_VARIABLE] = str(self.runs)
        self._watching = asyncio.create_task(self._watch(), name="guard")
        for server in (*self._servers.members, self._postgres):
            await self._side_loop.run(self._supervisor.add_server(server))
        await self._side_loop.run(self._servers.form())
        await self._open_cells()
        settings = self.settings
        migrate = RoleEnvironment(settings).member("migrate", "migrate", self._lines)
        if await self._side_loop.run(self._supervisor.run_once(migrate)) != 0:
            raise StackError(f"The migrations failed; {SEE_LOG}.")
        model = demo_model(self._backend, settings.pool, settings.max_batch_size)
        self._model = model.name
        await seed_demo(settings.database_url, self._home, [model])
        self._customers = await seed_customers(settings.database_url)
        self._batch_customers = await seed_batch_customers(settings.database_url)
        self._hostile_key = await seed_hostile(settings.database_url)
        await seed_cells(settings.database_url, self._cell_rows)
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                if self._tls_front is not None:
                    await self._add(RoleMember("tls", "tls", self._tls_front.command(), dict(os.environ), self._lines))
                    await self._tls_front.ready()
                shape = self._shape
                if self._engine:
                    command = engine_command(self._engine, urlsplit(self._engine_url).port or 0)
                    await self._add(RoleMember("engine", FaultTarget.ENGINE, command, dict(os.environ), self._lines))
                for number in range(shape.schedulers):
                    await self._start_role(FaultTarget.SCHEDULER, number, database=True)
                for number in range(shape.workers):
                    await self._start_role(FaultTarget.WORKER, number, database=False)
                for number in range(shape.gateways):
                    port = self._ports.enter_context(held_port(HOST, 0))  # Also while the gateway is down.
                    await self._start_role(FaultTarget.GATEWAY, number, database=True, port=port)
                    self._urls.append(f"http://{HOST}:{port}")
                await self._side_loop.run(self._supervisor.settle(self.healthy()))
        except TimeoutError:
            raise StackError(f"Not ready after {READY_TIMEOUT_S:.0f} s; {SEE_LOG}.") from None

    async def healthy(self) -> None:
        """Wait until every gateway is ready and counts every worker healthy; the caller sets the deadline."""
        headers = {"Authorization": f"Bearer {self.settings.service_token.get_secret_value()}"}
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            while not all([await _is_healthy(session, url, self._shape.workers) for url in self._urls]):  # noqa: ASYNC110 - a poll over HTTP
                await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Stop all processes in reverse order; those that do not exit are killed."""
        await self._side_loop.run(self._supervisor.stop())
        for proxies in self._proxies.values():
            for proxy in proxies:
                await proxy.stop()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._side_loop.close()
        self._ports.close()

    def kill(self) -> None:
        """Kill all processes at once."""
        self._supervisor.kill()

    @property
    def target(self) -> Target:
        """The target of the load."""
        if self._engine:  # Batches, and the load that saturates a tier, need the other model.
            customers = tuple(replace(each, in_flight=0) for each in self._customers)
            return Target(tuple(self._urls), customers, model=self._model, is_engine=True)
        return Target(tuple(self._urls), self._customers, self._batch_customers, self._model)

    def sources(self, started_at: float) -> Sources:
        """The sources of evidence; `started_at`: UNIX time before the first request."""
        runs = None if self._engine else self.runs
        urls = tuple(self.redis_urls[1:])
        return Sources(self.database_url, self.redis_url, runs, started_at, urls, self._engine_url)

    @property
    def counts(self) -> Mapping[FaultTarget, int]:
        """The number of targets of each place."""
        shape, proxies = self._shape, self._proxies
        return {
            FaultTarget.GATEWAY: shape.gateways,
            FaultTarget.SCHEDULER: shape.schedulers,
            FaultTarget.WORKER: shape.workers,
            FaultTarget.MODEL: shape.workers,
            FaultTarget.REDIS: shape.cells,
            FaultTarget.POSTGRES: 1,
            FaultTarget.ENGINE: int(self._engine is not None),
            **{place: len(several) for place, several in proxies.items()},
        }

    @property
    def redis_url(self) -> str:
        """Redis, without a proxy."""
        return self._servers.urls[0]

    @property
    def redis_urls(self) -> Sequence[str]:
        """Redis of each cell, without a proxy."""
        return self._servers.urls

    async def redis_server(self, index: int) -> str:
        """The URL of the server that has this cell now."""
        return (await self._servers.server(index)).url

    @property
    def database_url(self) -> str:
        """PostgreSQL, without a proxy."""
        return self._postgres.url

    @property
    def engine_url(self) -> str:
        """The engine."""
        return self._engine_url

    def hostile_access(self, index: int) -> HostileAccess:
        """Access to this gateway."""
        address = urlsplit(self._urls[index])
        return HostileAccess(address.hostname or HOST, address.port or 0, self._hostile_key, self._model)

    def name(self, place: FaultTarget, index: int) -> str:
        """The name of a target in events."""
        if place in self._proxies:
            return self._proxies[place][index].name
        if place is FaultTarget.REDIS:
            return self._servers.names[index]
        return str(place) if place in (FaultTarget.POSTGRES, FaultTarget.ENGINE) else f"{place}-{index + 1}"

    def proxy(self, place: FaultTarget, index: int) -> FaultProxy:
        """One proxy."""
        return self._proxies[place][index]

    def redis_proxy_of(self, place: FaultTarget, index: int) -> FaultProxy:
        """The proxy between this process and Redis."""
        wanted = _proxy_name(f"{place}-{index + 1}", "redis")
        return next(proxy for proxy in self._proxies[FaultTarget.REDIS_PROXY] if proxy.name == wanted)

    def processes(self, place: FaultTarget, index: int) -> Sequence[psutil.Process]:
        """The running processes of a target, a server with all its children."""
        if place is FaultTarget.MODEL:
            worker = self._member(f"{FaultTarget.WORKER}-{index + 1}")
            return self._models.of_worker(worker.name, worker.pid) if worker.alive else []
        is_redis = place is FaultTarget.REDIS
        member = asyncio.run(self._servers.server(index)) if is_redis else self._member(self.name(place, index))
        if not member.alive:
            return []
        processes = family(member.pid)
        return processes if place in (FaultTarget.REDIS, FaultTarget.POSTGRES) else processes[:1]

    @property
    def spools(self) -> list[Path]:
        """The data directories of the gateways."""
        return [self._home.path / f"gateway-{number + 1}" for number in range(self._shape.gateways)]

    def _member(self, name: str) -> ChildProcess:
        return next(member for member in self._supervisor.members if member.name == name)

    async def _open_cells(self) -> None:
        """Put a proxy that all roles use before the server of each other cell; slots of a cluster have none."""
        for number, name in enumerate(cell_names(self._shape.cells), 1):
            self._cell_rows[name] = None
            if self._servers.sockets:
                socket, server = self._servers.sockets[number], self._servers.names[number]
                proxy = await self._add_proxy(FaultTarget.REDIS_PROXY, ALL_ROLES, socket, server)
                self._cell_rows[name] = f"redis://{HOST}:{proxy.port}/0"

    async def _start_role(self, place: FaultTarget, index: int, *, database: bool, **own: object) -> None:
        name = f"{place}-{index + 1}"
        if self._servers.sockets:
            front = self._tls_front
            socket = front.socket if front else self._servers.sockets[0]
            redis = await self._add_proxy(FaultTarget.REDIS_PROXY, name, socket)
            own["redis_url"] = front.url(HOST, redis.port) if front else f"redis://{HOST}:{redis.port}/0"
        if database:
            address = dict(parse_qsl(urlsplit(self._postgres.url).query))
            postgres = await self._add_proxy(
                FaultTarget.POSTGRES_PROXY, name, Path(address["host"], f".s.PGSQL.{address['port']}")
            )
            own["database_url"] = f"postgresql+asyncpg://tierlane@{HOST}:{postgres.port}/tierlane"
        roles = RoleEnvironment(self.settings.model_copy(update=own))
        await self._add(roles.member(place, name, self._lines))

    async def _add(self, member: ChildProcess) -> None:
        await self._side_loop.run(self._supervisor.add(member))

    async def _add_proxy(self, place: FaultTarget, client: str, socket: Path, server: str = "") -> FaultProxy:
        server = server or ("redis" if place is FaultTarget.REDIS_PROXY else "postgres")
        proxy = FaultProxy(_proxy_name(client, server), socket)
        await proxy.start()
        self._proxies[place].append(proxy)
        return proxy

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(GUARD_POLL_S)
            self._guard.check()


def _proxy_name(client: str, server: str) -> str:
    return f"{client}>{server}"
