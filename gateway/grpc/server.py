"""The gRPC server of a gateway: the calls of the Open Inference Protocol, TLS, bounds, reflection, and the drain.

It runs on grpc.aio in the event loop of the gateway. Inference calls get their messages as bytes, which the pipeline
decodes. A stream is authenticated before a message is read; its requests run one after the other, each with its own limits.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from gateway.api.inference import ApiFormat
from gateway.api.open_inference.metadata import OpenInferenceParts
from gateway.config import GatewayConfig, GrpcConfig
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
from gateway.inference.handler import run
from gateway.inference.pipeline import InferencePipeline
from scheduler.errors import ErrorCode, RequestError, StartError
from scheduler.fault_log import log_fault

Describe = Callable[[str, str], Message]
"""From the name and version of a model."""


class InferenceService:
    """The calls. `pipeline` is that of the gateway's own pool."""

    def __init__(
        self,
        parts: OpenInferenceParts,
        pipeline: InferencePipeline,
        config: GatewayConfig,
        connections: CustomerConnections,
    ) -> None:
        self._parts = parts
        self._connections = connections
        self._pipeline = pipeline
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

    def model_ready(self, name: str, version: str) -> Message:
        """Whether requests of a model are served. Raises RequestError for an unknown model."""
        return ModelReadyResponse(ready=self._parts.readiness(name, version).ready)

    def model_metadata(self, name: str, version: str) -> Message:
        """The tensors of a model. Raises RequestError for an unknown model."""
        found = self._parts.metadata(name, version)
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
                response = await run(call, call.receive(partial(self._message, context)))
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
                    response = await run(call, call.receive(_ready(raw)))
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
        call = GrpcCall(self._pipeline, api_format, request, context.time_remaining)
        try:
            call.authenticate(request)
        except RequestError as error:
            self._fail(context, error, request.request_id)
            return None
        return call

    async def _unread(self, respond: Callable[[], Message], _: Any, __: "Context[Any, Any]") -> bytes:
        """The response to a call that needs neither a key nor its message."""
        return respond().SerializeToString()

    async def _described(self, kind: type[Message], describe: Describe, _: Any, context: "Context[Any, Any]") -> bytes:
        """The response to a call about a model."""
        share = self._connections.share()
        request = GrpcRequest(context, share, auxiliary=True)
        try:
            self._parts.authenticator.identify(request)
            raw = await self._message(context)
            message: Any = kind.FromString(raw if isinstance(raw, bytes) else b"")
            return describe(message.name, message.version).SerializeToString()
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


REFLECTION_S = 10.0


class BoundedReflection(ReflectionServicer):
    """Reflection, which needs no key: each call ends after a while, so that nobody occupies calls with it."""

    async def ServerReflectionInfo(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802  # the library's name
        """The responses to the requests of a stream."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REFLECTION_S):
                responses: Any = super().ServerReflectionInfo(request_iterator, context)
                async for response in responses:
                    await context.write(response)


MAX_METADATA_BYTES = 16 << 10
MAX_STREAMS = 1024  # Calls at a time on one connection; more wait in the client.
KEEPALIVE_MS = 30_000  # Between two pings of a silent connection; a dead client is noticed after one.
KEEPALIVE_TIMEOUT_MS = 10_000
MAX_AGE_MS = 600_000  # Then a client opens a new connection, and calls that it does not read end after the grace.
MAX_AGE_GRACE_MS = 600_000  # The longest answer ends on the old connection.


class GrpcServer:
    """The server of one gateway."""

    def __init__(self, service: InferenceService, config: GatewayConfig, own: GrpcConfig) -> None:
        self._config = config
        self._own = own
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=config.max_connections,
            options=[
                ("grpc.max_receive_message_length", config.longest.body_bytes),
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
        reflected = BoundedReflection((SERVICE, reflection.SERVICE_NAME))
        add_reflection: Any = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
        add_reflection(reflected, self._server)

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
