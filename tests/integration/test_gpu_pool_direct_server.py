"""A worker's direct endpoint: batches without Redis, lost models, draining, authentication, hostile input."""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import time
from pathlib import Path

import pytest

from configs import GONE_MS, worker_config
from eventually import eventually
from gpu_pool.model_process.respawn import FIRST_RESPAWN_S
from gpu_pool.worker import direct_server, slow_model
from gpu_pool.worker.worker import Worker
from integration.gpu_pool_direct import TOKEN, DirectClient, StartHere, item, start_here
from integration.gpu_pool_fixtures import batch, faulty_models, replies
from pool import Pool
from scheduler.errors import RedisUnavailable, StartError
from scheduler.payload import Payload, add_context, encode_payload
from scheduler.protocol import direct
from scheduler.protocol.direct import HEADER, DirectBatch, DirectBusy, DirectResults, Hello, Welcome, direct_token, pack
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.tracing import Context, Span
from stack import free_port
from tierlane_local.embedded.redis import EmbeddedRedis

__all__ = ["faulty_models", "start_here"]

HELLO = Hello("g1", TOKEN)


async def start_batches(worker: Worker, count: int) -> list["asyncio.Task[DirectResults | DirectBusy]"]:
    """The first of these batches runs, the others wait, each on its own connection."""
    tasks = []
    for i in range(count):
        client = await DirectClient.connected(worker)
        tasks.append(asyncio.create_task(client.run(item(f"r{i}"))))
        await eventually(lambda i=i: worker._direct._waiting == i and worker._execution.running, "it runs or waits")
    return tasks


async def assert_serves(worker: Worker) -> None:
    """A new connection is accepted and its batch is run."""
    assert await (await DirectClient.connected(worker)).outputs(item("abc")) == {"abc": "cba"}


async def test_batches_run_without_redis(start_here: StartHere) -> None:
    """Outcomes have time, tokens and version; batches of one connection are answered in order."""
    client = await DirectClient.connected(await start_here("simulated:20"))

    outcomes = await client.outcomes(item("one two"), item("three"))
    for seq in (7, 8, 9):
        client.send(DirectBatch(seq, [item("a")]))

    assert {name: outcome.output for name, outcome in outcomes.items()} == {"one two": "owt eno", "three": "eerht"}
    assert (outcomes["one two"].tokens_used, outcomes["one two"].model_version) == (2, "simulated-20ms")
    assert outcomes["three"].gpu_ms >= 20
    assert [(await client.receive()).seq for _ in range(3)] == [7, 8, 9]


async def test_bad_items_fail_alone_and_lost_models_split_the_batch(start_here: StartHere, faulty_models: Path) -> None:
    """Halves after the first loss, single items after the second; junk and late items do not run. Each run has a span."""
    spans: list[Span] = []
    client = await DirectClient.connected(await start_here("faulty_models:dies_on_bad", spans=spans.extend))
    context = Context("a" * 32, "b" * 16)
    bad = item("bad", 30_000, add_context(encode_payload(Payload("m", "bad", {})), context))

    outputs = await client.outputs(item("ab", 30_000), bad, item("cd", 30_000), item("ef", 30_000))
    others = await client.outputs(item("junk", body=b"\xc1"), item("late", 0), item("gh"))

    assert outputs == {"ab": "ba", "bad": "worker_lost", "cd": "dc", "ef": "fe"}
    assert (faulty_models / "deaths").read_text() == "4 2 1 "
    assert others == {"junk": "invalid_request", "late": "deadline_exceeded", "gh": "hg"}
    assert {span.context.trace_id for span in spans} == {context.trace_id}
    assert [span.failed for span in spans if span.name == "batch"] == [True] * 3


async def test_items_end_at_their_deadline(start_here: StartHere) -> None:
    """The response comes at the last deadline though the model goes on; late output is dropped."""
    client = await DirectClient.connected(await start_here("simulated:400"))

    mixed = await client.outputs(item("short", 200), item("long"))
    began = time.monotonic()
    late = await client.outputs(item("a", 150), item("b", 100))
    duration = time.monotonic() - began

    assert mixed == {"short": "deadline_exceeded", "long": "gnol"}
    assert late == {"a": "deadline_exceeded", "b": "deadline_exceeded"}
    assert duration < 0.35
    assert await client.outputs(item("next")) == {"next": "txen"}


async def test_four_batches_wait_and_the_fifth_is_rejected(start_here: StartHere) -> None:
    """Over all connections."""
    worker = await start_here("simulated:300")
    tasks = await start_batches(worker, 5)

    rejected = await (await DirectClient.connected(worker)).run(item("one too many"))

    assert rejected == DirectBusy(1, "Too many direct batches wait for this worker.")
    assert all(isinstance(response, DirectResults) for response in await asyncio.gather(*tasks))


async def test_a_model_that_became_slow(
    start_here: StartHere, faulty_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two batches at the cap, requests fail at once and no process is killed, until a trial batch ends in time."""
    monkeypatch.setattr(slow_model, "FIRST_PAUSE_S", 0.5)
    delay = faulty_models / "delay"
    delay.write_text("0.6")
    worker = await start_here("faulty_models:waits", gpu_timeout_ms=300)
    client = await DirectClient.connected(worker)

    hung = []
    for text in ("a", "b"):
        await worker._supervisor.ready.wait()
        hung.append(await client.outputs(item(text)))
    await eventually(lambda: worker._beat(worker._link).model_ms >= 600, "a trial is measured")
    pid, report = worker._supervisor.pid, worker._beat(worker._link)
    began = time.monotonic()
    rejected = [await client.outputs(item("c")) for _ in range(3)]
    duration_s = time.monotonic() - began
    delay.write_text("0")
    await eventually(lambda: worker._beat(worker._link).status == "ready", "the worker is ready again")

    assert hung == [{"a": "gpu_timeout"}, {"b": "gpu_timeout"}]
    assert (report.status, report.model_ms >= 600, report.timeout_ms) == ("slow", True, 300)
    assert rejected == [{"c": "model_too_slow"}] * 3
    assert duration_s < 0.3
    assert await client.outputs(item("de")) == {"de": "ed"}
    assert (worker._supervisor.pid, worker._beat(worker._link).model_ms < 300) == (pid, True)


async def test_inputs_that_hang_make_no_model_slow(start_here: StartHere, faulty_models: Path) -> None:
    """The trial after two of them ends in time: the worker is never reported as slow, which would fail the others."""
    delay, statuses = faulty_models / "delay", set[str]()
    delay.write_text("0.6")
    worker = await start_here("faulty_models:waits", gpu_timeout_ms=300)
    client = await DirectClient.connected(worker)

    def is_ready() -> bool:
        statuses.add(worker._beat(worker._link).status)
        return worker._beat(worker._link).status == "ready"

    for text in ("a", "b"):
        await worker._supervisor.ready.wait()
        assert await client.outputs(item(text)) == {text: "gpu_timeout"}
    delay.write_text("0")
    await eventually(is_ready, "the worker is ready again")

    assert statuses <= {"down", "starting", "ready"}
    assert 0 < worker._beat(worker._link).model_ms < 300
    assert await client.outputs(item("de")) == {"de": "ed"}


async def test_killed_model_process(start_here: StartHere) -> None:
    """The running batch runs again in the next process; waiting and new batches are rejected at once."""
    worker = await start_here("simulated:400")
    idle = await DirectClient.connected(worker)
    tasks = await start_batches(worker, 2)
    assert worker._supervisor.model is not None

    os.kill(worker._supervisor.model.pid, signal.SIGKILL)

    assert await tasks[1] == DirectBusy(1, "The model of this worker was lost before the batch began.")
    assert await idle.run(item("a")) == DirectBusy(1, "The model of this worker is not ready.")
    assert isinstance(await tasks[0], DirectResults)


async def test_model_that_worked_is_restarted_without_delay(start_here: StartHere) -> None:
    """Twenty good batches reset the delay."""
    worker = await start_here("simulated:0")
    client = await DirectClient.connected(worker)
    for _ in range(2):
        for _ in range(20):
            await client.outputs(item("abc"))
        killed = worker._supervisor.pid
        os.kill(killed, signal.SIGKILL)
        await eventually(
            lambda killed=killed: worker._supervisor.model and worker._supervisor.pid != killed, "restarted"
        )
    assert worker._supervisor._respawn._next_s == 2 * FIRST_RESPAWN_S


@pytest.mark.usefixtures("faulty_models")
async def test_hang_is_a_gpu_timeout(start_here: StartHere) -> None:
    """The process is killed at the cap; the next batch runs in another one."""
    worker = await start_here("faulty_models:hangs_on_bad", gpu_timeout_ms=400)
    client = await DirectClient.connected(worker)

    assert await client.outputs(item("bad"), item("a")) == {"bad": "gpu_timeout", "a": "gpu_timeout"}
    await eventually(worker._supervisor.ready.is_set, "the model is back")
    assert await client.outputs(item("ab")) == {"ab": "ba"}


async def test_draining_worker_finishes_and_accepts_nothing(start_here: StartHere) -> None:
    """The running batch is answered; another one is rejected and its connection closed; the port is closed."""
    worker = await start_here("simulated:400")
    idle = await DirectClient.connected(worker)
    host, _, port = worker._endpoint.address.rpartition(":")
    (task,) = await start_batches(worker, 1)

    worker.drain()
    await eventually(lambda: not worker._endpoint.address, "the address is withdrawn")

    assert await idle.run(item("late")) == DirectBusy(1, "This worker is shutting down.")
    assert await idle.closed()
    assert isinstance(await task, DirectResults)
    with pytest.raises(ConnectionError):
        await asyncio.open_connection(host, int(port))


async def test_batches_that_outlast_the_drain_are_rejected(start_here: StartHere) -> None:
    """They may run on another worker."""
    worker = await start_here("simulated:3000", drain_ms=200)
    tasks = await start_batches(worker, 2)

    worker.drain()

    assert await asyncio.gather(*tasks) == [DirectBusy(1, "This worker is shutting down.")] * 2


async def test_a_worker_that_lost_a_task_drains_for_three_seconds(start_here: StartHere) -> None:
    """Its restart is what helps. The SIGTERM that follows is the first one, which does not end the drain at once."""
    worker = await start_here("simulated:60000", gpu_timeout_ms=60_000, drain_ms=600_000)
    (task,) = await start_batches(worker, 1)
    began = asyncio.get_running_loop().time()

    worker._require(asyncio.create_task(asyncio.sleep(0)))
    await eventually(lambda: worker._broken, "the worker drains")
    worker.stop()

    assert await task == DirectBusy(1, "This worker is shutting down.")
    assert 2.9 < asyncio.get_running_loop().time() - began < 10


async def test_queued_batch_keeps_its_lease_while_direct_batches_run(
    pool: Pool, redis_url: str, start_here: StartHere
) -> None:
    """It waits 1.5 s with a lease of 600 ms while a reaper runs; the heartbeat has the direct address."""
    worker = await start_here("simulated:500", redis_url=redis_url)
    await eventually(worker._link.heartbeat.working.is_set, "redis is reached")
    tasks = await start_batches(worker, 3)
    ids = await batch(pool, "hello")

    async def answered() -> bool:
        with contextlib.suppress(RedisUnavailable):
            await pool.gateway_lives("g1")
            await pool.terminations.reap(0)
            return await pool.results.fetch(ids) != [None]
        return False

    await eventually(answered, "the queued batch ended")
    (reply,) = await replies(pool, ids)
    assert (reply.output, reply.attempts) == ("olleh", 1)
    assert all(isinstance(response, DirectResults) for response in await asyncio.gather(*tasks))
    (view,) = (await pool.presence.observe(["free"])).workers
    assert view.direct == worker._endpoint.address


async def test_batch_received_during_a_stall_is_rejected(start_here: StartHere) -> None:
    """The time it spent in the socket is unknown; the next one runs."""
    client = await DirectClient.connected(await start_here("simulated:20"))
    client.send(DirectBatch(7, [item("old")]))

    time.sleep(0.4)  # noqa: ASYNC251 - stalls the worker, which runs in this event loop

    assert isinstance(response := await client.receive(), DirectBusy)
    assert response.seq == 7

    async def served() -> bool:
        return isinstance(await client.run(item("new")), DirectResults)

    await eventually(served, "the next batch runs")


@pytest.mark.parametrize("changes", [{"service_token": ""}, {"direct_host": ""}])
async def test_without_token_or_host_nothing_listens(start_here: StartHere, changes: dict[str, str]) -> None:
    """No address is announced."""
    worker = await start_here(**changes)

    assert worker._endpoint._server is None
    assert worker._beat(worker._link).direct == ""


DERIVED = direct_token(TOKEN)


@pytest.mark.parametrize(
    ("changes", "accepted", "rejected"),
    [
        ({"service_token": "", "direct_token": DERIVED}, [DERIVED], [TOKEN, "", DERIVED[:-1]]),
        (
            {"service_token": TOKEN},
            [TOKEN, DERIVED],
            ["", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\u00e9\u00fc" * 200],
        ),
    ],
)
async def test_authentication(
    start_here: StartHere, changes: dict[str, str], accepted: list[str], rejected: list[str]
) -> None:
    """A wrong token closes the connection without a message. Older deployments use the service token."""
    worker = await start_here(**changes, max_batch_size=4096)
    for token in (*accepted, *rejected):
        client = await DirectClient.open(worker)
        client.send(Hello("g1", token))
        if token in accepted:
            assert await client.receive() == Welcome("w1", 100)
        else:
            assert await client.closed()

    assert (worker._endpoint.refused, worker._endpoint.malformed) == (len(rejected), 0)


def test_direct_token_is_an_hmac() -> None:
    """Printf 'tierlane direct 1' | openssl dgst -sha256 -hmac <service token>, as docs/deploy.md says."""
    assert direct_token("a-token-for-development") == "7d734418df09110ab8b2ddbc95d1506f31952b4384ff9b9c390ed4bb5d07f31d"


BEFORE_HELLO = [
    pack(DirectBatch(1, [])),
    pack(Welcome("w9", 8)),
    HEADER.pack(2) + b"\xc1\xc1",
    HEADER.pack(1 << 31),
    HEADER.pack(5000) + b"x" * 5000,  # Over the limit before authentication.
    b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
    HEADER.pack(0),
]
AFTER_HELLO = [
    pack(HELLO),
    pack(DirectBatch(1, [item(f"r{i}") for i in range(101)])),
    HEADER.pack(33 << 20),
    HEADER.pack(2) + b"\xc1\xc1",
    HEADER.pack(100_000) + b"\x91" * 100_000,
    HEADER.pack(len(pickle.dumps(HELLO))) + pickle.dumps(HELLO),
]


async def test_malformed_frames_close_their_connection(start_here: StartHere) -> None:
    """Before and after the hello; each is counted, and the endpoint goes on."""
    worker = await start_here()
    for connect, frames in ((DirectClient.open, BEFORE_HELLO), (DirectClient.connected, AFTER_HELLO)):
        for frame in frames:
            client, before = await connect(worker), worker._endpoint.malformed
            client.send_bytes(frame)
            assert await client.closed(), frame[:20]
            assert worker._endpoint.malformed == before + 1, frame[:20]
    await assert_serves(worker)


async def test_slow_clients_are_disconnected(start_here: StartHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hello, half a hello, or a frame that does not end; an idle connection after the hello stays open."""
    monkeypatch.setattr(direct_server, "HELLO_S", 0.2)
    monkeypatch.setattr(direct_server, "TRANSFER_S", 0.2)
    worker = await start_here()
    silent, half, good = [await DirectClient.open(worker) for _ in range(3)]
    good.send(HELLO)
    half.send_bytes(pack(HELLO)[:9])
    unfinished = await DirectClient.connected(worker)
    unfinished.send_bytes(HEADER.pack(100) + b"x")

    assert [await client.closed() for client in (silent, half, unfinished)] == [True] * 3
    assert await good.receive() == Welcome("w1", 32)
    assert await good.outputs(item("abc")) == {"abc": "cba"}


async def test_connections_are_limited(start_here: StartHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that leaves during its batch frees its connection; the batch runs to its end."""
    monkeypatch.setattr(direct_server, "MAX_CONNECTIONS", 2)
    worker = await start_here("simulated:200")
    first, second = await DirectClient.connected(worker), await DirectClient.connected(worker)
    third = await DirectClient.open(worker)
    third.send(HELLO)
    assert await third.closed()
    first.send(DirectBatch(1, [item("a")]))
    await eventually(lambda: worker._execution.running, "it runs")

    first.close()

    await eventually(lambda: len(worker._endpoint._connections) == 1, "the connection is free")
    assert worker._direct.in_flight == 0
    assert await second.outputs(item("abc")) == {"abc": "cba"}
    await assert_serves(worker)


async def test_results_too_large_for_a_frame(start_here: StartHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch fails with invalid_output; the connection stays."""
    client = await DirectClient.connected(await start_here())
    body = b"\x93\xa1m\xd9\xc8" + b"x" * 200 + b"\x80"
    frame = pack(DirectBatch(2, [item("a", body=body), item("b", body=body)]))
    monkeypatch.setattr(direct, "MAX_BODY_BYTES", len(frame) - HEADER.size)

    assert await client.outputs(item("a", body=body)) == {"a": "x" * 200}
    assert await client.outputs(item("a", body=body), item("b", body=body)) == dict.fromkeys("ab", "invalid_output")


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "127.0.0.1"])
async def test_address_that_cannot_be_used_is_a_start_error(start_here: StartHere, host: str) -> None:
    """An address of another host, an unknown name, a port in use."""
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1] if host == "127.0.0.1" else 0
        with pytest.raises(
            StartError, match=rf"The direct endpoint cannot listen on {host}:{port}: .+; choose another\."
        ):
            await start_here(direct_host=host, direct_port=port)


@pytest.mark.parametrize(
    ("changes", "local_host", "name", "address"),
    [
        ({"direct_host": "::1"}, "10.0.0.7", "gpu-1", "[::1]:7"),
        ({"direct_host": "0.0.0.0"}, "10.0.0.7", "gpu-1", "10.0.0.7:7"),
        ({"direct_host": "::"}, "fd00::7", "gpu-1", "[fd00::7]:7"),
        ({"direct_host": "0.0.0.0"}, "127.0.0.1", "gpu-1", "gpu-1:7"),  # Redis is on this host.
        ({"direct_host": "0.0.0.0"}, "127.0.0.1", "", "127.0.0.1:7"),
        ({"direct_host": "0.0.0.0"}, "", "", "127.0.0.1:7"),
        ({"direct_host": "0.0.0.0", "direct_advertise": "fd00::8"}, "10.0.0.7", "gpu-1", "[fd00::8]:7"),
    ],
)
def test_announced_address(changes: dict[str, str], local_host: str, name: str, address: str) -> None:
    """A wildcard address is replaced by the address from which Redis is reached, or by the host's name."""
    config = worker_config("redis://r", **changes)

    assert direct_server.announced(config, 7, local_host, name) == address


async def test_local_address_of_the_redis_connection(tmp_path: Path) -> None:
    """Known over TCP once connected; empty over a Unix socket."""
    port = free_port()
    server = EmbeddedRedis(tmp_path, tmp_path / "socket", ephemeral=True, extra_args=("--port", str(port)))
    await server.start()
    for url, address in ((f"redis://127.0.0.1:{port}", "127.0.0.1"), (server.url, "")):
        client = command_client(url, 5.0)
        presence = Presence(client, Keys(), gone_ms=GONE_MS)
        assert presence.local_host() == ""
        await presence.census()
        assert presence.local_host() == address
        await client.aclose()
    await server.stop()
