"""Verification of a JWT: parse, allowed algorithm, key by `kid`, signature, claims; and the cache of verified tokens.

Keys and key addresses in the header (`jwk`, `jku`, `x5u`) are never used. A verified token is cached by its SHA-256 until
it expires or the key set changes, since a signature costs more than the rest of the request. Text that two parsers could
read differently (duplicate names, non-canonical base64) is rejected. PyJWT verifies signatures but does not parse: its
parser accepts such text, and is slow.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any, NamedTuple

from jwt import PyJWK
from jwt.exceptions import PyJWTError

from gateway.auth.json_object import read_object
from gateway.auth.jwks import JwksSource
from gateway.auth.key_set import KeySet
from gateway.config import JwtConfig
from scheduler.bounded_dict import BoundedDict
from scheduler.errors import ErrorCode, RequestError

LATEST = 2.0**53  # Seconds. Integers above are not exact in JSON.
MAX_NAME_CHARACTERS = 200  # The limit of a customer's name.
KEY_ID_DIGITS = 24
MALFORMED = "The token is not a well-formed JWT."
_BASE64URL = re.compile(r"[A-Za-z0-9_-]+")


class Claims(NamedTuple):
    """The name or id of a customer, the key id for limits and audit, and the time of expiry, leeway included."""

    customer: str
    key_id: str
    good_until: float


def bad_token(message: str) -> RequestError:
    """The rejection of a token. The message goes to the client and must not contain parts of the token."""
    return RequestError(ErrorCode.INVALID_API_KEY, message)


def not_now() -> RequestError:
    """The error if no token can be verified."""
    return RequestError(ErrorCode.CATALOG_UNAVAILABLE, "This token cannot be verified right now; try again soon.")


def check_claims(claims: Mapping[str, Any], config: JwtConfig, now: float) -> Claims:
    """Check the claims at wall time `now`. Raises RequestError `invalid_api_key` with the reason."""
    expires_at = _time(claims, "exp")
    if expires_at is None:
        raise bad_token("The token has no expiry time (exp).")
    if now >= expires_at + config.leeway_s:
        raise bad_token("The token has expired.")
    for name in ("nbf", "iat"):
        begins_at = _time(claims, name)
        if begins_at is not None and now < begins_at - config.leeway_s:
            raise bad_token(f"The token is not valid yet ({name} is in the future).")
    if config.issuer and claims.get("iss") != config.issuer:
        raise bad_token("The token is from another issuer (iss) than the trusted one.")
    audience = claims.get("aud")
    if config.audience and config.audience not in (audience if isinstance(audience, list) else [audience]):
        raise bad_token("The token is for another audience (aud).")
    customer = claims.get(config.customer_claim)
    if not isinstance(customer, str) or not 0 < len(customer) <= MAX_NAME_CHARACTERS:
        raise bad_token("The token does not name a customer.")
    # Instead of the id of an API key: the same for all tokens of a subject, without revealing the subject.
    subject = claims.get("sub")
    parts = (str(claims.get("iss", "")), subject if isinstance(subject, str) else customer)
    digest = sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
    return Claims(customer, f"jwt:{digest[:KEY_ID_DIGITS]}", expires_at + config.leeway_s)


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    """A NumericDate (RFC 7519), None if absent. Raises RequestError for another value, such as `true`, an int in Python."""
    if name not in claims:
        return None
    value = claims[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST:
        raise bad_token(f"The token's {name} is not a time.")
    return float(value)


class JwtVerifier:
    """Verifies tokens with the current key set of `source`."""

    def __init__(self, config: JwtConfig, source: JwksSource) -> None:
        self._config = config
        self._source = source
        self._keys: KeySet | None = None
        self._verified: BoundedDict[bytes, Claims] = BoundedDict(config.max_cached)  # Of valid tokens only.

    def __len__(self) -> int:
        """The number of cached tokens."""
        return len(self._verified)

    def verify(self, token: str, wall_now: float) -> Claims:
        """The claims of a token. `wall_now` is seconds since the epoch.

        Raises RequestError: `invalid_api_key` with the reason; `catalog_unavailable` if the key set is missing.
        """
        keys = self._source.keys
        if keys is None:
            raise not_now()
        if keys is not self._keys:
            self._verified.clear()
            self._keys = keys
        digest = sha256(token.encode("ascii", "replace")).digest()
        claims = self._verified.get(digest)
        if claims is None:
            claims = self._check(token, keys, wall_now)
            self._verified[digest] = claims
        elif wall_now >= claims.good_until:
            del self._verified[digest]
            raise bad_token("The token has expired.")
        return claims

    def _check(self, token: str, keys: KeySet, now: float) -> Claims:
        if len(token) > self._config.max_token_bytes:
            raise bad_token(MALFORMED)
        signed, _, signature_text = token.rpartition(".")
        header_text, _, payload = signed.partition(".")
        try:
            header, raw_claims, signature = read_object(_decode(header_text)), _decode(payload), _decode(signature_text)
        except ValueError as error:
            raise bad_token(MALFORMED) from error
        key, is_signed = self._key(header, keys), False
        with suppress(PyJWTError, ValueError, TypeError):  # Takes 30 to 100 microseconds.
            is_signed = bool(key.Algorithm.verify(signed.encode("ascii"), key.key, signature))
        if not is_signed:
            raise bad_token("The token's signature is not valid.")
        try:
            claims = read_object(raw_claims)
        except ValueError as error:
            raise bad_token(MALFORMED) from error
        return check_claims(claims, self._config, now)

    def _key(self, header: Mapping[str, Any], keys: KeySet) -> PyJWK:
        algorithm, kid = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in self._config.algorithms:
            raise bad_token("The token's algorithm is not allowed here.")
        if "crit" in header:  # RFC 7515 section 4.1.11: unknown extensions must be rejected.
            raise bad_token("The token needs an unknown extension (crit).")
        if not (kid is None or isinstance(kid, str)):
            raise bad_token(MALFORMED)
        if not keys.knows(kid):
            self._source.wanted()
            if self._source.problem is not None:  # It may be a new key in a set that cannot be read now.
                raise not_now()
        key = keys.find(kid, algorithm)
        if key is None:
            raise bad_token("The token is signed with an unknown key.")
        return key


def _decode(segment: str) -> bytes:
    """The bytes of canonical base64url without padding. Raises ValueError."""
    if _BASE64URL.fullmatch(segment) is None:
        raise ValueError("It is not base64url.")
    raw = urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
    if urlsafe_b64encode(raw).rstrip(b"=") != segment.encode("ascii"):  # The last character may have unused bits.
        raise ValueError("It is not canonical base64url.")
    return raw
