"""TLS to Redis and PostgreSQL with a client certificate, configured in their URLs as deploy/k8s/overlays/tls does."""

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from redis.asyncio import Redis

from certificates import Certificates, certificates
from configs import GONE_MS
from integration.ledger_fixtures import database_url, postgres_server
from ledger.postgres import AWAY, closing, connect
from ledger.revision import current_revision, head_revision
from scheduler.errors import RedisUnavailable, StartError
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import (
    blocking_client,
    blocking_read,
    bounded,
    command_client,
    pipelined,
    subscriber_client,
)
from scheduler.redis_client.keys import Keys
from tls_front import tls_before_postgres, tls_before_redis

__all__ = ["database_url", "postgres_server"]

REDIS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
POSTGRES_FILES = ("sslrootcert", "sslcert", "sslkey")


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    """Certificates of an authority that the system does not know."""
    return certificates(tmp_path)


def with_files(url: str, names: Sequence[str], made: Certificates, *, own: bool = True) -> str:
    """Add the authority to the URL, and our own certificate and key."""
    files = [made.authority.cert, made.client.cert, made.client.key] if own else [made.authority.cert]
    return url + "&".join(f"{name}={file}" for name, file in zip(names, files, strict=False))


def redis_socket(redis_url: str) -> Path:
    return Path(redis_url.removeprefix("unix://"))


async def test_redis_clients_present_their_certificate(
    redis_url: str, client: Redis, made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands, scripts, blocking reads and subscriptions work with one SSL context for all, which takes 20 ms to build.
    A client without a certificate or with another authority is rejected.
    """
    await client.lpush("l", "x")
    created: list[ssl.SSLContext] = []
    create = ssl.create_default_context

    def record(*args: Any, **options: Any) -> ssl.SSLContext:
        created.append(create(*args, **options))
        return created[-1]

    async with tls_before_redis(redis_socket(redis_url), made.demanding()) as port:
        address = f"rediss://127.0.0.1:{port}/0"
        url = with_files(f"{address}?", REDIS_FILES, made)
        monkeypatch.setattr(ssl, "create_default_context", record)
        commands, blocking, subscriber = command_client(url, 2.0), blocking_client(url), subscriber_client(url)
        try:
            async with bounded(2.0):
                assert await commands.ping()
            assert await Presence(commands, Keys(), gone_ms=GONE_MS).census() == (0, 0)
            assert await blocking_read(blocking, b"BLPOP", b"l", b"1", block_s=1.0) == [b"l", b"x"]
            async with subscriber.pubsub() as subscription:
                await subscription.subscribe("c")
                assert (await subscription.get_message(timeout=2.0) or {})["type"] == "subscribe"
                assert len(created) == 1
        finally:
            for each in (commands, blocking, subscriber):
                await each.aclose()
        for rejected in (with_files(f"{address}?", REDIS_FILES, made, own=False), address):
            without = command_client(rejected, 2.0)
            with pytest.raises(RedisUnavailable):
                await Presence(without, Keys(), gone_ms=GONE_MS).census()
            await without.aclose()


async def test_a_renewed_certificate_is_used_by_the_next_connection(redis_url: str, made: Certificates) -> None:
    """The files are read again when they change, without a restart."""
    own = made.client
    good = own.cert.read_bytes(), own.key.read_bytes()
    (own.cert.parent / "other").mkdir()
    other = certificates(own.cert.parent / "other").client
    async with tls_before_redis(redis_socket(redis_url), made.demanding()) as port:
        client = command_client(with_files(f"rediss://127.0.0.1:{port}/0?", REDIS_FILES, made), 2.0)
        assert await Presence(client, Keys(), gone_ms=GONE_MS).census() == (0, 0)

        own.cert.write_bytes(other.cert.read_bytes())
        own.key.write_bytes(other.key.read_bytes())
        pipelined(client).close()
        with pytest.raises(RedisUnavailable):
            await Presence(client, Keys(), gone_ms=GONE_MS).census()

        own.cert.write_bytes(good[0])
        own.key.write_bytes(good[1])
        assert await Presence(client, Keys(), gone_ms=GONE_MS).census() == (0, 0)
        await client.aclose()


async def test_postgresql_connections_present_their_certificate(database_url: str, made: Certificates) -> None:
    """Roles and migrations connect by the same URL; without a certificate both report the server as unavailable."""
    parts = urlsplit(database_url)
    query = parse_qs(parts.query)
    socket = Path(query["host"][0]) / f".s.PGSQL.{query['port'][0]}"

    async def select(url: str) -> Any:
        connection = await connect(url, name="t", connect_timeout_s=5.0, statement_timeout_ms=1000)
        async with closing(connection):
            return await connection.fetchval("SELECT 1")

    async with tls_before_postgres(socket, made.demanding()) as port:
        base = f"{parts.scheme}://{parts.username}@127.0.0.1:{port}{parts.path}?ssl=verify-full&"
        url = with_files(base, POSTGRES_FILES, made)
        assert await select(url) == 1
        assert await current_revision(url) == head_revision()
        without = with_files(base, POSTGRES_FILES, made, own=False)
        with pytest.raises(AWAY):
            await select(without)
        with pytest.raises(StartError, match=r"127\.0\.0\.1"):
            await current_revision(without)
