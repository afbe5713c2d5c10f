"""Verification of a JWT: the order of checks, the check of claims, and the cache of verified tokens.

    parse -> algorithm on our list -> key by kid, of a type that fits -> signature -> claims

Keys or key addresses in the header (`jwk`, `jku`, `x5u`) are never used. A verified token is cached by its SHA-256
until it expires or the key set changes, since a signature costs more than everything else on a request's way. The check
of claims is pure; times are wall seconds.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from gateway.auth.jwks import KeySet, TokenText, VerifyKey, read_object, take_apart
from gateway.config import JwtConfig
from scheduler.errors import ErrorCode, RequestError

LATEST = 2.0**53  # Seconds; beyond it no number of JSON is exact, and infinity is no time.
MAX_NAME = 200  # Characters, as long as a customer's name may be.
KEY_ID_DIGITS = 24


class Claims(NamedTuple):
    """`customer` is a name or id, not looked up yet; from `good_until` on the token is refused, leeway included."""

    customer: str
    key_id: str
    good_until: float


def check_claims(claims: Mapping[str, Any], config: JwtConfig, now: float) -> Claims:
    """Who the token is for. Raises RequestError `invalid_api_key`, with a sentence that says why."""
    expires_at = _time(claims, "exp")
    if expires_at is None:
        raise bad_token("The token has no expiry time (exp).")
    if now >= expires_at + config.leeway_s:
        raise expired()
    for name in ("nbf", "iat"):
        begins_at = _time(claims, name)
        if begins_at is not None and now < begins_at - config.leeway_s:
            raise bad_token(f"The token is not valid yet ({name} is in the future).")
    if config.issuer and claims.get("iss") != config.issuer:
        raise bad_token("The token comes from another issuer (iss) than the one that is trusted here.")
    if config.audience and not _holds(claims.get("aud"), config.audience):
        raise bad_token("The token is meant for another audience (aud).")
    customer = claims.get(config.customer_claim)
    if not isinstance(customer, str) or not 0 < len(customer) <= MAX_NAME:
        raise bad_token("The token does not say which customer it is for.")
    return Claims(customer, _key_id(claims, customer), expires_at + config.leeway_s)


def bad_token(message: str) -> RequestError:
    """The refusal of a token, for the client; nothing in it may come from the token."""
    return RequestError(ErrorCode.INVALID_API_KEY, message)


def expired() -> RequestError:
    """The refusal of a token that was good once."""
    return bad_token("The token has expired.")


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    """A NumericDate of RFC 7519. Raises RequestError for what is none; `true` is an int for Python, but no time."""
    value = claims.get(name)
    if value is None and name not in claims:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST:
        raise bad_token(f"The token's {name} is not a time.")
    return float(value)


def _holds(audience: Any, wanted: str) -> bool:
    return audience == wanted or (isinstance(audience, list) and wanted in audience)


def _key_id(claims: Mapping[str, Any], customer: str) -> str:
    """What stands where the id of an API key stands: the same for all tokens of one subject, and it gives nobody away."""
    subject = claims.get("sub")
    parts = (str(claims.get("iss", "")), subject if isinstance(subject, str) else customer)
    return "jwt:" + sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:KEY_ID_DIGITS]


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
