"""The JWKS: which keys are usable, and how the key set follows its source."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from eventually import eventually
from gateway.auth.jwks import JwksSource
from gateway.auth.jwks_reading import MAX_BYTES, read_file
from gateway.auth.key_set import KeySetError, parse_jwks
from jwt_issuer import config, jwk, jwks, private_key
from scheduler.redis_client.backoff import Backoff

DAY_S = 86_400.0
URL = "https://issuer.example/keys"
OCT = {"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0", "kid": "oct", "alg": "HS256"}
WEAK_RSA = RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 1024).public_key(), as_dict=True) | {"kid": "weak"}
PRIVATE: dict[str, Any] = ECAlgorithm.to_jwk(private_key("ES256"), as_dict=True) | {"kid": "private"}


@pytest.mark.parametrize(
    "member",
    [
        OCT,
        OCT | {"kty": "RSA"},
        PRIVATE,
        WEAK_RSA,
        jwk("RS256") | {"use": "enc"},
        jwk("RS256") | {"key_ops": ["encrypt"]},
        jwk("RS256") | {"alg": "RSA-OAEP"},
        jwk("RS256") | {"kid": 7},
        jwk("RS256") | {"n": "!!"},
        jwk("ES256") | {"x": jwk("ES256", 1)["x"]},
        jwk("ES256") | {"crv": "P-384"},
        jwk("EdDSA") | {"crv": "X25519"},
        {"kty": "RSA", "kid": "empty"},
    ],
    ids=range(13),
)
def test_unusable_keys_are_skipped(member: dict[str, Any]) -> None:
    """Symmetric, private, weak and invalid keys; they do not affect the other keys of the set."""
    keys = parse_jwks(jwks(member, jwk("EdDSA", 1)), config().algorithms)

    assert (len(keys), keys.skipped) == (1, 1)
    assert keys.find("EdDSA-1", "EdDSA")
    assert not keys.knows(member.get("kid"))


@pytest.mark.parametrize(
    "raw",
    [
        b"not json",
        b"{}",
        b'{"keys": {}}',
        b'{"keys": [1, null, "x"]}',
        b'{"keys": [], "keys": []}',
        b'{"keys": ' + b"[" * 5000,
        json.dumps({"keys": [OCT]}).encode(),
        json.dumps({"keys": [jwk("ES256", number) for number in range(101)]}).encode(),
    ],
    ids=range(8),
)
def test_a_set_without_a_usable_key_is_rejected(raw: bytes) -> None:
    """The caller keeps its previous set."""
    with pytest.raises(KeySetError):
        parse_jwks(raw, config().algorithms)


def test_a_key_is_bound_to_the_algorithms_of_its_type() -> None:
    """An RSA key is used with the allowed RSA algorithms only, an elliptic-curve key with that of its curve."""
    keys = parse_jwks(jwks(jwk("RS256"), jwk("ES256")), ("RS256", "PS256", "ES256"))

    assert keys.find("RS256-0", "RS256")
    assert keys.find("RS256-0", "PS256")
    assert [keys.find("RS256-0", name) for name in ("RS384", "ES256", "HS256", "none", "EdDSA")] == [None] * 5
    assert [keys.find("ES256-0", name) for name in ("RS256", "ES384", "HS256")] == [None] * 3


def test_a_token_without_kid_needs_a_single_matching_key() -> None:
    """Two matching keys would be a guess. A key without `kid` serves only tokens without one."""
    keys = parse_jwks(jwks(jwk("ES256"), jwk("EdDSA"), jwk("EdDSA", 1)), config().algorithms)
    unnamed = parse_jwks(
        jwks({name: value for name, value in jwk("ES256").items() if name != "kid"}), config().algorithms
    )

    assert keys.find(None, "ES256") == keys.find("ES256-0", "ES256")
    assert [keys.find(None, name) for name in ("EdDSA", "RS256")] == [None, None]
    assert unnamed.find(None, "ES256")
    assert (unnamed.find("ES256-0", "ES256"), unnamed.knows("ES256-0")) == (None, False)


class Reader:
    """A fetch that returns or raises `response`, at a time that is recorded."""

    def __init__(self) -> None:
        self.response: bytes | Exception = jwks()
        self.times: list[float] = []
        self.now = 1000.0  # The source's clock.

    async def read(self) -> bytes:
        self.times.append(time.monotonic())
        if isinstance(self.response, Exception):
            raise self.response
        return self.response

    def source(self, **options: Any) -> JwksSource:
        return JwksSource(config(jwks=URL), read=self.read, clock=lambda: self.now, **options)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (KeySetError("does not respond: TimeoutError"), "does not respond: TimeoutError"),
        (b"<html>", "is not JSON"),
        (b'{"keys": []}', "has no public key for RS256, ES256, EdDSA"),
        (KeyError("unexpected"), "cannot be refreshed: KeyError"),
    ],
)
async def test_the_last_valid_set_is_kept_for_a_day(response: bytes | Exception, reason: str) -> None:
    """Health reports the failed fetch. After a day the set is dropped: a key may have been removed because it leaked."""
    reader = Reader()
    source = reader.source()
    assert (source.keys, source.problem is None) == (None, False)
    await source.refresh()
    valid = source.keys
    assert (valid is not None, source.problem) == (True, None)

    reader.response = response
    reader.now += DAY_S
    await source.refresh()
    assert source.keys is valid
    assert source.problem == f"The JWKS at {URL} {reason}."
    reader.now += 1
    assert source.keys is None
    reader.response = jwks()
    await source.refresh()

    assert (source.keys is None, source.problem) == (False, None)


async def test_an_unchanged_set_stays_the_same_object() -> None:
    """Cached tokens are dropped only when the set changes."""
    reader = Reader()
    source = reader.source()
    await source.refresh()
    first = source.keys

    await source.refresh()
    assert source.keys is first
    reader.response = jwks(jwk("ES256", 1))
    await source.refresh()

    assert source.keys is not None
    assert not source.keys.knows("ES256-0")


@pytest.mark.parametrize("failing", [False, True])
async def test_fetches_for_unknown_keys_are_rate_limited(failing: bool) -> None:
    """Unknown key ids cause an early fetch, but not within the minimum gap; failed fetches back off."""
    reader = Reader()
    source = reader.source(least_gap_s=0.0 if failing else 0.1)
    if failing:
        reader.response = KeySetError("responds with status 500")
        source._backoff = Backoff(0.05, 1.0, draw=lambda _, most: most)

    def third_fetch() -> bool:
        source.wanted()
        return len(reader.times) >= 3

    task = asyncio.create_task(source.run())
    try:
        await eventually(third_fetch, "three fetches")
    finally:
        task.cancel()
    first, second, third = reader.times[:3]

    assert (second - first) >= (0.049 if failing else 0.099)
    assert (third - second) >= 0.099


async def test_a_file_is_read_again_by_its_name(tmp_path: Path) -> None:
    """Also after it was replaced. A missing file is reported, and a file above the size limit is rejected."""
    path = tmp_path / "jwks.json"
    source = JwksSource(config(jwks=str(path)))
    await source.refresh()
    assert source.problem == f"The JWKS at {path} cannot be read: No such file or directory."

    path.write_bytes(jwks())
    await source.refresh()
    assert source.problem is None
    (tmp_path / "new").write_bytes(jwks(jwk("ES256", 1)))
    (tmp_path / "new").replace(path)
    await source.refresh()
    assert source.keys is not None
    assert [source.keys.knows(name) for name in ("ES256-0", "ES256-1")] == [False, True]

    path.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(KeySetError, match="more than 262144 bytes"):
        await read_file(path)
