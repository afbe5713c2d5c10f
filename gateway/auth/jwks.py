"""The JWKS (RFC 7517): read from a file or a URL, parsed, and refreshed by one task. Requests only use the current set.

If the source is unavailable or its set is invalid, the last valid set stays in use for a bounded time only, since keys are
removed from a set when they have leaked. A token with an unknown key can bring the next refresh forward, but not closer
than LEAST_GAP_S to the last one. Reads are bounded in time and size, and redirects to another host are rejected.

Each key is bound to the algorithms of its type; the `alg` of a token only selects among them, so that a public RSA key is
never used as an HMAC secret.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urljoin, urlsplit

import aiohttp
import structlog
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from gateway.config import JwtConfig
from scheduler.errors import TierlaneError
from scheduler.fault_log import log_fault
from scheduler.redis_client.backoff import Backoff

MAX_BYTES = 262_144
MAX_REDIRECTS = 3
TIMEOUT = aiohttp.ClientTimeout(total=10.0, sock_connect=3.0, sock_read=5.0)
# A compressed response is rejected as invalid JSON, since it could decompress to any size.
HEADERS = {"Accept": "application/jwk-set+json, application/json", "Accept-Encoding": "identity"}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class KeySetError(TierlaneError):
    """The key set cannot be read or has no usable key. The message is the end of a sentence."""


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


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises ValueError for anything else, NaN, and duplicate names at any depth."""
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_object, parse_constant=_reject_constant)
    except RecursionError as error:
        raise ValueError("It is nested too deeply.") from error
    if not isinstance(document, dict):
        raise ValueError("It is not a JSON object.")  # noqa: TRY004  # one type of error for all invalid text
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("It has two members of one name.")
    return members


def _reject_constant(_: str) -> NoReturn:
    raise ValueError("It is not JSON.")


MAX_KEYS = 100
RSA_BITS = (2048, 8192)  # Shorter keys are too weak (RFC 7518 section 3.3), longer ones take too long to verify.
PRIVATE_MEMBERS = {"d", "p", "q", "k"}

_ALGORITHMS: dict[tuple[str, str], tuple[str, ...]] = {
    ("RSA", ""): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
"""Key type and curve -> algorithms. Symmetric keys (oct) are not accepted, since a published key is not a secret."""

KeyName = tuple[str | None, str]
"""The `kid` and the algorithm of a key."""


class KeySet:
    """The public keys by name. `skipped` is the number of unusable members of the JWKS."""

    def __init__(self, keys: Mapping[KeyName, PyJWK], skipped: int = 0) -> None:
        self._keys = dict(keys)
        self._kids = {kid for kid, _ in keys}
        self.skipped = skipped

    def __len__(self) -> int:
        return len(self._kids)

    def knows(self, kid: str | None) -> bool:
        """Whether there is a key with this `kid`; true for a token without one."""
        return kid is None or kid in self._kids

    def find(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """The key of a token. Without `kid`, it is the only key for the algorithm, or None if there are several."""
        if kid is not None:
            return self._keys.get((kid, algorithm))
        keys = [key for (_, name), key in self._keys.items() if name == algorithm]
        return keys[0] if len(keys) == 1 else None


def parse_jwks(raw: bytes, algorithms: Sequence[str]) -> KeySet:
    """The usable keys of a JWKS; unusable members are skipped. Raises KeySetError if no key is usable."""
    try:
        members = read_object(raw).get("keys")
    except ValueError as error:
        raise KeySetError("is not JSON") from error
    if not isinstance(members, list) or len(members) > MAX_KEYS:
        raise KeySetError(f"has no list of keys, or more than {MAX_KEYS}")
    keys: dict[KeyName, PyJWK] = {}
    skipped = 0
    for member in members:
        usable = _usable(member, algorithms) if isinstance(member, dict) else {}
        skipped += not usable
        keys = usable | keys  # Of two keys with the same name the first is used.
    if not keys:
        raise KeySetError(f"has no public key for {', '.join(algorithms)}")
    return KeySet(keys, skipped)


def _usable(member: dict[str, Any], algorithms: Sequence[str]) -> dict[KeyName, PyJWK]:
    """The member as a key for each algorithm that it may be used with; empty if it is unusable."""
    kid, curve, operations = member.get("kid"), member.get("crv", ""), member.get("key_ops", ["verify"])
    verifies = member.get("use", "sig") == "sig" and isinstance(operations, list) and "verify" in operations
    if not verifies or PRIVATE_MEMBERS & member.keys() or not (kid is None or (isinstance(kid, str) and kid)):
        return {}
    names = _ALGORITHMS.get((str(member.get("kty")), str(curve)), ())
    wanted = [name for name in names if name in algorithms and member.get("alg", name) == name]
    try:
        keys = {(kid, name): PyJWK(member, name) for name in wanted}
    except (PyJWTError, ValueError, TypeError, KeyError, AttributeError):  # Invalid base64, or an invalid point.
        return {}
    if any(isinstance(k.key, RSAPublicKey) and not RSA_BITS[0] <= k.key.key_size <= RSA_BITS[1] for k in keys.values()):
        return {}
    return keys


log = structlog.get_logger("gateway")

LEAST_GAP_S = 10.0
FILE_LOOK_S = 2.0
RETRY_S = (0.5, 30.0)
"""The first and the highest upper bound of the pause after a failed read."""


class JwksSource:
    """Follows the key set in `config`. `clock` is monotonic seconds; `read` returns the bytes or raises KeySetError."""

    def __init__(
        self,
        config: JwtConfig,
        *,
        read: Callable[[], Awaitable[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        least_gap_s: float = LEAST_GAP_S,
        file_look_s: float = FILE_LOOK_S,
    ) -> None:
        self._config = config
        self._read = read or (
            partial(read_url, config.jwks) if config.is_url else partial(read_file, Path(config.jwks))
        )
        self._clock = clock
        least_s = min(least_gap_s, config.refresh_s)
        self._pauses_s = (least_s, config.refresh_s) if config.is_url else (file_look_s, file_look_s)
        self._raw: bytes | None = None
        self._keys: KeySet | None = None
        self._confirmed_at = -inf
        self._problem: str | None = f"The JWKS at {config.place} was not read yet."
        self._wanted = asyncio.Event()
        self._backoff = Backoff(*RETRY_S)

    @property
    def keys(self) -> KeySet | None:
        """The last valid set; None before the first read, and when its source was unavailable for `keep_s`."""
        return self._keys if self._clock() - self._confirmed_at <= self._config.keep_s else None

    @property
    def problem(self) -> str | None:
        """Why the set may be outdated or missing, as a sentence for health; None while there is no problem."""
        return self._problem

    def wanted(self) -> None:
        """Request a refresh, because a token has an unknown key."""
        self._wanted.set()

    async def run(self) -> None:
        """Refresh the set forever."""
        while True:
            await self.refresh()
            await self._pause()

    async def refresh(self) -> None:
        """Read the set once and use it if it is valid. Never raises."""
        self._wanted.clear()  # Before the read, so that a request during the read is not lost.
        try:
            self._take(await self._read())
        except KeySetError as error:
            self._problem = f"The JWKS at {self._config.place} {error}."
        except Exception as error:  # noqa: BLE001 - the loop must survive any error
            log_fault("JWKS refresh failed", error)
            self._problem = f"The JWKS at {self._config.place} cannot be refreshed: {type(error).__name__}."
        else:
            self._confirmed_at = self._clock()
            self._problem = None
            self._backoff.reset()

    def _take(self, raw: bytes) -> None:
        """Replace the set if it changed; an unchanged set keeps the cache of verified tokens. Raises KeySetError."""
        if raw == self._raw:
            return
        keys = parse_jwks(raw, self._config.algorithms)
        self._raw, self._keys = raw, keys
        log.info("key set for JWTs loaded", place=self._config.place, keys=len(keys), skipped=keys.skipped)

    async def _pause(self) -> None:
        """Wait for the next refresh. A request for it shortens the wait only if the last read succeeded."""
        if self._problem is not None:
            await self._backoff.sleep()
            return
        least_s, most_s = self._pauses_s
        await asyncio.sleep(least_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s - least_s):
                await self._wanted.wait()
