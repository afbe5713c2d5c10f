"""The pure parts of `up`: backoff, the demo model's row, environments of roles, prefixes of lines."""

import io
import os
from pathlib import Path

import pytest
from pydantic import SecretStr

from gpu_pool.model_process.handle import ModelLaunch
from scheduler.protocol.direct import direct_token
from tierlane.settings.model import Settings
from tierlane.settings.pools import default_torch_threads
from tierlane.up.data_dir import LogLines
from tierlane.up.demo_data import demo_model
from tierlane.up.members import RoleEnvironment, role_command
from tierlane.up.orphan_guard import Held
from tierlane.up.supervisor import RestartBackoff

KILLED, FAILED = False, True


@pytest.mark.parametrize(
    ("runs", "delays_s"),
    [
        ([(0, FAILED)] * 7, [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]),
        ([(0, FAILED), (9.9, FAILED), (0, FAILED)], [0.2, 0.4, 0.8]),
        ([(0, FAILED), (0, FAILED), (10.0, FAILED), (0, FAILED)], [0.2, 0.4, 0.2, 0.4]),
        ([(0.9, KILLED), (0.9, KILLED), (0.9, KILLED)], [0.2, 0.4, 0.8]),
        ([(3.0, KILLED)] * 7, [0.0] * 7),
        ([(0, FAILED), (0, FAILED), (1.0, KILLED), (0, FAILED)], [0.2, 0.4, 0.0, 0.2]),
    ],
)
def test_delays_grow_only_while_starts_fail(runs: list[tuple[float, bool]], delays_s: list[float]) -> None:
    """0.2 s doubling to 5 s; who was killed after serving is started at once, and what failed before is forgotten."""
    backoff = RestartBackoff()

    assert [round(backoff.delay_after(alive_s, failed=failed), 1) for alive_s, failed in runs] == delays_s


@pytest.mark.parametrize(
    ("backend", "given", "name", "size", "rate"),
    [
        ("tiny", None, "tiny", 8, 20.0),
        ("simulated", None, "simulated", 32, 640.0),
        ("simulated:100", None, "simulated", 32, 320.0),
        ("simulated:100", 64, "simulated", 64, 640.0),
        ("simulated:x", None, "simulated", 32, 640.0),
        ("pkg.module:function", None, "function", 32, 20.0),
        ("hf:/models/my model/", None, "my-model", 32, 20.0),
        ("openai:http://host/v1", None, "openai", 32, 20.0),
    ],
)
def test_a_backend_gives_a_model_row(backend: str, given: int | None, name: str, size: int, rate: float) -> None:
    """The row has a name that the table accepts, a batch size and a first guess of the rate."""
    model = demo_model(backend, "default", 3000, given)

    assert (model.name, model.max_batch_size, model.wanted_batch_size, model.rps_per_gpu) == (name, size, given, rate)


def test_secrets_reach_roles_by_environment_only() -> None:
    """The token is in the environment of a role and not in its command."""
    settings = Settings(service_token=SecretStr("a-token-of-some-length"), redis_url="redis://:secret@host")

    env = RoleEnvironment(settings).for_role("gateway", "gateway-1")

    assert env["TIERLANE_SERVICE_TOKEN"] == "a-token-of-some-length"
    assert env["TIERLANE_REDIS_URL"] == "redis://:secret@host"
    assert "secret" not in " ".join(role_command("gateway"))


def test_a_worker_gets_nothing_that_opens_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of others runs beside it: the token of direct calls, and neither the service token nor PostgreSQL."""
    service, callback = "a-token-of-some-length", "whsec_" + "A" * 32
    database = "postgresql+asyncpg://u:secret@host/db"
    monkeypatch.setenv("TIERLANE_SERVICE_TOKEN", service)
    monkeypatch.setenv("TIERLANE_DATABASE_URL", database)
    settings = Settings(service_token=SecretStr(service), database_url=database, callback_secret=SecretStr(callback))

    env = RoleEnvironment(settings).for_role("worker", "worker-1", {"backend": "tiny"})

    assert env["TIERLANE_DIRECT_TOKEN"] == direct_token(service)
    assert not [name for name, text in env.items() if service in text or "secret@host" in text or callback in text]


def test_a_model_process_gets_no_secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither our settings nor what opens a server by another name; what the model's own code needs stays."""
    secrets = {
        "TIERLANE_REDIS_URL": "redis://worker:canary@r",
        "TIERLANE_DIRECT_TOKEN": "canary",
        "PGPASSWORD": "canary",
        "REDISCLI_AUTH": "canary",
        "CACHE": "rediss://:canary@r",
        "DATABASE_URL": "postgresql://u:canary@h/d",
    }
    for name, text in (secrets | {"HF_HOME": "/models"}).items():
        monkeypatch.setenv(name, text)

    env = ModelLaunch("tiny").environment()

    assert "canary" not in " ".join(env.values())
    assert env["HF_HOME"] == "/models"


def test_roles_get_their_own_directory_and_workers_their_name() -> None:
    """One writer for each spool; the worker in Redis is called as in stack.json."""
    roles = RoleEnvironment(Settings(data_dir=Path("/data"), workers=2, backend="simulated"))

    assert roles.for_role("gateway", "gateway-2")["TIERLANE_DATA_DIR"] == "/data/gateway-2"
    assert roles.for_role("gateway", "gateway-2")["TIERLANE_METRICS_DIR"] == "/data/metrics"
    worker = roles.for_role("worker", "worker-1")
    assert worker["TIERLANE_WORKER_ID"] == "worker-1"
    assert worker["TIERLANE_TORCH_THREADS"] == str(max(1, (os.cpu_count() or 1) // 2))
    assert roles.for_role("worker", "w", {"backend": "tiny"})["TIERLANE_TORCH_THREADS"] == "1"


@pytest.mark.parametrize(
    ("backend", "workers", "threads"), [("tiny", 1, 1), ("hf:x", 1, 8), ("hf:x", 3, 2), ("m:f", 9, 1)]
)
def test_threads_of_a_model(monkeypatch: pytest.MonkeyPatch, backend: str, workers: int, threads: int) -> None:
    """The host's, shared; of `tiny` one."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)

    assert default_torch_threads(backend, workers) == threads


def test_what_a_role_is_given_is_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A role that loads its settings from its environment has the values of `up`."""
    settings = Settings(port=1234, lease_ms=900, drain_ms=60_000, default_model="tiny")
    env = RoleEnvironment(settings).for_role("gateway", "gateway-1")
    for name, value in env.items():
        monkeypatch.setenv(name, value)

    read = Settings()

    assert (read.port, read.lease_ms, read.default_model) == (1234, 900, "tiny")
    assert (read.notice_ms, read.drain_ms) == (0, 1500)


def test_only_a_worker_can_import_from_the_current_directory() -> None:
    """A folder called `gateway` beside the user's files must not shadow ours; a backend of the user must be found."""
    assert "-P" in role_command("gateway")
    assert "-P" not in role_command("worker")


@pytest.mark.parametrize(
    ("coloured", "expected"),
    [
        (False, b"worker-1    | one\ngateway-1   | two\n"),
        (True, b"\x1b[36mworker-1    | \x1b[0mone\n\x1b[33mgateway-1   | \x1b[0mtwo\n"),
    ],
)
def test_lines_carry_the_name_of_their_writer(coloured: bool, expected: bytes) -> None:
    """Names are aligned; colours only when asked for."""
    stream = io.BytesIO()
    lines = LogLines(stream, coloured=coloured)

    lines.write("worker-1", b"one\n")
    lines.write("gateway-1", b"two\r\n")

    assert stream.getvalue() == expected


def test_a_closed_output_does_not_stop_anything() -> None:
    """`up | head` goes on when head has ended."""
    stream = io.BytesIO()
    stream.close()

    LogLines(stream, coloured=False).say("nobody reads this")


@pytest.mark.parametrize("line", ["", "pid", "pid x", "pid 99999999", "remove /", "remove /etc", "strange 1", "pid -1"])
def test_the_leash_ignores_strange_lines(line: str) -> None:
    """It deletes nothing but our temporary directories, and a bad line is not its end."""
    held = Held("")

    held.note(line)

    assert not held._directories
    held.clear()
