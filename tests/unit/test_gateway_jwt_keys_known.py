"""Which key of the set verifies, and what is remembered of tokens that were good."""

import base64
import json

import pytest

from gateway.auth.jwt_verifier import Claims, JwtVerifier
from jwt_issuer import (
    NOW,
    LiteralSource,
    claims,
    config,
    jwk,
    refused,
    signed_text,
    token,
)
from scheduler.errors import ErrorCode, RequestError


@pytest.fixture
def source() -> LiteralSource:
    """The keys of the issuer."""
    return LiteralSource()


@pytest.fixture
def verifier(source: LiteralSource) -> JwtVerifier:
    """What is tested."""
    return JwtVerifier(config(), source)


@pytest.mark.parametrize("kid", ["../../etc/passwd", "ES256-0\x00", "' OR 1=1", "x" * 3000, ""])
def test_an_unknown_key_is_refused_and_asked_for(verifier: JwtVerifier, source: LiteralSource, kid: str) -> None:
    """The name is only ever compared."""
    assert "key" in refused(verifier, token(headers={"kid": kid}))
    assert source.wishes == 1


def test_a_kid_that_is_no_text_is_refused(verifier: JwtVerifier) -> None:
    """Lists and numbers name no key."""
    for kid in (7, ["ES256-0"], {"a": 1}, True):
        header = json.dumps({"alg": "ES256", "kid": kid})
        assert "well-formed" in refused(verifier, signed_text(header, json.dumps(claims())))


def test_while_the_key_set_is_away_an_unknown_key_may_be_a_new_one(
    verifier: JwtVerifier, source: LiteralSource
) -> None:
    """503, as for an API key while PostgreSQL is away; known keys go on."""
    source.problem = "The JWKS at https://issuer.example/keys does not answer."

    with pytest.raises(RequestError) as error:
        verifier.verify(token(number=1), NOW)

    assert error.value.code is ErrorCode.CATALOG_UNAVAILABLE
    assert verifier.verify(token(), NOW)


def test_without_a_key_set_nothing_can_be_said(verifier: JwtVerifier, source: LiteralSource) -> None:
    """Also of tokens that were good before: the set may be gone because its keys leaked."""
    verifier.verify(token(), NOW)
    source.keys = None

    with pytest.raises(RequestError) as error:
        verifier.verify(token(), NOW)

    assert error.value.code is ErrorCode.CATALOG_UNAVAILABLE


def test_a_remembered_token_expires_all_the_same(verifier: JwtVerifier) -> None:
    """It was good when it was seen first."""
    text = token()
    assert verifier.verify(text, NOW)
    assert verifier.verify(text, NOW + 609)
    assert len(verifier) == 1

    assert "expired" in refused(verifier, text, NOW + 610)
    assert len(verifier) == 0


def test_a_key_that_was_replaced_under_its_name_no_longer_verifies(
    verifier: JwtVerifier, source: LiteralSource
) -> None:
    """The remembered verdict was about another key."""
    text = token()
    assert verifier.verify(text, NOW)

    source.set(jwk("ES256", 1, kid="ES256-0"))

    assert "signature" in refused(verifier, text)


def test_the_memory_of_good_tokens_is_bounded_and_bad_ones_do_not_enter(source: LiteralSource) -> None:
    """The oldest goes; nobody can flush it with nonsense."""
    verifier = JwtVerifier(config(max_cached=3), source)
    texts = [token("EdDSA", sub=f"customer-{number}") for number in range(5)]
    for text in texts:
        verifier.verify(text, NOW)
    for number in range(10):
        refused(verifier, token("EdDSA", number=1, sub=f"customer-{number}"))

    assert len(verifier) == 3
    assert [verifier.verify(text, NOW).customer for text in texts] == [f"customer-{number}" for number in range(5)]


def test_nothing_of_a_remembered_token_is_kept(verifier: JwtVerifier) -> None:
    """Only its hash, and what it said."""
    text = token()
    verifier.verify(text, NOW)

    kept = verifier._verified
    assert [len(name) for name in kept] == [32]
    assert isinstance(next(iter(kept.values())), Claims)
    assert text not in repr(kept)
    assert base64.b64encode(text.encode()).decode() not in repr(kept)
