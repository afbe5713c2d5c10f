"""ModelStreamInfer over gRPC: responses in parts, slow clients, failures."""

import contextlib
import gc
from collections.abc import Iterable
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from alive import alive
from configs import grpc_config
from eventually import eventually
from gateway.grpc.call import MessageStream
from gateway.grpc.open_inference_pb2 import (
    ModelStreamInferResponse,
)
from gateway.inference.call import InferenceCall
from gateway.inference.pending import PendingRequest
from integration.gateway_fixtures import Stack, accepted, running_stack
from integration.grpc_fixtures import SERVICE, Channel, channel, infer, key, request, stack
from scheduler.errors import HTTP, ErrorCode
from scheduler.protocol.batches import Outcome
from scheduler.protocol.increments import Increment, IncrementChannel
from scheduler.redis_client.keys import Keys

__all__ = ["channel", "stack"]


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
        running_stack(client, redis_url, grpc=grpc_config(), write_timeout_s=0.2) as stack,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}") as channel,
    ):
        stack.worker.hold = True
        call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(metadata=key(stack))
        await call.write(request("go").SerializeToString())
        await accepted(stack)
        (pending,) = stack.gateway.pending_requests.all()
        for at in range(0, 64_000_000, 1_000_000):
            before = pending.used
            await write(stack, at, "x" * 1_000_000)
            # Increments that arrive together are dropped, before the connection has taken the first.
            await eventually(
                lambda: pending.used > before or not len(stack.gateway.pending_requests),  # noqa: B023  # awaited here
                "the increment is received, or the request is cancelled",
            )
            if not len(stack.gateway.pending_requests):
                break
        assert not len(stack.gateway.pending_requests)
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


@pytest.mark.parametrize("end", ["completed", "rejected", "late"])
async def test_calls_leave_no_reference_cycles(stack: Stack, channel: Channel, end: str) -> None:
    """Lists, streams and errors are freed at once, since garbage is collected rarely."""
    if end == "rejected":
        stack.gateway.limits.no_gpu = lambda _: True
    if end == "late":
        stack.worker.hold = True
        stack.gateway.sweep.sweep = lambda now: None  # The call itself ends its requests.
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await infer(stack, channel, request("a", "b"), timeout=0.2 if end == "late" else None)
        call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(
            metadata=key(stack), timeout=0.2 if end == "late" else None
        )
        await call.write(request("a").SerializeToString())
        await call.done_writing()
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        await eventually(lambda: not alive(InferenceCall, MessageStream, PendingRequest), "all are freed")
    finally:
        gc.enable()


async def test_a_silent_stream_ends(client: Redis, redis_url: str) -> None:
    """After the idle time, so that it does not occupy a call forever."""
    async with (
        running_stack(client, redis_url, grpc=grpc_config(), idle_timeout_s=0.1) as stack,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}") as channel,
    ):
        call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(metadata=key(stack))

        assert await call.read() is grpc.aio.EOF
