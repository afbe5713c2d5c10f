"""The limits that follow the distance of Redis, and the sentences about faults of its configuration."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, Connection
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,  # noqa: A004 - redis-py's
    NoPermissionError,
    RedisError,
    ResponseError,
)
from structlog.testing import capture_logs

from certificates import certificates
from gateway.circuit_breaker import Breaker, BreakerState
from scheduler.redis_client import distance
from scheduler.redis_client.connections import close_client, command_client, limit_of, pipelined, unavailable
from scheduler.redis_client.distance import HEARTBEATS, MOST_ROUND_TRIP_S, Distance, too_far
from scheduler.redis_client.pipeline import PipelinedClient
from scheduler.redis_client.sentinel import fault_of
from scheduler.redis_client.setup_faults import Server, SetupFault, login_fault, speaks_tls, tls_fault
from tierlane.check.system import judge_distance


def test_limits_follow_the_round_trip_up_to_a_bound() -> None:
    """Nothing is added beside the server; one that was never reached may be as far as the bound."""
    near, middle, far, unknown = Distance(7, 0.0), Distance(7, 0.06), Distance(7, 0.3), Distance(7)

    assert (near.call_s, near.connect_s, near.find_s, near.slack_s) == (0.0, 0.0, 0.0, 0.0)
    assert (middle.call_s, middle.connect_s) == (0.06, pytest.approx(0.42))
    assert (far.call_s, far.connect_s) == (MOST_ROUND_TRIP_S, pytest.approx(7 * MOST_ROUND_TRIP_S))
    assert (unknown.connect_s, unknown.slack_s) == (far.connect_s, 0.0)


def test_attempts_that_take_too_long_get_more_time_until_one_succeeds() -> None:
    """The primary may be another server now. Calls on open connections keep their limit."""
    found = Distance(7, 0.001)
    allowed = [found.connect_s]
    for _ in range(5):
        found.timed_out()
        allowed.append(found.connect_s)

    assert allowed == sorted(allowed)
    assert allowed[1] == pytest.approx(7 * distance.NEAR_S)
    assert allowed[-1] == pytest.approx(7 * MOST_ROUND_TRIP_S)
    assert found.call_s == 0.001
    found.measured(0.002)
    assert found.connect_s == pytest.approx(0.014)


def test_the_shortest_of_the_last_heartbeats_is_the_round_trip() -> None:
    """A late reply does not count; a changed route does, after some heartbeats."""
    found = Distance(7, 0.001)
    for _ in range(HEARTBEATS - 1):
        found.beat(0.5)
    found.beat(0.09)
    assert found.round_trip_s == 0.09
    for _ in range(HEARTBEATS):
        found.beat(0.2)
    assert found.round_trip_s == 0.2


def test_check_and_health_name_a_round_trip_beyond_the_bound() -> None:
    """`check` passes, warns, and fails by the same figure."""
    found = [judge_distance(seconds) for seconds in (0.0004, 0.02, 0.06, 0.12, 0.26)]

    assert [item.level for item in found] == ["pass", "pass", "warn", "warn", "fail"]
    assert [item.said for item in found][:2] == ["round trip 0.4 ms", "round trip 20.0 ms"]
    assert "260 ms" in found[-1].advice
    assert "150 ms" in found[-1].advice
    assert (too_far(None), too_far(0.15)) == (None, None)


def test_a_breaker_waits_longer_for_a_dependency_that_is_far_away() -> None:
    """Half a second of silence, and the time of a new connection."""
    breaker = Breaker()
    breaker.slack_s = 0.84
    breaker.begun(10.0)

    assert breaker.update(11.3) is BreakerState.CLOSED
    assert breaker.update(11.4) is BreakerState.OPEN


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(serve: Serve) -> AsyncIterator[Redis]:
    """A client of a server whose single connection `serve` serves."""
    ended = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer)
        writer.close()
        await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    client = command_client(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    yield client
    await client.aclose()
    server.close()
    await ended.wait()


async def test_clients_measure_the_round_trip_when_they_connect() -> None:
    """Limits of a new client allow for the bound, then for what was measured; a second look replaces a long first one."""
    pauses = iter((0.08, 0.03))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.strip() == b"HELLO":
                writer.write(b"%1\r\n$5\r\nproto\r\n:3\r\n")
            elif line.strip() == b"ID":
                await asyncio.sleep(next(pauses))
                writer.write(b":7\r\n")
            elif line.strip() == b"PING":
                writer.write(b"+PONG\r\n")

    async with served(serve) as client:
        assert limit_of(client) == pytest.approx(0.25 + 7 * MOST_ROUND_TRIP_S)

        assert await pipelined(client).call(("PING",)) in (b"PONG", "PONG")

        measured = pipelined(client).distance.round_trip_s
        assert measured is not None
        assert 0.03 <= measured < 0.08


async def test_a_server_that_accepts_and_says_nothing_ends_an_attempt_in_time() -> None:
    """Within the limit of the distance that was known; the next attempt gets more."""

    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with served(serve) as client:
        pipelined(client).distance.measured(0.001)

        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await pipelined(client).call(("PING",))

        assert time.monotonic() - began < 0.5
        assert pipelined(client).distance.connect_s == pytest.approx(7 * distance.NEAR_S)


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (AuthenticationError("Authentication required."), "Redis requires a password: set the user and password"),
        (AuthenticationError("HELLO must be called with the client already authenticated"), "requires a password"),
        (AuthenticationError("invalid username-password pair or user is disabled."), "Redis rejected the login"),
        (ConnectionError("invalid username-password pair or user is disabled."), "Redis rejected the login"),
        (
            NoPermissionError("User secret has no permissions to run the 'ping' command"),
            r"roles need their rules of deploy/redis/users.acl, people its user admin \(run the 'ping' command\)",
        ),
        (
            ResponseError(
                "ERR ACL failure in script: User secret has no permissions to run the 'get' command script: a, on @b:1."
            ),
            r"people its user admin \(run the 'get' command\)",
        ),
        (
            # Redis 7.0.
            ResponseError("ERR The user executing the script can't run this command or subcommand script: a, on @b:1."),
            r"people its user admin \(can't run this command or subcommand\)",
        ),
        (
            ConnectionError("[SSL: X] certificate verify failed: unable to get local issuer certificate (_ssl.c:992)"),
            r"\(unable to get local issuer certificate\): correct ssl_ca_certs",
        ),
        (SetupFault("As it is."), r"^As it is\.$"),
    ],
)
def test_a_fault_of_the_configuration_is_one_sentence(error: Exception, names: str) -> None:
    """It names the setting, and neither user nor password."""
    with pytest.raises(Exception, match=names) as caught:
        raise unavailable(error)

    assert "secret" not in str(caught.value)
    assert str(caught.value).endswith(".")
    assert isinstance(error, SetupFault) or "TIERLANE_REDIS_URL" in str(caught.value)


def test_other_faults_keep_their_text() -> None:
    """A server that is away is no fault of the configuration."""
    assert login_fault(ConnectionError("Connection closed by server.")) is None
    assert str(unavailable(ConnectionError("Gone."))) == "Redis did not respond: ConnectionError: Gone."
    assert str(unavailable(TimeoutError())) == "Redis did not respond: TimeoutError"


@pytest.mark.parametrize(
    ("kind", "tls", "names"),
    [
        ("Redis", True, "Redis at h:1 does not use TLS: begin TIERLANE_REDIS_URL with redis instead of rediss"),
        ("Redis", False, "Redis at h:1 uses TLS: begin TIERLANE_REDIS_URL with rediss instead of redis"),
        ("Sentinel", True, "Sentinel at h:1 does not use TLS: remove sentinel_tls=on"),
        ("Sentinel", False, "Sentinel at h:1 uses TLS: use rediss[+]sentinel:// with sentinel_tls=on"),
    ],
)
def test_tls_against_plain_and_the_reverse(kind: str, tls: bool, names: str) -> None:
    """The sentence names the server and the part of the URL; without a contradiction there is none."""
    sentence = tls_fault(Server(kind, "h", 1, tls), speaks_tls=not tls)

    assert sentence is not None
    with pytest.raises(SetupFault, match=names):
        raise SetupFault(sentence)
    assert tls_fault(Server(kind, "h", 1, tls), speaks_tls=tls) is None


async def test_a_port_without_a_server_uses_neither() -> None:
    """Nothing is concluded from a refused connection."""
    assert await speaks_tls(Server("Redis", "127.0.0.1", 1, tls=False)) is None


async def closes(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As a proxy whose Redis is away."""
    writer.close()


async def resets(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As a proxy of containers."""
    writer.transport.abort()


async def rejects(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As a web server."""
    await reader.readline()
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As Redis that requires a login."""
    await reader.readline()
    writer.write(b"-NOAUTH Authentication required.\r\n")
    writer.close()


async def alerts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As Redis with TLS 1.2 that demands a certificate of the client: a fatal handshake_failure."""
    await reader.read(1)
    writer.write(bytes.fromhex("15030300020228"))
    writer.close()


@pytest.mark.parametrize(
    ("serve", "expected"), [(closes, None), (resets, None), (rejects, None), (answers, False), (alerts, True)]
)
async def test_a_server_that_only_closes_does_not_use_tls(serve: Serve, expected: bool | None) -> None:
    """Proxies accept connections while Redis is away; only a handshake, or an alert in reply to one, shows TLS."""
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]

        assert await speaks_tls(Server("Redis", "127.0.0.1", port, tls=False)) is expected


async def test_a_server_with_tls(tmp_path: Path) -> None:
    """Its certificate is of an unknown authority, and it demands one of the client."""
    context = certificates(tmp_path).demanding()
    async with await asyncio.start_server(answers, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]

        assert await speaks_tls(Server("Redis", "127.0.0.1", port, tls=False)) is True


def caused(error: Exception, cause: Exception) -> Exception:
    """As redis-py raises it."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ResponseError("No such master with that name"), "S does not monitor 'primary': correct the service"),
        (AuthenticationError("WRONGPASS"), "S rejected the login: correct sentinel_user and sentinel_password"),
        (
            caused(ConnectionError("x"), ssl.SSLError(1, "[SSL] tlsv13 alert certificate required")),
            "S rejected the TLS connection: correct sentinel_tls, ssl_certfile and ssl_keyfile in TIERLANE_REDIS_URL.",
        ),
        (
            ResponseError("unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'default' 'secret' "),
            """S answered "unknown command 'HELLO'": correct its address in TIERLANE_REDIS_URL if it is not a Sentinel.""",
        ),
        (caused(ConnectionError("x"), ssl.SSLEOFError(8, "EOF occurred in violation of protocol")), None),
        (ConnectionError("Connection closed by server."), None),
    ],
)
def test_what_a_sentinel_answered(error: Exception, sentence: str | None) -> None:
    """Each answer has a sentence, without a password. One that closes the connection has not answered."""
    found = fault_of(error, "S", "primary")

    assert (found is None) is (sentence is None)
    assert (found or "").startswith(sentence or "")
    assert "secret" not in (found or "")


@pytest.mark.parametrize("kind", [AuthenticationError, NoPermissionError, SetupFault])
async def test_calls_that_wait_for_an_attempt_get_its_fault(kind: type[RedisError]) -> None:
    """Each of them reports the fault of the configuration, as the call that made the attempt does."""
    attempts: list[AbstractConnection] = []

    class Refused(Connection):
        """Its login is not accepted."""

        async def connect(self) -> None:
            attempts.append(self)
            await asyncio.sleep(0)
            raise kind("User x has no permissions to run the 'client|id' command")

    calls = PipelinedClient(Refused, 0.25, lambda error: None)
    found = await asyncio.gather(*(calls.call(("PING",)) for _ in range(3)), return_exceptions=True)

    assert [type(error) for error in found] == [kind] * 3
    assert len(attempts) == 1


async def test_a_connection_that_is_not_closed_in_time_is_one_line_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller continues, since the connection is not used any more."""

    async def late() -> None:
        raise TimeoutError("Timed out closing connection after 0.25")

    client = command_client("redis://127.0.0.1:1")
    monkeypatch.setattr(client, "aclose", late)
    with capture_logs() as lines:
        await close_client(client)

    assert [(line["log_level"], line["error"]) for line in lines] == [("info", "TimeoutError")]
