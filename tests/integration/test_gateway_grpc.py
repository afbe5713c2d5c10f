"""The Open Inference Protocol over gRPC on a running gateway: raw calls of grpc.aio, and the real tritonclient."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from redis.asyncio import Redis

from certificates import Certificates, certificates
from eventually import eventually
from gateway.app import Gateway
from gateway.config import GatewayConfig, GrpcConfig
from gateway.grpc.call import STATUS, MessageStream
from gateway.grpc.open_inference_pb2 import (
    InferParameter,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelStreamInferResponse,
    ServerReadyRequest,
    ServerReadyResponse,
)
from gateway.grpc.server import GrpcServer, InferenceService
from gateway.inference.pipeline import InferenceCall
from integration.gateway_fixtures import LiteralCatalog, Stack, accepted, running_stack
from scheduler.errors import HTTP, ErrorCode, StartError
from scheduler.payload import Payload, decode_payload
from scheduler.protocol.audit_outbox import AcceptedRecord, decode_entry
from scheduler.protocol.batches import ClaimedRequest, Outcome
from scheduler.protocol.replies import Increment, IncrementChannel
from scheduler.redis_client.keys import Keys
from triton_client import run_triton

SERVICE = "/inference.GRPCInferenceService"
Channel = grpc.aio.Channel


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with gRPC and a worker."""
    async with running_stack(client, redis_url, grpc=GrpcConfig(port=0)) as running:
        yield running


@pytest.fixture
async def channel(stack: Stack) -> AsyncIterator[Channel]:
    """A connection to it."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}") as opened:
        yield opened


def request(*texts: str, raw: bool = False, **fields: Any) -> ModelInferRequest:
    """An inference of `tiny`; `raw`: its elements are raw contents."""
    message = ModelInferRequest(**{"model_name": "tiny"} | fields)
    tensor = message.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    data = [text.encode() for text in texts]
    if raw:
        message.raw_input_contents.append(b"".join(len(each).to_bytes(4, "little") + each for each in data))
    else:
        tensor.contents.bytes_contents.extend(data)
    return message


def key(stack: Stack) -> tuple[tuple[str, str], ...]:
    """The metadata with the key of the free customer."""
    return (("authorization", stack.key()["Authorization"]),)


def infer(stack: Stack, channel: Channel, message: ModelInferRequest | bytes, **options: Any) -> Any:
    """Start ModelInfer."""
    call = channel.unary_unary(f"{SERVICE}/ModelInfer", response_deserializer=ModelInferResponse.FromString)
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    return call(raw, **{"metadata": key(stack)} | options)


async def failure(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Status, message and trailing metadata of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = caught.value
    return error.code(), error.details() or "", {name: str(value) for name, value in error.trailing_metadata() or ()}


@pytest.mark.parametrize("raw", [False, True])
async def test_the_response_has_the_form_of_the_request(stack: Stack, channel: Channel, raw: bool) -> None:
    """Raw or typed contents; the trailing metadata has the id and the limits."""
    call = infer(stack, channel, request("one", "zwei \u00fc", raw=raw, id="7"))
    response = await call
    trailing = dict(await call.trailing_metadata())

    output = response.outputs[0]
    assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "7")
    assert (output.name, output.datatype, list(output.shape)) == ("text_output", "BYTES", [2])
    expected = [b"eno", "\u00fc iewz".encode()]
    assert list(output.contents.bytes_contents) == ([] if raw else expected)
    assert list(response.raw_output_contents) == (
        [b"".join(len(each).to_bytes(4, "little") + each for each in expected)] if raw else []
    )
    assert response.parameters["request_id"].string_param == trailing["x-request-id"] in stack.worker.seen
    assert trailing["x-ratelimit-limit-requests"] == "1000"
    assert trailing["ratelimit"].startswith('"requests"')


async def test_parameters_reach_the_model(stack: Stack, channel: Channel) -> None:
    """All types; a number as text too, since tritonclient sends no fractions. Counters and audit name the endpoint."""
    payloads: list[Payload] = []

    def complete(member: ClaimedRequest) -> Outcome:
        payloads.append(decode_payload(member.body))
        return Outcome(member.id, "", 1.5, 8, "v7", "hi!", 3, "length")

    stack.worker.answerer = complete
    parameters = {
        "max_tokens": InferParameter(int64_param=7),
        "temperature": InferParameter(string_param="0.5"),
        "top_p": InferParameter(double_param=0.25),
        "seed": InferParameter(uint64_param=3),
        "stop": InferParameter(string_param="x"),
    }
    response = await infer(stack, channel, request("a", parameters=parameters))

    assert [each.parameters for each in payloads] == [
        {"max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "seed": 3, "stop": "x"}
    ]
    assert response.parameters["tokens_used"].int64_param == 8
    assert response.parameters["finish_reason"].string_param == "length"
    async with stack.http.get(f"{stack.url}/metrics") as metrics:
        assert f'endpoint="{SERVICE}/ModelInfer",outcome="completed"' in await metrics.text()
    entries = await stack.redis.lrange(Keys().outbox, 0, -1)
    records = [record for entry in entries for record in decode_entry(entry)[0]]
    assert [r.endpoint for r in records if isinstance(r, AcceptedRecord)] == [f"{SERVICE}/ModelInfer"]


@pytest.mark.parametrize(
    ("change", "status", "code", "words"),
    [
        ({"model_name": "none"}, "NOT_FOUND", "model_not_found", "There is no such model. Models: `tiny`."),
        ({"model_version": "2"}, "NOT_FOUND", "model_not_found", "only the version 1"),
        ({"parameters": {"n": InferParameter()}}, "INVALID_ARGUMENT", "invalid_request", "`parameters.n`"),
        (
            {"parameters": {"top_p": InferParameter(double_param=float("nan"))}},
            "INVALID_ARGUMENT",
            "invalid_request",
            "`parameters.top_p`",
        ),
        (
            {"parameters": {"seed": InferParameter(uint64_param=2**63)}},
            "INVALID_ARGUMENT",
            "invalid_request",
            "`parameters.seed`",
        ),
        ({"raw_input_contents": [b"x"]}, "INVALID_ARGUMENT", "invalid_request", "`raw_input_contents`"),
        (
            {"outputs": [ModelInferRequest.InferRequestedOutputTensor(name="logits")]},
            "INVALID_ARGUMENT",
            "invalid_request",
            "`outputs`",
        ),
        (
            {"inputs": [ModelInferRequest.InferInputTensor(name="x")]},
            "INVALID_ARGUMENT",
            "invalid_request",
            "`inputs` must be one tensor",
        ),
    ],
)
async def test_bad_requests_have_a_status_and_a_code(
    stack: Stack, channel: Channel, change: dict[str, Any], status: str, code: str, words: str
) -> None:
    """And a message that names the field; no request reaches the worker."""
    found, message, trailing = await failure(infer(stack, channel, request("a", **change)))

    assert (found.name, trailing["error-code"]) == (status, code)
    assert words in message
    assert trailing["x-request-id"].startswith("req_")
    assert "ratelimit-policy" in trailing
    assert stack.worker.seen == []


def test_every_error_has_a_status() -> None:
    """One table from the HTTP status."""
    assert {HTTP[code].status for code in ErrorCode} - STATUS.keys() == set()


async def test_keys(stack: Stack, channel: Channel) -> None:
    """In `authorization` or `x-api-key`; without one the call is not authenticated, nor is a stream before its messages."""
    alone = stack.key()["Authorization"].removeprefix("Bearer ")
    response = await infer(stack, channel, request("ab"), metadata=(("x-api-key", alone),))
    status, _, trailing = await failure(infer(stack, channel, request("ab"), metadata=()))
    streamed, _, _ = await failure(channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(metadata=()).read())
    metadata = channel.unary_unary(f"{SERVICE}/ModelMetadata", ModelMetadataRequest.SerializeToString)
    described, _, _ = await failure(metadata(ModelMetadataRequest(name="tiny")))

    assert response.outputs[0].contents.bytes_contents[0] == b"ba"
    assert {status, streamed, described} == {grpc.StatusCode.UNAUTHENTICATED}
    assert trailing["error-code"] == "invalid_api_key"


async def test_calls_without_a_message(stack: Stack, channel: Channel) -> None:
    """An unknown caller gets its error, and probes their response, before any message: nobody can occupy calls."""
    for name, expected in (
        ("ModelInfer", "UNAUTHENTICATED"),
        ("ModelReady", "UNAUTHENTICATED"),
        ("ModelStreamInfer", "UNAUTHENTICATED"),
        ("ServerLive", "OK"),
    ):
        call = channel.stream_unary(f"{SERVICE}/{name}")()
        assert (await call.code()).name == expected, name
    without = channel.stream_unary(f"{SERVICE}/ModelInfer")(metadata=key(stack))
    await without.done_writing()
    status, message, _ = await failure(without)

    assert (status, message) == (grpc.StatusCode.INVALID_ARGUMENT, "The call has no message.")


async def test_a_message_that_comes_late(stack: Stack, channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key, which may have been revoked meanwhile, is checked again."""
    monkeypatch.setattr("gateway.grpc.call.SLOW_S", 0.0)
    identified = stack.gateway.authenticator.identify
    seen: list[str] = []

    def identify(each: Any, *header: str) -> Any:
        seen.append(each.request_id)
        return identified(each, *header)

    stack.gateway.inference.identify = identify
    call = channel.stream_unary(f"{SERVICE}/ModelInfer")(metadata=key(stack))
    await eventually(lambda: seen, "the caller is known")
    stack.catalog.set(key={"revoked": True})
    await call.write(request("ab").SerializeToString())
    await call.done_writing()
    status, _, trailing = await failure(call)

    assert status is grpc.StatusCode.UNAUTHENTICATED
    assert seen == [trailing["x-request-id"]] * 2


async def test_a_limit_says_when_to_retry(stack: Stack, channel: Channel) -> None:
    """RESOURCE_EXHAUSTED with the wait; a list is admitted as a whole."""
    stack.catalog.set(key={"burst": 12.0, "requests_per_second": 0.001})  # A new bucket holds a quarter: three.

    status, _, trailing = await failure(infer(stack, channel, request("a", "b", "c", "d")))
    response = await infer(stack, channel, request("a", "b", "c"))

    assert (status, trailing["error-code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded")
    assert int(trailing["retry-after-ms"]) > 0
    assert len(response.outputs[0].contents.bytes_contents) == 3


async def test_the_deadline_and_the_end_of_a_call(stack: Stack, channel: Channel) -> None:
    """The deadline of the call is that of the request; a cancelled call cancels its requests. Both are recorded."""
    stack.worker.hold = True
    late = infer(stack, channel, request("late"), timeout=0.3)
    await accepted(stack)
    (pending,) = stack.gateway.pending_requests.all()
    total_ms, ids = pending.submission.total_ms, [pending.id]
    status, _, _ = await failure(late)
    cancelled = infer(stack, channel, request("a", "b"))
    await accepted(stack, 2)
    ids += [each.id for each in stack.gateway.pending_requests.all()]
    cancelled.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled

    async def ends() -> list[Any]:
        return [(await stack.internal(f"/internal/requests/{each}"))[1]["error"] for each in ids]

    async def ended() -> bool:
        return None not in await ends()

    await eventually(ended, "all have ended in Redis")
    assert await ends() == ["deadline_exceeded", "cancelled", "cancelled"]
    assert 100 < total_ms <= 300
    assert status is grpc.StatusCode.DEADLINE_EXCEEDED
    async with stack.http.get(f"{stack.url}/metrics") as response:
        metrics = await response.text()
    assert f'endpoint="{SERVICE}/ModelInfer",outcome="deadline_exceeded"' in metrics
    assert f'endpoint="{SERVICE}/ModelInfer",outcome="cancelled"' in metrics


async def test_hostile_messages(stack: Stack, channel: Channel) -> None:
    """Bytes that are no message, cut or changed ones, and too large ones have a status of the client's fault."""
    whole = request("hello", raw=True, parameters={"max_tokens": InferParameter(int64_param=1)}).SerializeToString()
    cut = [whole[:at] for at in range(len(whole))]
    changed = [whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :] for at in range(len(whole)) for bit in (1, 128)]
    nested = b"\x2a\xff\xff\xff\xff\x0f" * 1000
    for raw in (*cut, *changed, nested, b"\xff" * 64):
        try:
            await infer(stack, channel, raw)
        except grpc.aio.AioRpcError as error:
            assert error.code().name in ("INVALID_ARGUMENT", "NOT_FOUND"), (raw, error)  # noqa: PT017
    too_large, _, _ = await failure(infer(stack, channel, b"\x00" * 300_000))
    bomb = infer(stack, channel, b"\x00" * 30_000_000, compression=grpc.Compression.Gzip)
    inflated, _, _ = await failure(bomb)
    ready = channel.unary_unary(f"{SERVICE}/ModelReady")
    malformed, _, _ = await failure(ready(b"\xff", metadata=key(stack)))

    assert {too_large, inflated} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert malformed is grpc.StatusCode.INVALID_ARGUMENT
    assert (await infer(stack, channel, request("ab"))).outputs[0].contents.bytes_contents[0] == b"ba"


async def responses(call: Any, count: int) -> list[ModelStreamInferResponse]:
    """So many responses of a stream."""
    return [ModelStreamInferResponse.FromString(await call.read()) for _ in range(count)]


async def test_a_stream(stack: Stack, channel: Channel) -> None:
    """Requests one after the other: each ends with a final response; an error of one does not end the stream."""
    call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(metadata=key(stack))
    for message in (request("abc", id="1"), request("a", id="2", model_name="none"), request("a", "bc", id="3")):
        await call.write(message.SerializeToString())
    await call.write(b"\xff")
    text, end, wrong, both, malformed = await responses(call, 5)
    await call.done_writing()

    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert list(text.infer_response.outputs[0].contents.bytes_contents) == [b"cba"]
    final = [
        each.infer_response.parameters["triton_final_response"].bool_param
        for each in (text, end, wrong, both, malformed)
    ]
    assert final == [False, True, True, True, True]
    assert [each.infer_response.id for each in (text, end, both)] == ["1", "1", "3"]
    assert end.infer_response.parameters["request_id"].string_param in stack.worker.seen
    assert "There is no such model" in wrong.error_message
    assert wrong.infer_response.parameters["error_code"].string_param == "model_not_found"
    assert list(both.infer_response.outputs[0].contents.bytes_contents) == [b"a", b"cb"]
    assert malformed.error_message == "The message is not a ModelInferRequest."


async def write(stack: Stack, offset: int, text: str) -> None:
    """Publish an increment of the one pending request, as its worker does."""
    (pending,) = stack.gateway.pending_requests.all()
    increment = Increment(pending.id, pending.submission.nonce, 1, offset, text)
    await IncrementChannel(stack.redis, Keys()).publish("g1", [increment])


def text_of(responses: Iterable[ModelStreamInferResponse]) -> str:
    """The text of the responses."""
    return b"".join(each.infer_response.outputs[0].contents.bytes_contents[0] for each in responses).decode()


async def test_increments_are_responses(stack: Stack, channel: Channel) -> None:
    """They are sent before the request has ended; the rest comes from the stored reply."""
    stack.worker.hold = True
    call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(metadata=key(stack))
    await call.write(request("olleh").SerializeToString())
    await accepted(stack)
    await write(stack, 0, "he")
    first = await responses(call, 1)
    await write(stack, 2, "l")
    second = await responses(call, 1)
    stack.worker.hold = False
    rest = await responses(call, 2)

    assert [text_of([each]) for each in (*first, *second, *rest)] == ["he", "l", "lo", ""]
    assert rest[-1].infer_response.parameters["triton_final_response"].bool_param


async def test_a_client_that_reads_slowly(stack: Stack) -> None:
    """Increments beyond a bound are dropped, and the stored reply fills the gap: the text is whole."""
    stack.worker.hold = True
    whole = "".join(f"{n:07} " for n in range(1_000_000))
    stack.worker.answerer = lambda member: Outcome(member.id, "", 1.5, 8, "v1", whole)
    unlimited = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}", unlimited) as channel:
        call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(metadata=key(stack))
        await call.write(request("go").SerializeToString())
        await accepted(stack)
        for at in range(0, 8_000_000, 1_000_000):
            await write(stack, at, whole[at : at + 1_000_000])
        stack.worker.hold = False
        received: list[ModelStreamInferResponse] = []
        while not (received and received[-1].infer_response.parameters["triton_final_response"].bool_param):
            received += await responses(call, 1)

    assert len(received) < 10
    assert text_of(received) == whole


async def test_a_client_that_does_not_read(client: Redis, redis_url: str) -> None:
    """After the write timeout its requests are cancelled; other calls are served, and the gateway can stop."""
    async with (
        running_stack(client, redis_url, grpc=GrpcConfig(port=0), write_timeout_s=0.2) as stack,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}") as channel,
    ):
        stack.worker.hold = True
        call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(metadata=key(stack))
        await call.write(request("go").SerializeToString())
        await accepted(stack)
        for at in range(0, 8_000_000, 1_000_000):
            await write(stack, at, "x" * 1_000_000)
        await eventually(lambda: not len(stack.gateway.pending_requests), "it is cancelled", 3.0)
        stack.worker.hold = False

        assert (await infer(stack, channel, request("ab"))).outputs[0].contents.bytes_contents[0] == b"ba"


async def test_a_stream_that_fails_or_is_cancelled(stack: Stack, channel: Channel) -> None:
    """A failure after the first text is a final response with the error; a cancelled stream cancels its request."""
    stack.worker.hold = True
    call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(metadata=key(stack))
    await call.write(request("olleh", id="1").SerializeToString())
    await accepted(stack)
    await write(stack, 0, "other")
    await responses(call, 1)
    stack.worker.hold = False
    (failed,) = await responses(call, 1)
    stack.worker.hold = True
    await call.write(request("olleh").SerializeToString())
    await accepted(stack)
    (pending,) = stack.gateway.pending_requests.all()
    call.cancel()

    async def cancelled() -> bool:
        return (await stack.internal(f"/internal/requests/{pending.id}"))[1]["error"] == "cancelled"

    await eventually(cancelled, "it is cancelled")
    assert failed.error_message == HTTP[ErrorCode.WORKER_LOST].message
    assert failed.infer_response.id == "1"
    assert failed.infer_response.parameters["error_code"].string_param == "worker_lost"
    assert failed.infer_response.parameters["retry_after_ms"].int64_param > 0


@pytest.mark.parametrize("rejected", [False, True])
async def test_calls_leave_no_reference_cycles(stack: Stack, channel: Channel, rejected: bool) -> None:
    """Lists, streams and errors are freed at once, since garbage is collected rarely."""
    if rejected:
        stack.gateway.limits.no_gpu = lambda _: True
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await infer(stack, channel, request("a", "b"))
        call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(metadata=key(stack))
        await call.write(request("a").SerializeToString())
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        await eventually(
            lambda: not [each for each in gc.get_objects() if issubclass(type(each), InferenceCall | MessageStream)],
            "all are freed",
            2.0,
        )
    finally:
        gc.enable()


async def test_a_silent_stream_ends(client: Redis, redis_url: str) -> None:
    """After the idle time, so that it does not occupy a call forever."""
    async with (
        running_stack(client, redis_url, grpc=GrpcConfig(port=0), idle_timeout_s=0.1) as stack,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}") as channel,
    ):
        call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(metadata=key(stack))

        assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize("name", ["ModelInfer", "ModelReady"])
async def test_a_message_that_never_comes(client: Redis, redis_url: str, name: str) -> None:
    """A call without its message ends after the time for a body, so that it does not occupy a call forever."""
    async with (
        running_stack(client, redis_url, grpc=GrpcConfig(port=0), body_timeout_s=0.1) as stack,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}") as channel,
    ):
        status, _, trailing = await failure(channel.stream_unary(f"{SERVICE}/{name}")(metadata=key(stack)))

        assert status is grpc.StatusCode.DEADLINE_EXCEEDED
        assert trailing["error-code"] == "request_timeout"


async def test_a_gateway_that_stops(client: Redis, redis_url: str) -> None:
    """Accepted requests are completed; then the port is closed, and the server was not ready before."""
    async with (
        running_stack(client, redis_url, grpc=GrpcConfig(port=0)) as stack,
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
    config = GrpcConfig(port=0, tls_cert=made.server.cert, tls_key=made.server.key, tls_ca=made.authority.cert)
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
    config = GrpcConfig(port=0, tls_cert=cert, tls_key=private)
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
    config = GatewayConfig(gateway_id="g", redis_url="redis://127.0.0.1:1", service_token="s", host=host)
    gateway = Gateway(config, LiteralCatalog())
    service = InferenceService(gateway.open_inference, gateway.inference, config)
    server = GrpcServer(service, config, GrpcConfig(**{"port": 0} | changes))

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
