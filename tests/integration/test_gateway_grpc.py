"""ModelInfer of the Open Inference Protocol over gRPC: requests, responses, errors, keys, deadlines, limits."""

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from configs import grpc_config
from eventually import eventually
from gateway.grpc.call import STATUS
from gateway.grpc.open_inference_pb2 import InferParameter, ModelInferRequest, ModelMetadataRequest
from integration.gateway_fixtures import Stack, accepted, model, running_stack
from integration.grpc_fixtures import SERVICE, Channel, channel, failure, infer, key, request, stack
from scheduler.errors import HTTP, ErrorCode
from scheduler.payload import Payload, decode_payload
from scheduler.protocol.audit_records import AcceptedRecord, decode_entry
from scheduler.protocol.batches import ClaimedRequest, Outcome
from scheduler.redis_client.keys import Keys

__all__ = ["channel", "stack"]


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
    ("change", "words"),
    [
        ({"model_name": "none"}, "There is no such model. Models: `tiny`."),
        ({"model_version": "2"}, "only the version 1"),
        ({"parameters": {"n": InferParameter()}}, "`parameters.n`"),
        ({"parameters": {"top_p": InferParameter(double_param=float("nan"))}}, "`parameters.top_p`"),
        ({"parameters": {"seed": InferParameter(uint64_param=2**63)}}, "`parameters.seed`"),
        ({"raw_input_contents": [b"x"]}, "`raw_input_contents`"),
        ({"outputs": [ModelInferRequest.InferRequestedOutputTensor(name="logits")]}, "`outputs`"),
        ({"inputs": [ModelInferRequest.InferInputTensor(name="x")]}, "`inputs` must be one tensor"),
    ],
)
async def test_bad_requests_have_a_status_and_a_code(
    stack: Stack, channel: Channel, change: dict[str, Any], words: str
) -> None:
    """And a message that names the field; no request reaches the worker."""
    found, message, trailing = await failure(infer(stack, channel, request("a", **change)))

    known = change.keys().isdisjoint({"model_name", "model_version"})
    expected = ("INVALID_ARGUMENT", "invalid_request") if known else ("NOT_FOUND", "model_not_found")
    assert (found.name, trailing["error-code"]) == expected
    assert words in message
    assert trailing["x-request-id"].startswith("req_")
    assert "ratelimit-policy" in trailing
    assert stack.worker.seen == []


async def test_models_that_the_key_may_not_use_are_unknown(stack: Stack, channel: Channel) -> None:
    """For inference and descriptions; the message names only the models of the key."""
    rows = (model("tiny"), model("secret"), model("large"))
    stack.catalog.set(models=rows, key={"models": ("tiny",)})
    metadata = channel.unary_unary(f"{SERVICE}/ModelMetadata", ModelMetadataRequest.SerializeToString)
    served = await infer(stack, channel, request("ab"))
    calls = [infer(stack, channel, request("ab", model_name=name)) for name in ("secret", "nobody")]
    calls.append(metadata(ModelMetadataRequest(name="secret"), metadata=key(stack)))
    failures = [await failure(call) for call in calls]

    assert served.outputs[0].contents.bytes_contents[0] == b"ba"
    assert {status for status, _, _ in failures} == {grpc.StatusCode.NOT_FOUND}
    assert {message for _, message, _ in failures} == {
        "There is no such model, or this key may not use it. Models: `tiny`."
    }


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

    def identify(each: Any, **header: str) -> Any:
        seen.append(each.request_id)
        return identified(each, **header)

    stack.gateway.authenticator.identify = identify  # type: ignore[method-assign]
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
    stack.catalog.set(key={"burst": 12.0, "requests_per_second": 0.05})  # A new bucket holds a quarter: three.

    status, _, trailing = await failure(infer(stack, channel, request("a", "b", "c", "d")))
    response = await infer(stack, channel, request("a", "b", "c"))

    assert (status, trailing["error-code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded")
    assert int(trailing["retry-after-ms"]) > 0
    assert len(response.outputs[0].contents.bytes_contents) == 3


@pytest.mark.parametrize(
    ("budget", "status", "code"),
    [
        ("key_body_memory_bytes", "RESOURCE_EXHAUSTED", "rate_limit_exceeded"),
        ("body_memory_bytes", "UNAVAILABLE", "no_capacity"),
    ],
)
async def test_messages_in_memory_are_bounded(
    client: Redis, redis_url: str, budget: str, status: str, code: str
) -> None:
    """A message beyond the budget of bodies is rejected as a body is; calls that end, fail or are cancelled return theirs."""
    large = request("x" * 600)
    async with (
        running_stack(client, redis_url, grpc=grpc_config(), **{budget: 1000}) as stack,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}") as channel,
    ):
        for end in ("complete", "fail", "cancel", "stream"):
            stack.worker.hold = True
            if end == "stream":
                held = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(metadata=key(stack))
                await held.write(large.SerializeToString())
            else:
                held = infer(stack, channel, large, timeout=0.2 if end == "fail" else None)
            await eventually(lambda: len(stack.gateway.pending_requests), "it is pending")
            found, _, trailing = await failure(infer(stack, channel, large))
            assert (found.name, trailing["error-code"]) == (status, code)
            if end in ("cancel", "stream"):
                held.cancel()
            stack.worker.hold = end == "fail"
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await held.code()
            await eventually(lambda: not stack.gateway.entry.bodies.in_all, f"{end}: its bytes are returned")


async def test_calls_of_one_customer(client: Redis, redis_url: str) -> None:
    """An open stream counts as one connection, whatever it sends; further calls are rejected until it has ended."""
    async with (
        running_stack(client, redis_url, grpc=grpc_config(), customer_connections=1) as stack,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}") as channel,
    ):
        open_stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(metadata=key(stack))
        for _ in range(2):
            await open_stream.write(request("ab").SerializeToString())
            assert all([await open_stream.read() for _ in range(2)])  # The output, and the end.
        ready = channel.unary_unary(f"{SERVICE}/ModelReady")
        for refused in (infer(stack, channel, request("ab")), ready(b"", metadata=key(stack))):
            status, _, trailing = await failure(refused)
            assert (status, trailing["error-code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_many_connections")
        await open_stream.done_writing()
        assert await open_stream.read() is grpc.aio.EOF
        assert await open_stream.code() is grpc.StatusCode.OK

        for _ in range(2):
            assert (await infer(stack, channel, request("ab"))).outputs[0].contents.bytes_contents[0] == b"ba"


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

    assert inflated is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert {too_large, malformed} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert (await infer(stack, channel, request("ab"))).outputs[0].contents.bytes_contents[0] == b"ba"
