"""The public keys of a JWKS (RFC 7517).

Each key is bound to the algorithms of its type; the `alg` of a token only selects among them, so that a public RSA key is
never used as an HMAC secret.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from gateway.auth.json_object import read_object
from scheduler.errors import TierlaneError

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


class KeySetError(TierlaneError):
    """The key set cannot be read or has no usable key. The message is the end of a sentence."""


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
