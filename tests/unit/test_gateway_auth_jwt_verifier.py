"""JWT verification: only a valid token of the configured issuer for this service is accepted. Known attacks by name."""

import base64
import contextlib
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.jwt_verifier import JwtVerifier
from gateway.config import ALGORITHMS
from jwt_issuer import (
    AUDIENCE,
    ISSUER,
    NOW,
    LiteralSource,
    base64url,
    claims,
    config,
    hmac_token,
    jwk,
    private_key,
    rejection,
    signed_text,
    token,
)
from scheduler.errors import ErrorCode, RequestError, StartError

HEADER = '{"alg":"ES256","kid":"ES256-0"}'


@pytest.fixture
def source() -> LiteralSource:
    """The key set of the issuer."""
    return LiteralSource()


@pytest.fixture
def verifier(source: LiteralSource) -> JwtVerifier:
    """A verifier with the issuer's keys and the default settings."""
    return JwtVerifier(config(), source)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"algorithms": ("RS256", "HS256")}, "HS256"),
        ({"algorithms": ("None",)}, "none"),
        ({"algorithms": ()}, "JWT_ALGORITHMS"),
        ({"issuer": None, "audience": ""}, "JWT_AUDIENCE"),
        ({"customer_claim": ""}, "JWT_CUSTOMER_CLAIM"),
        ({"jwks": "ftp://issuer.example/keys"}, "JWT_JWKS"),
        ({"jwks": "https://user:secret@issuer.example/keys"}, "JWT_JWKS"),
        ({"leeway_s": 3600.0}, "leeway"),
        ({"keep_s": 1.0}, "keep"),
        ({"max_token_bytes": 100_000}, "8000"),
    ],
)
def test_unsafe_settings_are_rejected_at_start(changes: dict[str, Any], named: str) -> None:
    """The error names the setting and contains no secret. No symmetric algorithm can be allowed."""
    with pytest.raises(StartError) as error:
        config(**changes)

    assert named.lower() in str(error.value).lower()
    assert "secret@" not in str(error.value)
    assert not [name for name in ALGORITHMS if name.startswith("HS") or name.lower() == "none"]
    assert config(jwks="https://issuer.example:8443/keys?code=secret").place == "https://issuer.example:8443/keys"


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_valid_token_names_its_customer(verifier: JwtVerifier, algorithm: str) -> None:
    """The key id for the audit is the same for all tokens of a subject, short, and does not contain the subject."""
    found, again = verifier.verify(token(algorithm), NOW), verifier.verify(token(algorithm, jti="other"), NOW)

    assert (found.customer, found.good_until) == ("acme", NOW + 600 + 10)
    assert found.key_id == again.key_id != verifier.verify(token(algorithm, sub="other"), NOW).key_id
    assert (found.key_id[:4], len(found.key_id), "acme" in found.key_id) == ("jwt:", 28, False)
    by_claim = JwtVerifier(config(customer_claim="org", issuer=None), LiteralSource())
    assert by_claim.verify(token(org="globex"), NOW).customer == "globex"


@pytest.mark.parametrize("name", ["none", "None", "", "HS256", "RS512", "ES256 ", "es256", 7, None, ["ES256"], {}])
def test_an_algorithm_outside_the_list_is_rejected(verifier: JwtVerifier, name: Any) -> None:
    """Also with a valid signature of another algorithm, and without any signature."""
    header = json.dumps({"alg": name, "kid": "ES256-0"})
    unsigned = f"{base64url(header.encode())}.{base64url(json.dumps(claims()).encode())}."

    assert "algorithm" in rejection(verifier, signed_text(header, json.dumps(claims())))
    assert "well-formed" in rejection(verifier, unsigned)


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
@pytest.mark.parametrize("form", ["pem", "der", "jwk"])
def test_a_public_key_is_not_accepted_as_hmac_secret(verifier: JwtVerifier, algorithm: str, form: str) -> None:
    """Algorithm confusion: the attacker signs with HMAC under the public key, in each form that is published."""
    public = private_key(algorithm).public_key()
    encoding = Encoding.PEM if form == "pem" else Encoding.DER
    secret = public.public_bytes(encoding, PublicFormat.SubjectPublicKeyInfo)
    if form == "jwk":
        secret = json.dumps(jwk(algorithm)).encode()

    assert "algorithm" in rejection(verifier, hmac_token(secret, kid=f"{algorithm}-0"))
    assert rejection(verifier, hmac_token(secret, kid=f"{algorithm}-0", alg=algorithm))


@pytest.mark.parametrize(("signer", "claimed"), [("RS256", "ES256"), ("ES256", "RS256"), ("EdDSA", "ES256")])
def test_the_algorithm_must_match_the_key_type(verifier: JwtVerifier, signer: str, claimed: str) -> None:
    """A key is not tried under the algorithm of another type, and another key's signature is invalid."""
    payload = json.dumps(claims())

    assert "key" in rejection(
        verifier, signed_text(json.dumps({"alg": claimed, "kid": f"{signer}-0"}), payload, signer)
    )
    assert rejection(verifier, signed_text(json.dumps({"alg": claimed, "kid": f"{claimed}-0"}), payload, signer))


def test_a_changed_claim_breaks_the_signature(verifier: JwtVerifier) -> None:
    """The payload of another valid token does not match the signature."""
    header, _, signature = token().split(".")

    assert "signature" in rejection(verifier, f"{header}.{token(sub='globex').split('.')[1]}.{signature}")


def test_keys_in_the_header_are_ignored(verifier: JwtVerifier) -> None:
    """A token signed with an attacker's key cannot supply that key or its address."""
    offered = {"jwk": jwk("ES256", 1), "jku": "https://attacker.example/jwks", "x5u": "https://attacker.example/cert"}
    header = json.dumps({"alg": "ES256", "kid": "ES256-0", **offered, "x5c": ["AAAA"]})

    assert "signature" in rejection(verifier, signed_text(header, json.dumps(claims()), "ES256", number=1))
    assert verifier.verify(token(headers=offered), NOW).customer == "acme"


@pytest.mark.parametrize("crit", [["b64"], ["exp"], [], "b64", None])
def test_critical_extensions_are_rejected(verifier: JwtVerifier, crit: Any) -> None:
    """No extension is supported, and an empty list is invalid."""
    header = json.dumps({"alg": "ES256", "kid": "ES256-0", "crit": crit, "b64": False})

    assert "crit" in rejection(verifier, signed_text(header, json.dumps(claims())))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"exp": int(NOW) - 10}, "expired"),
        ({"exp": 0}, "expired"),
        ({"exp": -1}, "exp is not a time"),
        ({"exp": None}, "expiry"),
        ({"exp": "2030"}, "exp is not a time"),
        ({"exp": True}, "exp is not a time"),
        ({"exp": 10**400}, "exp is not a time"),
        ({"nbf": int(NOW) + 11}, "nbf"),
        ({"iat": int(NOW) + 11}, "iat"),
        ({"iss": ISSUER + "/"}, "issuer"),
        ({"iss": [ISSUER]}, "issuer"),
        ({"aud": ["other", 7]}, "audience"),
        ({"aud": {AUDIENCE: 1}}, "audience"),
        ({"aud": AUDIENCE + "-admin"}, "audience"),
        ({"sub": 7}, "customer"),
        ({"sub": "a" * 201}, "customer"),
    ],
    ids=str,
)
def test_an_invalid_claim_is_named(verifier: JwtVerifier, changes: dict[str, Any], named: str) -> None:
    """The message names the claim, without its value."""
    assert named in rejection(verifier, signed_text(HEADER, json.dumps(claims(**changes))))


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": int(NOW) - 9},
        {"nbf": int(NOW) + 10},
        {"iat": None},
        {"aud": ["other", AUDIENCE]},
        {"sub": "a" * 200},
    ],
    ids=str,
)
def test_valid_claims_within_the_leeway_are_accepted(verifier: JwtVerifier, changes: dict[str, Any]) -> None:
    """Clocks may differ by the leeway, and the audience may be a list."""
    assert verifier.verify(signed_text(HEADER, json.dumps(claims(**changes))), NOW)


GOOD = '"sub":"acme","aud":"tierlane","iss":"https://issuer.example"'


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        ('{"alg":"none","alg":"ES256","kid":"ES256-0"}', f'{{{GOOD},"exp":1900000000}}'),
        ('{"alg":"ES256","kid":"x","kid":"ES256-0"}', f'{{{GOOD},"exp":1900000000}}'),
        *((f'{{"alg":"ES256","kid":{kid}}}', f'{{{GOOD},"exp":1900000000}}') for kid in ("7", '["ES256-0"]', "true")),
        (HEADER, f'{{"sub":"globex",{GOOD},"exp":1900000000}}'),
        (HEADER, f'{{{GOOD},"exp":1,"exp":1900000000}}'),
        (HEADER, f'{{{GOOD},"exp":1900000000,"x":{{"a":1,"a":2}}}}'),
        (HEADER, f'{{{GOOD},"exp":NaN}}'),
        (HEADER, ""),
        (HEADER, "[" * 3000),
        (HEADER, '{"a":' * 900 + "1" + "}" * 900),
    ],
    ids=range(12),
)
def test_ambiguous_json_is_rejected(verifier: JwtVerifier, header: str, payload: str) -> None:
    """Although it is signed: two parsers could read repeated members or invalid numbers in two ways."""
    assert rejection(verifier, signed_text(header, payload)) in {
        "The token is not a well-formed JWT.",
        "The token has no expiry time (exp).",
    }


def test_a_token_has_one_spelling(verifier: JwtVerifier) -> None:
    """Padding, the other alphabet, spaces, and unused bits in the last character are rejected."""
    good = token()
    header, payload, signature = good.split(".")
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    other_bits = alphabet[alphabet.index(signature[-1]) ^ 1]

    for text in (good + "=", good + "==", f" {good}", f"{header}=.{payload}.{signature}", good + "\n", good + "+"):
        assert rejection(verifier, text)
    assert rejection(verifier, good[:-1] + other_bits)
    assert verifier.verify(good, NOW)


def test_malformed_tokens_are_rejected(verifier: JwtVerifier) -> None:
    """With any number of parts; a token above the size limit is rejected although its signature is valid."""
    for text in ("..", "a..", "e30.e30", "a.b.c.d.e", "\ud800.a.b", token(filler="x" * 8000)):
        assert "well-formed" in rejection(verifier, text)


@given(st.lists(st.binary(max_size=200), min_size=3, max_size=3), st.booleans())
def test_arbitrary_bytes_are_rejected(parts: list[bytes], encoded: bool) -> None:
    """Any three parts, encoded or raw, are rejected with `invalid_api_key` and cause no other error."""
    pieces = [base64url(part) if encoded else part.decode("latin-1") for part in parts]

    assert rejection(JwtVerifier(config(), LiteralSource(jwk("ES256"))), ".".join(pieces))


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), st.lists, max_leaves=5))
def test_arbitrary_claim_values_cause_no_other_error(value: Any) -> None:
    """Each claim in turn has an arbitrary JSON value: the token is rejected, or valid for acme."""
    verifier = JwtVerifier(config(), LiteralSource(jwk("ES256")))
    for name in ("exp", "nbf", "iat", "iss", "aud"):
        text = signed_text(HEADER, json.dumps(claims() | {name: value}))
        with contextlib.suppress(RequestError):
            assert verifier.verify(text, NOW).customer == "acme"


@pytest.mark.parametrize("kid", ["../../etc/passwd", "ES256-0\x00", "' OR 1=1", "x" * 3000, ""])
def test_an_unknown_key_id_is_rejected_and_requested(verifier: JwtVerifier, source: LiteralSource, kid: str) -> None:
    """The key id is only compared; an unknown one triggers a fetch of the key set."""
    assert "key" in rejection(verifier, token(headers={"kid": kid}))
    assert source.wishes == 1


def test_an_unknown_key_is_503_while_the_key_set_is_unavailable(verifier: JwtVerifier, source: LiteralSource) -> None:
    """It may be a new key; known keys are still accepted. Without any key set, cached tokens are 503 as well."""
    source.problem = "The JWKS at https://issuer.example/keys does not respond."
    assert verifier.verify(token(), NOW)
    for text, keys in ((token(number=1), source.keys), (token(), None)):
        source.keys = keys
        with pytest.raises(RequestError) as error:
            verifier.verify(text, NOW)
        assert error.value.code is ErrorCode.CATALOG_UNAVAILABLE


def test_cached_tokens_expire(verifier: JwtVerifier) -> None:
    """Expiry is checked for each request, and removes the token from the cache."""
    text = token()
    assert verifier.verify(text, NOW)
    assert verifier.verify(text, NOW + 609)
    assert len(verifier) == 1

    assert "expired" in rejection(verifier, text, NOW + 610)
    assert len(verifier) == 0


def test_a_replaced_key_invalidates_cached_tokens(verifier: JwtVerifier, source: LiteralSource) -> None:
    """The cached result was about the previous key of the same id."""
    text = token()
    assert verifier.verify(text, NOW)

    source.set(jwk("ES256", 1, kid="ES256-0"))

    assert "signature" in rejection(verifier, text)


def test_the_cache_is_bounded_and_holds_hashes_of_valid_tokens_only(source: LiteralSource) -> None:
    """The oldest entry is dropped, invalid tokens are not cached, and no token can be read from the cache."""
    verifier = JwtVerifier(config(max_cached=3), source)
    texts = [token("EdDSA", sub=f"customer-{number}") for number in range(5)]
    for text in texts:
        verifier.verify(text, NOW)
    for number in range(10):
        rejection(verifier, token("EdDSA", number=1, sub=f"customer-{number}"))

    assert {len(name) for name in verifier._verified} == {32}
    for text in texts:
        assert text not in repr(verifier._verified)
        assert base64.b64encode(text.encode()).decode() not in repr(verifier._verified)
    assert len(verifier) == 3
    assert [verifier.verify(text, NOW).customer for text in texts] == [f"customer-{number}" for number in range(5)]
