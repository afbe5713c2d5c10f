"""The calls of the Open Inference Protocol over gRPC.

Inference calls get their messages as bytes, which the pipeline decodes. A stream is authenticated before a message is read;
its requests run one after the other, each with its own limits.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from gateway.api.inference import ApiFormat
from gateway.api.open_inference.metadata import OpenInferenceParts
from gateway.config import GatewayConfig
from gateway.grpc.call import Context, GrpcCall, GrpcRequest, MessageStream, fail, trailers
from gateway.grpc.messages import INFER, SERVICE, STREAM, failed_message, infer_format, stream_format
from gateway.grpc.open_inference_pb2 import (
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    ServerLiveResponse,
    ServerMetadataResponse,
    ServerReadyResponse,
)
from gateway.http.response import HttpResponse
from gateway.http.router import ConnectionShare, CustomerConnections
from gateway.http.validation import invalid
from gateway.inference.entry import Entry
from ledger.catalog.snapshot import Identity
from scheduler.errors import ErrorCode, RequestError

Describe = Callable[[Identity, str, str], Message]
"""From the caller, and the name and version of a model."""


class InferenceService:
    """The calls."""

    def __init__(
        self,
        parts: OpenInferenceParts,
        entry: Entry,
        config: GatewayConfig,
        connections: CustomerConnections,
    ) -> None:
        self._parts = parts
        self._connections = connections
        self._entry = entry
        self._idle_s = config.idle_timeout_s
        self._body_s = config.body_timeout_s
        self._write_s = config.write_timeout_s
        self._infer = infer_format(parts.check_model)
        self._stream = stream_format(parts.check_model)

    def handlers(self) -> grpc.GenericRpcHandler:
        """The table of the calls. On the wire a call with one message is the same as a stream of one."""
        unread = {"ServerLive": self.live, "ServerReady": self.ready, "ServerMetadata": self.metadata}
        described: dict[str, tuple[type[Message], Describe]] = {
            "ModelReady": (ModelReadyRequest, self.model_ready),
            "ModelMetadata": (ModelMetadataRequest, self.model_metadata),
        }
        unary: dict[str, Any] = {
            INFER: self.infer,
            **{name: partial(self._unread, respond) for name, respond in unread.items()},
            **{name: partial(self._described, *each) for name, each in described.items()},
        }
        table: dict[str, Any] = {
            STREAM: grpc.stream_stream_rpc_method_handler(self.stream_infer),
            **{name: grpc.stream_unary_rpc_method_handler(handler) for name, handler in unary.items()},
        }
        return grpc.method_handlers_generic_handler(SERVICE, table)

    def live(self) -> Message:
        """The event loop is running."""
        return ServerLiveResponse(live=True)

    def ready(self) -> Message:
        """Whether the gateway accepts traffic."""
        return ServerReadyResponse(ready=self._parts.not_ready() is None)

    def metadata(self) -> Message:
        """The name and version of the server."""
        return ServerMetadataResponse(name="tierlane", version=self._parts.version, extensions=["parameters"])

    def model_ready(self, identity: Identity, name: str, version: str) -> Message:
        """Whether requests of a model are served. Raises RequestError for an unknown model."""
        return ModelReadyResponse(ready=self._parts.readiness(identity, name, version).ready)

    def model_metadata(self, identity: Identity, name: str, version: str) -> Message:
        """The tensors of a model. Raises RequestError for an unknown model."""
        found = self._parts.metadata(identity, name, version)
        response = ModelMetadataResponse(name=found.name, versions=found.versions, platform=found.platform)
        for tensors, described in ((response.inputs, found.inputs), (response.outputs, found.outputs)):
            for each in described:
                tensors.add(name=each.name, datatype=each.datatype, shape=each.shape)
        return response

    async def infer(self, _: Any, context: "Context[bytes, bytes]") -> bytes:
        """ModelInfer."""
        with contextlib.closing(self._connections.share()) as share:
            call = self._authenticated(self._infer, context, share)
            if call is None:
                return b""
            with contextlib.closing(call):
                response = await call.answered(partial(self._message, context))
        if call.error is not None:
            fail(context, call.error, response)
            return b""
        context.set_trailing_metadata(trailers(response))
        return response.body

    async def stream_infer(self, _: Any, context: "Context[bytes, bytes]") -> None:
        """ModelStreamInfer: the responses of each request, in order. An error of a request does not end the stream."""
        with contextlib.closing(self._connections.share()) as share:
            if self._authenticated(self._stream, context, share) is None:
                return
            while (raw := await self._next(context)) is not None:
                call = self._authenticated(self._stream, context, share)
                if call is None:
                    return
                with contextlib.closing(call):
                    response = await call.answered(_ready(raw))
                    context.set_trailing_metadata(trailers(response, call.error))
                    if not await self._write(call, response, context):
                        return

    async def _write(self, call: GrpcCall, response: HttpResponse, context: "Context[bytes, bytes]") -> bool:
        """Write the responses to one request of a stream; whether the client has read them."""
        try:
            if isinstance(response, MessageStream):
                await response.run(context.write, self._write_s)
            else:
                body = response.body if call.error is None else failed_message(response, call.decoded)
                async with asyncio.timeout(self._write_s):
                    await context.write(body)
        except (ConnectionError, TimeoutError):  # The library keeps the call until the connection ends.
            context.set_code(grpc.StatusCode.CANCELLED)
            context.set_details("The client does not read.")
            return False
        return True

    async def _message(self, context: "Context[bytes, bytes]") -> Any:
        """The only message of a call. Raises RequestError if it is not there in time, as a body of HTTP."""
        try:
            async with asyncio.timeout(self._body_s):
                return await context.read()
        except TimeoutError:
            raise RequestError(ErrorCode.REQUEST_TIMEOUT) from None

    async def _next(self, context: "Context[bytes, bytes]") -> bytes | None:
        """The next message of a stream; None at its end, or if none came for the idle time."""
        try:
            async with asyncio.timeout(self._idle_s):
                raw = await context.read()
        except TimeoutError:
            return None
        return raw if isinstance(raw, bytes) else None

    def _authenticated(
        self, api_format: ApiFormat, context: "Context[bytes, bytes]", share: ConnectionShare
    ) -> GrpcCall | None:
        """The call of a known caller. If the caller is unknown, None, and the call ends with the error."""
        request = GrpcRequest(context, share)
        try:
            return GrpcCall(self._entry, api_format, request, context.time_remaining)
        except RequestError as error:
            self._fail(context, error, request.request_id)
            return None

    async def _unread(self, respond: Callable[[], Message], _: Any, __: "Context[Any, Any]") -> bytes:
        """The response to a call that needs neither a key nor its message."""
        return respond().SerializeToString()

    async def _described(self, kind: type[Message], describe: Describe, _: Any, context: "Context[Any, Any]") -> bytes:
        """The response to a call about a model."""
        share = self._connections.share()
        request = GrpcRequest(context, share, auxiliary=True)
        try:
            identity = self._parts.authenticator.identify(request)
            raw = await self._message(context)
            message: Any = kind.FromString(raw if isinstance(raw, bytes) else b"")
            return describe(identity, message.name, message.version).SerializeToString()
        except DecodeError:
            self._fail(context, invalid(None, f"The message is not a {kind.DESCRIPTOR.name}."), request.request_id)
        except RequestError as error:
            self._fail(context, error, request.request_id)
        finally:
            share.close()
        return b""

    def _fail(self, context: "Context[Any, Any]", error: RequestError, request_id: str) -> None:
        fail(context, error, self._parts.error_responses.answer(error, request_id))


def _ready(raw: bytes) -> Callable[[], Awaitable[bytes]]:
    async def read() -> bytes:
        return raw

    return read
