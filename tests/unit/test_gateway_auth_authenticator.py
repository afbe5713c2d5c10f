"""Authentication: API keys and JWTs, the limit of failures, and `service_tier`."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.auth.authenticator import MAX_KEY_BYTES, Authenticator, bearer_token
from gateway.auth.jwks import JwksSource
from gateway.auth.jwt_customers import JwtIdentities
from gateway.auth.service_tier import own, served_as
from gateway.auth.throttle import AuthThrottle
from gateway.http.error_responses import ErrorResponses
from gateway.http.errors import RejectionError
from gateway.http.parsed_request import ParsedRequest
from gateway.http.router import CustomerConnections, RoutedRequest
from identities import identity
from jwt_issuer import NOW, LiteralCustomers, LiteralSource, config, customer, token
from ledger.catalog.snapshot import Identity, Snapshot, Tier
from scheduler.errors import ErrorCode, RequestError

KEY = "tl_good"
INVALID = ErrorCode.INVALID_API_KEY
SERVICE_TOKEN = "service-token-16"


class OneKey:
    """A catalog with one key, which records its lookups."""

    def __init__(self) -> None:
        self.lookups: list[str] = []
        self.error = INVALID

    def identify(self, presented: str, wall_now: float) -> Identity:
        self.lookups.append(presented)
        if presented != KEY:
            raise RequestError(self.error)
        return Identity("key", "id-acme", "acme", "free", 1000, limits=(1.0, 1.0, 1, None))


def call(presented: str | None) -> RoutedRequest:
    """A request with this bearer token."""
    return routed([] if presented is None else [("Authorization", f"Bearer {presented}")])


def routed(headers: list[tuple[str, str]]) -> RoutedRequest:
    """A request with these headers, on a connection of its own."""
    connection = CustomerConnections(1).share()
    sent = CIMultiDictProxy(CIMultiDict(headers))
    request = SimpleNamespace(headers=sent, remote="192.0.2.1", protocol=connection)
    return RoutedRequest(cast("ParsedRequest", request), "req_1", auxiliary=True)


def jwt_identities(**changes: Any) -> JwtIdentities:
    """Tokens of the issuer, for the customer acme."""
    source = cast("JwksSource", LiteralSource())
    return JwtIdentities(LiteralCustomers(customer()), config(**changes), source=source)


def authenticator(keys: OneKey, tokens: JwtIdentities | None = None, limit: str = "100/minute") -> Authenticator:
    return Authenticator(keys, tokens, AuthThrottle(limit, clock=lambda: 6001.5), lambda: NOW)


def rejection(auth: Authenticator, presented: str | None) -> RequestError:
    with pytest.raises(RequestError) as error:
        auth.identify(call(presented))
    return error.value


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["Bearer abc"], "abc"),
        ([], INVALID),
        (["Basic abc"], INVALID),
        (["Bearer "], INVALID),
        (["Bearer " + "x" * 257], INVALID),
        (["Bearer \u00e9"], INVALID),
        (["Bearer abc", "Bearer abc"], ErrorCode.INVALID_REQUEST),
    ],
)
def test_one_short_bearer_token_is_required(values: list[str], expected: str) -> None:
    """Any other Authorization header is rejected."""
    if not isinstance(expected, ErrorCode):
        assert bearer_token(values) == expected
        return
    with pytest.raises(RequestError) as error:
        bearer_token(values)
    assert error.value.code is expected


@pytest.mark.parametrize(
    ("headers", "key_header", "expected"),
    [
        ([("x-api-key", KEY)], "x-api-key", "key"),
        ([("Authorization", f"Bearer {KEY}"), ("x-api-key", "wrong")], "x-api-key", "key"),
        ([("x-api-key", KEY)], "", INVALID),
        ([("Authorization", "Basic x"), ("x-api-key", KEY)], "x-api-key", INVALID),
        ([("x-api-key", KEY), ("x-api-key", KEY)], "x-api-key", ErrorCode.INVALID_REQUEST),
    ],
)
def test_a_header_with_the_key_alone(headers: list[tuple[str, str]], key_header: str, expected: str) -> None:
    """It is read where the API has one, if there is no Authorization."""
    request, auth = routed(headers), authenticator(OneKey())
    if not isinstance(expected, ErrorCode):
        assert auth.identify(request, key_header).key_id == expected
        return
    with pytest.raises(RequestError) as error:
        auth.identify(request, key_header)
    assert error.value.code is expected


def test_keys_and_tokens_are_told_apart_by_their_form() -> None:
    """Anything that is not a JWT is looked up as a key. JWTs may be longer than keys, up to the configured limit."""
    keys = OneKey()
    auth = authenticator(keys, jwt_identities(max_token_bytes=1000))

    assert auth.identify(call(KEY)).key_id == "key"
    assert auth.identify(call(token(filler="x" * 300))).key_id.startswith("jwt:")
    for other in ("tl_a.b.c", "a.b", "a.b.c.d", "tl_" + "a" * MAX_KEY_BYTES, token(filler="x" * 1000)):
        assert rejection(auth, other).code is INVALID
    assert keys.lookups == [KEY, "tl_a.b.c", "a.b", "a.b.c.d"]


def test_too_many_failures_are_rejected_with_429() -> None:
    """Wrong keys, missing keys and invalid tokens count alike; 429 has Retry-After."""
    auth = authenticator(OneKey(), jwt_identities(), limit="4/minute")
    for presented in ("wrong", None, token(aud="x"), token(number=1)):
        assert rejection(auth, presented).code is INVALID

    error = rejection(auth, "wrong")

    assert isinstance(error, RejectionError)
    assert error.code is ErrorCode.RATE_LIMIT_EXCEEDED
    assert 58_500 <= (error.retry_after_ms or 0) <= 58_501
    response = ErrorResponses(lambda: 0.0).answer(error, "req_1")
    assert (response.status, dict(response.headers)["Retry-After"]) == (429, "59")


def test_valid_credentials_pass_whatever_the_address_did() -> None:
    """Behind a proxy all clients have one address."""
    auth = authenticator(OneKey(), jwt_identities(), limit="2/minute")
    for _ in range(50):
        rejection(auth, "wrong")

    assert auth.identify(call(KEY)).key_id == "key"
    assert auth.identify(call(token())).customer_id == "id-acme"


@pytest.mark.parametrize("code", [ErrorCode.CATALOG_UNAVAILABLE, ErrorCode.ACCOUNT_SUSPENDED])
def test_other_errors_are_not_counted_as_failures(code: ErrorCode) -> None:
    """An unavailable catalog and a suspended account keep their codes."""
    keys = OneKey()
    keys.error = code
    auth = authenticator(keys, limit="2/minute")

    assert {rejection(auth, "unknown").code for _ in range(10)} == {code}


def test_guesses_of_the_service_token_are_limited() -> None:
    """They count like failures of customers; the right token always passes, and an empty one never does."""
    auth = authenticator(OneKey(), limit="2/minute")
    codes = []
    for _ in range(3):
        with pytest.raises(RequestError) as error:
            auth.check_service(call("guess"), SERVICE_TOKEN)
        codes.append(error.value.code)

    assert codes == [INVALID, INVALID, ErrorCode.RATE_LIMIT_EXCEEDED]
    auth.check_service(call(SERVICE_TOKEN), SERVICE_TOKEN)
    with pytest.raises(RequestError):
        auth.check_service(call(SERVICE_TOKEN), "")


def test_an_operator_without_a_token_is_told_which_one_to_send() -> None:
    """Not the API key, which these endpoints never accept."""
    with pytest.raises(RequestError, match="Send the service token") as error:
        Authenticator(OneKey()).check_service(call(None), SERVICE_TOKEN)

    assert error.value.code is INVALID


def test_the_throttle_can_be_disabled() -> None:
    """For gateways behind one proxy. JWTs are disabled by default: a token is an unknown key."""
    keys = OneKey()
    auth = Authenticator(keys)

    assert {rejection(auth, "a.b.c").code for _ in range(100)} == {INVALID}
    assert (keys.lookups[0], auth.problem, auth.loops()) == ("a.b.c", None, {})


def test_auxiliary_requests_are_charged_once() -> None:
    """Also if the caller is identified again; not those that join a queue, nor those of an unknown caller."""
    charged: list[str] = []
    auth = Authenticator(OneKey(), charge=lambda caller: charged.append(caller.customer_id))
    request, queued = call(KEY), call(KEY)
    queued.auxiliary = False
    for each in (request, request, queued):
        auth.identify(each)

    assert rejection(auth, "tl_unknown").code is INVALID
    assert charged == ["id-acme"]


def test_errors_do_not_repeat_the_credentials() -> None:
    """Whatever was sent."""
    auth = authenticator(OneKey(), jwt_identities())

    for presented in (token(aud="canary"), token(headers={"kid": "canary"}), "canary.canary.canary", "tl_canary"):
        error = rejection(auth, presented)
        assert "canary" not in error.message
        assert error.param is None


def test_service_tier_flex_uses_the_lowest_tier() -> None:
    """Name and priority are those of the last tier, limits those of the customer's own. Other values change nothing."""
    first = Tier("enterprise", 1, 0.6, (500.0, 1000.0, 200, None), 1000, 2000, None, None)
    last = Tier("free", 7, 0.1, (5.0, 10.0, 5, None), 100, 500, None, None)
    catalog = Snapshot(1, (first, last), {}, {}, {}, ())
    high, low = identity(tier="enterprise", priority=1, burst=40.0), identity(tier="free", priority=7)
    lowered = served_as(high, "flex", catalog)

    assert (lowered.tier, lowered.priority, lowered.limits) == ("free", 7, high.limits)
    assert own(lowered) is high
    assert all(served_as(high, value, catalog) is high for value in (None, "auto", "default"))
    assert served_as(low, "flex", catalog) is low
