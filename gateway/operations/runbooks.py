"""The runbooks that health links, as pages: `GET /internal/runbooks/{name}`.

The files are Markdown of a fixed form: a title, paragraphs, lists of one level, bold, code and links. They contain no data of
the deployment and need no token.
"""

import re
from html import escape
from pathlib import Path

from gateway.http.response import HttpResponse
from gateway.http.router import RoutedRequest
from gateway.http.static import HTML, STYLE, StaticPage
from scheduler.errors import ErrorCode, RequestError

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} - Tierlane runbook</title>
<style>{style}</style>
</head>
<body>
<main>
{body}</main>
</body>
</html>
"""
_PARTS = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*|\[([^\]]+)\]\(([^)]+)\)")
_RUNBOOK = re.compile(r"(\w+)\.md")


def _inline(text: str) -> str:
    """Text with code, bold and links. Links that lead to other documents are shown as text: they are not served here."""
    html, at = "", 0
    for found in _PARTS.finditer(text):
        html += escape(text[at : found.start()])
        code, bold, label, target = found.groups()
        if code is not None:
            html += f"<code>{escape(code)}</code>"
        elif bold is not None:
            html += f"<strong>{escape(bold)}</strong>"
        elif name := _RUNBOOK.fullmatch(target):
            html += f'<a href="{name[1]}">{escape(label)}</a>'
        else:
            html += escape(label)
        at = found.end()
    return html + escape(text[at:])


def runbook_html(markdown: str) -> str:
    """The page of one runbook."""
    title, body = "", ""
    for block in markdown.strip().split("\n\n"):
        text = " ".join(line.strip() for line in block.splitlines())
        if block.startswith("# "):
            title = text.removeprefix("# ")
            body += f"<h1>{escape(title)}</h1>\n"
        elif block.startswith("* "):
            items = re.split(r"(?:^|\s)\* ", text)[1:]
            body += "<ul>\n" + "".join(f"<li>{_inline(item)}</li>\n" for item in items) + "</ul>\n"
        else:
            body += f"<p>{_inline(text)}</p>\n"
    return _PAGE.format(title=escape(title), style=STYLE, body=body)


class Runbooks:
    """The handler of the pages. They are read once, at start: from the package in a wheel, from docs/ in a checkout."""

    def __init__(self) -> None:
        package = Path(__file__).resolve().parents[1]
        packaged = package / "static" / "runbooks"
        directory = packaged if packaged.is_dir() else package.parent / "docs" / "runbooks"
        self.pages = {
            path.stem: StaticPage(runbook_html(path.read_text("utf-8")).encode(), HTML)
            for path in sorted(directory.glob("*.md"))
        }

    async def __call__(self, call: RoutedRequest) -> HttpResponse:
        """One runbook. Raises RequestError `not_found`."""
        page = self.pages.get(call.tail)
        if page is None:
            raise RequestError(ErrorCode.NOT_FOUND, "There is no runbook with this name.")
        return await page(call)
