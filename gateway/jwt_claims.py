"""What a token with a good signature says: is it for us, is it valid now, and who is it? Pure; times are wall seconds."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple

from gateway.jwt_config import JwtConfig
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
