"""The gRPC server of a gateway: the calls of the Open Inference Protocol, TLS, bounds, reflection, and the drain.

It runs on grpc.aio in the event loop of the gateway. Inference calls get their messages as bytes, which the pipeline
decodes. A stream is authenticated before a message is read; its requests run one after the other, each with its own limits.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_reflection.v1alpha import reflection

from gateway.api.open_inference import OpenInferenceParts
from gateway.config import GatewayConfig, GrpcConfig
from gateway.grpc.call import Context, GrpcCall, GrpcRequest, MessageStream, fail, trailers
from gateway.grpc.messages import INFER, SERVICE, STREAM, failed_message, infer_format, stream_format
from gateway.grpc.open_inference_pb2 import (
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    ServerLiveRequest,
    ServerLiveResponse,
    ServerMetadataRequest,
    ServerMetadataResponse,
    ServerReadyRequest,
    ServerReadyResponse,
)
from gateway.http.validation import invalid
from gateway.inference.handler import run
from gateway.inference.pipeline import InferencePipeline
from scheduler.errors import ErrorCode, RequestError, StartError
from scheduler.fault_log import log_fault

Respond = Callable[[Any, "Context[Any, Any]"], Awaitable[Message]]


class InferenceService:
    """The calls. `pipeline` is that of the gateway's own pool."""

    def __init__(self, parts: OpenInferenceParts, pipeline: InferencePipeline, config: GatewayConfig) -> None:
        self._parts = parts
        self._pipeline = pipeline
        self._idle_s = config.idle_timeout_s
        self._write_s = config.write_timeout_s
        self._infer = infer_format(parts.check_model)
        self._stream = stream_format(parts.check_model)

    def handlers(self) -> grpc.GenericRpcHandler:
        """The table of the calls."""
        described: dict[str, tuple[type[Message], Respond]] = {
            "ServerLive": (ServerLiveRequest, self.server_live),
            "ServerReady": (ServerReadyRequest, self.server_ready),
            "ServerMetadata": (ServerMetadataRequest, self.server_metadata),
            "ModelReady": (ModelReadyRequest, self.model_ready),
            "ModelMetadata": (ModelMetadataRequest, self.model_metadata),
        }
        table: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(partial(self._answer, kind, respond))
            for name, (kind, respond) in described.items()
        }
        table[INFER] = grpc.unary_unary_rpc_method_handler(self.infer)
        table[STREAM] = grpc.stream_stream_rpc_method_handler(self.stream_infer)
        return grpc.method_handlers_generic_handler(SERVICE, table)

    async def server_live(self, _: ServerLiveRequest, __: "Context[Any, Any]") -> ServerLiveResponse:
        """The event loop is running."""
        return ServerLiveResponse(live=True)

    async def server_ready(self, _: ServerReadyRequest, __: "Context[Any, Any]") -> ServerReadyResponse:
        """Whether the gateway accepts traffic."""
        return ServerReadyResponse(ready=self._parts.not_ready() is None)

    async def server_metadata(self, _: ServerMetadataRequest, __: "Context[Any, Any]") -> ServerMetadataResponse:
        """The name and version of the server."""
        return ServerMetadataResponse(name="tierlane", version=self._parts.version, extensions=["parameters"])

    async def model_ready(self, message: ModelReadyRequest, context: "Context[Any, Any]") -> ModelReadyResponse:
        """Whether requests of a model are served. Raises RequestError for an unknown caller or model."""
        self._identify(context)
        return ModelReadyResponse(ready=self._parts.readiness(message.name, message.version).ready)

    async def model_metadata(
        self, message: ModelMetadataRequest, context: "Context[Any, Any]"
    ) -> ModelMetadataResponse:
        """The tensors of a model. Raises RequestError for an unknown caller or model."""
        self._identify(context)
        found = self._parts.metadata(message.name, message.version)
        response = ModelMetadataResponse(name=found.name, versions=found.versions, platform=found.platform)
        for tensors, described in ((response.inputs, found.inputs), (response.outputs, found.outputs)):
            for each in described:
                tensors.add(name=each.name, datatype=each.datatype, shape=each.shape)
        return response

    async def infer(self, raw: bytes, context: "Context[bytes, bytes]") -> bytes:
        """ModelInfer."""
        request = GrpcRequest(context, time.monotonic())
        call = GrpcCall(self._pipeline, self._infer, request, raw, context.time_remaining)
        if not self._authenticated(call, request, context):
            return b""
        response = await run(call, call.receive())
        if call.error is not None:
            fail(context, call.error, response)
            return b""
        context.set_trailing_metadata(trailers(response))
        return response.body

    async def stream_infer(self, _: Any, context: "Context[bytes, bytes]") -> None:
        """ModelStreamInfer: the responses of each request, in order. An error of a request does not end the stream."""
        if self._stream_call(b"", context) is None:
            return
        while (raw := await self._next(context)) is not None and (call := self._stream_call(raw, context)) is not None:
            response = await run(call, call.receive())
            context.set_trailing_metadata(trailers(response, call.error))
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
                return

    def _stream_call(self, raw: bytes, context: "Context[bytes, bytes]") -> GrpcCall | None:
        """The call of one message of a stream; None if its caller is unknown, which ends the stream."""
        request = GrpcRequest(context, time.monotonic())
        call = GrpcCall(self._pipeline, self._stream, request, raw, context.time_remaining)
        return call if self._authenticated(call, request, context) else None

    async def _next(self, context: "Context[bytes, bytes]") -> bytes | None:
        """The next message of a stream; None at its end, or if none came for the idle time."""
        try:
            async with asyncio.timeout(self._idle_s):
                raw = await context.read()
        except TimeoutError:
            return None
        return raw if isinstance(raw, bytes) else None

    def _authenticated(self, call: GrpcCall, request: GrpcRequest, context: "Context[bytes, bytes]") -> bool:
        """Find the identity of the caller. If there is none, set the status of the error."""
        try:
            call.authenticate(request)
        except RequestError as error:
            self._fail(context, error, request.request_id)
            return False
        return True

    async def _answer(self, kind: type[Message], respond: Respond, raw: bytes, context: "Context[Any, Any]") -> bytes:
        """The response to a call without inference."""
        request_id = GrpcRequest(context, 0.0).request_id
        try:
            return (await respond(kind.FromString(raw), context)).SerializeToString()
        except DecodeError:
            fault = invalid(None, f"The message is not a {kind.DESCRIPTOR.name}.")
        except RequestError as error:
            fault = RequestError(
                error.code, error.message, error.param
            )  # Without traceback, which references this frame.
        except Exception as error:  # noqa: BLE001  # every exception has a status
            log_fault("request failed", error, request_id=request_id)
            fault = RequestError(ErrorCode.INTERNAL_ERROR)
        self._fail(context, fault, request_id)
        return b""

    def _identify(self, context: "Context[Any, Any]") -> None:
        self._parts.authenticator.identify(GrpcRequest(context, 0.0))

    def _fail(self, context: "Context[Any, Any]", error: RequestError, request_id: str) -> None:
        fail(context, error, self._parts.error_responses.answer(error, request_id))


MAX_METADATA_BYTES = 16 << 10
MAX_STREAMS = 1024  # Calls at a time on one connection; more wait in the client.
KEEPALIVE_MS = 30_000  # Between two pings of a silent connection; a dead client is noticed after one.
KEEPALIVE_TIMEOUT_MS = 10_000
MAX_AGE_MS = 600_000  # Then a client opens a new connection, and calls that it does not read end after the grace.
MAX_AGE_GRACE_MS = 60_000


class GrpcServer:
    """The server of one gateway."""

    def __init__(self, service: InferenceService, config: GatewayConfig, own: GrpcConfig) -> None:
        self._config = config
        self._own = own
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=config.max_connections,
            options=[
                ("grpc.max_receive_message_length", config.max_body_bytes),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                ("grpc.max_connection_idle_ms", int(config.idle_timeout_s * 1000)),
                ("grpc.max_connection_age_ms", MAX_AGE_MS),
                ("grpc.max_connection_age_grace_ms", MAX_AGE_GRACE_MS),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
                ("grpc.so_reuseport", int(config.reuse_port)),
            ],
        )
        self._server.add_generic_rpc_handlers((service.handlers(),))
        reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), self._server)

    async def start(self) -> int:
        """Listen; returns the port. Raises StartError for an unusable port or certificate."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address = f"{host}:{self._own.port}"
        credentials = server_credentials(self._own)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise StartError(f"Cannot listen on {address} for gRPC: the port is in use or not allowed.") from error
        await self._server.start()
        return port

    async def stop(self, grace_s: float | None) -> None:
        """Accept no more calls, and end those that are open after the grace time."""
        await self._server.stop(grace_s)


def server_credentials(own: GrpcConfig) -> grpc.ServerCredentials | None:
    """TLS with the files of the configuration, read again at a handshake after they changed; None without TLS.

    With a CA, clients need a certificate of it. Raises StartError for an unreadable file.
    """
    if own.tls_cert is None or own.tls_key is None:
        return None
    files = CertificateFiles(own.tls_cert, own.tls_key, own.tls_ca)
    try:
        first = files.read()
    except OSError as error:
        raise StartError(f"Cannot read {error.filename} for gRPC: {error.strerror}.") from error
    return grpc.dynamic_ssl_server_credentials(first, files.changed, own.tls_ca is not None)  # type: ignore[arg-type]  # None: unchanged


class CertificateFiles:
    """The files of a certificate, its key, and the CA of clients."""

    def __init__(self, cert: Path, key: Path, ca: Path | None) -> None:
        self._cert, self._key, self._ca = cert, key, ca
        self._seen: tuple[int, ...] = ()

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Their contents. Raises OSError."""
        self._seen = self._times()
        pair = (self._key.read_bytes(), self._cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], self._ca.read_bytes() if self._ca else None)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Their contents if they changed since they were read; None if not, or while they cannot be read."""
        try:
            return self.read() if self._times() != self._seen else None
        except OSError as error:
            log_fault("a certificate cannot be read; the last one is used", error)
            return None

    def _times(self) -> tuple[int, ...]:
        return tuple(path.stat().st_mtime_ns for path in (self._cert, self._key, self._ca) if path is not None)
