"""The page for admins: `/admin/`, to which `/` leads, and its files, without data and without a token. It uses the admin API.

The files are in gateway/static/admin; those that it shares with the dashboard are in gateway/static/dashboard.
"""

import html
import json
from hashlib import sha256
from importlib.resources import files

from aiohttp import web

from gateway.admin_api.roles import ROLE_ACTIONS, Action, least_role
from gateway.http.static import HTML, SCRIPTED_PAGE_HEADERS, SHARED, assets_of, page_headers
from scheduler.errors import ErrorCode, RequestError

STATIC = files("gateway").joinpath("static")
FILES = STATIC.joinpath("admin")
ROLES_MARK = "<!-- roles -->"
"""Where the page gets the least role of each action, so that it offers what the role of the operator allows."""


def page_document() -> bytes:
    """The page with the roles in an attribute."""
    roles = {"roles": list(ROLE_ACTIONS), "actions": {action.value: least_role(action) for action in Action}}
    mark = f'<meta name="roles" content="{html.escape(json.dumps(roles))}">'
    return FILES.joinpath("page.html").read_text("utf-8").replace(ROLES_MARK, mark).encode()


def add_page(router: web.UrlDispatcher) -> None:
    """Add the routes of the page."""
    page = page_document()
    assets = {name: (FILES.joinpath(name).read_bytes(), kind) for name, kind in assets_of(FILES).items()}
    dashboard = STATIC.joinpath("dashboard")
    assets |= {name: (dashboard.joinpath(name).read_bytes(), assets_of(dashboard)[name]) for name in SHARED}

    async def to_page(_: web.Request) -> web.Response:
        return web.Response(status=308, headers={"Location": "/admin/"})

    async def show_page(_: web.Request) -> web.Response:
        return web.Response(body=page, headers=[*SCRIPTED_PAGE_HEADERS, ("Content-Type", HTML)])

    async def show_asset(request: web.Request) -> web.Response:
        found = assets.get(request.match_info["name"])
        if found is None:
            raise RequestError(ErrorCode.NOT_FOUND)
        body, kind = found
        tag = f'"{sha256(body).hexdigest()[:16]}"'
        headers = [("ETag", tag), *page_headers(kind)]
        if tag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers=[*headers, ("Content-Type", kind)])

    for path in ("/", "/admin"):
        router.add_get(path, to_page, allow_head=False)
    router.add_get("/admin/", show_page, allow_head=False)
    router.add_get("/admin/assets/{name}", show_asset, allow_head=False)
