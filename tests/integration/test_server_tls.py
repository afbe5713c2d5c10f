"""TLS to Redis and PostgreSQL with a certificate of ours, by the parameters of their URLs, as deploy/k8s/overlays/tls has them."""

import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from redis.asyncio import Redis

from certificates import Certificates, certificates
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
from stack import free_port
from tls_front import tls_before_postgres, tls_before_redis

__all__ = ["database_url", "postgres_server"]


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    """Of an authority that no system knows."""
    return certificates(tmp_path)


def with_files(url: str, names: Sequence[str], made: Certificates, *, shown: bool = True) -> str:
    """The URL with the parameters of these names: the authority, and where one is shown our certificate and its key."""
    files = [made.authority.cert, made.client.cert, made.client.key] if shown else [made.authority.cert]
    return url + "&".join(f"{name}={file}" for name, file in zip(names, files, strict=False))


REDIS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
POSTGRES_FILES = ("sslrootcert", "sslcert", "sslkey")


def redis_socket(redis_url: str) -> Path:
    return Path(redis_url.removeprefix("unix://"))


async def test_every_kind_of_client_shows_its_certificate_to_redis(
    redis_url: str, client: Redis, made: Certificates
) -> None:
    """Commands, scripts, blocking reads, subscriptions."""
    await client.lpush("l", "x")
    async with tls_before_redis(redis_socket(redis_url), made.demanding()) as port:
        url = with_files(f"rediss://127.0.0.1:{port}/0?", REDIS_FILES, made)
        commands, blocking, subscriber = command_client(url, 2.0), blocking_client(url), subscriber_client(url)
        try:
            async with bounded(2.0):
                assert await commands.ping()
            assert await Presence(commands, Keys()).census() == (0, 0)
            assert await blocking_read(blocking, b"BLPOP", b"l", b"1", block_s=1.0) == [b"l", b"x"]
            async with subscriber.pubsub() as listening:
                await listening.subscribe("c")
                assert (await listening.get_message(timeout=2.0) or {})["type"] == "subscribe"
        finally:
            for each in (commands, blocking, subscriber):
                await each.aclose()


async def test_redis_turns_away_who_shows_none(redis_url: str, made: Certificates) -> None:
    """And a server of another authority is not spoken to."""
    async with tls_before_redis(redis_socket(redis_url), made.demanding()) as port:
        for url in (
            with_files(f"rediss://127.0.0.1:{port}/0?", REDIS_FILES, made, shown=False),
            f"rediss://127.0.0.1:{port}/0",
        ):
            without = command_client(url, 2.0)
            with pytest.raises(RedisUnavailable):
                await Presence(without, Keys()).census()
            await without.aclose()


async def test_all_connections_of_a_process_share_one_ssl_context(
    redis_url: str, made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines, pools and Sentinels of one URL, and attempts that fail: a context costs 20 ms of CPU, an attempt does not."""
    contexts = 0
    make = ssl.create_default_context

    def counted(*args: Any, **options: Any) -> ssl.SSLContext:
        nonlocal contexts
        contexts += 1
        return make(*args, **options)

    async with tls_before_redis(redis_socket(redis_url), made.demanding()) as port:
        monkeypatch.setattr(ssl, "create_default_context", counted)
        url = with_files(f"rediss://127.0.0.1:{port}/0?", REDIS_FILES, made)
        away = f"127.0.0.1:{free_port()}"
        sentinel = with_files(f"rediss+sentinel://{away}/primary?", REDIS_FILES, made) + "&sentinel_tls=on"
        clients = [command_client(url, 2.0), blocking_client(url), command_client(sentinel, 2.0)]
        for each in clients:
            for _ in range(3):
                with suppress(RedisUnavailable):
                    await Presence(each, Keys()).census()
                with suppress(RedisUnavailable):
                    async with bounded(2.0):
                        await each.ping()
                pipelined(each).close()
        for each in clients:
            await each.aclose()
    assert contexts == 1


async def test_a_renewed_certificate_is_shown_by_the_next_connection(redis_url: str, made: Certificates) -> None:
    """The files are read again when they change, without a restart."""
    good = made.client.cert.read_bytes(), made.client.key.read_bytes()
    (made.client.cert.parent / "other").mkdir()
    other = certificates(made.client.cert.parent / "other").client
    async with tls_before_redis(redis_socket(redis_url), made.demanding()) as port:
        client = command_client(with_files(f"rediss://127.0.0.1:{port}/0?", REDIS_FILES, made), 2.0)
        assert await Presence(client, Keys()).census() == (0, 0)

        made.client.cert.write_bytes(other.cert.read_bytes())
        made.client.key.write_bytes(other.key.read_bytes())
        pipelined(client).close()
        with pytest.raises(RedisUnavailable):
            await Presence(client, Keys()).census()

        made.client.cert.write_bytes(good[0])
        made.client.key.write_bytes(good[1])
        assert await Presence(client, Keys()).census() == (0, 0)
        await client.aclose()


def place(database_url: str, port: int) -> str:
    """The same database behind the port."""
    parts = urlsplit(database_url)
    return f"{parts.scheme}://{parts.username}@127.0.0.1:{port}{parts.path}?ssl=verify-full&"


def postgres_socket(database_url: str) -> Path:
    query = parse_qs(urlsplit(database_url).query)
    return Path(query["host"][0]) / f".s.PGSQL.{query['port'][0]}"


async def test_roles_and_migrations_show_their_certificate_to_postgresql(database_url: str, made: Certificates) -> None:
    """By the same URL."""
    async with tls_before_postgres(postgres_socket(database_url), made.demanding()) as port:
        url = with_files(place(database_url, port), POSTGRES_FILES, made)
        async with closing(
            await connect(url, name="t", connect_timeout_s=5.0, statement_timeout_ms=1000)
        ) as connection:
            assert await connection.fetchval("SELECT 1") == 1
        assert await current_revision(url) == head_revision()


async def test_postgresql_turns_away_who_shows_none(database_url: str, made: Certificates) -> None:
    """Both ways of connecting say so."""
    async with tls_before_postgres(postgres_socket(database_url), made.demanding()) as port:
        url = with_files(place(database_url, port), POSTGRES_FILES, made, shown=False)
        with pytest.raises(AWAY):
            await (await connect(url, name="t", connect_timeout_s=5.0, statement_timeout_ms=1000)).fetchval("SELECT 1")
        with pytest.raises(StartError, match=r"127\.0\.0\.1"):
            await current_revision(url)


@pytest.mark.parametrize("url", ["rediss://127.0.0.1:1/0?", "rediss+sentinel://127.0.0.1:1/service?"])
def test_connections_to_redis_share_a_context_until_a_file_is_renewed(
    url: str, made: Certificates, tmp_path: Path
) -> None:
    """Making one takes tens of milliseconds, in which a gateway does nothing else; certificates are renewed in place."""
    pool = command_client(with_files(url, REDIS_FILES, made)).connection_pool
    first, second = (pool.make_connection()._connection_arguments()["ssl"] for _ in range(2))
    assert first is second

    certificates(tmp_path)
    assert pool.make_connection()._connection_arguments()["ssl"] is not first
