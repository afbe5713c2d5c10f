"""`/`, `/docs` and `/openapi.json`: public, cacheable and self-contained pages without secrets."""

import asyncio
import html
import json
import re
import subprocess
import sys
from base64 import b64encode
from hashlib import sha256

from gateway.account.page import ASSETS
from gateway.openapi.endpoints import ENDPOINTS
from integration.gateway_fixtures import SERVICE_TOKEN, Stack, lower, stack
from scheduler.errors import ErrorCode

__all__ = ["stack"]

PAGES = ("/", "/docs", "/openapi.json")


async def page(stack: Stack, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Read a page without a token."""
    async with stack.http.request(method, stack.url + path, headers=headers) as response:
        return response.status, lower(response.headers), await response.text()


def stable(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in ("x-request-id", "date")}


async def test_pages_are_cacheable_and_have_no_secrets(stack: Stack) -> None:
    """A page's ETag gets 304; HEAD has the headers of GET; no page holds a token, a key or an internal address."""
    secrets = [SERVICE_TOKEN, stack.gateway.config.redis_url, *(key.text for key in stack.catalog.keys.values())]
    for path in PAGES:
        status, headers, text = await page(stack, path)
        not_modified, cached, nothing = await page(stack, path, **{"If-None-Match": f'"x", W/{headers["etag"]}'})
        other, _, same = await page(stack, path, **{"If-None-Match": '"x"'})
        head_status, head, no_body = await page(stack, path, "HEAD")

        assert (status, not_modified, other, head_status) == (200, 304, 200, 200)
        assert (nothing, same, no_body) == ("", text, "")
        assert (cached["etag"], headers["cache-control"]) == (headers["etag"], "public, max-age=300")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-request-id"].startswith("req_")
        assert cached["x-request-id"] != headers["x-request-id"]
        assert (int(head["content-length"]), stable(head)) == (len(text.encode()), stable(headers))
        assert [secret for secret in secrets if secret in text] == []


async def test_pages_load_and_run_nothing(stack: Stack) -> None:
    """There is no script, image or foreign address; the policy allows only the page's own style, by its hash."""
    _, headers, text = await page(stack, "/docs")
    check_addresses(headers, text, {*PAGES, *(f"#{name}" for name in re.findall(r' id="([^"]*)"', text))})
    assert {"script", "img", "iframe", "link", "form", "object"}.isdisjoint(re.findall(r"<(\w+)", text))
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert "font:" in style
    policy = headers["content-security-policy"]
    assert f"style-src 'sha256-{b64encode(sha256(style.encode()).digest()).decode()}'" in policy


async def test_the_landing_page_loads_its_own_files(stack: Stack) -> None:
    """All of them exist; nothing is inline, and the policy allows only files and requests of the same host."""
    _, headers, text = await page(stack, "/")
    assets = {f"/assets/{name}" for name in ASSETS}
    check_addresses(headers, text, {*PAGES, "/readyz", *assets})
    assert set(re.findall(r"<script([^>]*)>(.*?)</script>", text)) == {
        (f' src="/assets/{name}" defer', "") for name, kind in ASSETS.items() if kind.startswith("text/javascript")
    }
    assert "<style" not in text
    assert (
        "script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'" in headers["content-security-policy"]
    )
    for path in assets:
        status, found, _ = await page(stack, path)
        assert (status, found["x-content-type-options"]) == (200, "nosniff")
    assert (await page(stack, "/assets/page.html"))[0] == 404


def check_addresses(headers: dict[str, str], text: str, known: set[str]) -> None:
    """A page of HTML links and loads only what is known, has no code in attributes, and a policy that allows nothing else."""
    assert [tag for tag in re.findall(r"<\w+([^>]*)>", text) if re.search(r"\b(on\w+|style)=", tag)] == []
    assert set(re.findall(r' (?:href|src)="([^"]*)"', text)) <= known
    policy = headers["content-security-policy"]
    assert ("default-src 'none'" in policy, "frame-ancestors 'none'" in policy) == (True, True)
    assert "unsafe" not in policy
    assert headers["content-type"] == "text/html; charset=utf-8"


async def test_the_reference_is_complete(stack: Stack) -> None:
    """`/docs` has every endpoint, error code and header of the description."""
    _, _, text = await page(stack, "/docs")
    document = json.loads((await page(stack, "/openapi.json"))[2])
    names = [endpoint.template for endpoint in ENDPOINTS] + [code.value for code in ErrorCode]
    names += [name.removesuffix("-if-known") for name in document["components"]["headers"]]

    assert [name for name in names if f"<code>{name}</code>" not in html.unescape(text)] == []


async def test_the_examples_of_the_landing_page_work(stack: Stack) -> None:
    """Its curl and Python examples, with the address and a key filled in, print the model's output."""
    text = (await page(stack, "/"))[2].replace("https://inference.example", stack.url)
    text = text.replace("tl_...", stack.catalog.keys["free"].text)
    shell, python = [
        html.unescape(code) for code in re.findall(r'<pre[^>]* aria-label="Example[^>]*>(.*?)</pre>', text, re.DOTALL)
    ]

    # A process of its own: the example leaves its client open.
    curl, script = [
        await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30, check=False)
        for command in (["bash", "-c", shell], [sys.executable, "-c", python])
    ]

    assert json.loads(curl.stdout)["output"] == "Once upon a time"[::-1]
    assert (script.stdout.strip(), script.stderr) == ("Once upon a time"[::-1], "")
