"""A deployment on three hosts, set up as in docs/platform.md, serves while the host of its Redis is lost repeatedly."""

import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from certificates import certificates
from deploy_files import DEPLOY
from eventually import eventually
from separate_hosts import NETWORK, Host, Hosts, Typist, separate_hosts
from tierlane.check.system import CheckItem

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(420)]

WORKERS = 4
RATE, SECONDS = 200, 96.0
MIX = {"enterprise": 0.3, "paid": 0.6, "free": 0.1}
KILLS_AT_S, DOWN_S = (8.0, 24.0, 40.0), 3.0
CUTS_S = ((56.0, 61.0), (70.0, 82.0))  # The second for longer than the last known capacity is used.
LEAST, LATEST_MS = 0.995, 4100.0
URL = "http://127.0.0.1:8080"
ALIASES = {"redis.internal": "servers", "postgres.internal": "servers"}
PLACEHOLDERS = ("gateway", "scheduler", "worker", "scaler", "admin", "database")
HEALTH = (
    "import os, urllib.request as r; q = r.Request('{url}/internal/health'); "
    "q.add_header('Authorization', 'Bearer ' + os.environ['TIERLANE_SERVICE_TOKEN']); "
    "a = r.OpenerDirector(); a.add_handler(r.HTTPHandler()); print(a.open(q, timeout=3).read().decode())"
)


class Deployment:
    """The three hosts, and the commands of their operator."""

    def __init__(self, hosts: Hosts, typist: Typist) -> None:
        self.hosts = hosts
        self.servers, self.edge, self.gpus = hosts["servers"], hosts["edge"], hosts["gpus"]
        self.typist = typist

    def start_redis(self) -> None:
        self.typist.start(self.servers, "tierlane-redis")

    async def start_servers(self, cert: Path, key: Path) -> None:
        """Start Redis, and the embedded PostgreSQL with the statements of the page."""
        self.start_redis()
        sql = self.typist.put(" ".join(self.typist.block("CREATE ROLE")))
        home = self.servers.home / "postgres"
        words = [sys.executable, "-m", "postgres_host", str(home), str(cert), str(key), sql]
        self.servers.start("postgres", words, {"PYTHONPATH": str(DEPLOY.parent / "tests")}, self.servers.home)
        await eventually((home / "ready").exists, "PostgreSQL listens", 60.0)

    async def start_edge(self) -> None:
        """Two gateways that share a port and a folder, two schedulers."""
        migrate = self.typist.start(self.edge, "tierlane-migrate")
        code = await asyncio.to_thread(self.edge.processes.pop(migrate).wait, 60.0)
        assert code == 0, self.edge.log(migrate)
        self.typist.start(self.edge, "tierlane-scheduler")
        self.edge.processes["tierlane-scheduler-2"] = self.edge.processes.pop("tierlane-scheduler")
        self.typist.start(self.edge, "tierlane-scheduler")
        for number in ("1", "2"):
            self.typist.start(self.edge, "tierlane-gateway@", number)

    def start_worker(self, number: int, **more: str) -> str:
        return self.typist.start(self.gpus, "tierlane-worker@", str(number), TIERLANE_BACKEND="simulated:50", **more)

    def operator(self, line: str, environment: str) -> subprocess.CompletedProcess[str]:
        return self.edge.typed(line, self.typist.environment(environment))

    def add_customers(self) -> dict[str, str]:
        """Create the model of the page and one customer of each tier; returns the keys by tier."""
        model, customer, key, _ = self.typist.block("tierlane model create")
        keys = {}
        assert self.operator(model, "admin.env").returncode == 0
        for tier in MIX:
            for line in (customer, key):
                name = "acme" if tier == "paid" else f"acme-{tier}"
                done = self.operator(line.replace("acme", name).replace("paid", tier), "admin.env")
                assert done.returncode == 0, done.stderr
            keys[tier] = re.findall(r"\S{30,}", done.stdout)[-1]
        return keys

    def check(self) -> tuple[int, list[CheckItem]]:
        """`tierlane check` as the page has it."""
        done = self.operator(self.typist.block("tierlane model create")[-1] + " -o json", "admin.env")
        assert done.stdout, done.stderr
        return done.returncode, [CheckItem(**each) for each in json.loads(done.stdout)["checks"]]

    def passes(self) -> bool:
        """Whether the check passes without a warning, at whichever gateway answers."""
        code, items = self.check()
        return code == 0 and all(item.level == "pass" for item in items)

    def warned_of(self, text: str) -> bool:
        """Whether the check has a warning with this text, at whichever gateway answers."""
        return any(item.level == "warn" and text in item.advice for item in self.check()[1])

    def health(self) -> dict[str, Any]:
        done = self.operator(f'python -c "{HEALTH.format(url=URL)}"', "admin.env")
        try:
            return dict(json.loads(done.stdout))
        except ValueError:
            return {"healthy_gpus": -1, "reasons": [done.stderr[-300:]]}

    def reason(self, text: str) -> str:
        """The reason of health with this text, or ""."""
        return next((each for each in self.health()["reasons"] if text in each), "")

    async def healthy(self) -> None:
        def problems() -> str:
            health = self.health()
            return "" if health["healthy_gpus"] == WORKERS and not health["reasons"] else json.dumps(health)[:3000]

        found = ""
        for _ in range(120):
            found = problems()
            if not found:
                return
            await asyncio.sleep(0.5)
        raise AssertionError(found)

    def ended(self) -> dict[str, int]:
        return self.servers.ended() | self.edge.ended() | self.gpus.ended()


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Three hosts without processes; their logs are printed at the end."""
    tmp_path.chmod(0o755)
    tls = tmp_path / "tls"
    tls.mkdir()
    made = certificates(tls, tuple(ALIASES))
    for name, file in {"ca.crt": made.authority.cert, "tls.crt": made.server.cert, "tls.key": made.server.key}.items():
        (tls / name).write_bytes(file.read_bytes())
    known = {f"{name} password": secrets.token_hex(12) for name in PLACEHOLDERS}
    known["service token"] = secrets.token_hex(16)
    with separate_hosts(tmp_path, ("servers", "edge", "gpus"), ALIASES) as hosts:
        line = Typist({}, tls).block("SERVICE_TOKEN=")[1]
        made_up = hosts["edge"].typed(line, {"SERVICE_TOKEN": known["service token"]})
        known["direct token"] = made_up.stdout.strip()
        yield Deployment(hosts, Typist(known, tls))
    for host in hosts.by_name.values():
        for log in sorted(host.home.glob("*.log")):
            print(host.log(log.stem))


async def faults(deployment: Deployment) -> list[str]:
    """Kill Redis three times and cut its host off twice; returns a line for each step."""
    began, steps = time.monotonic(), []

    async def until(at_s: float, step: str) -> None:
        await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
        steps.append(f"{time.monotonic() - began:.1f} s {step}, load average {os.getloadavg()[0]:.1f}")

    for at_s in KILLS_AT_S:
        await until(at_s, "kill")
        deployment.servers.kill("tierlane-redis")
        await until(at_s + DOWN_S, "start")
        deployment.start_redis()
    for at_s, restored_s in CUTS_S:
        await until(at_s, "cut")
        deployment.hosts.cut("servers")
        await until(restored_s, "restored")
        deployment.hosts.restore("servers")
    return steps


async def loaded(host: Host, home: Path, keys: dict[str, str], database_url: str) -> dict[str, Any]:
    """The report of `tierlane bench` on this host, with the audit check."""
    stack, report = home / "stack.json", home / "bench.json"
    stack.write_text(json.dumps({"keys": keys, "database_url": database_url}))
    mix = ",".join(f"{tier}={share}" for tier, share in MIX.items())
    words = ["tierlane", "bench", "--url", URL, "--stack", str(stack), "--mix", mix, "--rate", str(RATE)]
    words += ["--duration", str(SECONDS), "--warmup", "3", "--audit-wait", "40", "--json", str(report)]
    host.start("bench", words, {}, home)
    await asyncio.to_thread(host.processes.pop("bench").wait)
    assert report.exists(), host.log("bench")
    return dict(json.loads(report.read_text()))


async def test_requests_succeed_while_the_redis_host_is_lost(deployment: Deployment, tmp_path: Path) -> None:
    """At least 99.5 % get 200, none after the deadline; before that, a worker with a wrong address is reported."""
    tls = tmp_path / "tls"
    await deployment.start_servers(tls / "tls.crt", tls / "tls.key")
    await deployment.start_edge()
    keys = deployment.add_customers()
    for number in range(WORKERS - 1):
        deployment.start_worker(number)
    wrong_address = f"{NETWORK}99"
    misconfigured = deployment.start_worker(WORKERS - 1, TIERLANE_DIRECT_ADVERTISE=wrong_address)

    reason = await eventually(
        lambda: deployment.reason("cannot call 1 of the workers directly"), "health reports it", 60.0
    )
    assert wrong_address in reason
    await eventually(lambda: deployment.warned_of(wrong_address), "`tierlane check` reports it", 60.0)
    deployment.gpus.stop(misconfigured)
    deployment.start_worker(WORKERS - 1)
    await deployment.healthy()
    await eventually(deployment.passes, "`tierlane check` passes", 60.0)

    database_url = deployment.typist.environment("gateway.env")["TIERLANE_DATABASE_URL"]
    found, steps = await asyncio.gather(loaded(deployment.edge, tmp_path, keys, database_url), faults(deployment))

    share = found["completed"] / found["scheduled"]
    latest = max(found["max_e2el_ms"] or 0.0, found["error_latency_ms"]["max"] or 0.0)
    print(*steps, f"{share:.3%} of {found['scheduled']} got 200, latest {latest:.0f} ms", found["errors"], sep="\n")
    print(found["audit"])
    assert deployment.ended() == {}
    assert share >= LEAST
    assert found["unanswered"] == 0
    assert latest <= LATEST_MS
    await deployment.healthy()
