"""The JWKS in force: read, parsed, and refreshed by one task; requests only use what is there.

A set that is bad or unavailable leaves the last good one in force, for a bounded time, because keys are removed from a
set when they leaked. A token with an unknown key may hasten the next refresh, but not past `LEAST_GAP_S` since the last
one. Sets are read from a file or by HTTP, bounded in time and size, and never from another host.

Each key (RFC 7517) is bound to the algorithms that fit its type; the token's `alg` only picks among them, so a public
RSA key is never used as an HMAC secret. The text of a JWT that two readers could read in two ways is refused. PyJWT's
own parser is not used for it: it looks at every character in Python and takes the last of two claims of one name.
"""

import asyncio
import contextlib
import json
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol
from urllib.parse import urljoin, urlsplit

import aiohttp
import structlog
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from gateway.config import JwtConfig
from scheduler.errors import TierlaneError
from scheduler.fault_log import log_fault
from scheduler.redis_client.pipeline import Backoff

MAX_BYTES = 262_144
MAX_REDIRECTS = 3
TIMEOUT = aiohttp.ClientTimeout(total=10.0, sock_connect=3.0, sock_read=5.0)
# A packed answer is refused as no JSON, instead of being unpacked to any size.
HEADERS = {"Accept": "application/jwk-set+json, application/json", "Accept-Encoding": "identity"}
_MOVED = frozenset({301, 302, 303, 307, 308})


class KeySetAway(TierlaneError):
    """The key set could not be read; the message is the end of a sentence."""


class KeySetReader(Protocol):
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


_SEGMENT = re.compile(r"[A-Za-z0-9_-]+")


class TokenText(NamedTuple):
    """The parts of a compact JWS (RFC 7515 section 3.1); `signed` is what the signature is of."""

    header: dict[str, Any]
    payload: bytes
    signed: bytes
    signature: bytes


def take_apart(token: str) -> TokenText:
    """The parts of a token. Raises ValueError for what is not well formed."""
    signed, _, signature = token.rpartition(".")
    header, _, payload = signed.partition(".")
    return TokenText(read_object(_bytes(header)), _bytes(payload), signed.encode("ascii"), _bytes(signature))


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises ValueError for anything else, NaN, and two members of one name at any depth."""
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_object, parse_constant=_not_json)
    except RecursionError as error:
        raise ValueError("It is nested too deeply.") from error
    if not isinstance(document, dict):
        raise ValueError("It is not a JSON object.")  # noqa: TRY004  # one kind of error for all bad text
    return document


def _bytes(segment: str) -> bytes:
    if _SEGMENT.fullmatch(segment) is None:
        raise ValueError("It is not base64url.")
    raw = urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
    if urlsafe_b64encode(raw).rstrip(b"=") != segment.encode("ascii"):  # The last character holds bits that are lost.
        raise ValueError("It is not base64url.")
    return raw


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("It has two members of one name.")
    return members


def _not_json(_: str) -> NoReturn:
    raise ValueError("It is not JSON.")


MAX_KEYS = 100
RSA_BITS = (2048, 8192)  # Shorter is too weak (RFC 7518 section 3.3), longer takes too long to verify with.
PRIVATE_MEMBERS = {"d", "p", "q", "k"}

_FITS: dict[tuple[str, str], tuple[str, ...]] = {
    ("RSA", ""): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
"""Key type and curve -> algorithms. Symmetric keys (oct) are missing: what was published is no secret."""


class BadKeySet(TierlaneError):
    """What was read is not a JWKS with a usable key; the message is the end of a sentence."""


class VerifyKey(NamedTuple):
    """A public key with the one algorithm that it is used for here."""

    jwk: PyJWK

    def verifies(self, signed: bytes, signature: bytes) -> bool:
        """Whether the signature is good. It takes 30 to 100 microseconds."""
        try:
            return bool(self.jwk.Algorithm.verify(signed, self.jwk.key, signature))
        except (PyJWTError, ValueError, TypeError):
            return False


class KeySet:
    """The keys by `kid` and algorithm. `skipped` counts the members of the JWKS that are of no use here."""

    def __init__(self, keys: Mapping[tuple[str | None, str], VerifyKey], skipped: int = 0) -> None:
        self._keys = dict(keys)
        self._kids = {kid for kid, _ in keys}
        self.skipped = skipped

    def __len__(self) -> int:
        return len(self._kids)

    def knows(self, kid: str | None) -> bool:
        """Whether there is a key of this name; nothing can be missing for a token that names none."""
        return kid is None or kid in self._kids

    def find(self, kid: str | None, algorithm: str) -> VerifyKey | None:
        """The key for a token; one without `kid` gets the only key that fits its algorithm, where it is the only one."""
        if kid is not None:
            return self._keys.get((kid, algorithm))
        fitting = [key for (_, name), key in self._keys.items() if name == algorithm]
        return fitting[0] if len(fitting) == 1 else None


def parse_jwks(raw: bytes, algorithms: Sequence[str]) -> KeySet:
    """The usable keys of a JWKS. A member that is of no use is skipped. Raises BadKeySet where no usable one is left."""
    try:
        members = read_object(raw).get("keys")
    except ValueError as error:
        raise BadKeySet("is not JSON") from error
    if not isinstance(members, list) or len(members) > MAX_KEYS:
        raise BadKeySet(f"has no list of keys, or more than {MAX_KEYS}")
    keys: dict[tuple[str | None, str], VerifyKey] = {}
    skipped = 0
    for member in members:
        found = _usable(member, algorithms) if isinstance(member, dict) else {}
        skipped += not found
        for name, key in found.items():
            keys.setdefault(name, key)  # Of two keys of one name the first counts.
    if not keys:
        raise BadKeySet(f"holds no public key for {', '.join(algorithms)}")
    return KeySet(keys, skipped)


def _usable(member: dict[str, Any], algorithms: Sequence[str]) -> dict[tuple[str | None, str], VerifyKey]:
    """One member under each algorithm that it may be used with; nothing where it may not be used at all."""
    kid, curve, operations = member.get("kid"), member.get("crv", ""), member.get("key_ops", ["verify"])
    for_us = member.get("use", "sig") == "sig" and isinstance(operations, list) and "verify" in operations
    if not for_us or PRIVATE_MEMBERS & member.keys() or not (kid is None or (isinstance(kid, str) and kid)):
        return {}
    fitting = _FITS.get((str(member.get("kty")), str(curve)), ())
    wanted = [name for name in fitting if name in algorithms and member.get("alg", name) == name]
    try:
        return {(kid, name): VerifyKey(_checked(PyJWK(member, name))) for name in wanted}
    except (PyJWTError, ValueError, TypeError, KeyError, AttributeError):  # Base64 or points that are none.
        return {}


def _checked(jwk: PyJWK) -> PyJWK:
    """The key. Raises ValueError for an RSA key that is too short or too long."""
    key = jwk.key
    if isinstance(key, RSAPublicKey) and not RSA_BITS[0] <= key.key_size <= RSA_BITS[1]:
        raise ValueError("The RSA key is too short or too long.")
    return jwk


log = structlog.get_logger("gateway")

LEAST_GAP_S = 10.0
FILE_LOOK_S = 2.0
RETRY_S = (0.5, 30.0)
"""The first and the longest ceiling of the pause after a failed look."""


class JwksSource:
    """Follows the key set that `config` names. `clock` is monotonic seconds."""

    def __init__(
        self,
        config: JwtConfig,
        *,
        reader: KeySetReader | None = None,
        clock: Callable[[], float] = time.monotonic,
        least_gap_s: float = LEAST_GAP_S,
        file_look_s: float = FILE_LOOK_S,
    ) -> None:
        self._config = config
        self._reader = reader or _reader(config)
        self._clock = clock
        # A refresh that is shorter than the least gap is what was asked for.
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
        """The last good set; None before the first one, and once its source has been away for too long."""
        return self._keys if self._clock() - self._confirmed_at <= self._config.keep_s else None

    @property
    def problem(self) -> str | None:
        """Why the set may be old or missing, in one sentence for health; None while all is well."""
        return self._problem

    def wanted(self) -> None:
        """Somebody presented a key that is not in the set: look again soon."""
        self._wanted.set()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await self._pause()

    async def look(self) -> None:
        """Read once and take over what is good. Never raises."""
        self._wanted.clear()  # Before the look, so that a wish during it is heard.
        try:
            self._take(await self._reader.read())
        except (KeySetAway, BadKeySet) as error:
            self._problem = f"The JWKS at {self._config.place} {error}."
        except Exception as error:  # noqa: BLE001 - the loop must outlive what nobody thought of.
            log_fault("the JWKS cannot be followed", error)
            self._problem = f"The JWKS at {self._config.place} cannot be followed: {type(error).__name__}."
        else:
            self._confirmed_at = self._clock()
            self._problem = None
            self._backoff.reset()

    def _take(self, raw: bytes) -> None:
        """Replace the set where it changed, so that verified tokens are not forgotten for nothing. Raises BadKeySet."""
        if raw == self._raw:
            return
        keys = parse_jwks(raw, self._config.algorithms)
        self._raw, self._keys = raw, keys
        log.info("key set for JWTs loaded", place=self._config.place, keys=len(keys), skipped=keys.skipped)

    async def _pause(self) -> None:
        """Wait for the next look; a wish shortens the wait only where the last look was good."""
        if self._problem is not None:
            await self._backoff.sleep()
            return
        least_s, most_s = self._pauses_s
        await asyncio.sleep(least_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s - least_s):
                await self._wanted.wait()


def _reader(config: JwtConfig) -> KeySetReader:
    return UrlReader(config.jwks) if config.is_url else FileReader(Path(config.jwks))
