"""`tierlane check` and `tierlane top` with real servers and a stub gateway, and `tierlane check model` on model processes."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from redis.asyncio import Redis

from endpoint_stand_in import StandIn, serving
from eventually import eventually
from integration.admin_fixtures import Admin
from integration.ledger_fixtures import database_url, db, postgres_server
from pool import Pool
from scheduler.errors import RedisUnavailable, StartError
from scheduler.redis_client.connections import bounded, command_client, server_url
from tierlane.check import examination, judgements
from tierlane.check import model as check_model
from tierlane.roles.process import check_redis
from tierlane_local.embedded.cluster import HOST, free_ports
from tierlane_local.embedded.redis import EmbeddedRedis

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
TOKEN = "service-token-of-the-tests"
HEALTH = {"status": "healthy", "reasons": [], "audit_lag_ms": 3, "healthy_gpus": 1, "total_gpus": 1, "tiers": {}}
CHECKS = {
    "settings readable",
    *(f"postgresql {name}" for name in ("reachable", "sessions", "writable", "clock", "migrations")),
    *(f"redis {name}" for name in ("reachable", "distance", "version", "mode", "eviction", "clock")),
    *(
        "catalog tiers",
        "catalog models",
        "rows without effect rows",
        "workers pool default",
        "workers limits of default",
        "gateway readyz",
        "gateway health",
    ),
    *("audit lag", "audit dead letters"),
}
QUICK = ("--batch-sizes", "1,2,4", "--device", "cpu", "--gpu-timeout-ms", "1500", "--torch-threads", "1")
MODELS = """
import asyncio, os, random, signal, time

def reverse(texts): return [t[::-1] for t in texts]
def only_first(texts): return reverse(texts)[:1]
def by_length(texts): return reverse(sorted(texts, key=len))
def numbers(texts): return [len(t) for t in texts]
def random_words(texts): return [str(random.random()) for _ in texts]
def picky(texts):
    if any("bad" in t for t in texts): raise ValueError("bad")
    return reverse(texts)
def not_empty(texts): return [t[0] for t in texts]
def crashes(texts): os.kill(os.getpid(), signal.SIGKILL)
def crashes_on_long(texts):
    if max(map(len, texts)) > 10_000: os.kill(os.getpid(), signal.SIGKILL)
    return reverse(texts)
def hangs(texts): time.sleep(60)
def holds_two(texts):
    if len(texts) == 4: raise MemoryError
    return reverse(texts)
class NeverLoads:
    def load(self): time.sleep(60)
    def predict(self, texts): return texts
class Halting:
    def predict(self, texts): return reverse(texts)
    def generate(self, texts, tell): raise KeyError("step")
    def chat_template(self, messages): return messages[7]["content"]
    def embed(self, texts): return [[1 / 0] for _ in texts]
class Drifting:
    def predict(self, texts): return reverse(texts)
    def generate(self, texts, tell):
        tell(["other"] * len(texts))
        return reverse(texts)
class NoTemplate:
    def predict(self, texts): return reverse(texts)
    def chat_template(self, messages): return messages
class SlowStream:
    def predict(self, texts): return reverse(texts)
    def generate(self, texts, tell):
        for _ in range(7):
            time.sleep(0.2)
            tell(["."] * len(texts))
        return ["." * 7] * len(texts)
class Typed:
    def predict(self, texts, parameters): return [t[: p["max_tokens"]] for t, p in zip(texts, parameters)]
class Talker:
    async def answer(self, item):
        for word in item.input.split()[:1000]:
            await asyncio.sleep(0.02)
            item.emit(word)
class Unwell:
    def predict(self, texts): return texts
    def health(self): return False
class CannotLoad:
    def load(self): raise OSError("weights are not readable")
    def predict(self, texts): return texts
"""


class StubGateway:
    """A gateway with readiness and a health document."""

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
async def gateway() -> AsyncIterator[StubGateway]:
    stub, app = StubGateway(), web.Application()
    app.add_routes([web.get("/readyz", stub.ready), web.get("/internal/health", stub.health)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield stub
    await runner.cleanup()


@pytest.fixture
def admin(database_url: str, redis_url: str) -> Admin:
    return Admin(database_url, TIERLANE_REDIS_URL=redis_url, TIERLANE_SERVICE_TOKEN=TOKEN, TIERLANE_GONE_MS="60000")


async def checks(admin: Admin, gateway: StubGateway) -> tuple[int, dict[str, str]]:
    """The exit code, and the level of each check by group and name."""
    result = await admin.run("check", "-o", "json", "--url", gateway.url)
    return result.exit_code, {f"{c['group']} {c['name']}": c["level"] for c in json.loads(result.stdout)["checks"]}


async def test_a_healthy_system_passes_every_check(
    gateway: StubGateway, admin: Admin, db: Connection, pool: Pool
) -> None:
    """The exit code is 0."""
    await db.execute("INSERT INTO models (name) VALUES ('tiny')")
    await pool.worker_beats("w1")

    assert await checks(admin, gateway) == (0, dict.fromkeys(CHECKS, "pass"))


async def test_problems_fail_their_checks(gateway: StubGateway, admin: Admin, db: Connection) -> None:
    """No worker and a gateway that is not ready are failures, a paused tier is a warning."""
    await db.execute("INSERT INTO models (name) VALUES ('tiny')")
    await db.execute("UPDATE tiers SET paused = true WHERE name = 'free'")
    gateway.status, gateway.document = 503, {**HEALTH, "status": "down", "reasons": ["No GPU is known."]}

    code, levels = await checks(admin, gateway)

    failed = {name for name, level in levels.items() if level == "fail"}
    assert (code, failed) == (1, {"workers pool default", "gateway readyz", "gateway health"})
    assert levels["catalog paused"] == "warn"


async def test_a_standby_fails_the_check(gateway: StubGateway, admin: Admin, db: Connection) -> None:
    """As a database that is read-only by a setting; also behind the pooler beside a direct URL, which is checked, too."""
    name = await db.fetchval("SELECT current_database()")
    await db.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")

    code, levels = await checks(admin, gateway)
    shown = await admin.run("check", env={"TIERLANE_DATABASE_DIRECT_URL": admin.database_url})

    assert (code, levels["postgresql writable"], levels["postgresql sessions"]) == (1, "fail", "pass")
    assert [shown.stdout.count(f"✗ {name}") for name in ("writable", "pooler")] == [1, 1]
    assert "target_session_attrs=primary" in shown.stdout


async def test_unavailable_servers_fail_their_checks(gateway: StubGateway) -> None:
    """Each is reported, without passwords; a gateway with another token rejects the check."""
    admin = Admin(
        "postgresql+asyncpg://user:hunter2@/lane?host=/nonexistent",
        TIERLANE_REDIS_URL="unix:///nonexistent",
        TIERLANE_SERVICE_TOKEN="another-service-token",
    )

    code, levels = await checks(admin, gateway)
    shown = await admin.run("check", "--url", "http://127.0.0.1:9")

    failed = {name for name, level in levels.items() if level == "fail"}
    assert (code, failed) == (1, {"postgresql reachable", "redis reachable", "gateway readyz"})
    assert "hunter2" not in shown.stdout
    assert "The gateway at http://127.0.0.1:9 does not respond" in shown.stdout


async def is_served(url: str) -> bool:
    """Whether a server of a cluster serves the slot of Tierlane."""
    client = command_client(await server_url(url))
    try:
        async with bounded():
            await client.get("{cell:default}:protocol")
    except RedisUnavailable:
        return False
    finally:
        await client.aclose()
    return True


async def test_redis_in_cluster_mode(gateway: StubGateway, tmp_path: Path, database_url: str) -> None:
    """The check passes with either URL; a role accepts the one with the scheme of a cluster, which is detected."""
    port, bus_port = free_ports(2)
    options = ["--port", str(port), "--bind", HOST, "--cluster-enabled", "yes", "--cluster-port", str(bus_port)]
    server = EmbeddedRedis(tmp_path, tmp_path / "s", ephemeral=True, extra_args=options)
    await server.start()
    url = f"redis://{HOST}:{port}"
    try:
        with pytest.raises(StartError, match=r"cluster mode: .* redis\+cluster://"):
            await check_redis(url)
        async with Redis.from_url(url) as client:
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await eventually(lambda: is_served(url), "the server has all slots")
        await check_redis(await server_url(url))
        admin = Admin(database_url, TIERLANE_REDIS_URL=url, TIERLANE_SERVICE_TOKEN=TOKEN)
        code, levels = await checks(admin, gateway)
    finally:
        await server.stop()

    assert (levels["redis reachable"], levels["redis mode"]) == ("pass", "pass")
    assert code == 1  # There is no worker.


async def test_top_prints_one_frame(gateway: StubGateway, admin: Admin) -> None:
    """If the gateway does not respond or rejects the token, it reports that with exit code 1."""
    shown = await admin.run("top", "--once", "--url", gateway.url)
    away = await admin.run("top", "--once", "--url", "http://127.0.0.1:9")
    refused = await admin.run("top", "--once", "--url", gateway.url, env={"TIERLANE_SERVICE_TOKEN": "x" * 16})

    assert (shown.exit_code, shown.stdout.split()[:2]) == (0, ["tierlane", "healthy"])
    assert (away.exit_code, "does not respond" in away.stdout) == (1, True)
    assert (refused.exit_code, "rejects the service token" in refused.stdout) == (1, True)


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of models that only model processes can import."""
    (tmp_path / "checked_models.py").write_text(MODELS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


async def check(spec: str, *options: str) -> tuple[int, dict[str, bool | None], dict[str, Any]]:
    """The exit code, the result of each check, and the whole document."""
    name = spec if ":" in spec or spec == "tiny" else f"checked_models:{spec}"
    result = await Admin("").run("check", "model", name, *QUICK, *options, "-o", "json")
    document = json.loads(result.stdout)
    return result.exit_code, {each["name"]: each["ok"] for each in document["checks"]}, document


async def test_a_correct_model_passes_with_suggested_settings() -> None:
    """If the time does not depend on the batch size, the largest batch is suggested."""
    code, checks, document = await check("simulated:5")

    assert (code, set(checks.values())) == (0, {True, None})
    assert [each["size"] for each in document["sizes"]] == [1, 2, 4]
    assert all(5 <= each["p50_ms"] < 100 for each in document["sizes"])
    assert document["suggestion"]["max_batch_size"] == 4
    assert document["version"] == "simulated-5ms"


@pytest.mark.parametrize(
    ("spec", "failed"),
    [
        ("only_first", {"length"}),
        ("by_length", {"order"}),
        ("numbers", {"type"}),
        ("random_words", {"determinism"}),
        ("not_empty", {"empty"}),
        ("crashes_on_long", {"long"}),
        ("holds_two", {"sizes"}),
        ("crashes", {"answers"}),
        ("hangs", {"answers", "time"}),
        ("CannotLoad", {"load"}),
        ("Unwell", {"load"}),
        ("Halting", {"stream", "chat", "embed"}),
        ("Drifting", {"stream"}),
        ("NoTemplate", {"chat"}),
        ("NeverLoads", {"load"}),
        ("no_such_name", {"load"}),
    ],
)
async def test_each_violation_fails_its_checks(spec: str, failed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 1, and each failed check has advice."""
    if spec == "NeverLoads":
        monkeypatch.setattr(check_model, "LOAD_TIMEOUT_S", 0.5)
    for module in (examination, judgements):
        monkeypatch.setattr(module, "TRIAL_CAPS", 1.1)
    code, checks, document = await check(spec)

    assert {name for name, ok in checks.items() if ok is False} == failed
    assert (code, document["ok"]) == (1, False)
    assert all(each["advice"] for each in document["checks"] if each["ok"] is False)


async def test_nothing_else_is_tested_if_the_answers_are_unusable() -> None:
    """Each further check would have the result of the same fault."""
    _, checks, document = await check("only_first")

    assert [checks[name] for name in ("time", "length", "type", "order", "long", "sizes")] == [True, False, *[None] * 4]
    assert {each["said"] for each in document["checks"] if each["ok"] is None} == {"not tested"}
    assert document["suggestion"] is None


async def test_a_stream_that_its_deadline_breaks_off_has_a_finding_about_its_time() -> None:
    """With the setting that would suffice; other streams may take as long as a request."""
    limits = ("--gpu-timeout-ms", "900", "--total-request-ms")
    _, checks, _ = await check("SlowStream", *limits, "4000")
    _, _, document = await check("SlowStream", *limits, "1000")

    assert (checks["time"], checks["stream"]) == (True, True)
    (failed,) = [each for each in document["checks"] if each["ok"] is False]
    assert failed["name"] == "time"
    assert "over TIERLANE_TOTAL_REQUEST_MS = 1,000" in failed["said"]
    assert failed["advice"].startswith("Set TIERLANE_TOTAL_REQUEST_MS=")


async def test_a_model_that_raises_on_values_of_a_wrong_type_gets_a_note() -> None:
    """It is no fault of the model, but its customers get a better error by ModelOutput."""
    code, checks, document = await check("Typed")

    (note,) = [each for each in document["checks"] if each["name"] == "values"]
    assert (code, note["ok"], checks["parameters"]) == (0, None, True)
    assert 'max_tokens: "many": The model raised TypeError.' in note["said"]
    assert "values" not in (await check("reverse"))[1]


async def test_a_class_with_slots_has_the_limits_of_its_requests() -> None:
    """An answer may take longer than a batch, as long as its event loop runs; a long one is not waited for."""
    code, checks, document = await check("Talker", "--gpu-timeout-ms", "250")

    found = {each["name"]: each["said"] for each in document["checks"]}
    assert (code, checks["answers"], checks["stream"], checks["long"]) == (0, True, True, None)
    assert "a request may take 600,000 ms" in found["time"]
    assert "no result in 2.5 s, stopped" in found["long"]


async def test_an_endpoint_is_checked_with_single_requests() -> None:
    """As a worker sends them; its failures have advice about a server."""
    with serving(StandIn()) as server:
        code, checks, document = await check(f"openai:{server.url}")
        server.fault = lambda route, body: "500"
        failed_code, _, failed = await check(f"openai:{server.url}")

    assert (code, checks["order"], checks["stream"], checks["chat"], checks["embed"]) == (0, True, True, True, True)
    assert document["suggestion"]["max_batch_size"] >= 1
    assert failed_code == 1
    assert {each["advice"] for each in failed["checks"] if each["ok"] is False} == {judgements.OF_SERVER}


async def test_tracebacks_of_the_model_are_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Each once, with the frames of the model's module only; the module's own fault, too."""
    await check("Halting")
    halting = capfd.readouterr().err
    await check("CannotLoad")
    loading = capfd.readouterr().err

    assert [halting.count(line) for line in ("KeyError: 'step'", "IndexError: ", "ZeroDivisionError: ")] == [1, 1, 1]
    assert halting.count("Traceback") == 3
    assert "gpu_pool" not in halting + loading
    assert "in load\n" in loading
    assert "OSError: weights are not readable" in loading


async def test_every_method_is_run() -> None:
    """Those that the model does not have are unknown; a parameter that it does not read is rejected by name."""
    _, plain, document = await check("reverse")
    _, tiny, _ = await check("tiny", "--max-tokens", "2")

    found = {each["name"]: each["said"] for each in document["checks"]}
    assert [plain[name] for name in ("stream", "chat", "embed", "parameters")] == [True, True, None, True]
    assert [tiny[name] for name in ("stream", "chat", "embed", "parameters")] == [True, True, True, True]
    assert "parameters.check is not a parameter of this model" in found["parameters"]


async def test_the_isolation_of_a_bad_input_is_checked() -> None:
    """With the input that is given, or with one that made the model raise; a harmless input is no evidence."""
    calls = (("picky", "--poison", "a bad one"), ("not_empty",), ("reverse", "--poison", "harmless"))

    assert [(await check(*arguments))[1]["isolation"] for arguments in calls] == [True, True, None]


async def test_the_suggestion_is_written_to_the_model(database_url: str, db: Connection) -> None:
    """The change is recorded with its actor; nothing is written after a failed check or to an unknown model."""
    admin = Admin(database_url)
    await admin.done("model", "create", "mine")
    options = (*QUICK, "--write", "mine", "--actor", "kim")

    await admin.done("check", "model", "simulated:5", *options)

    row = await db.fetchrow("SELECT max_batch_size, max_wait_ms FROM models WHERE name = 'mine'")
    assert row["max_batch_size"] == 4
    assert 4 <= row["max_wait_ms"] <= 40
    assert await db.fetchval("SELECT changed_by FROM config_changes ORDER BY id DESC LIMIT 1") == "kim"
    failed = await admin.run("check", "model", "checked_models:by_length", *options)
    unknown = await admin.run("check", "model", "simulated:0", *QUICK, "--write", "absent")
    assert (failed.exit_code, unknown.exit_code) == (1, 1)
    assert "✗ order " in failed.stdout
    assert "There is no model named absent." in unknown.stderr
    assert await db.fetchval("SELECT max_batch_size FROM models WHERE name = 'mine'") == 4
