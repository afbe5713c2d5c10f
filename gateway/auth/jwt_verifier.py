"""Is this token good? The order of checks, and the memory of tokens that were found good.

    take apart -> algorithm on our list -> key by kid, of a type that fits -> signature -> claims

What a header offers as a key or an address of one (`jwk`, `jku`, `x5u`) is never looked at. A good token is remembered
by its SHA-256 until it expires or the key set changes, since a signature costs more than all else on a request's way.
"""

from hashlib import sha256
from typing import Protocol

from gateway.jwt_claims import Claims, bad_token, check_claims, expired
from gateway.jwt_config import JwtConfig
from gateway.jwt_keys import KeySet, VerifyKey
from gateway.jwt_text import TokenText, read_object, take_apart
from scheduler.errors import ErrorCode, RequestError

NOT_NOW = "This token cannot be checked right now; try again soon."
MALFORMED = "The token is not a well-formed JWT."


class KeySource(Protocol):
    """Where the key set comes from. Nothing here waits for it."""

    @property
    def keys(self) -> KeySet | None: ...
    @property
    def problem(self) -> str | None: ...

    def wanted(self) -> None: ...


class JwtVerifier:
    """Verifies tokens against the key set that `source` has now."""

    def __init__(self, config: JwtConfig, source: KeySource) -> None:
        self._config = config
        self._source = source
        self._keys: KeySet | None = None
        self._good: dict[bytes, Claims] = {}

    def __len__(self) -> int:
        """How many good tokens are remembered."""
        return len(self._good)

    def verify(self, token: str, wall_now: float) -> Claims:
        """What the token says. `wall_now` is seconds since the epoch.

        Raises RequestError: `invalid_api_key` with the reason; `catalog_unavailable` where the key set is not there.
        """
        keys = self._source.keys
        if keys is None:
            raise not_now()
        if keys is not self._keys:
            self._good.clear()
            self._keys = keys
        name = sha256(token.encode("ascii", "replace")).digest()
        claims = self._good.get(name)
        if claims is None:
            claims = self._check(token, keys, wall_now)
            self._remember(name, claims)
        elif wall_now >= claims.good_until:
            del self._good[name]
            raise expired()
        return claims

    def _check(self, token: str, keys: KeySet, now: float) -> Claims:
        if len(token) > self._config.max_token_bytes:
            raise bad_token(MALFORMED)
        try:
            text = take_apart(token)
        except ValueError as error:
            raise bad_token(MALFORMED) from error
        if not self._key(text, keys).verifies(text.signed, text.signature):
            raise bad_token("The token's signature is not valid.")
        try:
            claims = read_object(text.payload)
        except ValueError as error:
            raise bad_token(MALFORMED) from error
        return check_claims(claims, self._config, now)

    def _key(self, text: TokenText, keys: KeySet) -> VerifyKey:
        algorithm, kid = text.header.get("alg"), text.header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in self._config.algorithms:
            raise bad_token("The token is not signed with an algorithm that is allowed here.")
        if "crit" in text.header:  # RFC 7515 section 4.1.11: whoever does not know an extension must refuse.
            raise bad_token("The token asks for an extension (crit) that is not known here.")
        if not (kid is None or isinstance(kid, str)):
            raise bad_token(MALFORMED)
        if not keys.knows(kid):
            self._source.wanted()
            if self._source.problem is not None:  # It may be a new one, of which we cannot hear.
                raise not_now()
        key = keys.find(kid, algorithm)
        if key is None:
            raise bad_token("The token is signed with a key that is not known here.")
        return key

    def _remember(self, name: bytes, claims: Claims) -> None:
        if len(self._good) >= self._config.max_cached:
            del self._good[next(iter(self._good))]  # The oldest; only good tokens get in, so nobody can flush it.
        self._good[name] = claims


def not_now() -> RequestError:
    """Nothing can be said of any token."""
    return RequestError(ErrorCode.CATALOG_UNAVAILABLE, NOT_NOW)
