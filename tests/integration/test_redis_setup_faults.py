"""Faults of TIERLANE_REDIS_URL before real servers: one sentence, at the start of roles and in `tierlane check`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from certificates import certificates
from guarded_redis import GuardedRedis
from integration.test_tls import with_files
from scheduler.errors import RedisUnavailable
from scheduler.redis_client.connections import check_server, command_client
from tierlane.connect import VerbError
from tierlane.operate.cells import redis_at
from tierlane_local.embedded.binaries import find_redis
from tls_front import tls_before_redis


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[GuardedRedis]:
    """One server and one Sentinel, both with passwords."""
    servers = GuardedRedis(tmp_path, find_redis(), replicas=0, sentinels=1)
    try:
        await servers.start()
        yield servers
    finally:
        servers.stop()


async def faults(url: str) -> list[str]:
    """The sentences at the start of a role, and of the commands of operators; without any if the server can be used."""
    client, found = command_client(url), []
    try:
        await check_server(client)
    except RedisUnavailable as error:
        found.append(str(error))
    finally:
        await client.aclose()
    try:
        async with redis_at(url) as operated:
            await check_server(operated)
    except VerbError as error:
        found.append(str(error))
    return found


async def test_each_fault_is_one_sentence_that_names_the_part_of_the_url(guarded: GuardedRedis) -> None:
    """Wrong and missing logins at Redis and at the Sentinels, an unknown service, addresses without a Sentinel, and TLS where
    there is none. The good URL works. No sentence has a password.
    """
    url, port, sentinel = guarded.url, guarded.ports[0], guarded.sentinel_ports[0]
    login, here = "sentinel_password=watch%262", f"127.0.0.1:{sentinel}"
    cases = {
        url: "",
        url.replace(login, "sentinel_password=wrong"): f"Sentinel at {here} rejected the login: correct sentinel_user",
        url.replace(
            f"?{login}", ""
        ): f"Sentinel at {here} requires a password: set sentinel_user and sentinel_password",
        url.replace("/primary", "/other"): f"Sentinel at {here} does not monitor 'other': correct the service",
        url.replace(here, "127.0.0.1:1,127.0.0.1:2"): (
            "No Sentinel answered (127.0.0.1:1 refused the connection, 127.0.0.1:2 refused the connection): start them"
        ),
        url.replace("tierlane:data", "tierlane:wrong"): "Redis rejected the login: correct the user and password",
        url.replace("redis+", "rediss+"): f"Redis at 127.0.0.1:{port} does not use TLS: begin TIERLANE_REDIS_URL with",
        url.replace("redis+", "rediss+") + "&sentinel_tls=on": f"Sentinel at {here} does not use TLS: remove",
        f"redis://127.0.0.1:{port}": "Redis requires a password: set the user and password in TIERLANE_REDIS_URL",
        f"rediss://127.0.0.1:{port}": f"Redis at 127.0.0.1:{port} does not use TLS",
    }
    for given, sentence in cases.items():
        found = await faults(given)

        assert [each[: len(sentence)] for each in found] == ([sentence] * 2 if sentence else [])
        for each in found:
            assert each.count(".\n") == 0
            assert len(each) < 250
            assert not any(secret in each for secret in ("data", "watch", "wrong"))


async def test_a_server_with_tls_is_named_if_the_url_has_none(redis_url: str, tmp_path: Path) -> None:
    """The scheme is at fault, and with the scheme a certificate of an unknown authority."""
    made = certificates(tmp_path)
    async with tls_before_redis(Path(redis_url.removeprefix("unix://")), made.demanding()) as port:
        plain = await faults(f"redis://127.0.0.1:{port}/0")
        unknown = await faults(f"rediss://127.0.0.1:{port}/0")
        good = await faults(
            with_files(f"rediss://127.0.0.1:{port}/0?", ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"), made)
        )

    assert plain == [f"Redis at 127.0.0.1:{port} uses TLS: begin TIERLANE_REDIS_URL with rediss instead of redis."] * 2
    assert len(unknown) == 2
    assert all("is not accepted" in each and "correct ssl_ca_certs in TIERLANE_REDIS_URL" in each for each in unknown)
    assert good == []
