"""A JWKS (RFC 7517) as the keys that may verify here, each bound to the algorithms that fit its type.

The token's `alg` only picks among them: a public RSA key is never there under an HMAC's name, nor under a curve's.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from gateway.jwt_text import read_object
from scheduler.errors import TierlaneError

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
