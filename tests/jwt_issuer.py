"""An identity provider for tests: real keys, valid tokens, and tokens of an attacker."""

import base64
import hashlib
import hmac
import json
from functools import cache
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from configs import jwt_config
from customer_limits import with_values
from gateway.auth.jwt_verifier import JwtVerifier
from gateway.auth.key_set import KeySet, parse_jwks
from gateway.config import JwtConfig
from ledger.catalog.snapshot import Customer, Snapshot
from scheduler.errors import ErrorCode, RequestError

ISSUER = "https://issuer.example"
AUDIENCE = "tierlane"
NOW = 1_800_000_000.0
"""Wall time of tests with their own clock."""


@cache
def private_key(algorithm: str, number: int = 0) -> Any:
    """A key pair for the algorithm; another one for every number. Kept, because RSA keys are slow to create."""
    if algorithm.startswith(("RS", "PS")):
        return rsa.generate_private_key(public_exponent=65537, key_size=2048)
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    return ec.generate_private_key({"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1()}[algorithm])


def jwk(algorithm: str, number: int = 0, **members: Any) -> dict[str, Any]:
    """The public key as a member of a JWKS; its `kid` is the algorithm with the number."""
    public = private_key(algorithm, number).public_key()
    maker = (
        {"R": RSAAlgorithm, "P": RSAAlgorithm, "E": ECAlgorithm}[algorithm[0]] if algorithm != "EdDSA" else OKPAlgorithm
    )
    document: dict[str, Any] = maker.to_jwk(public, as_dict=True)  # type: ignore[attr-defined]
    return {name: value for name, value in document.items() if name != "key_ops"} | {
        "kid": f"{algorithm}-{number}",
        "use": "sig",
        **members,
    }


def jwks(*members: dict[str, Any]) -> bytes:
    """A key set of these members; without any, of one key for each default algorithm."""
    return json.dumps({"keys": list(members) or [jwk("RS256"), jwk("ES256"), jwk("EdDSA")]}).encode()


def claims(now: float = NOW, **changes: Any) -> dict[str, Any]:
    """Valid claims for the customer acme; a change to None removes one."""
    document = {"sub": "acme", "iss": ISSUER, "aud": AUDIENCE, "iat": int(now), "exp": int(now) + 600} | changes
    return {name: value for name, value in document.items() if value is not None}


def token(algorithm: str = "ES256", number: int = 0, *, headers: dict[str, Any] | None = None, **changes: Any) -> str:
    """A token with a valid signature, these changes of claims, and these headers; `kid` None removes it."""
    header = {"kid": f"{algorithm}-{number}"} | (headers or {})
    header = {name: value for name, value in header.items() if value is not None}
    return jwt.encode(claims(**changes), private_key(algorithm, number), algorithm, header)


def base64url(raw: bytes) -> str:
    """Without padding, as in a token."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def signed_text(header: str, payload: str, algorithm: str = "ES256", number: int = 0) -> str:
    """A token of exactly this JSON text, signed by the key, whatever its header contains."""
    text = f"{base64url(header.encode())}.{base64url(payload.encode())}"
    algorithms = jwt.algorithms.get_default_algorithms()
    return f"{text}.{base64url(algorithms[algorithm].sign(text.encode(), private_key(algorithm, number)))}"


def hmac_token(secret: bytes, **header: Any) -> str:
    """A token signed with HS256 under some secret, such as a public key."""
    text = f"{base64url(json.dumps({'alg': 'HS256'} | header).encode())}.{base64url(json.dumps(claims()).encode())}"
    return f"{text}.{base64url(hmac.new(secret, text.encode(), hashlib.sha256).digest())}"


def config(**changes: Any) -> JwtConfig:
    """The verifier's settings for this issuer."""
    return jwt_config(**{"issuer": ISSUER, "audience": AUDIENCE} | changes)


class LiteralSource:
    """A key set that the test sets."""

    def __init__(self, *members: dict[str, Any]) -> None:
        self.keys: KeySet | None = None
        self.problem: str | None = None
        self.wishes = 0
        self.set(*members)

    def set(self, *members: dict[str, Any]) -> None:
        """Replace the set."""
        self.keys = parse_jwks(jwks(*members), config().algorithms)

    def wanted(self) -> None:
        self.wishes += 1


def customer(name: str = "acme", **changes: Any) -> Customer:
    """A row of `customers`, whose id is `id-` and its name."""
    fields: dict[str, Any] = {
        "id": f"id-{name}",
        "name": name,
        "tier": "free",
        "suspended": False,
        "requests_per_second": 10.0,
        "burst": 20.0,
        "max_concurrency": 8,
        "tokens_per_minute": 6000,
        "max_queue_ms": 2000,
        "quotas": (("1day", 1000),),
    }
    return Customer(**with_values(fields | changes))


class LiteralCustomers:
    """A catalog of these customers, and of no keys."""

    def __init__(self, *rows: Customer) -> None:
        self.snapshot: Snapshot | None = None
        self.usable = True
        self.all_known = True
        self.set(*rows)

    def set(self, *rows: Customer) -> None:
        """Replace the snapshot."""
        self.snapshot = Snapshot(1, (), {row.id: row for row in rows}, {}, {}, ())

    def knows_all(self, now: float) -> bool:
        return self.all_known


def rejection(verifier: JwtVerifier, text: str, now: float = NOW) -> str:
    """The message of the rejection as `invalid_api_key`."""
    with pytest.raises(RequestError) as error:
        verifier.verify(text, now)
    assert error.value.code is ErrorCode.INVALID_API_KEY
    return error.value.message
