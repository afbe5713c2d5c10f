"""A gateway with gRPC, a connection to it, and raw calls of grpc.aio."""

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from configs import grpc_config
from gateway.grpc.open_inference_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
)
from integration.gateway_fixtures import Stack, running_stack

SERVICE = "/inference.GRPCInferenceService"
Channel = grpc.aio.Channel


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with gRPC and a worker."""
    async with running_stack(client, redis_url, grpc=grpc_config()) as running:
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
