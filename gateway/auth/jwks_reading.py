"""Reading a JWKS from a file or a URL: bounded in time and size, and without redirects to another host."""

import asyncio
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import aiohttp

from gateway.auth.key_set import KeySetError

MAX_BYTES = 262_144
MAX_REDIRECTS = 3
TIMEOUT = aiohttp.ClientTimeout(total=10.0, sock_connect=3.0, sock_read=5.0)
# A compressed response is rejected as invalid JSON, since it could decompress to any size.
HEADERS = {"Accept": "application/jwk-set+json, application/json", "Accept-Encoding": "identity"}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


async def read_file(path: Path) -> bytes:
    """The bytes of a file. Raises KeySetError."""
    try:
        return await asyncio.to_thread(_read_file, path)  # In a thread, since a file system may hang.
    except OSError as error:
        raise KeySetError(f"cannot be read: {error.strerror or type(error).__name__}") from error


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return _bounded(file.read(MAX_BYTES + 1))


def _bounded(raw: bytes) -> bytes:
    if len(raw) > MAX_BYTES:
        raise KeySetError(f"has more than {MAX_BYTES} bytes")
    return raw


async def read_url(url: str) -> bytes:
    """The body of a 200 response. Follows redirects on the same host. Raises KeySetError."""
    try:
        async with aiohttp.ClientSession(timeout=TIMEOUT, auto_decompress=False, headers=HEADERS) as session:
            for _ in range(MAX_REDIRECTS + 1):
                async with session.get(url, allow_redirects=False) as response:
                    if response.status not in _REDIRECTS:
                        return await _body(response)
                    url = _redirected(url, response.headers.get("Location", ""))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise KeySetError(f"does not respond: {type(error).__name__}") from error
    raise KeySetError(f"redirects more than {MAX_REDIRECTS} times")


def _redirected(url: str, location: str) -> str:
    """The target of a redirect. Raises KeySetError for another host, whose owner could sign tokens for all customers."""
    old, new = urlsplit(url), urlsplit(urljoin(url, location))
    weaker = old.scheme == "https" and new.scheme != "https"
    if weaker or new.scheme not in {"http", "https"} or new.netloc.lower() != old.netloc.lower():
        raise KeySetError("redirects to another host or to plain HTTP")
    return new.geturl()


async def _body(response: aiohttp.ClientResponse) -> bytes:
    if response.status != 200:
        raise KeySetError(f"responds with status {response.status}")
    raw = b""
    async for chunk in response.content.iter_chunked(16_384):
        raw = _bounded(raw + chunk)
    return raw
