"""Reading the bytes of a key set, from a file or by HTTP: bounded in time and size, and never from another host."""

import asyncio
from pathlib import Path
from typing import Protocol
from urllib.parse import urljoin, urlsplit

import aiohttp

from scheduler.errors import TierlaneError

MAX_BYTES = 262_144
MAX_REDIRECTS = 3
TIMEOUT = aiohttp.ClientTimeout(total=10.0, sock_connect=3.0, sock_read=5.0)
# A packed answer is refused as no JSON, instead of being unpacked to any size.
HEADERS = {"Accept": "application/jwk-set+json, application/json", "Accept-Encoding": "identity"}
_MOVED = frozenset({301, 302, 303, 307, 308})


class KeySetAway(TierlaneError):
    """The key set could not be read; the message is the end of a sentence."""


class Reader(Protocol):
    """A source of key sets; `read` gives all its bytes, changed or not. Raises KeySetAway."""

    async def read(self) -> bytes: ...


class FileReader:
    """A file. Reading it whole costs no more than asking for its time, and finds every change."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self) -> bytes:
        """The file's bytes. A thread reads it: a file system may hang."""
        try:
            return await asyncio.to_thread(self._read)
        except OSError as error:
            raise KeySetAway(f"cannot be read: {error.strerror or type(error).__name__}") from error

    def _read(self) -> bytes:
        with self._path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise KeySetAway(f"has more than {MAX_BYTES} bytes")
        return raw


class UrlReader:
    """A URL, asked each time."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def read(self) -> bytes:
        """The body of its answer, which must be a 200."""
        try:
            async with aiohttp.ClientSession(timeout=TIMEOUT, auto_decompress=False, headers=HEADERS) as session:
                return await self._fetch(session)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise KeySetAway(f"does not answer: {type(error).__name__}") from error

    async def _fetch(self, session: aiohttp.ClientSession) -> bytes:
        url = self._url
        for _ in range(MAX_REDIRECTS + 1):
            async with session.get(url, allow_redirects=False) as answer:
                if answer.status not in _MOVED:
                    return await _body(answer)
                url = _next(url, answer.headers.get("Location", ""))
        raise KeySetAway(f"redirects more than {MAX_REDIRECTS} times")


def _next(url: str, location: str) -> str:
    """Where a redirect leads. Raises KeySetAway for another host: who runs that one could sign for everybody."""
    here, there = urlsplit(url), urlsplit(urljoin(url, location))
    weaker = here.scheme == "https" and there.scheme != "https"
    if weaker or there.scheme not in {"http", "https"} or there.netloc.lower() != here.netloc.lower():
        raise KeySetAway("redirects to another host or to plain HTTP")
    return there.geturl()


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    if answer.status != 200:
        raise KeySetAway(f"answers {answer.status}")
    raw = b""
    async for chunk in answer.content.iter_chunked(16_384):
        raw += chunk
        if len(raw) > MAX_BYTES:
            raise KeySetAway(f"has more than {MAX_BYTES} bytes")
    return raw
