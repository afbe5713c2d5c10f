"""An OpenID Connect provider: its metadata, the address of its sign-in page, and the exchange of a code for claims.

PyJWT verifies ID tokens, with keys that are bound to their algorithms as those of JWTs of customers are
(`gateway.auth.key_set`). Keys are read for each sign-in, after the provider has accepted the code.
"""

import asyncio
import base64
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import jwt
from jwt.exceptions import (
    ExpiredSignatureError,
    ImmatureSignatureError,
    InvalidAudienceError,
    InvalidIssuerError,
    InvalidSignatureError,
    PyJWTError,
)

from gateway.auth.json_object import read_object
from gateway.auth.jwks_reading import TIMEOUT, read_url
from gateway.auth.key_set import KeySetError, parse_jwks
from scheduler.errors import ErrorCode, RequestError

METADATA_PATH = "/.well-known/openid-configuration"
KEEP_S = 300.0
"""For how long the metadata of the provider is used."""

LEEWAY_S = 60
MAX_BYTES = 262_144
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")
CLOCKS = "compare the clocks of this host and the identity provider."
REJECTIONS: Mapping[type[Exception], str] = {
    ExpiredSignatureError: f"The ID token has expired: {CLOCKS}",
    ImmatureSignatureError: f"The ID token is not valid yet: {CLOCKS}",
    InvalidAudienceError: "The ID token is for another client than TIERLANE_ADMIN_OIDC_CLIENT_ID (aud).",
    InvalidIssuerError: "The ID token is from another issuer than TIERLANE_ADMIN_OIDC_ISSUER (iss).",
    InvalidSignatureError: "The signature of the ID token is not valid.",
}
"""Faults of an ID token that have a sentence of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcConfig:
    """Sign-in through a provider. `roles`: group -> role; `groups_claim`: the claim with the groups of a person."""

    issuer: str
    client_id: str
    client_secret: str = field(repr=False)
    scopes: str
    groups_claim: str
    roles: Mapping[str, str]


class SignInRequest(NamedTuple):
    """The secrets of one sign-in, and the address that the provider sends the browser back to."""

    state: str
    nonce: str
    verifier: str
    redirect_uri: str


class OidcProvider:
    """The provider of a configuration. Methods raise RequestError `identity_provider_unavailable` or `sign_in_failed`."""

    def __init__(self, config: OidcConfig) -> None:
        self._config = config
        self._metadata: Mapping[str, Any] = {}
        self._read_at = -inf
        self._reading = asyncio.Lock()

    async def authorization_url(self, sign_in: SignInRequest) -> str:
        """The address of the provider's sign-in page."""
        endpoint = (await self._endpoints())["authorization_endpoint"]
        challenge = base64.urlsafe_b64encode(sha256(sign_in.verifier.encode()).digest()).rstrip(b"=").decode()
        query = {
            "response_type": "code",
            "client_id": self._config.client_id,
            "redirect_uri": sign_in.redirect_uri,
            "scope": self._config.scopes,
            "state": sign_in.state,
            "nonce": sign_in.nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"

    async def claims(self, code: str, sign_in: SignInRequest) -> Mapping[str, Any]:
        """The claims about the person who signed in: of the ID token, and of the userinfo endpoint without the groups in it."""
        metadata = await self._endpoints()
        tokens = await self._tokens(metadata, code, sign_in)
        claims = await self._verified(metadata, tokens.get("id_token"), sign_in.nonce)
        endpoint = metadata.get("userinfo_endpoint")
        if self._config.groups_claim in claims or not isinstance(endpoint, str) or not tokens.get("access_token"):
            return claims
        headers = {"Authorization": f"Bearer {tokens['access_token']}"}
        status, about = await self._call("GET", endpoint, headers=headers)
        if status != 200 or about.get("sub") != claims["sub"]:
            raise failed(f"The identity provider's userinfo endpoint returned status {status} or another person.")
        return {**about, **claims}

    async def _endpoints(self) -> Mapping[str, Any]:
        async with self._reading:
            if time.monotonic() - self._read_at > KEEP_S:
                self._metadata = await self._read_metadata()
                self._read_at = time.monotonic()
        return self._metadata

    async def _read_metadata(self) -> Mapping[str, Any]:
        issuer = self._config.issuer
        url = issuer.rstrip("/") + METADATA_PATH
        try:
            metadata = read_object(await read_url(url))
        except KeySetError as error:
            raise unavailable(f"The metadata of the identity provider at {url} {error}.") from error
        except ValueError as error:
            raise unavailable(f"The metadata of the identity provider at {url} is not a JSON object.") from error
        if metadata.get("issuer") != issuer:
            raise unavailable(
                f"The identity provider at {url} calls itself another issuer than TIERLANE_ADMIN_OIDC_ISSUER, {issuer}."
            )
        schemes = ("https",) if issuer.startswith("https:") else ("https", "http")
        for name in ENDPOINTS:
            if urlsplit(str(metadata.get(name))).scheme not in schemes:
                raise unavailable(f"The metadata of the identity provider at {url} has no valid {name}.")
        return metadata

    async def _tokens(self, metadata: Mapping[str, Any], code: str, sign_in: SignInRequest) -> Mapping[str, Any]:
        """The response of the token endpoint (RFC 6749, section 4.1.3)."""
        client = self._config.client_id, self._config.client_secret
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": sign_in.redirect_uri,
            "code_verifier": sign_in.verifier,
        }
        headers = {}
        methods = metadata.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        if "client_secret_basic" in methods:
            pair = ":".join(quote(each, safe="") for each in client)
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form |= {"client_id": client[0], "client_secret": client[1]}
        status, tokens = await self._call("POST", metadata["token_endpoint"], data=form, headers=headers)
        match status, tokens.get("error"):
            case 200, _:
                return tokens
            case _, "invalid_grant":
                raise failed("The identity provider does not accept the code: it is used up or expired. Sign in again.")
            case _, "invalid_client" | "unauthorized_client":
                raise failed("The identity provider does not accept the client: see TIERLANE_ADMIN_OIDC_CLIENT_SECRET.")
        raise failed(f"The identity provider's token endpoint returned status {status}.")

    async def _verified(self, metadata: Mapping[str, Any], token: object, nonce: str) -> Mapping[str, Any]:
        """The claims of an ID token (OpenID Connect Core, section 3.1.3.7)."""
        try:
            keys = parse_jwks(await read_url(metadata["jwks_uri"]), ALGORITHMS)
        except KeySetError as error:
            raise unavailable(f"The JWKS of the identity provider at {metadata['jwks_uri']} {error}.") from error
        try:
            header = jwt.get_unverified_header(str(token))
            key = keys.find(header.get("kid"), header["alg"])
            if key is None:
                raise failed("The ID token is signed with a key that the identity provider does not publish.")
            claims: dict[str, Any] = jwt.decode(
                str(token),
                key,
                algorithms=[header["alg"]],
                audience=self._config.client_id,
                issuer=self._config.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iat", "sub"]},
            )
        except (PyJWTError, KeyError, TypeError) as error:
            raise failed(REJECTIONS.get(type(error), "The ID token is missing or malformed.")) from error
        if claims.get("azp", self._config.client_id) != self._config.client_id:
            raise failed("The ID token is for another client (azp).")
        if claims.get("nonce") != nonce:
            raise failed("The ID token is from another sign-in (nonce).")
        return claims

    async def _call(self, method: str, url: str, **options: Any) -> tuple[int, Mapping[str, Any]]:
        """Status and JSON object of a response, {} for other content."""
        try:
            async with (
                aiohttp.ClientSession(timeout=TIMEOUT, cookie_jar=aiohttp.DummyCookieJar()) as http,
                http.request(method, url, allow_redirects=False, **options) as response,
            ):
                raw = b""
                async for chunk in response.content.iter_chunked(16_384):
                    raw += chunk
                    if len(raw) > MAX_BYTES:  # What was read is no JSON object then.
                        break
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise unavailable(f"The identity provider at {url} does not respond: {type(error).__name__}.") from error
        if response.status >= 500:
            raise unavailable(f"The identity provider at {url} returned status {response.status}.")
        try:
            return response.status, read_object(raw)
        except ValueError:
            return response.status, {}


def failed(message: str) -> RequestError:
    """The error of a sign-in that the person may repeat."""
    return RequestError(ErrorCode.SIGN_IN_FAILED, message)


def unavailable(message: str) -> RequestError:
    """The error of a provider that does not work."""
    return RequestError(ErrorCode.IDENTITY_PROVIDER_UNAVAILABLE, message)
