"""`/`, `/docs` and `/openapi.json`: for everybody, complete in themselves, and no more than they should be."""

import asyncio
import html
import json
import re
import subprocess
from collections.abc import AsyncIterator
from html.parser import HTMLParser

import pytest
from redis.asyncio import Redis

from gateway.openapi.endpoints import ENDPOINTS
from integration.gateway_fixtures import SERVICE_TOKEN, Stack, running_stack
from scheduler.errors import ErrorCode

PAGES = ("/", "/docs", "/openapi.json")
VOID = {"meta", "br", "link"}


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A ready gateway with a worker behind it."""
    async with running_stack(client, redis_url) as running:
        yield running


async def page(stack: Stack, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers in lower case, text; without a token."""
    async with stack.http.request(method, stack.url + path, headers=headers) as answer:
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.text()


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_needs_no_token_and_is_not_sent_twice(stack: Stack, path: str) -> None:
    """200 with an ETag; the ETag gets 304 without a body, on the same connection; another gets the page again."""
    status, headers, text = await page(stack, path)
    again, known, nothing = await page(stack, path, **{"If-None-Match": f'"x", W/{headers["etag"]}'})
    other, _, same = await page(stack, path, **{"If-None-Match": '"x"'})

    assert (status, again, other) == (200, 304, 200)
    assert (nothing, same) == ("", text)
    assert known["etag"] == headers["etag"]
    assert headers["cache-control"] == "public, max-age=300"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-request-id"].startswith("req_")
    assert known["x-request-id"] != headers["x-request-id"]


@pytest.mark.parametrize("path", PAGES)
async def test_head_says_what_get_would(stack: Stack, path: str) -> None:
    """The same headers, no body."""
    _, headers, text = await page(stack, path)
    status, head, nothing = await page(stack, path, "HEAD")

    assert (status, nothing) == (200, "")
    assert int(head["content-length"]) == len(text.encode())
    assert {name: value for name, value in head.items() if name not in ("x-request-id", "date")} == {
        name: value for name, value in headers.items() if name not in ("x-request-id", "date")
    }


class Links(HTMLParser):
    """What a page would load, where it leads, and whether its elements are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.targets += [value or "" for name, value in attrs if name in ("href", "src")]
        self.ids |= {value or "" for name, value in attrs if name == "id"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_a_page_loads_nothing_and_runs_nothing(stack: Stack, path: str) -> None:
    """No script, no image, no address elsewhere; the policy allows its own style alone, and no frame around it."""
    _, headers, text = await page(stack, path)
    links = Links()
    links.feed(text)

    assert links.open == []
    assert links.elements.isdisjoint({"script", "img", "iframe", "link", "form", "object"})
    assert [name for name in links.attributes if name == "style" or name.startswith("on")] == []
    assert [
        to for to in links.targets if to not in PAGES and to != "/readyz" and to.removeprefix("#") not in links.ids
    ] == []
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["content-type"] == "text/html; charset=utf-8"


async def test_the_policy_allows_the_style_that_is_there(stack: Stack) -> None:
    """Its hash is that of the style element, byte by byte; nothing was left unfilled."""
    from base64 import b64encode  # noqa: PLC0415
    from hashlib import sha256  # noqa: PLC0415

    for path in ("/", "/docs"):
        _, headers, text = await page(stack, path)
        (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
        assert "font:" in style
        digest = b64encode(sha256(style.encode()).digest()).decode()
        assert f"style-src 'sha256-{digest}'" in headers["content-security-policy"]


async def test_the_page_of_the_api_has_everything(stack: Stack) -> None:
    """Every address, error code and header of the description."""
    _, _, text = await page(stack, "/docs")
    document = json.loads((await page(stack, "/openapi.json"))[2])
    shown = html.unescape(text)
    wanted = [door.template for door in ENDPOINTS] + [code.value for code in ErrorCode]
    wanted += [name.removesuffix("-if-known") for name in document["components"]["headers"]]

    assert [name for name in wanted if f"<code>{name}</code>" not in shown] == []
    assert "<code>Idempotent-Replayed</code>?" in shown
    assert "<code>Server-Timing</code>," in shown


async def test_nothing_secret_is_said(stack: Stack) -> None:
    """No token, no key, no address of a server inside."""
    for path in PAGES:
        _, _, text = await page(stack, path)
        secrets = [SERVICE_TOKEN, stack.gateway.config.redis_url, *(key.text for key in stack.catalog.keys.values())]
        assert [secret for secret in secrets if secret in text] == []


def snippets(text: str) -> list[str]:
    """The code of the landing page."""
    return [html.unescape(code) for code in re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)]


async def test_what_the_landing_page_tells_to_type_works(stack: Stack) -> None:
    """Its curl and its Python, with the address and a key filled in, get the model's answer."""
    shell, python = snippets((await page(stack, "/"))[2])
    key = stack.catalog.keys["free"].text
    shell, python = (
        text.replace("https://inference.example", stack.url).replace("tl_...", key) for text in (shell, python)
    )
    said: list[str] = []
    curl = await asyncio.to_thread(
        subprocess.run, ["bash", "-c", shell], capture_output=True, text=True, timeout=20, check=False
    )
    await asyncio.to_thread(exec, python, {"print": said.append})

    assert json.loads(curl.stdout)["output"] == "Once upon a time"[::-1]
    assert said == ["Once upon a time"[::-1]]
