"""`tierlane check` and `tierlane top` against real servers and a gateway that only has a health document."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from integration.admin_bench import Admin
from integration.ledger_fixtures import database_url, db, postgres_server
from pool import Pool
from scheduler.errors import StartError
from tierlane.embedded.redis import EmbeddedRedis
from tierlane.roles.process import check_redis

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
TOKEN = "service-token-of-the-tests"
HEALTH = {"status": "healthy", "reasons": [], "audit_lag_ms": 3, "healthy_gpus": 1, "total_gpus": 1, "tiers": {}}


class StandIn:
    """What a gateway says, as the test wishes."""

    url = ""
    status = 200
    document: dict[str, Any] = HEALTH

    async def ready(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status)

    async def health(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401)
        return web.json_response(self.document, status=self.status)


@pytest.fixture
async def gateway() -> AsyncIterator[StandIn]:
    stand_in, app = StandIn(), web.Application()
    app.add_routes([web.get("/readyz", stand_in.ready), web.get("/internal/health", stand_in.health)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    stand_in.url = f"http://127.0.0.1:{port}"
    yield stand_in
    await runner.cleanup()


@pytest.fixture
def env(database_url: str, redis_url: str) -> dict[str, str]:
    return {"TIERLANE_REDIS_URL": redis_url, "TIERLANE_SERVICE_TOKEN": TOKEN, "TIERLANE_GONE_MS": "60000"}


async def checks(admin: Admin, gateway: StandIn, env: dict[str, str]) -> tuple[int, dict[str, str]]:
    """The exit code, and the level of each check by group and name."""
    found = await admin.run("check", "-o", "json", "--url", gateway.url, env=env)
    return found.exit_code, {f"{c['group']} {c['name']}": c["level"] for c in json.loads(found.stdout)["checks"]}


async def test_a_whole_system_passes(
    gateway: StandIn, database_url: str, db: Connection, env: dict[str, str], pool: Pool
) -> None:
    """Everything is looked at, and is as it must be."""
    await db.execute("INSERT INTO models (name) VALUES ('tiny')")
    await pool.worker_beats("w1")

    code, levels = await checks(Admin(database_url), gateway, env)

    assert (code, set(levels.values())) == (0, {"pass"})
    assert set(levels) == {
        *("settings readable", "postgresql reachable", "postgresql clock", "postgresql migrations"),
        *(
            "redis reachable",
            "redis version",
            "redis mode",
            "redis eviction",
            "redis clock",
            "catalog tiers",
            "catalog models",
        ),
        *("workers pool default", "gateway readyz", "gateway health", "audit lag", "audit dead letters"),
    }


async def test_what_is_missing_is_found(
    gateway: StandIn, database_url: str, db: Connection, env: dict[str, str], pool: Pool
) -> None:
    """No worker, a paused tier, a gateway that is not ready: each its own line, with what to do, and exit code 1."""
    await db.execute("INSERT INTO models (name) VALUES ('tiny')")
    await db.execute("UPDATE tiers SET paused = true WHERE name = 'free'")
    gateway.status, gateway.document = 503, {**HEALTH, "status": "down", "reasons": ["No GPU is known."]}

    code, levels = await checks(Admin(database_url), gateway, env)
    shown = await Admin(database_url).run("check", "--url", gateway.url, env=env)

    assert code == 1
    assert {name for name, level in levels.items() if level == "fail"} == {
        *("workers pool default", "gateway readyz", "gateway health"),
    }
    assert levels["catalog paused"] == "warn"
    assert "No GPU is known." in shown.stdout
    assert shown.stdout.splitlines()[-1].startswith("Status check results are \u2717")


async def test_servers_that_are_away_are_told(gateway: StandIn) -> None:
    """One after the other, none of them a traceback."""
    admin = Admin("postgresql+asyncpg://user:hunter2@/lane?host=/nonexistent")
    env = {"TIERLANE_REDIS_URL": "unix:///nonexistent", "TIERLANE_SERVICE_TOKEN": "another-token-than-theirs"}

    code, levels = await checks(admin, gateway, env)
    shown = await admin.run("check", "--url", "http://127.0.0.1:9", env=env)

    assert code == 1
    assert {name for name, level in levels.items() if level == "fail"} == {
        *("postgresql reachable", "redis reachable", "gateway readyz"),
    }
    assert "hunter2" not in shown.stdout
    assert "The gateway at http://127.0.0.1:9 does not respond" in shown.stdout


async def test_a_redis_in_cluster_mode_is_refused(gateway: StandIn, tmp_path: Path, database_url: str) -> None:
    """Scripts fail there, each with another error; roles and `check` say what is wrong, and what to do."""
    server = EmbeddedRedis(tmp_path, tmp_path / "s", ephemeral=True, extra_args=["--cluster-enabled", "yes"])
    await server.start()
    try:
        with pytest.raises(StartError, match=r"cluster mode: .* single primary"):
            await check_redis(server.url)
        env = {"TIERLANE_REDIS_URL": server.url, "TIERLANE_SERVICE_TOKEN": TOKEN}
        code, levels = await checks(Admin(database_url), gateway, env)
    finally:
        await server.stop()

    assert (code, levels["redis reachable"], levels["redis mode"]) == (1, "pass", "fail")


async def test_top_prints_one_frame(gateway: StandIn, database_url: str, env: dict[str, str]) -> None:
    """For pipes; without an answer it says so, and the exit code is 1."""
    admin = Admin(database_url)

    shown = await admin.run("top", "--once", "--url", gateway.url, env=env)
    away = await admin.run("top", "--once", "--url", "http://127.0.0.1:9", env=env)
    refused = await admin.run("top", "--once", "--url", gateway.url, env=env | {"TIERLANE_SERVICE_TOKEN": "x" * 16})

    assert (shown.exit_code, shown.stdout.split()[:2]) == (0, ["tierlane", "healthy"])
    assert (away.exit_code, "does not respond" in away.stdout) == (1, True)
    assert (refused.exit_code, "rejects the service token" in refused.stdout) == (1, True)
