"""The direct endpoint of a worker, over TCP: gateways that cannot reach Redis send their batches here.

scheduler/protocol/direct.py has the wire format. A connection must send the token for direct calls within a second, and
then runs one batch at a time. An error on a connection closes only that connection.
"""

import asyncio
import hmac
import math
import socket
from collections.abc import Callable

import structlog

from gpu_pool.config import WorkerConfig
from gpu_pool.model_process.stall_detector import StallDetector
from gpu_pool.worker.direct_address import announced, own_name
from gpu_pool.worker.direct_batches import BatchRejected, DirectBatches
from gpu_pool.worker.execution import not_run
from scheduler.errors import ErrorCode, StartError
from scheduler.failpoints import failpoint
from scheduler.protocol.batches import Outcome
from scheduler.protocol.direct import (
    HEADER,
    MAX_BODY_BYTES,
    MAX_ITEMS,
    DirectBatch,
    DirectBusy,
    DirectError,
    DirectResults,
    Hello,
    ToWorker,
    Welcome,
    body_length,
    direct_token,
    pack,
    read_by_worker,
)

log = structlog.get_logger()

MAX_CONNECTIONS = 64
HELLO_S = 1.0
REFUSALS_EVERY_S = 10.0  # At most one log line in this time.
TRANSFER_S = 5.0  # For the body of a frame after its header, and for sending a response.
_MAX_HELLO_BYTES = 4096  # Limit before authentication.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # Finds connections of gateways that are gone.


class DirectEndpoint:
    """A TCP server, if `config` has a host and a token. `malformed` counts protocol errors, `refused` wrong tokens.

    `local_host` returns the address of this machine from which Redis is reached, "" while it is unknown.
    """

    def __init__(
        self, config: WorkerConfig, batches: DirectBatches, local_host: Callable[[], str] = lambda: ""
    ) -> None:
        self._config = config
        self._batches = batches
        self._welcome = pack(Welcome(config.worker_id, min(config.max_batch_size, MAX_ITEMS)))
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._responding: set[asyncio.Task[None]] = set()
        self._draining = False
        self._stall_detector = StallDetector()
        self._local_host = local_host
        # With a service token, the token derived from it and itself are accepted too.
        found = config.direct_token, direct_token(config.service_token), config.service_token
        self._tokens = tuple(token for token in found if token)
        self._port = 0
        self._hostname = ""
        self._refused_at = -math.inf
        self.malformed = 0
        self.refused = 0

    async def start(self) -> None:
        """Listen. Raises StartError if that is not possible."""
        host, port = self._config.direct_host, self._config.direct_port
        if not host or not self._tokens:
            return
        try:
            # Only the first address: each of several would get its own port.
            info = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._server = await asyncio.start_server(self._accept, str(info[0][4][0]), port, family=info[0][0])
        except OSError as error:
            fault = f"{error.strerror or error}"
            raise StartError(f"The direct endpoint cannot listen on {host}:{port}: {fault}; choose another.") from None
        self._port = self._server.sockets[0].getsockname()[1]
        self._hostname = await own_name()
        log.info("direct endpoint listening", host=host, port=self._port)

    @property
    def address(self) -> str:
        """host:port, as announced to gateways; "" if there is none."""
        if not self._port:
            return ""
        return announced(self._config, self._port, self._local_host(), self._hostname)

    def drain(self) -> None:
        """Accept no new connection, and no new batch on existing ones."""
        self._draining = True
        self._port = 0
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Close every connection after its current response was sent."""
        self.drain()
        if self._responding:
            await asyncio.wait(self._responding, timeout=HELLO_S)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._draining or len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        connection = asyncio.create_task(self._serve(reader, writer), name="direct-connection")
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        try:
            if await self._authenticate(reader, writer):
                await self._serve_batches(reader, writer)
        except DirectError as error:
            self.malformed += 1
            log.warning("direct connection closed", reason=str(error), malformed=self.malformed)
        except (OSError, EOFError, TimeoutError):
            pass  # The gateway closed the connection or sent no hello.
        except Exception as error:
            log.exception("direct connection failed", error=type(error).__name__)
        finally:
            writer.close()

    async def _serve_batches(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._stall_detector.watched():  # Before the welcome, so no batch can arrive unwatched.
            await _send(writer, self._welcome)
            while not self._draining:
                batch = await _receive(reader, MAX_BODY_BYTES)
                if not isinstance(batch, DirectBatch):
                    raise DirectError("A direct connection sends one hello.")
                if len(batch.items) > MAX_ITEMS:
                    raise DirectError(f"A direct batch holds {len(batch.items)} items; at most {MAX_ITEMS} are taken.")
                answering = asyncio.create_task(self._answer(batch, writer), name="direct-answer")
                self._responding.add(answering)
                answering.add_done_callback(self._responding.discard)
                await answering

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        async with asyncio.timeout(HELLO_S):
            hello = await _receive(reader, _MAX_HELLO_BYTES)
        if not isinstance(hello, Hello):
            raise DirectError("A direct connection must begin with a hello.")
        if any(hmac.compare_digest(hello.token.encode(), each.encode()) for each in self._tokens):
            return True
        self.refused += 1
        now = asyncio.get_running_loop().time()
        if now - self._refused_at < REFUSALS_EVERY_S:
            return False
        self._refused_at = now
        log.warning(
            "direct connection refused: the token is wrong; TIERLANE_DIRECT_TOKEN must follow from the gateways' "
            "TIERLANE_SERVICE_TOKEN (docs/deploy.md)",
            gateway=hello.gateway_id[:64],
            peer=str(writer.get_extra_info("peername")),
            refused=self.refused,
        )
        return False

    async def _answer(self, batch: DirectBatch, writer: asyncio.StreamWriter) -> None:
        why = (
            "This worker was stalled, so the waiting time of the batch is unknown."
            if self._stall_detector.in_doubt()
            else ""
        )
        outcomes: list[Outcome] = []
        if not why:
            try:
                outcomes = await self._batches.run(batch.items)
            except BatchRejected as error:
                why = str(error)
        try:
            frame = pack(DirectBusy(batch.seq, why) if why else DirectResults(batch.seq, outcomes))
        except DirectError:
            too_large = "The model's output is too large."
            outcomes = [not_run(each.id, ErrorCode.INVALID_OUTPUT, too_large) for each in outcomes]
            frame = pack(DirectResults(batch.seq, outcomes))
        failpoint("direct_unanswered")
        await _send(writer, frame)


async def _receive(reader: asyncio.StreamReader, most: int) -> ToWorker:
    """The next message. Raises DirectError, EOFError at the end of the connection, TimeoutError inside a frame."""
    length = body_length(await reader.readexactly(HEADER.size))
    if length > most:
        raise DirectError(f"A direct message announces {length} bytes, over the limit of {most}.")
    async with asyncio.timeout(TRANSFER_S):
        return read_by_worker(await reader.readexactly(length))


async def _send(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(frame)
    try:
        async with asyncio.timeout(TRANSFER_S):
            await writer.drain()
    except TimeoutError:
        writer.transport.abort()  # The gateway reads nothing, so close() would wait forever.
        raise
