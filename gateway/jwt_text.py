"""The text of a JWT taken apart, without a guess: what two readers could read in two ways is refused.

PyJWT's own reader looks at every character in Python, which lets a long piece of nonsense cost more than a signature,
and takes the last of two claims of one name (RFC 7519 section 4 allows that, or refusing). Nothing is trusted here.
"""

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, NamedTuple, NoReturn

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
