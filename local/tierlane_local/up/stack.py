"""The local stack: start order, readiness, processes.

Servers, migrations, demo data, schedulers, workers and gateways are started in this order. The stack is ready when each
gateway is ready and has seen a healthy worker of each pool, or one whose model is too slow, which a warning then says.
"""

import asyncio
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from ledger.catalog.snapshot import CellRow
from ratelimit.request_limits import limits_of_workers
from scheduler.cells.places import cell_urls
from scheduler.redis_client.keys import DEFAULT_CELL
from tierlane.check.model_times import limits_line
from tierlane.settings.model import Settings
from tierlane.settings.pools import parse_pools
from tierlane_local.embedded import EmbeddedPostgres, EmbeddedRedis
from tierlane_local.embedded.cluster import EmbeddedCluster
from tierlane_local.embedded.process import EmbeddedServer
from tierlane_local.stack_file import ProcessInfo, StackFile, StackInfo
from tierlane_local.up.autoscale import WorkerAutoscaler
from tierlane_local.up.banner import banner
from tierlane_local.up.cells import cell_names, cell_server, write_cells
from tierlane_local.up.data_dir import DataDir, LogLines, StackError
from tierlane_local.up.demo_data import admin_token, demo_models, seed_demo
from tierlane_local.up.members import Command, RoleEnvironment, RoleMember, body_dir
from tierlane_local.up.model_processes import ModelProcesses
from tierlane_local.up.model_times import is_measured, measured_workers, warnings
from tierlane_local.up.orphan_guard import REMOVABLE_PREFIX, OrphanGuard
from tierlane_local.up.readiness import Unready, wait_until_ready
from tierlane_local.up.supervisor import Supervisor

READY_TIMEOUT_S = 180.0  # Loading a large model takes minutes.
LOOK_S = 0.25
WAITING_EVERY_S = 5.0  # How often the start reports what it waits for.


class Stack:
    """A stack in a data directory. `run` runs until cancelled or an error; `stop` ends everything."""

    def __init__(
        self, settings: Settings, data_dir: DataDir, guard: OrphanGuard, lines: LogLines, command: Command
    ) -> None:
        """`settings` must have the port and a service token; `command` returns the argv of a role."""
        self._settings = settings
        self._data_dir = data_dir
        self._guard = guard
        self._lines = lines
        self._command = command
        self._http_url = f"http://{_reachable(settings.host)}:{settings.port}"
        self._file = StackFile(data_dir)
        self._supervisor = Supervisor(guard, lines, self._update, settings.drain_ms / 1000)
        self._models = ModelProcesses()
        self._temporary: Path | None = None
        self._home = data_dir.path
        self._cells: dict[str, str | None] = {}  # The servers of the other cells.

    async def run(self) -> None:
        """Start everything and keep it running. Raises StackError and EmbeddedServerError if it cannot start."""
        started = time.monotonic()
        settings = await self._start_servers()
        if settings.body_dir is None:
            self._guard.remove_at_end(body_dir(settings.data_dir))
        migration = RoleEnvironment(settings, self._command).member("migrate", "migrate", self._lines)
        if (code := await self._supervisor.run_once(migration)) != 0:
            raise StackError(f"The migrations failed (exit code {code}); see the log above.")
        await write_cells(settings.session_url, self._cells, self._home)
        model, *others = demo_models(settings)
        keys = await seed_demo(settings.session_url, self._data_dir, [model, *others])
        sizes = {other.pool: other.max_batch_size for other in others}
        settings_of_roles = settings.model_copy(update={"max_batch_size": model.max_batch_size})
        autoscaler = await self._start_roles(RoleEnvironment(settings_of_roles, self._command), sizes)
        self._lines.say(f"waiting until {settings.backend} is loaded and {self._http_url} is ready")
        await self._supervisor.settle(self._ready(settings))
        cells = self._cell_urls(settings)
        self._file.serve(
            StackInfo(
                http_url=self._http_url,
                service_token=settings.service_token.get_secret_value(),
                redis_url=cells[DEFAULT_CELL],
                cells=cells,
                database_url=settings.session_url,
                keys=dict(keys),
            )
        )
        self._update()
        self._lines.say(f"ready in {time.monotonic() - started:.1f} s")
        names = [each.name for each in (model, *others)]
        addresses = {"gRPC": f"{_reachable(settings.host)}:{settings.grpc_port}"} if settings.grpc_port else {}
        if settings.admin_port:
            base = f"http://{_reachable(settings.admin_host)}:{settings.admin_port}/admin"
            addresses |= {"Admin": f"{base}/", "API": await self._admin_command(settings, base)}
        self._lines.raw(banner(self._http_url, keys, names, str(self._data_dir.path), addresses))
        await asyncio.gather(
            self._watch(), self._warn(settings), *([autoscaler.follow()] if settings.autoscale else [])
        )

    async def stop(self) -> None:
        """Stop everything in reverse order. The orphan guard ends the orphans of dead workers."""
        await self._supervisor.stop()
        self._file.remove()
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def kill(self) -> None:
        """Kill everything at once; a running `stop` then ends quickly."""
        self._supervisor.kill()

    async def _start_servers(self) -> Settings:
        """Start the servers without a configured URL; return the settings with both URLs."""
        urls = {}
        if self._settings.redis_url and (self._settings.cluster or self._settings.cells > 1):
            flag = "--cluster" if self._settings.cluster else "--cells"
            raise StackError(
                f"{flag} starts servers, but TIERLANE_REDIS_URL is set: omit one of them. `tierlane cell open` adds cells."
            )
        home = self._data_dir.path
        if self._settings.ephemeral:
            home = self._temporary = Path(tempfile.mkdtemp(prefix=REMOVABLE_PREFIX))
            self._guard.remove_at_end(home)
            if os.geteuid() == 0:
                home.chmod(0o711)  # The user of PostgreSQL must be able to enter it.
        self._home = home
        if not self._settings.redis_url:
            urls["redis_url"] = await self._start_redis(home)
            for name in cell_names(self._settings.cells):  # With a cluster, they are slots of it.
                self._cells[name] = None
                if not self._settings.cluster:
                    server = cell_server(home, name, ephemeral=self._settings.ephemeral)
                    await self._start_server(server)
                    self._cells[name] = server.url
        if not self._settings.database_url:
            postgres = EmbeddedPostgres(home, home / "run", ephemeral=self._settings.ephemeral)
            await self._start_server(postgres)
            urls["database_url"] = postgres.url
        return self._settings.model_copy(update=urls)

    async def _start_redis(self, home: Path) -> str:
        """Start one server, or a cluster of them; returns the URL."""
        ephemeral = self._settings.ephemeral
        if not self._settings.cluster:
            redis = EmbeddedRedis(home, home / "run", ephemeral=ephemeral)
            await self._start_server(redis)
            return redis.url
        password = secrets.token_urlsafe(24)
        cluster = EmbeddedCluster(home, home / "run", self._settings.cluster, password=password, ephemeral=ephemeral)
        for node in cluster.nodes:
            await self._start_server(node)
        await cluster.form()
        return cluster.url

    def _cell_urls(self, settings: Settings) -> dict[str, str]:
        """The URL of each cell of this stack."""
        rows = [CellRow(name, url, "open", 1.0) for name, url in self._cells.items()]
        return cell_urls(settings.redis_url, rows)

    async def _start_server(self, server: EmbeddedServer) -> None:
        started = time.monotonic()
        await self._supervisor.add_server(server)
        self._lines.say(f"{server.name} responds after {time.monotonic() - started:.2f} s")

    async def _start_roles(self, roles: RoleEnvironment, sizes: Mapping[str, int]) -> WorkerAutoscaler:
        settings = roles.settings
        for number in range(1, settings.schedulers + 1):
            await self._supervisor.add(roles.member("scheduler", f"scheduler-{number}", self._lines))

        def make(name: str) -> RoleMember:
            number = int(name.rpartition("-")[2])
            return roles.member("worker", name, self._lines, self._worker_cell(settings, number))

        token = self._settings.service_token.get_secret_value()
        autoscaler = WorkerAutoscaler(
            self._supervisor, make, self._lines, pool=self._settings.pool, url=self._http_url, token=token
        )
        least, most = settings.scale_bounds if settings.autoscale else (settings.workers, settings.workers)
        await autoscaler.start(min(max(settings.workers, least), most))
        for pool in parse_pools(settings.pools, settings.pool):
            for number, name in enumerate(pool.names(), 1):
                differs = {"pool": pool.pool, "backend": pool.backend, "max_batch_size": sizes[pool.pool]}
                differs |= self._worker_cell(settings, number)
                await self._supervisor.add(roles.member("worker", name, self._lines, differs))
        for number in range(1, settings.gateway_count + 1):
            await self._supervisor.add(roles.member("gateway", f"gateway-{number}", self._lines))
        if settings.admin_port:
            await self._supervisor.add(roles.member("admin", "admin", self._lines))
        return autoscaler

    async def _admin_command(self, settings: Settings, base: str) -> str:
        """A call of the admin API, with the token of an administrator."""
        token = await admin_token(settings.session_url, self._data_dir)
        return f"curl -s -H 'Authorization: Bearer {token}' {base}/v1/customers"

    def _worker_cell(self, settings: Settings, number: int) -> dict[str, object]:
        """The settings with which the worker of this number of a pool starts in one of the cells, in turn."""
        urls = list(self._cell_urls(settings).values())
        return {"redis_url": urls[(number - 1) % len(urls)]} if len(urls) > 1 else {}

    async def _ready(self, settings: Settings) -> None:
        token = settings.service_token.get_secret_value()
        gateways = [member.name for member in self._supervisor.members if member.role == "gateway"]
        unready = Unready(gateways)
        reports = asyncio.create_task(self._report_waiting(settings, unready))
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                urls = self._cell_urls(settings).values()
                await wait_until_ready(
                    self._http_url, token, urls, _pools(settings), gateways, gone_ms=settings.gone_ms, unready=unready
                )
        except TimeoutError:
            raise StackError(f"Not ready after {READY_TIMEOUT_S:.0f} s; see the log above.") from None
        finally:
            reports.cancel()

    async def _report_waiting(self, settings: Settings, unready: Unready) -> None:
        """Every few seconds, print the processes that are not ready, each with the last line that it printed."""
        pool_of = {name: pool.pool for pool in parse_pools(settings.pools, settings.pool) for name in pool.names()}
        for number in count(1):
            await asyncio.sleep(WAITING_EVERY_S)
            workers = [each.name for each in self._supervisor.members if each.role == "worker"]
            names = [name for name in workers if pool_of.get(name, settings.pool) in unready.pools]
            self._lines.say(f"after {number * WAITING_EVERY_S:.0f} s, waiting for:")
            for name in names or sorted(unready.gateways):
                self._lines.say(f"  {name}, which last printed: {self._lines.last(name) or 'nothing'}")

    async def _warn(self, settings: Settings) -> None:
        """Print the limits of each pool, and warn about models that cannot meet them, once they are measured."""
        while True:
            urls = self._cell_urls(settings).values()
            pools = await measured_workers(urls, _pools(settings), settings.gone_ms)
            workers = [each for pool in pools.values() for each in pool]
            if workers and all(is_measured(worker) for worker in workers):  # None: Redis does not respond.
                break
            await asyncio.sleep(LOOK_S)
        for pool, found in pools.items():
            if not found:
                continue
            of_backend = limits_of_workers(found)
            self._lines.say(f"pool {pool}, limits of a request: {limits_line(found[0].backend, of_backend, settings)}")
            for warning in warnings(found, settings.request_limits(of_backend).total_ms):
                self._lines.say(warning)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._guard.check()
            self._update()

    def _update(self) -> None:
        """Write stack.json; a full disk must not stop the stack."""
        entries = []
        for member in self._supervisor.members:
            if not member.alive or member.role == "migrate":
                continue
            entries.append(ProcessInfo(member.role, member.name, member.pid))
            models = self._models.of_worker(member.name, member.pid) if member.role == "worker" else []
            for index, process in enumerate(models):
                name = f"{member.name}-model" + (f"-{index + 1}" if index else "")
                entries.append(ProcessInfo("model", name, process.pid))
        try:
            self._file.update(entries)
        except OSError as error:
            self._lines.say(f"cannot write stack.json: {error}")


def _pools(settings: Settings) -> list[str]:
    """The pools that have workers in this stack."""
    return [settings.pool, *(other.pool for other in parse_pools(settings.pools, settings.pool))]


def _reachable(host: str) -> str:
    """The address for calls of a gateway that listens on `host`."""
    if host in ("0.0.0.0", "::", ""):  # noqa: S104 - compared, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
