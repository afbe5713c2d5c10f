"""Only a token that the trusted issuer signed for us, and that is valid now, is good. Attacks by name."""

import contextlib
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.jwt_verifier import JwtVerifier
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
    refused,
    signed_text,
    token,
)
from scheduler.errors import RequestError

HEADER = '{"alg":"ES256","kid":"ES256-0"}'


@pytest.fixture
def source() -> LiteralSource:
    """The keys of the issuer."""
    return LiteralSource()


@pytest.fixture
def verifier(source: LiteralSource) -> JwtVerifier:
    """What is tested."""
    return JwtVerifier(config(), source)


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_good_token_names_its_customer(verifier: JwtVerifier, algorithm: str) -> None:
    """By each algorithm of the default list."""
    found = verifier.verify(token(algorithm), NOW)

    assert (found.customer, found.good_until) == ("acme", NOW + 600 + 10)


def test_the_key_id_is_short_the_same_for_all_tokens_of_a_subject_and_gives_nobody_away(verifier: JwtVerifier) -> None:
    """It goes into the audit, where an API key's id stands otherwise."""
    first, second = verifier.verify(token(), NOW), verifier.verify(token("RS256", jti="other"), NOW)
    other = verifier.verify(token(sub="other"), NOW)

    assert first.key_id == second.key_id != other.key_id
    assert first.key_id.startswith("jwt:")
    assert len(first.key_id) == 28
    assert "acme" not in first.key_id


def test_another_claim_may_name_the_customer() -> None:
    """The subject stays who it is in the audit."""
    verifier = JwtVerifier(config(customer_claim="org"), LiteralSource())

    found = verifier.verify(token(org="globex", sub="user-7"), NOW)

    assert found.customer == "globex"
    assert found.key_id == verifier.verify(token(org="acme", sub="user-7"), NOW).key_id


@pytest.mark.parametrize("name", ["none", "None", "NONE", "", "HS256", "RS512", "ES256 ", "es256"])
def test_an_algorithm_that_is_not_on_the_list_is_refused(verifier: JwtVerifier, name: str) -> None:
    """With and without a signature; the good signature of another algorithm does not help."""
    header = json.dumps({"alg": name, "kid": "ES256-0"})
    unsigned = f"{base64url(header.encode())}.{base64url(json.dumps(claims()).encode())}."

    assert "algorithm" in refused(verifier, signed_text(header, json.dumps(claims())))
    assert "well-formed" in refused(verifier, unsigned)


@pytest.mark.parametrize("number", [7, None, True, ["ES256"], {}])
def test_an_algorithm_that_is_no_text_is_refused(verifier: JwtVerifier, number: Any) -> None:
    """Whatever JSON can say."""
    assert "algorithm" in refused(verifier, signed_text(json.dumps({"alg": number}), json.dumps(claims())))


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
@pytest.mark.parametrize("form", ["pem", "der", "jwk"])
def test_a_public_key_is_no_secret_for_hs256(verifier: JwtVerifier, algorithm: str, form: str) -> None:
    """The classic confusion: sign with HMAC under the public key, in each form that an attacker can have it."""
    public = private_key(algorithm).public_key()
    encoding = Encoding.PEM if form == "pem" else Encoding.DER
    secret = (
        json.dumps(jwk(algorithm)).encode()
        if form == "jwk"
        else public.public_bytes(encoding, PublicFormat.SubjectPublicKeyInfo)
    )

    assert "algorithm" in refused(verifier, hmac_token(secret, kid=f"{algorithm}-0"))
    assert refused(verifier, hmac_token(secret, kid=f"{algorithm}-0", alg=algorithm))


@pytest.mark.parametrize(("signer", "claimed"), [("RS256", "ES256"), ("ES256", "RS256"), ("EdDSA", "ES256")])
def test_the_algorithm_has_to_fit_the_keys_type(verifier: JwtVerifier, signer: str, claimed: str) -> None:
    """A key is not even tried under another type's algorithm, and another key's signature does not pass under it."""
    payload = json.dumps(claims())

    assert "key" in refused(verifier, signed_text(json.dumps({"alg": claimed, "kid": f"{signer}-0"}), payload, signer))
    assert refused(verifier, signed_text(json.dumps({"alg": claimed, "kid": f"{claimed}-0"}), payload, signer))


def test_a_changed_claim_breaks_the_signature(verifier: JwtVerifier) -> None:
    """Header, payload and signature of three good tokens do not make one."""
    header, _, signature = token().split(".")

    assert "signature" in refused(verifier, f"{header}.{token(sub='globex').split('.')[1]}.{signature}")


def test_keys_and_addresses_in_the_header_are_never_looked_at(verifier: JwtVerifier, source: LiteralSource) -> None:
    """Signed with an attacker's key, which the header brings along."""
    offered = {"jwk": jwk("ES256", 1), "jku": "https://attacker.example/jwks", "x5u": "https://attacker.example/cert"}
    header = json.dumps({"alg": "ES256", "kid": "ES256-0", **offered, "x5c": ["AAAA"]})

    assert "signature" in refused(verifier, signed_text(header, json.dumps(claims()), "ES256", number=1))
    assert verifier.verify(token(headers=offered), NOW).customer == "acme"


@pytest.mark.parametrize("crit", [["b64"], ["exp"], [], "b64", None])
def test_an_extension_that_must_be_understood_is_refused(verifier: JwtVerifier, crit: Any) -> None:
    """None is understood here, and an empty list is not allowed."""
    header = json.dumps({"alg": "ES256", "kid": "ES256-0", "crit": crit, "b64": False})

    assert "crit" in refused(verifier, signed_text(header, json.dumps(claims())))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"exp": int(NOW) - 10}, "expired"),
        ({"exp": 0}, "expired"),
        ({"exp": None}, "expiry"),
        ({"exp": "2030"}, "exp is not a time"),
        ({"exp": True}, "exp is not a time"),
        ({"exp": [1]}, "exp is not a time"),
        ({"exp": -1}, "exp is not a time"),
        ({"exp": 10**400}, "exp is not a time"),
        ({"exp": 1e300}, "exp is not a time"),
        ({"nbf": int(NOW) + 11}, "nbf"),
        ({"nbf": "now"}, "nbf is not a time"),
        ({"iat": int(NOW) + 11}, "iat"),
        ({"iss": None}, "issuer"),
        ({"iss": ISSUER + "/"}, "issuer"),
        ({"iss": [ISSUER]}, "issuer"),
        ({"aud": None}, "audience"),
        ({"aud": "other"}, "audience"),
        ({"aud": ["other", 7]}, "audience"),
        ({"aud": {AUDIENCE: 1}}, "audience"),
        ({"aud": AUDIENCE + "-admin"}, "audience"),
        ({"sub": None}, "customer"),
        ({"sub": ""}, "customer"),
        ({"sub": 7}, "customer"),
        ({"sub": "a" * 201}, "customer"),
    ],
    ids=str,
)
def test_a_claim_that_does_not_hold_is_named(verifier: JwtVerifier, changes: dict[str, Any], word: str) -> None:
    """The client is told which, and nothing that it sent is said again."""
    payload = json.dumps(claims(**changes))

    assert word in refused(verifier, signed_text(HEADER, payload))


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": int(NOW) - 9},
        {"exp": NOW + 0.5},
        {"nbf": int(NOW) + 10},
        {"iat": int(NOW) + 10},
        {"iat": None},
        {"aud": ["other", AUDIENCE]},
        {"sub": "a" * 200},
    ],
    ids=str,
)
def test_clocks_may_differ_by_the_leeway_and_lists_of_audiences_are_fine(
    verifier: JwtVerifier, changes: dict[str, Any]
) -> None:
    """What a strict but sane provider sends."""
    assert verifier.verify(signed_text(HEADER, json.dumps(claims(**changes))), NOW)


@pytest.mark.parametrize(
    "payload",
    [
        '{"sub":"globex","sub":"acme","aud":"tierlane","iss":"https://issuer.example","exp":1900000000}',
        '{"sub":"acme","aud":"tierlane","iss":"https://issuer.example","exp":1,"exp":1900000000}',
        '{"sub":"acme","aud":"tierlane","iss":"https://issuer.example","exp":1900000000,"x":{"a":1,"a":2}}',
        '{"sub":"acme","aud":"tierlane","iss":"https://issuer.example","exp":NaN}',
        '{"sub":"acme","aud":"tierlane","iss":"https://issuer.example","exp":Infinity}',
        '["acme"]',
        '"acme"',
        "acme",
        "",
        "{" * 2000,
        "[" * 3000,
        '{"a":' * 900 + "1" + "}" * 900,
    ],
    ids=range(12),
)
def test_a_payload_that_two_readers_could_read_in_two_ways_is_refused(verifier: JwtVerifier, payload: str) -> None:
    """Although its signature is good."""
    assert refused(verifier, signed_text(HEADER, payload)) in {
        "The token is not a well-formed JWT.",
        "The token has no expiry time (exp).",
    }


def test_two_header_members_of_one_name_are_refused(verifier: JwtVerifier) -> None:
    """The second `alg` or `kid` is what another reader would have believed."""
    payload = json.dumps(claims())

    for header in ('{"alg":"none","alg":"ES256","kid":"ES256-0"}', '{"alg":"ES256","kid":"x","kid":"ES256-0"}'):
        assert "well-formed" in refused(verifier, signed_text(header, payload))


def test_a_token_has_one_spelling(verifier: JwtVerifier) -> None:
    """Padding, the other alphabet, spaces, and bits in the last character that are thrown away."""
    good = token()
    header, payload, signature = good.split(".")
    last = signature[-1]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    other_bits = alphabet[alphabet.index(last) ^ 1]

    for text in (good + "=", good + "==", f" {good}", f"{header}=.{payload}.{signature}", good + "\n", good + "+"):
        assert refused(verifier, text)
    assert refused(verifier, good[:-1] + other_bits)
    assert verifier.verify(good, NOW)


@pytest.mark.parametrize(
    "text",
    ["..", "a..", ".a.", "..a", "a.b.c", "tl_.x.y", "e30.e30.e30", "....", "a.b.c.d.e", "!.!.!", "é.é.é", "\ud800.a.b"],
)
def test_nonsense_is_refused(verifier: JwtVerifier, text: str) -> None:
    """In any number of pieces."""
    assert refused(verifier, text)


@given(st.lists(st.binary(max_size=200), min_size=3, max_size=3), st.booleans())
def test_no_bytes_at_all_get_in(parts: list[bytes], encoded: bool) -> None:
    """Any three pieces, as base64url or raw: always a refusal, never another error."""
    pieces = [base64url(part) if encoded else part.decode("latin-1") for part in parts]

    assert refused(JwtVerifier(config(), LiteralSource(jwk("ES256"))), ".".join(pieces))


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), st.lists, max_leaves=5))
def test_no_claim_of_a_strange_type_breaks_it(value: Any) -> None:
    """Each claim in turn is something that JSON can say: a refusal, or acme."""
    verifier = JwtVerifier(config(), LiteralSource(jwk("ES256")))
    for name in ("exp", "nbf", "iat", "iss", "aud"):
        text = signed_text(HEADER, json.dumps(claims() | {name: value}))
        with contextlib.suppress(RequestError):
            assert verifier.verify(text, NOW).customer == "acme"


def test_a_huge_token_is_refused_before_anything_is_read(verifier: JwtVerifier) -> None:
    """It is well signed."""
    assert "well-formed" in refused(verifier, token(filler="x" * 8000))
