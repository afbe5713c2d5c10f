"""Sign-in to `tierlane admin` through a real OpenID Connect provider, `oidc-provider` of npm: `make clients CLIENTS=npm`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urljoin

import aiohttp
import pytest

from eventually import eventually
from integration.ledger_fixtures import database_url, db, postgres_server
from stack import free_port

__all__ = ["database_url", "db", "postgres_server"]

SCRIPTS = Path(__file__).resolve().parents[1] / "clients"
GROUPS = {"ann": ["staff", "platform"], "bob": ["guests"]}
CALLBACK = "/admin/oidc/callback"


@contextmanager
def running(command: list[str], **variables: str) -> Iterator[None]:
    """A process during the block."""
    path = f"{SCRIPTS / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(command, env=os.environ | {"PATH": path} | variables, cwd=SCRIPTS)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


async def responds(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether a server returns 200."""
    try:
        async with http.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


@pytest.fixture
async def admin_url(database_url: str) -> AsyncIterator[str]:
    """The address of an admin API before a provider with one client."""
    provider_url, port = f"http://127.0.0.1:{free_port()}", free_port()
    url = f"http://127.0.0.1:{port}"
    variables = {
        "TIERLANE_DATABASE_URL": database_url,
        "TIERLANE_ADMIN_OIDC_ISSUER": provider_url,
        "TIERLANE_ADMIN_OIDC_CLIENT_ID": "tierlane",
        "TIERLANE_ADMIN_OIDC_CLIENT_SECRET": "a secret: of + tests",
        "TIERLANE_ADMIN_OIDC_SCOPES": "openid email groups",
        "TIERLANE_ADMIN_OIDC_ROLES": "staff=viewer,platform=admin",
    }
    provider = ["node", "oidc_provider.js", provider_url.rpartition(":")[2], url + CALLBACK, json.dumps(GROUPS)]
    admin = [sys.executable, "-m", "tierlane", "admin", "--admin-port", str(port)]
    async with aiohttp.ClientSession() as http:
        with running(provider), running(admin, **variables):
            await eventually(lambda: responds(http, f"{provider_url}/.well-known/openid-configuration"), "the provider")
            await eventually(lambda: responds(http, f"{url}/readyz"), "the admin API")
            yield url


async def signed_in(http: aiohttp.ClientSession, url: str, name: str) -> tuple[int, str, list[str]]:
    """Sign in and consent as a person does; status and text of the page at the end, and the addresses on the way."""
    async with http.get(f"{url}/admin/oidc/start?next=/admin/v1/session") as response:
        page, text, visited = response.url, await response.text(), [str(response.url)]
    for _ in range(2):
        form = re.search(r'<form[^>]* action="([^"]+)"', text)
        prompt = re.search(r'name="prompt" value="(\w+)"', text)
        assert form is not None, text
        assert prompt is not None, text
        fields = {"prompt": prompt[1]} | ({"login": name, "password": "x"} if prompt[1] == "login" else {})
        async with http.post(urljoin(str(page), form[1]), data=fields) as response:
            page, text = response.url, await response.text()
            visited += [str(each.url) for each in (*response.history, response)]
    return response.status, text, visited


@pytest.mark.clients
async def test_npm_oidc_provider_signs_in(admin_url: str) -> None:
    """A person of a mapped group gets a session with the highest role, and no code twice; one of another group gets 403."""
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(cookie_jar=jar) as http:
        status, text, visited = await signed_in(http, admin_url, "ann")
        callback = next(each for each in visited if CALLBACK in each)
        async with http.get(callback) as replayed:
            again = await replayed.json()
        session = json.loads(text)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
        denied = await signed_in(http, admin_url, "bob")

    assert (status, session["operator"], session["role"]) == (200, "oidc:ann@example.com", "admin")
    assert visited[-1] == f"{admin_url}/admin/v1/session"
    assert again["error"]["code"] == "sign_in_failed"
    assert denied[0] == 403
    assert "No group of bob@example.com in the claim `groups` has a role" in denied[1]
    assert "maps staff, platform" in denied[1]
