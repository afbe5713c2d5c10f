"""A server with the users of deploy/redis/users.acl, a client of each user, and what it refused to anybody."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from eventually import eventually
from redis_acl import ROLES, acl_server, password
from scheduler.redis_client.connections import command_client

PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path) -> Iterator[Path]:
    """A server with the users of deploy/redis/."""
    with acl_server(tmp_path_factory.mktemp("acl"), redis_binary) as socket:
        yield socket


def url_of(socket: Path, user: str) -> str:
    return f"unix://{user}:{quote(password(user), safe='')}@{socket}"


@pytest.fixture
async def redis_url(socket: Path) -> AsyncIterator[str]:
    """An empty Redis as `root` sees it; whatever a test was refused is looked for by name in it."""
    client = command_client(f"unix://root:-@{socket}", PATIENCE_S)

    async def answers() -> bool:
        try:
            return bool(await client.ping())
        except (OSError, RedisError):
            return False

    await eventually(answers, "the server with the ACL file answers")
    await client.flushall()
    await client.execute_command("ACL", "LOG", "RESET")
    yield f"unix://root:-@{socket}"
    await client.aclose()


@pytest.fixture
async def users(socket: Path, redis_url: str) -> AsyncIterator[dict[str, Redis]]:
    """A client of each user."""
    clients = {user: command_client(url_of(socket, user), PATIENCE_S) for user in (*ROLES, "scaler", "admin")}
    yield clients
    for client in clients.values():
        await client.aclose()


async def refused(client: Redis) -> list[Any]:
    """What the server refused to anybody: user, reason, object."""
    log = await client.execute_command("ACL", "LOG")
    return [(row[b"username"], row[b"reason"], row[b"object"]) for row in log] if log else []
