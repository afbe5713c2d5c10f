"""Load balancers with the files of deploy/proxies/: rolling restarts behind them, and the addresses of clients."""

import asyncio
import json
import os
import signal
import ssl
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import aiohttp
import grpc
import pytest

from certificates import Certificates, certificates
from endpoint_stand_in import MODEL, StandIn, serving
from eventually import eventually
from gateway.grpc.open_inference_pb2 import ModelInferResponse
from integration.grpc_fixtures import SERVICE, failure, request
from load import ask
from load_balancers import PROGRAMS, Gateway, answers, load_balancer
from stack import Stack, start_stack
from streamed_answers import Streams

pytestmark = [pytest.mark.surroundings, pytest.mark.timeout(1200)]

SCALES = [pytest.param(2, 20.0, id="two_restarts"), pytest.param(10, 100.0, id="ten_restarts")]
"""Restarts of gateways, and of workers; short requests a second. CI has the smaller one, with Debian's load balancers."""

STREAMS = 6
TEXT = "x" * 40
CHUNK_S = 0.5
"""A stream takes 20 s."""

SETTLED_S = 3.0
"""Between two restarts: until a load balancer uses the new gateway."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers before a server that writes slowly; the gateway of the stack has no requests."""
    home = tmp_path_factory.mktemp("balanced")
    environment = {"TIERLANE_DRAIN_MS": "600000"}
    with (
        serving(StandIn(chunk_s=CHUNK_S)) as endpoint,
        start_stack(
            home, "--backend", f"openai:{endpoint.url}#{MODEL}", "--workers", "2", environment=environment
        ) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The certificate of the load balancers."""
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def gateways(
    request: pytest.FixtureRequest, stack: Stack, tmp_path: Path
) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Two gateways that trust a load balancer on this host, with default times unless the test has others."""
    settings = {"TIERLANE_TRUSTED_PROXIES": "127.0.0.1", **getattr(request, "param", {})}
    made = Gateway(stack, tmp_path, "gateway-a", settings), Gateway(stack, tmp_path, "gateway-b", settings)
    try:
        for gateway in made:
            await gateway.start()
        yield made
    finally:
        for gateway in made:
            gateway.kill()


@pytest.fixture(params=list(PROGRAMS))
async def url(
    request: pytest.FixtureRequest, tmp_path: Path, gateways: tuple[Gateway, Gateway], tls: Certificates
) -> AsyncIterator[str]:
    """The address of a load balancer."""
    with ExitStack() as running:
        address = running.enter_context(load_balancer(request.param, tmp_path, gateways, tls))
        await eventually(lambda: answers(f"{address}/readyz"), "the load balancer serves", 20.0)
        yield address


class Load:
    """Short requests and streams through the load balancer, until `stop`."""

    def __init__(self, stack: Stack, url: str, tls: Certificates, rate: float) -> None:
        self._stack, self._url, self._rate = stack, url, rate
        self._trust = ssl.create_default_context(cafile=str(tls.authority.cert))
        self._going = True
        self.outcomes: Counter[str] = Counter()

    async def requests(self) -> None:
        """Send short requests at even distances."""
        loop, key = asyncio.get_running_loop(), self._stack.key("enterprise")
        connector = aiohttp.TCPConnector(ssl=self._trust, limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
            due = loop.time()
            while self._going:
                group.create_task(self._ask(session, key))
                due += 1 / self._rate
                await asyncio.sleep(max(0.0, due - loop.time()))

    async def _ask(self, session: aiohttp.ClientSession, key: str) -> None:
        answer = await ask(session, self._stack, "enterprise", key, self._url)
        self.outcomes["ok" if answer.status == 200 and answer.echoed else f"{answer.status} {answer.code}"] += 1

    async def streams(self) -> None:
        """Streams of 20 s, one after the other in each place."""
        while self._going:
            streams = Streams(self._url, self._stack.key("enterprise"), STREAMS, text=TEXT, verify=self._trust)
            failed = await asyncio.to_thread(streams.failed)
            self.outcomes.update(f"cut: {answer}" for answer in failed)
            self.outcomes["whole"] += STREAMS - len(failed)

    def stop(self) -> None:
        self._going = False


@pytest.mark.parametrize(("restarts", "rate"), SCALES)
async def test_rolling_restarts_fail_no_request(
    stack: Stack, gateways: tuple[Gateway, Gateway], url: str, tls: Certificates, restarts: int, rate: float
) -> None:
    """Each gateway and each worker several times, with load and open streams: no failure, and no stream is cut."""
    await stack.healthy(2)
    load = Load(stack, url, tls, rate)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.requests())
        group.create_task(load.streams())
        group.create_task(load.streams())
        for number in range(restarts):
            worker = f"worker-{number % 2 + 1}"
            pid = stack.pids("worker")[worker]
            os.kill(pid, signal.SIGTERM)
            await gateways[number % 2].restart()
            await eventually(lambda name=worker, old=pid: stack.pids("worker").get(name) not in (None, old), worker, 90)
            await stack.healthy(2, 90.0)
            await asyncio.sleep(SETTLED_S)
        load.stop()

    print(dict(load.outcomes))
    assert set(load.outcomes) == {"ok", "whole"}


@pytest.mark.parametrize("gateways", [{"TIERLANE_IDLE_TIMEOUT_MS": "60000"}], indirect=True, ids=["idle"])
async def test_requests_on_idle_connections(stack: Stack, url: str, tls: Certificates) -> None:
    """2,000 requests after pauses around the idle times of the load balancer (5 s) and of the gateway (here a minute)."""
    await stack.healthy(2)
    trust, key = ssl.create_default_context(cafile=str(tls.authority.cert)), stack.key("enterprise")
    outcomes: Counter[str] = Counter()

    async def client(number: int) -> None:
        pauses = Random(number)
        connector = aiohttp.TCPConnector(ssl=trust, keepalive_timeout=3600)
        async with aiohttp.ClientSession(connector=connector) as session:
            for _ in range(5):
                answer = await ask(session, stack, "enterprise", key, url)
                outcomes["ok" if answer.status == 200 and answer.echoed else f"{answer.status} {answer.code}"] += 1
                await asyncio.sleep(pauses.choice((5, 5, 10, 60)) * pauses.uniform(0.97, 1.03))

    async with asyncio.TaskGroup() as group:
        for number in range(400):
            group.create_task(client(number))

    assert dict(outcomes) == {"ok": 2000}


async def test_grpc_and_http_2(stack: Stack, url: str, tls: Certificates) -> None:
    """Both on the address of HTTP/1.1; calls go on when they are sent with the key of a customer only."""
    await stack.healthy(2)
    credentials = grpc.ssl_channel_credentials(tls.authority.cert.read_bytes())
    async with grpc.aio.secure_channel(url.removeprefix("https://"), credentials) as channel:
        metadata = (("authorization", f"Bearer {stack.key('enterprise')}"),)
        message = request("hello", model_name=MODEL).SerializeToString()
        call = channel.unary_unary(f"{SERVICE}/ModelInfer", response_deserializer=ModelInferResponse.FromString)
        answer = await call(message, metadata=metadata)
        status, _, _ = await failure(call(message, metadata=()))
    command = ["curl", "-s", "--http2", "-w", " %{http_version}", "--cacert", str(tls.authority.cert)]
    command += ["-H", f"Authorization: Bearer {stack.key('enterprise')}", "--json", '{"input": "hello"}']
    curl = await asyncio.to_thread(subprocess.run, [*command, f"{url}/v1/inference"], capture_output=True, check=True)

    assert answer.outputs[0].contents.bytes_contents[0] == b"olleh"
    assert status is grpc.StatusCode.UNAUTHENTICATED
    body, _, version = curl.stdout.decode().rpartition(" ")
    assert (version, json.loads(body)["output"]) == ("2", "olleh")


async def test_the_limit_of_failed_sign_ins_is_that_of_a_client(url: str, tls: Certificates) -> None:
    """Clients behind one load balancer have limits of their own, and cannot choose an address."""
    trust = ssl.create_default_context(cafile=str(tls.authority.cert))

    async def fails(address: str, times: int, **headers: str) -> Counter[int]:
        connector = aiohttp.TCPConnector(ssl=trust, local_addr=(address, 0))
        headers |= {"Authorization": "Bearer wrong"}
        found: Counter[int] = Counter()
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            for _ in range(times):
                async with session.get(f"{url}/v1/models") as response:
                    found[response.status] += 1
        return found

    guesses = await fails("127.0.0.2", 100)
    assert 30 <= guesses[401] <= 60
    assert (await fails("127.0.0.2", 5, **{"X-Forwarded-For": "192.0.2.1"})) == {429: 5}
    assert (await fails("127.0.0.3", 5)) == {401: 5}
