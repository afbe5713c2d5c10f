"""A stack in which processes die at failpoints, a light load on it, and the response to each request."""

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import asyncpg
import psutil
from redis.asyncio import Redis

from configs import GONE_MS
from eventually import eventually
from ledger.postgres import asyncpg_dsn
from scheduler.failpoints import FAILPOINTS
from scheduler.protocol.pool_view import WorkerView
from scheduler.protocol.presence import Presence
from scheduler.redis_client.keys import Keys
from stack import Stack

TIERS = ("enterprise", "paid", "free")
RATE = 40.0
REARM_S = 4.0
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tierlane-auditor'"


class Response(NamedTuple):
    """The response to one request: status 0 is a connection that broke. Times are monotonic seconds."""

    trace: str
    sent: float
    ended: float
    status: int
    code: str
    echoed: bool
    request_id: str


class Load:
    """Open loop: requests at a rate, each on a connection of its own, each with a trace and a secret."""

    def __init__(self, stack: Stack) -> None:
        self._url = f"{stack.url}/v1/inference"
        self._keys = {tier: stack.key(tier) for tier in TIERS}
        self._stopping = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._open = 0
        self.responses: list[Response] = []

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        tasks: list[asyncio.Task[None]] = []
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=10)) as session:
            while not self._stopping:
                await self._flowing.wait()
                tasks.append(asyncio.create_task(self._send(session, TIERS[len(tasks) % len(TIERS)])))
                await asyncio.sleep(1 / RATE)
            await asyncio.gather(*tasks)

    def stop(self) -> None:
        self._stopping = True

    async def pause(self) -> None:
        """Send no further request, and wait until none is open."""
        self._flowing.clear()
        await eventually(lambda: not self._open, "a response to every request")

    def resume(self) -> None:
        self._flowing.set()

    async def _send(self, session: aiohttp.ClientSession, tier: str) -> None:
        trace, secret, sent = secrets.token_hex(16), secrets.token_hex(8), time.monotonic()
        headers = {"Authorization": f"Bearer {self._keys[tier]}", "traceparent": f"00-{trace}-{'1' * 16}-01"}
        status, code, echoed, request_id = 0, "", False, ""
        self._open += 1
        try:
            async with session.post(self._url, json={"input": secret}, headers=headers) as response:
                body = await response.json(content_type=None)
            status, request_id = response.status, response.headers["x-request-id"]
            code, echoed = str((body.get("error") or {}).get("code", "")), body.get("output") == secret[::-1]
        except (aiohttp.ClientError, TimeoutError):
            pass
        self._open -= 1
        self.responses.append(Response(trace, sent, time.monotonic(), status, code, echoed, request_id))


class Scene:
    """The stack, the directory of armed failpoints, and a second scheduler."""

    def __init__(self, stack: Stack, gaps: Path, client: Redis, db: "asyncpg.Connection[asyncpg.Record]") -> None:
        self.stack = stack
        self.client = client
        self.db = db
        self._presence = Presence(client, Keys(), gone_ms=GONE_MS)
        self._gaps = gaps
        self._standby: asyncio.subprocess.Process | None = None
        self._at_risk: set[int] = set()
        self.crossed: set[str] = set()
        self.timeline: list[tuple[float, str]] = []
        self.gateway_deaths: list[tuple[float, float]] = []

    async def keep_standby(self) -> None:
        """Keep the second scheduler running."""
        environment = self.stack.role_environment() | {"TIERLANE_TEST_FAILPOINTS": str(self._gaps)}
        command = [sys.executable, "-P", "-m", "tierlane", "scheduler"]
        standby: asyncio.subprocess.Process | None = None
        try:
            while True:
                standby = self._standby = await asyncio.create_subprocess_exec(
                    *command, env=environment, stdout=asyncio.subprocess.DEVNULL
                )
                await standby.wait()
        finally:
            if standby is not None and standby.returncode is None:
                standby.kill()
                await standby.wait()

    def arm(self, *names: str) -> None:
        """A process dies at each of these failpoints."""
        self._at_risk = {
            pid for role in ("gateway", "worker", "model", "scheduler") for pid in self.stack.pids(role).values()
        }
        self._at_risk |= {self._standby.pid} if self._standby else set()
        for name in names:
            assert name in FAILPOINTS
            (self._gaps / name).touch()

    async def keep_armed(self, name: str) -> None:
        """Arm it again and again, until cancelled."""
        try:
            while True:
                await asyncio.sleep(REARM_S)
                (self._gaps / name).touch()
        finally:
            (self._gaps / name).unlink(missing_ok=True)

    async def crossing(self, *names: str) -> None:
        """Wait until processes have died at all of these."""
        for name in names:
            await eventually(lambda: not (self._gaps / name).exists(), f"a process dies at {name}", 15.0)  # noqa: B023
            self.timeline.append((time.monotonic(), f"a process died at {name}"))
        self.crossed |= set(names)
        await eventually(lambda: sum(map(_dead, self._at_risk)) >= len(names), "they are dead")

    async def die_at(self, *names: str, role: str) -> None:
        """Arm these and wait until processes of the role died there."""
        await self.whole(role)
        began = time.monotonic()
        self.arm(*names)
        await self.crossing(*names)
        if role == "gateway":
            self.gateway_deaths.append((began, time.monotonic() + 0.5))

    async def whole(self, *roles: str) -> None:
        """Wait until all processes of the roles serve."""
        for role in roles:
            ready = {"gateway": self._gateways, "worker": self._workers, "scheduler": self._schedulers}[role]
            await eventually(ready, f"every {role} serves", 15.0)

    async def _gateways(self) -> bool:
        port = int(self.stack.url.rpartition(":")[2])
        return sum(_listens(pid, port) for pid in self.stack.pids("gateway").values()) == 2

    async def _workers(self) -> bool:
        pids = self.stack.pids("worker")
        seen = {worker.id: worker for worker in (await self._presence.observe([])).workers}
        return len(pids) == 2 and all(name in seen and _serves(seen[name], pid) for name, pid in pids.items())

    async def _schedulers(self) -> bool:
        return await self.db.fetchval(SESSIONS) == 2

    async def draining(self, name: str) -> bool:
        return await self.client.hget(Keys().gpu(name), "status") == b"draining"

    async def observed(self) -> None:
        """Wait until every gateway has observed the pool again, and knows the direct endpoints of the workers."""
        now_s, _ = await self.client.time()

        async def all_observed() -> bool:
            living = await self.client.zrange(Keys().gateways, -2, -1)
            beats = [await self.client.hget(f"gateway:{name.decode()}", "last_heartbeat") for name in living]
            # An observation follows each heartbeat, so the first is complete when the second heartbeat was sent.
            return bool(beats) and all(heartbeat and float(heartbeat) > (now_s + 1) * 1000 + 500 for heartbeat in beats)

        await eventually(all_observed, "every gateway has observed the pool")

    def spooled(self) -> int:
        """Bytes in the spools of all gateways."""
        return sum(path.stat().st_size for path in self.stack.data_dir.glob("gateway-*/spool/*.log*"))

    async def rows(self) -> list[asyncpg.Record]:
        """Every audit row, once none is open and nothing waits to be written."""

        async def settled() -> list[asyncpg.Record]:
            if self.spooled() or [key async for key in self.client.scan_iter("outbox*")]:
                return []
            rows = await self.db.fetch("SELECT id, trace_id, status, http_status FROM requests")
            return rows if all(row["status"] in {"completed", "failed"} for row in rows) else []

        return await eventually(settled, "every audit row is closed", 20.0)


def _dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _serves(worker: WorkerView, pid: int) -> bool:
    """Whether the model of this process is ready: by pid, since start times are off by up to a second."""
    try:
        serves = worker.status in {"ready", "busy"} and psutil.Process(worker.model_pid).ppid() == pid
    except psutil.NoSuchProcess:
        return False
    return serves and not _dead(pid)


def _listens(pid: int, port: int) -> bool:
    try:
        found = psutil.Process(pid).net_connections(kind="inet")
    except psutil.Error:
        return False
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)


@asynccontextmanager
async def scene_on(stack: Stack, gaps: Path, client: Redis) -> AsyncIterator[Scene]:
    """The scene with its second scheduler."""
    db = await asyncpg.connect(asyncpg_dsn(stack.info.database_url))
    scene = Scene(stack, gaps, client, db)
    standby = asyncio.create_task(scene.keep_standby())
    try:
        yield scene
    finally:
        standby.cancel()
        await asyncio.gather(standby, return_exceptions=True)
        await db.close()
