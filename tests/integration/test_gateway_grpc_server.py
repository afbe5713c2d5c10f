"""The gRPC server of a gateway: TLS, start and stop, reflection, and the real tritonclient."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from redis.asyncio import Redis

from certificates import Certificates, certificates
from configs import gateway_config, grpc_config
from eventually import eventually
from gateway.app import Gateway
from gateway.grpc.open_inference_pb2 import (
    ModelReadyRequest,
    ServerReadyRequest,
    ServerReadyResponse,
)
from gateway.grpc.server import GrpcServer
from gateway.grpc.service import InferenceService
from gateway.http.router import CustomerConnections
from integration.gateway_fixtures import LiteralCatalog, Stack, accepted, running_stack, tier
from integration.grpc_fixtures import SERVICE, Channel, channel, failure, infer, key, request, stack
from scheduler.errors import StartError
from triton_client import run_triton

__all__ = ["channel", "stack"]


@pytest.mark.parametrize("name", ["ModelInfer", "ModelReady"])
async def test_a_message_that_never_comes(client: Redis, redis_url: str, name: str) -> None:
    """A call without its message ends after the time for a body, so that it does not occupy a call forever."""
    async with (
        running_stack(client, redis_url, grpc=grpc_config(), body_timeout_s=0.1) as stack,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}") as channel,
    ):
        status, _, trailing = await failure(channel.stream_unary(f"{SERVICE}/{name}")(metadata=key(stack)))

        assert status is grpc.StatusCode.DEADLINE_EXCEEDED
        assert trailing["error-code"] == "request_timeout"


async def test_calls_about_models_are_limited(stack: Stack, channel: Channel) -> None:
    """They run no model; the wait and the limits are in the trailing metadata."""
    stack.catalog.set(tiers=(tier("free", 3, 0.1, auxiliary_rate=0.02, auxiliary_burst=1.0),))
    message = ModelReadyRequest(name="tiny").SerializeToString()
    calls = [channel.unary_unary(f"{SERVICE}/{name}") for name in ("ModelReady", "ModelMetadata")]
    await calls[0](message, metadata=key(stack))

    for call in calls:
        status, words, trailing = await failure(call(message, metadata=key(stack)))
        assert (status, trailing["error-code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded")
        assert "auxiliary requests/s (burst 1)" in words
        assert int(trailing["retry-after"]) > 20
        assert '"auxiliary-requests";r=0;' in trailing["ratelimit"]
    assert (await infer(stack, channel, request("ab"))).outputs[0].contents.bytes_contents[0] == b"ba"


async def test_a_gateway_that_stops(client: Redis, redis_url: str) -> None:
    """Accepted requests are completed; then the port is closed, and the server was not ready before."""
    async with (
        running_stack(client, redis_url, grpc=grpc_config()) as stack,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}") as channel,
    ):
        stack.worker.hold = True
        open_call = infer(stack, channel, request("ab"))
        await accepted(stack)
        draining = asyncio.create_task(stack.gateway.drain())
        await eventually(lambda: stack.gateway.drain_state.closed, "the gateway drains")
        refused, _, _ = await failure(infer(stack, channel, request("late"), timeout=2))
        stack.worker.hold = False

        assert (await open_call).outputs[0].contents.bytes_contents[0] == b"ba"
        await draining
        assert refused is grpc.StatusCode.UNAVAILABLE


async def test_tls_and_client_certificates(client: Redis, redis_url: str, tmp_path: Path) -> None:
    """With a CA, a client needs a certificate of it; without TLS no call succeeds."""
    made = certificates(tmp_path)
    config = grpc_config(tls_cert=made.server.cert, tls_key=made.server.key, tls_ca=made.authority.cert)
    async with running_stack(client, redis_url, grpc=config) as stack:
        address = f"127.0.0.1:{stack.gateway.grpc_port}"
        root = made.authority.cert.read_bytes()
        both = grpc.ssl_channel_credentials(root, made.client.key.read_bytes(), made.client.cert.read_bytes())
        server_only = grpc.ssl_channel_credentials(root)

        async def ready(channel: Channel) -> bool:
            call: Callable[..., Any] = channel.unary_unary(
                f"{SERVICE}/ServerReady", ServerReadyRequest.SerializeToString, ServerReadyResponse.FromString
            )
            async with channel:
                return bool((await call(ServerReadyRequest(), timeout=5)).ready)

        assert await ready(grpc.aio.secure_channel(address, both))
        for channel in (grpc.aio.secure_channel(address, server_only), grpc.aio.insecure_channel(address)):
            status, _, _ = await failure(ready(channel))
            assert status is grpc.StatusCode.UNAVAILABLE


async def test_a_new_certificate_is_used(client: Redis, redis_url: str, tmp_path: Path) -> None:
    """At the next handshake after the files changed; a broken one is not, and the last one stays."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = certificates(tmp_path / "old"), certificates(tmp_path / "new")
    cert, private = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(made: Certificates) -> None:
        private.write_bytes(made.server.key.read_bytes())
        cert.write_bytes(made.server.cert.read_bytes())

    install(old)
    config = grpc_config(tls_cert=cert, tls_key=private)
    async with running_stack(client, redis_url, grpc=config) as stack:

        async def live(trusted: Certificates) -> bool:
            credentials = grpc.ssl_channel_credentials(trusted.authority.cert.read_bytes())
            options = [("grpc.use_local_subchannel_pool", 1)]  # Else the connection of the last call may be used.
            async with grpc.aio.secure_channel(f"127.0.0.1:{stack.gateway.grpc_port}", credentials, options) as channel:
                try:
                    await channel.unary_unary(f"{SERVICE}/ServerLive")(b"", timeout=5)
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017
                    return False
            return True

        assert await live(old)
        install(new)
        assert (await live(new), await live(old)) == (True, False)
        cert.write_text("broken")
        assert await live(new)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tls_cert": Path("/none/cert.pem"), "tls_key": Path("/none/key.pem")}, "Cannot read /none/cert.pem for gRPC"),
        ({"port": 1, "host": "203.0.113.1"}, "Cannot listen on 203.0.113.1:1 for gRPC"),
    ],
)
async def test_what_cannot_be_used_stops_the_start(changes: dict[str, Any], words: str) -> None:
    """With a sentence that names it."""
    host = changes.pop("host", "127.0.0.1")
    config = gateway_config(gateway_id="g", redis_url="redis://127.0.0.1:1", service_token="s", host=host)
    gateway = Gateway(config, LiteralCatalog())
    service = InferenceService(gateway.open_inference, gateway.inference, config, CustomerConnections(1))
    server = GrpcServer(service, config, grpc_config(**changes))

    with pytest.raises(StartError) as caught:
        await server.start()
    await server.stop(None)

    assert words in str(caught.value)


async def test_reflection(channel: Channel) -> None:
    """The service and its messages are listed, as grpcurl reads them."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService"),
    ]
    services, file = [each async for each in stub.ServerReflectionInfo(iter(asked))]

    assert "inference.GRPCInferenceService" in [each.name for each in services.list_services_response.service]
    assert b"ModelStreamInfer" in file.file_descriptor_response.file_descriptor_proto[0]


TRITON = """
client = triton.InferenceServerClient(address)
found = {
    "live": client.is_server_live(),
    "ready": client.is_server_ready(),
    "model_ready": client.is_model_ready("tiny", "1", headers=headers),
    "server": client.get_server_metadata(as_json=True)["name"],
    "inputs": client.get_model_metadata("tiny", headers=headers, as_json=True)["inputs"],
    "two": strings(client.infer("tiny", texts("one", "two"), headers=headers, client_timeout=10)),
    "column": client.infer("tiny", texts("ab", shape=[1, 1]), headers=headers).as_numpy("text_output").shape,
}
for name, call in {
    "unknown": lambda: client.infer("none", texts("a"), headers=headers),
    "key": lambda: client.infer("tiny", texts("a")),
    "compressed": lambda: client.infer("tiny", texts("a"), headers=headers, compression_algorithm="gzip"),
}.items():
    try:
        found[name] = strings(call())
    except triton.InferenceServerException as error:
        found[name] = str(error)

import queue
answers = queue.Queue()
client.start_stream(callback=lambda result, error: answers.put((result, error)), headers=headers)
client.async_stream_infer("tiny", texts("abc"), request_id="7", enable_empty_final_response=True)
client.async_stream_infer("none", texts("abc"))
streamed, final = "", False
while not final:
    result, error = answers.get(timeout=10)
    response = result.get_response(as_json=False)
    streamed += "".join(strings(result))
    final = response.parameters["triton_final_response"].bool_param
found["streamed"], found["id"] = streamed, response.id
found["stream_error"] = str(answers.get(timeout=10)[1])
client.stop_stream()
print(json.dumps(found))
"""


async def test_tritonclient(stack: Stack) -> None:
    """Metadata, inference, compression, streams and errors."""
    address = f"127.0.0.1:{stack.gateway.grpc_port}"
    found = await run_triton("grpc", TRITON, address, stack.catalog.keys["free"].text)

    assert (found["live"], found["ready"], found["model_ready"], found["server"]) == (True, True, True, "tierlane")
    assert found["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": ["-1"]}]
    assert (found["two"], found["column"], found["compressed"]) == (["eno", "owt"], [1, 1], ["a"])
    assert found["unknown"] == "[StatusCode.NOT_FOUND] There is no such model. Models: `tiny`."
    assert found["key"].startswith("[StatusCode.UNAUTHENTICATED]")
    assert (found["streamed"], found["id"]) == ("cba", "7")
    assert found["stream_error"] == "There is no such model. Models: `tiny`."
