"""The direct endpoint of a worker, over TCP: gateways that cannot reach Redis send their batches here.

scheduler/protocol/direct.py has the wire format. A connection must send the token for direct calls within a second, and
then runs one batch at a time. An error on a connection closes only that connection. Batches run on the same model as
those of the queue. There is no lease and no reaper: the worker itself reruns what a lost model process leaves, first in
halves, then one by one, so that a request that kills the model is finally alone.
"""

import asyncio
import hmac
import ipaddress
import math
import socket
import time
from collections.abc import Callable, Sequence

import structlog

from gpu_pool.config import WorkerConfig
from gpu_pool.model_process.handle import ModelLost, RunRefused
from gpu_pool.model_process.stall_detector import StallDetector
from gpu_pool.model_process.supervisor import ModelSupervisor
from gpu_pool.model_process.watchdog import ModelHung
from gpu_pool.worker.execution import Execution, NotStarted, not_run
from gpu_pool.worker.traces import BatchTrace, BatchTraces
from scheduler.errors import ErrorCode, StartError, TierlaneError
from scheduler.failpoints import failpoint
from scheduler.protocol.batches import RETRY_BUDGET, ClaimedRequest, Outcome
from scheduler.protocol.direct import (
    HEADER,
    MAX_BODY_BYTES,
    MAX_ITEMS,
    DirectBatch,
    DirectBusy,
    DirectError,
    DirectItem,
    DirectResults,
    Hello,
    ToWorker,
    Welcome,
    body_length,
    direct_token,
    pack,
    read_by_worker,
)

MOST_WAITING = 4

log = structlog.get_logger()


class BatchRejected(TierlaneError):
    """The batch was not run; the message is the reason for the gateway. Another worker may run it."""


class DirectBatches:
    """Runs the direct batches of all connections; at most MOST_WAITING wait for the model."""

    def __init__(
        self, execution: Execution, supervisor: ModelSupervisor, draining: Callable[[], bool], traces: BatchTraces
    ) -> None:
        self._execution = execution
        self._supervisor = supervisor
        self._draining = draining
        self._traces = traces
        self._waiting = 0
        self._runs: set[asyncio.Task[list[Outcome]]] = set()
        self.in_flight = 0

    async def run(self, items: Sequence[DirectItem]) -> list[Outcome]:
        """One outcome for each item, at the latest when the last item's time is over. Raises BatchRejected."""
        requests = [ClaimedRequest(item.id, item.ms_left, 1, item.body) for item in items]
        if self._execution.slow_model.confirmed:  # Even while its process is being replaced.
            return _ended(requests, ErrorCode.MODEL_TOO_SLOW)
        self._check()
        read_at = time.monotonic()
        longest_s = max((item.ms_left for item in items), default=0) / 1000
        run_task = self._start(requests, read_at)
        # A run past its deadline continues: killing the model for it would cost the next batch more.
        # A run that has not begun will find that no time is left.
        await asyncio.wait([run_task], timeout=longest_s)
        if not run_task.done():
            return [_deadline_exceeded(request.id) for request in requests]
        return _in_time(run_task.result(), requests, (time.monotonic() - read_at) * 1000)

    async def settled(self, timeout_s: float | None) -> None:
        """Wait until nothing runs, for at most `timeout_s`."""
        if self._runs:
            await asyncio.wait(self._runs, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel what is left."""
        for run_task in self._runs:
            run_task.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)

    def _check(self) -> None:
        if self._draining():
            raise BatchRejected("This worker is shutting down.")
        if self._supervisor.model is None:
            raise BatchRejected("The model of this worker is not ready.")
        if self._waiting >= MOST_WAITING:
            raise BatchRejected("Too many direct batches wait for this worker.")

    def _start(self, requests: Sequence[ClaimedRequest], read_at: float) -> asyncio.Task[list[Outcome]]:
        self._waiting += 1
        run_task = asyncio.create_task(self._attempt(requests, read_at, 0), name="direct")
        self._runs.add(run_task)
        self.in_flight += len(requests)

        def ended(run_task: asyncio.Task[list[Outcome]]) -> None:
            self._runs.discard(run_task)
            self.in_flight -= len(requests)
            if not run_task.cancelled() and run_task.exception() is not None:
                log.warning("direct batch not run", reason=str(run_task.exception()), size=len(requests))

        run_task.add_done_callback(ended)
        return run_task

    async def _attempt(self, requests: Sequence[ClaimedRequest], read_at: float, losses: int) -> list[Outcome]:
        """Run these requests; after a lost model run them again in smaller parts, while there is time and retry budget.

        The caller has counted them in `_waiting`.
        """
        model = self._execution.slow_model
        if model.slow:
            self._waiting -= 1
            if not model.confirmed and losses == 0:
                raise BatchRejected("The model of this worker is being measured.")
            return _ended(requests, ErrorCode.MODEL_TOO_SLOW)
        try:
            return await self._run(requests, read_at)
        except ModelHung:
            return _ended(requests, ErrorCode.GPU_TIMEOUT)
        except RunRefused as error:
            if losses == 0 and not error.counted:
                raise BatchRejected(str(error)) from error
            losses += 1
        except ModelLost as error:
            if self._execution.stopped or self._draining():
                raise BatchRejected("This worker is shutting down.") from error
            if not isinstance(error, NotStarted):
                losses += 1
            elif losses == 0:
                raise BatchRejected("The model of this worker was lost before the batch began.") from error
        if losses > RETRY_BUDGET:
            return _ended(requests, ErrorCode.WORKER_LOST)
        if not await self._wait_for_model(requests, read_at):
            return _ended(requests, ErrorCode.DEADLINE_EXCEEDED)
        outcomes: list[Outcome] = []
        for part in parts(requests, losses):
            self._waiting += 1
            outcomes += await self._attempt(part, read_at, losses)
        return outcomes

    async def _run(self, requests: Sequence[ClaimedRequest], read_at: float) -> list[Outcome]:
        with self._traces.of("", requests, read_at) as trace:
            outcomes = await self._execution.run(
                trace.requests, read_at, lambda: self._start_running(trace), trace.over
            )
            trace.ended(outcomes)
            return outcomes

    def _start_running(self, trace: BatchTrace) -> bool:
        self._waiting -= 1
        trace.begins()
        return True

    async def _wait_for_model(self, requests: Sequence[ClaimedRequest], read_at: float) -> bool:
        """Wait for the next model process while any of these requests has time; whether it is ready."""
        until = read_at + max(request.ms_left for request in requests) / 1000
        try:
            async with asyncio.timeout(until - time.monotonic()):
                return await self._supervisor.ready.wait()
        except TimeoutError:
            return False


def parts(requests: Sequence[ClaimedRequest], losses: int) -> list[Sequence[ClaimedRequest]]:
    """What runs together after so many lost model processes: two halves, later single requests."""
    size = (len(requests) + 1) // 2 if losses == 1 else 1
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def _in_time(outcomes: Sequence[Outcome], requests: Sequence[ClaimedRequest], gone_ms: float) -> list[Outcome]:
    """Requests that were overdue when the batch ended got an error from their gateway; the outcome must match."""
    late = {request.id for request in requests if request.ms_left <= gone_ms}
    return [_deadline_exceeded(outcome.id) if outcome.id in late else outcome for outcome in outcomes]


def _ended(requests: Sequence[ClaimedRequest], code: ErrorCode) -> list[Outcome]:
    return [not_run(request.id, code, "") for request in requests]


def _deadline_exceeded(request_id: str) -> Outcome:
    return not_run(request_id, ErrorCode.DEADLINE_EXCEEDED, "The deadline of this request came before its response.")


MAX_CONNECTIONS = 64
HELLO_S = 1.0
REFUSALS_EVERY_S = 10.0  # At most one log line in this time.
LOOPBACK = "127.0.0.1"
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
        self._tokens = accepted_tokens(config)
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
        self._hostname = await _own_name()
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
        _keep_alive(writer)
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
                await self._next(reader, writer)

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        async with asyncio.timeout(HELLO_S):
            hello = await _receive(reader, _MAX_HELLO_BYTES)
        if not isinstance(hello, Hello):
            raise DirectError("A direct connection must begin with a hello.")
        good = any(hmac.compare_digest(hello.token.encode(), each.encode()) for each in self._tokens)
        if not good:
            self._reject_hello(hello, writer)
        return good

    def _reject_hello(self, hello: Hello, writer: asyncio.StreamWriter) -> None:
        self.refused += 1
        now = asyncio.get_running_loop().time()
        if now - self._refused_at < REFUSALS_EVERY_S:
            return
        self._refused_at = now
        log.warning(
            "direct connection refused: the token is wrong; TIERLANE_DIRECT_TOKEN must follow from the gateways' "
            "TIERLANE_SERVICE_TOKEN (docs/deploy.md)",
            gateway=hello.gateway_id[:64],
            peer=str(writer.get_extra_info("peername")),
            refused=self.refused,
        )

    async def _next(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        message = await _receive(reader, MAX_BODY_BYTES)
        if not isinstance(message, DirectBatch):
            raise DirectError("A direct connection sends one hello.")
        if len(message.items) > MAX_ITEMS:
            raise DirectError(f"A direct batch holds {len(message.items)} items; at most {MAX_ITEMS} are taken.")
        answering = asyncio.create_task(self._answer(message, writer), name="direct-answer")
        self._responding.add(answering)
        answering.add_done_callback(self._responding.discard)
        await answering

    async def _answer(self, batch: DirectBatch, writer: asyncio.StreamWriter) -> None:
        frame = await self._outcomes(batch)
        failpoint("direct_unanswered")
        await _send(writer, frame)

    async def _outcomes(self, batch: DirectBatch) -> bytes:
        if self._stall_detector.in_doubt():
            return pack(DirectBusy(batch.seq, "This worker was stalled, so the waiting time of the batch is unknown."))
        try:
            outcomes = await self._batches.run(batch.items)
        except BatchRejected as error:
            return pack(DirectBusy(batch.seq, str(error)))
        try:
            return pack(DirectResults(batch.seq, outcomes))
        except DirectError:
            return pack(DirectResults(batch.seq, _too_large(outcomes)))


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


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def accepted_tokens(config: WorkerConfig) -> tuple[str, ...]:
    """The token for direct calls, and with a service token both the token derived from it and itself."""
    found = config.direct_token, direct_token(config.service_token), config.service_token
    return tuple(token for token in found if token)


def announced(config: WorkerConfig, port: int, local_host: str, named: str) -> str:
    """The address for gateways. `local_host`: from where Redis is reached; `named`: this host's name, "" if it does not
    resolve.

    A worker that listens on all addresses is best reached at the address from which it reaches Redis. A Redis on the
    same host says nothing about other hosts; the host name may.
    """
    host = config.direct_advertise or config.direct_host
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - only compared
        host = local_host if local_host and not _is_loopback(local_host) else named or local_host or LOOPBACK
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _own_name() -> str:
    name = socket.gethostname()
    try:
        await asyncio.get_running_loop().getaddrinfo(name, None)
    except OSError:
        return ""
    return name


def _too_large(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [not_run(outcome.id, ErrorCode.INVALID_OUTPUT, "The model's output is too large.") for outcome in outcomes]
