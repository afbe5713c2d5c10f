"""The Lua scripts: read from their files, assembled with what they include, called by their hash.

A script names the parts it builds on in a line `-- include: prelude, wake, ratelimit/bucket`; parts are put in front of
its own text in that order. One that Redis has forgotten (restart, failover, SCRIPT FLUSH) is sent again whole.
"""

import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, OutOfMemoryError

from scheduler.connections import bounded
from scheduler.errors import TierlaneError
from scheduler.keys import Keys

_INCLUDE = re.compile(r"^-- include: (.+)$", re.MULTILINE)


class RedisFull(TierlaneError):
    """Redis has no memory left for new requests; nothing was written."""


@cache
def source(name: str) -> str:
    """The whole text of a script, shebang first."""
    text = files("scheduler").joinpath("lua", f"{name}.lua").read_text("utf-8")
    shebang, body = text.split("\n", 1)
    if not shebang.startswith("#!lua"):
        raise ValueError(f"{name}.lua must begin with #!lua")
    included = _INCLUDE.search(body)
    parts = [_part(part.strip()) for part in included.group(1).split(",")] if included else []
    return "\n".join([shebang, *parts, body])


def _part(name: str) -> str:
    room, _, part = name.rpartition("/")
    folder = files(room).joinpath("lua") if room else files("scheduler").joinpath("lua", "includes")
    return folder.joinpath(f"{part}.lua").read_text("utf-8")


class Script:
    """One script on one pool; KEYS[1] and ARGV[1] are the same for all of them, and are added here."""

    def __init__(self, name: str, client: Redis, keys: Keys) -> None:
        self._text = source(name)
        self._sha = sha1(self._text.encode(), usedforsecurity=False).hexdigest()
        self._client = client
        self._head = (1, keys.leases, keys.prefix)

    async def __call__(self, *args: str | bytes | float) -> Any:
        """Run it. Raises RedisFull, or RedisUnavailable where the outcome is not known."""
        async with bounded():
            try:
                return await self._send(args)
            except OutOfMemoryError as error:
                raise RedisFull("Redis is at its memory limit; raise maxmemory or drain the queues.") from error

    async def _send(self, args: Sequence[str | bytes | float]) -> Any:
        try:
            return await self._client.evalsha(self._sha, *self._head, *args)
        except NoScriptError:
            return await self._client.eval(self._text, *self._head, *args)
