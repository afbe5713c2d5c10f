"""The gRPC server of a gateway, with its bounds. It runs on grpc.aio in the event loop of the gateway."""

from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from gateway.config import GatewayConfig, GrpcConfig
from gateway.grpc.messages import SERVICE
from gateway.grpc.reflection import BoundedReflection
from gateway.grpc.service import InferenceService
from gateway.grpc.tls import server_credentials
from scheduler.errors import StartError

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
