"""The pages that everybody may read: `/` to begin with, `/docs` and `/openapi.json` about the API. Made once, at start."""

from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from gateway.http.response import JSON, encode_json
from gateway.http.static import HTML, STYLE, Page
from gateway.openapi.document import openapi
from gateway.openapi.endpoints import DOORS
from gateway.openapi.html import reference


class Pages:
    """The handlers."""

    def __init__(self) -> None:
        document = openapi(DOORS, _version())
        self.description = Page(encode_json(document), JSON)
        self.landing = _html(files("gateway").joinpath("static", "landing.html").read_text("utf-8"))
        self.reference = _html(reference(document))


def _html(text: str) -> Page:
    return Page(text.replace("/* style */", STYLE).encode(), HTML)


def _version() -> str:
    try:
        return version("tierlane")
    except PackageNotFoundError:  # A checkout that was never installed.
        return "0"
