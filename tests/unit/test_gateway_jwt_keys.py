"""A JWKS becomes the keys that may verify here: public, strong enough, and each under its own algorithms only."""

import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from gateway.auth.jwks import KeySetError, parse_jwks
from gateway.config import DEFAULT_ALGORITHMS
from jwt_issuer import jwk, jwks, private_key

OCT = {"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0", "kid": "oct", "alg": "HS256"}


def weak_rsa() -> dict[str, Any]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()
    return {**RSAAlgorithm.to_jwk(key, as_dict=True), "kid": "weak"}


@pytest.mark.parametrize("member", [OCT, OCT | {"kty": "RSA"}, OCT | {"alg": "RS256"}])
def test_symmetric_keys_are_skipped(member: dict[str, Any]) -> None:
    """What stands in a public document is no secret, whatever it is called."""
    keys = parse_jwks(jwks(member, jwk("ES256")), DEFAULT_ALGORITHMS)

    assert (len(keys), keys.skipped) == (1, 1)
    assert not keys.knows("oct")


def test_private_keys_are_skipped() -> None:
    """Whoever published it let everybody sign."""
    private: dict[str, Any] = ECAlgorithm.to_jwk(private_key("ES256"), as_dict=True)

    keys = parse_jwks(jwks({**private, "kid": "private"}, jwk("EdDSA")), DEFAULT_ALGORITHMS)

    assert not keys.knows("private")


@pytest.mark.parametrize(
    "member",
    [
        jwk("RS256") | {"use": "enc"},
        jwk("RS256") | {"key_ops": ["encrypt"]},
        jwk("RS256") | {"key_ops": "verify"},
        jwk("RS256") | {"alg": "RSA-OAEP"},
        jwk("RS256") | {"alg": "RS512"},
        jwk("RS256") | {"kid": 7},
        jwk("RS256") | {"kid": ""},
        jwk("RS256") | {"n": "!!"},
        jwk("RS256") | {"n": 5},
        jwk("ES256") | {"x": jwk("ES256", 1)["x"]},
        jwk("ES256") | {"crv": "P-384"},
        jwk("ES256") | {"crv": ["P-256"]},
        jwk("ES384"),
        jwk("EdDSA") | {"crv": "X25519"},
        jwk("EdDSA") | {"x": "AA"},
        {"kty": "RSA", "kid": "empty"},
        {"kid": "nothing"},
        weak_rsa(),
    ],
    ids=str,
)
def test_a_member_of_no_use_is_skipped_and_the_others_count(member: dict[str, Any]) -> None:
    """One strange key of a provider takes no other down."""
    keys = parse_jwks(jwks(member, jwk("EdDSA", 1)), DEFAULT_ALGORITHMS)

    assert (len(keys), keys.skipped) == (1, 1)
    assert keys.find("EdDSA-1", "EdDSA")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"not json",
        b"[]",
        b"{}",
        b'{"keys": {}}',
        b'{"keys": []}',
        b'{"keys": [1, null, "x"]}',
        b'{"keys": [], "keys": []}',
        b'{"keys": ' + b"[" * 5000,
        b"\xff\xfe",
        json.dumps({"keys": [OCT]}).encode(),
        json.dumps({"keys": [jwk("ES256", number) for number in range(101)]}).encode(),
    ],
    ids=range(12),
)
def test_a_set_without_a_usable_key_is_refused(raw: bytes) -> None:
    """Whatever it is: the caller keeps what it had."""
    with pytest.raises(KeySetError):
        parse_jwks(raw, DEFAULT_ALGORITHMS)


def test_a_key_is_bound_to_the_algorithms_of_its_type() -> None:
    """An RSA key under all its own that are allowed, and never under a curve's or an HMAC's name."""
    keys = parse_jwks(jwks(jwk("RS256"), jwk("ES256")), ("RS256", "PS256", "ES256"))

    assert keys.find("RS256-0", "RS256")
    assert keys.find("RS256-0", "PS256")
    assert [keys.find("RS256-0", name) for name in ("RS384", "ES256", "HS256", "none", "EdDSA")] == [None] * 5
    assert [keys.find("ES256-0", name) for name in ("RS256", "ES384", "HS256")] == [None] * 3


def test_without_a_kid_only_the_single_fitting_key_is_taken() -> None:
    """Two would make it a guess."""
    keys = parse_jwks(jwks(jwk("ES256"), jwk("EdDSA"), jwk("EdDSA", 1)), DEFAULT_ALGORITHMS)

    assert keys.find(None, "ES256") == keys.find("ES256-0", "ES256")
    assert keys.find(None, "EdDSA") is None
    assert keys.find(None, "RS256") is None


def test_a_key_without_a_kid_serves_only_tokens_without_one() -> None:
    """A name that nobody gave is not known."""
    member = jwk("ES256")
    del member["kid"]
    keys = parse_jwks(jwks(member), DEFAULT_ALGORITHMS)

    assert keys.find(None, "ES256")
    assert keys.find("ES256-0", "ES256") is None
    assert not keys.knows("ES256-0")
