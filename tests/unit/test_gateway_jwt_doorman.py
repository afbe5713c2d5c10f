"""Header to identity at one place: keys, tokens, and who has failed too often."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.auth.authenticator import MAX_KEY_BYTES, Authenticator
from gateway.auth.jwks import JwksSource
from gateway.auth.jwt_customers import JwtIdentities
from gateway.auth.throttle import AuthThrottle
from gateway.catalog import IdentityView
from gateway.http.errors import ErrorResponses, RejectionError
from gateway.http.router import RoutedRequest
from jwt_issuer import NOW, LiteralCustomers, LiteralSource, config, customer, token
from ledger.catalog.snapshot import Identity
from scheduler.errors import ErrorCode, RequestError

KEY = "tl_good"
PROXY = "192.0.2.1"


class OneKey:
    """A catalog that knows one key and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error = ErrorCode.INVALID_API_KEY

    def identify(self, presented: str, wall_now: float) -> IdentityView:
        self.asked.append(presented)
        if presented != KEY:
            raise RequestError(self.error)
        return Identity("key", "id-acme", "acme", "free", (1.0, 1.0, 1, None), 1000)


def call(token: str | None, address: str | None = PROXY) -> RoutedRequest:
    """A request with this token, from this address."""
    headers = CIMultiDict({} if token is None else {"Authorization": f"Bearer {token}"})
    request = SimpleNamespace(headers=CIMultiDictProxy(headers), remote=address)
    return RoutedRequest(cast("web.BaseRequest", request), "req_1")


def jwt_way(**changes: Any) -> JwtIdentities:
    """Tokens of the issuer, for acme."""
    source = cast("JwksSource", LiteralSource())
    return JwtIdentities(LiteralCustomers(customer()), config(**changes), source=source)


def authenticator(keys: OneKey, tokens: JwtIdentities | None = None, limit: str = "2/minute") -> Authenticator:
    """What is tested, at the issuer's wall time."""
    return Authenticator(keys, tokens, AuthThrottle(limit, clock=lambda: 6001.5), lambda: NOW)


def refusal(door: Authenticator, presented: RoutedRequest) -> RequestError:
    """What is answered instead of an identity."""
    with pytest.raises(RequestError) as error:
        door.identify(presented)
    return error.value


def test_keys_and_tokens_go_their_own_ways() -> None:
    """What begins as a key does, or has not the form of a JWT, is a matter of the catalog."""
    keys = OneKey()
    door = authenticator(keys, jwt_way())

    assert door.identify(call(KEY)).key_id == "key"
    assert door.identify(call(token())).key_id.startswith("jwt:")
    for other in ("tl_a.b.c", "a.b", "a.b.c.d"):
        assert refusal(door, call(other, other)).code is ErrorCode.INVALID_API_KEY

    assert keys.asked == [KEY, "tl_a.b.c", "a.b", "a.b.c.d"]


def test_jwts_are_off_by_default() -> None:
    """A good one is as unknown as any other text, and a long one is not even looked at."""
    keys = OneKey()
    door = authenticator(keys, limit="100/minute")

    assert refusal(door, call("a.b.c")).code is ErrorCode.INVALID_API_KEY
    assert refusal(door, call(token("RS256"))).code is ErrorCode.INVALID_API_KEY
    assert keys.asked == ["a.b.c"]


def test_only_jwts_may_be_long() -> None:
    """A key has 256 bytes at most, with and without tokens; a token as many as are configured."""
    keys = OneKey()
    door = authenticator(keys, jwt_way(max_token_bytes=1000), limit="100/minute")
    long_key = "tl_" + "a" * MAX_KEY_BYTES

    assert refusal(door, call(long_key)).code is ErrorCode.INVALID_API_KEY
    assert keys.asked == []
    assert door.identify(call(token(filler="x" * 300)))
    assert refusal(door, call(token(filler="x" * 1000))).code is ErrorCode.INVALID_API_KEY


def test_who_fails_too_often_is_told_to_wait() -> None:
    """429 with Retry-After instead of 401, also for requests without any key."""
    door = authenticator(OneKey())
    assert [refusal(door, call(presented)).code for presented in ("wrong", None)] == [ErrorCode.INVALID_API_KEY] * 2

    error = refusal(door, call("wrong"))

    assert isinstance(error, RejectionError)
    assert error.code is ErrorCode.RATE_LIMIT_EXCEEDED
    assert 58_500 <= (error.retry_after_ms or 0) <= 58_501
    answer = ErrorResponses(lambda: 0.0).answer(error, "req_1")
    assert answer.status == 429
    assert ("Retry-After", "59") in answer.headers


def test_a_good_key_passes_whatever_its_address_did() -> None:
    """Behind a proxy everybody has the same one."""
    door = authenticator(OneKey(), jwt_way())
    for _ in range(50):
        refusal(door, call("wrong"))

    assert door.identify(call(KEY)).key_id == "key"
    assert door.identify(call(token())).customer_id == "id-acme"
    assert door.identify(call(token("RS256"))).customer_id == "id-acme"


@pytest.mark.parametrize("code", [ErrorCode.CATALOG_UNAVAILABLE, ErrorCode.ACCOUNT_SUSPENDED])
def test_what_is_no_wrong_key_is_no_failure(code: ErrorCode) -> None:
    """A catalog that is away, and a suspended account, stay what they are."""
    keys = OneKey()
    keys.error = code
    door = authenticator(keys)

    assert {refusal(door, call("unknown")).code for _ in range(10)} == {code}


def test_bad_tokens_count_as_bad_keys_do() -> None:
    """Whatever is wrong with them, and by the same address."""
    door = authenticator(OneKey(), jwt_way())

    told = [refusal(door, call(presented)).code for presented in (token(aud="x"), "tl_wrong", token(number=1))]

    assert told == [ErrorCode.INVALID_API_KEY] * 2 + [ErrorCode.RATE_LIMIT_EXCEEDED]


def test_guesses_at_the_service_token_are_counted_too() -> None:
    """By the same address as customers' failures; the right one always passes."""
    door = authenticator(OneKey())
    for _ in range(2):
        with pytest.raises(RequestError) as error:
            door.check_service(call("guess"), "service-token-16")
        assert error.value.code is ErrorCode.INVALID_API_KEY

    with pytest.raises(RequestError) as error:
        door.check_service(call("guess"), "service-token-16")

    assert error.value.code is ErrorCode.RATE_LIMIT_EXCEEDED
    door.check_service(call("service-token-16"), "service-token-16")
    with pytest.raises(RequestError):  # Without a configured token none is accepted.
        door.check_service(call("service-token-16"), "")


def test_without_a_throttle_nobody_waits() -> None:
    """It can be switched off, for gateways behind one proxy."""
    door = Authenticator(OneKey())

    assert {refusal(door, call("wrong")).code for _ in range(100)} == {ErrorCode.INVALID_API_KEY}


def test_no_error_says_again_what_was_presented() -> None:
    """Not in the message, whatever it was."""
    door = authenticator(OneKey(), jwt_way(), limit="1000/minute")

    for presented in (token(aud="canary"), token(headers={"kid": "canary"}), "canary.canary.canary", "tl_canary"):
        error = refusal(door, call(presented))
        assert "canary" not in error.message
        assert error.param is None


def test_health_hears_of_a_key_set_that_is_away() -> None:
    """And of nothing where JWTs are off."""
    tokens = jwt_way()
    cast("LiteralSource", tokens.source).problem = "The JWKS at jwks.json is away."

    assert Authenticator(OneKey(), tokens).problem == "The JWKS at jwks.json is away."
    assert Authenticator(OneKey()).problem is None
    assert Authenticator(OneKey()).loops() == {}
