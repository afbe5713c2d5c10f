"""The files of the page for on-call, as they lie in gateway/static/dashboard, and the headers of what is shown with them.

Nothing is loaded from elsewhere, nothing stands inline. The charts are drawn by uPlot, which lies there with its licence;
without it the page shows figures alone.
"""

from importlib.resources import files

from gateway.http.response import Headers
from gateway.http.static import Page

CSS = "text/css; charset=utf-8"
ICON = "image/svg+xml"
SCRIPT = "text/javascript; charset=utf-8"
ASSETS = {
    "ask.js": SCRIPT,
    "dashboard.css": CSS,
    "dashboard.js": SCRIPT,
    "charts.js": SCRIPT,
    "customers.js": SCRIPT,
    "icon.svg": ICON,
    "letters.js": SCRIPT,
    "login.js": SCRIPT,
    "promises.js": SCRIPT,
    "uplot.css": CSS,
    "uplot.js": SCRIPT,
    "words.js": SCRIPT,
    "workers.js": SCRIPT,
}
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"


def asset_pages() -> dict[str, Page]:
    """Every file by name, ready to be sent."""
    return {name: Page(_content(name), kind) for name, kind in ASSETS.items() if _is_there(name)}


def html(name: str) -> bytes:
    """`page.html` or `login.html`."""
    return _content(name)


def html_headers() -> Headers:
    """Of a page that is for those alone who have logged in, or are about to."""
    return [
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        ("Content-Security-Policy", POLICY),
        ("Referrer-Policy", "no-referrer"),
    ]


def _content(name: str) -> bytes:
    return files("gateway").joinpath("static", "dashboard", name).read_bytes()


def _is_there(name: str) -> bool:
    return files("gateway").joinpath("static", "dashboard", name).is_file()
