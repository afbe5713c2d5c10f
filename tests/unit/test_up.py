"""`tierlane up` without processes: restart delays, environments of roles, autoscaling, pools, and prefixes of lines."""

import io
import os
from pathlib import Path

import pytest
from pydantic import SecretStr

from gpu_pool.model_process.launch import ModelLaunch
from scheduler.protocol.direct import direct_token
from scheduler.protocol.pool_view import WorkerView
from scheduler.redis_client.keys import pools_of, pools_to_serve
from tierlane.settings.model import Settings, load_settings
from tierlane.settings.pools import OtherPool, PoolsError, default_torch_threads, parse_pools
from tierlane_local.up.autoscale import PoolAdvice, change, free_names
from tierlane_local.up.data_dir import LogLines
from tierlane_local.up.demo_data import demo_model
from tierlane_local.up.members import RoleEnvironment, role_command
from tierlane_local.up.model_times import warnings
from tierlane_local.up.orphan_guard import Held
from tierlane_local.up.restart_backoff import RestartBackoff

KILLED, FAILED = False, True


@pytest.mark.parametrize(
    ("runs", "delays_s"),
    [
        ([(0, FAILED)] * 7, [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]),
        ([(0, FAILED), (9.9, FAILED), (0, FAILED)], [0.2, 0.4, 0.8]),
        ([(0, FAILED), (0, FAILED), (10.0, FAILED), (0, FAILED)], [0.2, 0.4, 0.2, 0.4]),
        ([(0, FAILED), (0, FAILED), (30.0, FAILED), (0, FAILED)], [0.2, 0.4, 0.0, 0.2]),
        ([(0.9, KILLED), (0.9, KILLED), (0.9, KILLED)], [0.2, 0.4, 0.8]),
        ([(3.0, KILLED)] * 7, [0.0] * 7),
        ([(0, FAILED), (0, FAILED), (1.0, KILLED), (0, FAILED)], [0.2, 0.4, 0.0, 0.2]),
    ],
)
def test_delays_grow_only_while_starts_fail(runs: list[tuple[float, bool]], delays_s: list[float]) -> None:
    """0.2 s doubles to 5 s; a process that was killed after it served, or ran for 30 s, is restarted at once and resets it."""
    backoff = RestartBackoff()

    assert [round(backoff.delay_after(alive_s, failed=failed), 1) for alive_s, failed in runs] == delays_s


@pytest.mark.parametrize(
    ("backend", "given", "name", "size", "rate"),
    [
        ("tiny", None, "tiny", 8, 20.0),
        ("simulated", None, "simulated", 32, 640.0),
        ("simulated:100", 64, "simulated", 64, 640.0),
        ("simulated:x", None, "simulated", 32, 640.0),
        ("pkg.module:function", None, "function", 32, 20.0),
        ("hf:/models/my model/", None, "my-model", 32, 20.0),
        ("openai:http://host/v1", None, "openai", 32, 20.0),
        ("openai:http://host/v1#org/m-7b", None, "m-7b", 32, 20.0),
    ],
)
def test_a_backend_gives_a_model_row(backend: str, given: int | None, name: str, size: int, rate: float) -> None:
    """The row has a name that the table accepts, a batch size and a first guess of the rate."""
    model = demo_model(backend, "default", given)

    assert (model.name, model.max_batch_size, model.wanted_batch_size, model.rps_per_gpu) == (name, size, given, rate)


def test_a_gateway_gets_secrets_by_environment_only() -> None:
    """No secret is in a command line."""
    settings = Settings(service_token=SecretStr("a-token-of-some-length"), redis_url="redis://:secret@host")
    env = RoleEnvironment(settings).for_role("gateway", "gateway-1")

    assert env["TIERLANE_SERVICE_TOKEN"] == "a-token-of-some-length"
    assert env["TIERLANE_REDIS_URL"] == "redis://:secret@host"
    assert "secret" not in " ".join(role_command("gateway"))


def test_a_worker_gets_no_secret_beyond_direct_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker runs foreign code, so it gets the token of direct calls, and neither service token nor database."""
    service, callback = "a-token-of-some-length", "whsec_" + "c2VjcmV0" * 4
    database = "postgresql+asyncpg://u:secret@host/db"
    monkeypatch.setenv("TIERLANE_SERVICE_TOKEN", service)
    monkeypatch.setenv("TIERLANE_DATABASE_URL", database)
    settings = Settings(service_token=SecretStr(service), database_url=database, callback_secret=SecretStr(callback))

    env = RoleEnvironment(settings).for_role("worker", "worker-1", {"backend": "tiny"})

    assert env["TIERLANE_DIRECT_TOKEN"] == direct_token(service)
    assert not [name for name, text in env.items() if service in text or "secret@host" in text or callback in text]


def test_a_worker_starts_where_callbacks_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their hosts may be set in the environment or in the settings file of the stack; a worker gets no secret for them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tierlane.toml").write_text('callback_hosts = "hooks.example"\npools = "other=tiny"\n')
    monkeypatch.setenv("TIERLANE_CALLBACK_SECRET", "whsec_" + "c2VjcmV0" * 4)
    monkeypatch.setenv("TIERLANE_CALLBACK_HOSTS", "hooks.example")
    env = RoleEnvironment(load_settings()).for_role("worker", "worker-1", {"backend": "tiny", "pool": "other"})

    for name in os.environ.keys() - env.keys():
        monkeypatch.delenv(name)
    for name, text in env.items():
        monkeypatch.setenv(name, text)
    assert load_settings().pool == "other"


def test_a_model_process_gets_no_secret_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings and any address with a password are removed; variables of the model's own libraries stay."""
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


def test_a_role_reads_what_up_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gateway has a directory of its own and shared counters; there is no notice, and the drain is that of the stack."""
    settings = Settings(port=1234, lease_ms=900, drain_ms=60_000, default_model="tiny", data_dir=Path("/data"))
    env = RoleEnvironment(settings).for_role("gateway", "gateway-2")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    read = Settings()

    assert (read.port, read.lease_ms, read.default_model, read.notice_ms, read.drain_ms) == (
        1234,
        900,
        "tiny",
        0,
        60_000,
    )
    assert (env["TIERLANE_DATA_DIR"], env["TIERLANE_METRICS_DIR"]) == ("/data/gateway-2", "/data/metrics")


def test_workers_have_their_name_and_share_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name in Redis is that in stack.json; the threads of the host are divided, `tiny` gets one."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    roles = RoleEnvironment(Settings(workers=2, backend="simulated"))
    worker = roles.for_role("worker", "worker-1")

    assert (worker["TIERLANE_WORKER_ID"], worker["TIERLANE_TORCH_THREADS"]) == ("worker-1", "4")
    assert roles.for_role("worker", "w", {"backend": "tiny"})["TIERLANE_TORCH_THREADS"] == "1"
    shared = [default_torch_threads(backend, n) for backend, n in (("tiny", 1), ("hf:x", 1), ("hf:x", 3), ("m:f", 9))]
    assert shared == [1, 8, 2, 1]


def test_only_a_worker_can_import_from_the_current_directory() -> None:
    """A folder named `gateway` beside the user's files must not shadow the package; a backend of the user must be found."""
    assert "-P" in role_command("gateway")
    assert "-P" not in role_command("worker")


@pytest.mark.parametrize(
    ("members", "healthy", "recommended", "expected"),
    [
        (2, 2, 2, 0),
        (2, 2, 5, 3),
        (5, 2, 5, 0),  # Three are loading.
        (5, 2, 2, 0),  # Workers that are loading are not drained.
        (8, 8, 7, -1),
        (7, 8, 7, 0),  # One is draining.
        (8, 7, 6, -1),  # One died and is being restarted.
        (3, 0, 1, 0),  # Redis came back empty.
    ],
)
def test_workers_follow_the_advice(members: int, healthy: int, recommended: int, expected: int) -> None:
    """Only healthy workers are drained, and none is started twice. New ones get free names: a draining one keeps its own."""
    assert change(members, PoolAdvice(healthy, recommended, "")) == expected
    assert free_names(["worker-1", "worker-3", "gateway-1"], 3) == ["worker-2", "worker-4", "worker-5"]


def test_other_pools_are_read() -> None:
    """POOL=BACKEND, with *N for several workers, whose names contain the pool."""
    text = " a=tiny*2 , b=hf:/models/x,e=openai:http://host:8000/v1*3"
    pools = [OtherPool("a", "tiny", 2), OtherPool("b", "hf:/models/x", 1)]

    assert parse_pools(text, "default") == [*pools, OtherPool("e", "openai:http://host:8000/v1", 3)]
    assert parse_pools("", "default") == []
    assert pools[0].names() == ["worker-a-1", "worker-a-2"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("slow", "'slow'"),
        ("slow=", "'slow='"),
        ("sl:ow=tiny", "'sl:ow=tiny'"),
        ("slow=tiny*0", "1 to 256"),
        ("slow=tiny*999", "1 to 256"),
        ("a=tiny,a=tiny", "'a'"),
        ("default=tiny", "'default'"),
    ],
)
def test_a_bad_list_of_pools_is_named(text: str, named: str) -> None:
    """The part that is wrong is in the message."""
    with pytest.raises(PoolsError, match=named):
        parse_pools(text, "default")


def test_pools_of_disabled_models_are_served_but_not_offered() -> None:
    """Requests that wait there must end. A name that is not valid is ignored: it would address keys of other pools."""

    class Row:
        def __init__(self, pool: str, *, enabled: bool = True) -> None:
            self.pool, self.enabled = pool, enabled

    rows = [Row("a"), Row("a"), Row("b", enabled=False), Row("{c}:"), Row("")]
    assert (pools_of(rows), pools_to_serve(rows)) == ({"a"}, {"a", "b"})


@pytest.mark.parametrize(
    ("ms", "timeout_ms", "total_ms", "parts"),
    [
        (0, 3000, 4000, ()),  # Not measured.
        (3000, 3000, 4000, ()),
        (
            *(3500, 3000, 4000),
            (
                "simulated:9 takes 3,500 ms",
                "over TIERLANE_GPU_TIMEOUT_MS = 3,000;",
                "model_too_slow",
                "TIMEOUT_MS=7000",
                "REQUEST_MS=8000",
            ),
        ),
        (9000, 3000, 4000, ("MS = 3,000 and TIERLANE_TOTAL_REQUEST_MS = 4,000", "TIMEOUT_MS=18000")),
        (5000, 20_000, 4000, ("over TIERLANE_TOTAL_REQUEST_MS", "deadline_exceeded", "TIMEOUT_MS=20000")),
    ],
)
def test_a_model_that_cannot_meet_the_caps_is_warned_about(
    ms: float, timeout_ms: float, total_ms: float, parts: tuple[str, ...]
) -> None:
    """One warning for a model on several workers, with its time, the settings that it exceeds, and what to set."""
    views = [
        WorkerView(
            f"w{n}",
            "slow",
            0.0,
            0,
            0.0,
            0.0,
            "simulated:9",
            "v",
            age_ms=0.0,
            healthy=False,
            model_ms=ms * n,
            timeout_ms=timeout_ms,
        )
        for n in (0, 1)
    ]
    found = warnings(views, total_ms)

    assert len(found) == bool(parts)
    assert [part for part in parts if part not in found[0]] == []


def test_lines_have_the_name_of_their_process() -> None:
    """Names are aligned; a closed output is ignored, so that `up | head` goes on."""
    stream = io.BytesIO()
    lines = LogLines(stream, coloured=False)
    lines.write("worker-1", b"one\n")
    lines.write("gateway-1", b"two\r\n")
    lines.write("gateway-1", b"  \n")
    output = stream.getvalue()
    stream.close()
    lines.say("lost")

    assert output == b"worker-1    | one\ngateway-1   | two\ngateway-1   |   \n"
    assert [lines.last(name) for name in ("worker-1", "gateway-1", "worker-2")] == ["one", "two", ""]


@pytest.mark.parametrize("line", ["", "pid", "pid x", "pid 99999999", "remove /", "remove /etc", "strange 1", "pid -1"])
def test_the_orphan_guard_ignores_bad_lines(line: str) -> None:
    """It deletes only temporary directories of the stack, and a bad line does not end it."""
    held = Held("")

    held.note(line)

    assert not held._directories
    held.clear()
