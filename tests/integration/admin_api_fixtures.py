"""The admin API on the test's own database, with an operator of each role."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from uuid import UUID

import aiohttp
import asyncpg
import pytest
from yarl import URL

from gateway.admin_api.document import DOCUMENTS
from gateway.admin_api.oidc_provider import OidcConfig
from gateway.admin_api.roles import ROLE_ACTIONS
from gateway.admin_api.routes import ROUTES
from gateway.admin_api.server import AdminConfig, AdminServer
from gateway.auth.client_address import Network
from ledger.admin.changes import changing
from ledger.admin.operators import create_operator
from scheduler.request_id import created_at
from tierlane.connect import administering
from tierlane.settings.model import Settings

Connection = Any
CALLBACK_SECRET = b"a secret of thirty-two bytes 123"


class Reply(NamedTuple):
    """A response with its document."""

    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def etag(self) -> str:
        return self.headers["ETag"]

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"])


class AdminApi:
    """A client of a running admin API. `tokens`: by role, which is also the name of the operator."""

    def __init__(self, url: str, tokens: Mapping[str, str], http: aiohttp.ClientSession) -> None:
        self.url = url
        self.tokens = tokens
        self._http = http

    async def __call__(
        self, method: str, path: str, body: object = None, *, role: str | None = "admin", **headers: str
    ) -> Reply:
        """One request with the token of a role."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if role is not None:
            sent.setdefault("Authorization", f"Bearer {self.tokens[role]}")
        url = self.url + (path if path in ("/livez", "/readyz") else f"/admin/v1{path}")
        data = {"data": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
        async with self._http.request(method, URL(url, encoded=True), headers=sent, **data) as response:
            text = await response.text()
            document = await response.json() if text else None
            return Reply(response.status, document, response.headers.copy())

    async def done(self, method: str, path: str, body: object = None, **options: str) -> Any:
        """A request that must succeed; its document."""
        reply = await self(method, path, body, **options)
        assert reply.status in (200, 201), reply
        return reply.body


async def add_requests(db: Connection, acme: str, count: int) -> list[str]:
    """Insert failed and completed requests of this minute in turn; their ids, the newest first."""
    await db.execute("SELECT ensure_request_partitions(1)")
    now = time.time_ns() // 1_000_000
    ids = [f"req_{now - 10 * n:012x}7{n:03x}8{'0' * 15}" for n in range(count)]
    for n, request_id in enumerate(ids):
        await db.execute(
            "INSERT INTO requests (id, created_at, customer_id, tier, model, status, error_code, tokens_used, cost_ms) "
            "VALUES ($1, $2, $3, 'paid', 'tiny', $4, $5, 100, 500)",
            request_id,
            created_at(request_id),
            UUID(acme),
            "failed" if n % 2 else "completed",
            "gpu_timeout" if n % 2 else None,
        )
    return ids


@asynccontextmanager
async def running_admin_api(database_url: str, db: Connection, auth_failures: str = "off") -> AsyncIterator[AdminApi]:
    """An admin API with an operator for each role."""
    tokens = {}
    async with changing(db, "test", dry_run=False):
        for role in ROLE_ACTIONS:
            token, _ = await create_operator(db, role, role, None)
            tokens[role] = token.text
    async with served(database_url, auth_failures) as url, aiohttp.ClientSession() as http:
        yield AdminApi(url, tokens, http)


@asynccontextmanager
async def served(
    database_url: str,
    auth_failures: str = "off",
    trusted_proxies: Sequence[Network] = (),
    oidc: OidcConfig | None = None,
) -> AsyncIterator[str]:
    """The address of a process of the admin API."""
    settings = Settings(database_url=database_url)
    config = AdminConfig(
        host="127.0.0.1",
        port=0,
        auth_failures=auth_failures,
        trusted_proxies=trusted_proxies,
        callback_secret=CALLBACK_SECRET,
        oidc=oidc,
    )
    server = AdminServer(config, lambda: administering(settings, "test-admin-api"), ROUTES, DOCUMENTS)
    async with server.listening() as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
async def api(database_url: str, db: "asyncpg.Connection[asyncpg.Record]") -> AsyncIterator[AdminApi]:
    """A running admin API without a limit of failed authentications."""
    async with running_admin_api(database_url, db) as running:
        yield running
