"""The report as a directory: pictures, the document, and a page that shows them without anything from elsewhere."""

from collections.abc import Sequence
from html import escape
from io import StringIO
from pathlib import Path

import msgspec
from rich.console import Console

from tierlane.bench.document import Document
from tierlane.bench.plots import draw_all
from tierlane.bench.report import show

WIDTH = 120
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>tierlane bench</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
pre {{ background: #f5f5f5; padding: 1rem; overflow-x: auto; font-size: 12px; line-height: 1.35 }}
img {{ max-width: 100% }}
</style>
<h1>tierlane bench</h1>
<p>{summary}</p>
<pre>{text}</pre>
{pictures}
<p>All figures are in <a href="result.json">result.json</a>.</p>
</html>
"""


def write_report(directory: Path, result: Document) -> None:
    """Write everything to a directory that exists."""
    (directory / "result.json").write_bytes(json_text(result))
    (directory / "index.html").write_text(page(result, draw_all(result, directory)), "utf-8")


def json_text(result: Document) -> bytes:
    """The document, for people as well."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def page(result: Document, pictures: Sequence[tuple[str, str]]) -> str:
    """The page; `pictures` are (file name, what it shows)."""
    text = StringIO()
    show(Console(file=text, width=WIDTH, no_color=True), result)
    settings = result["settings"]
    load = (
        f"{settings['connections']} connections, closed loop"
        if settings["mode"] == "closed"
        else f"{settings['rate']:g} requests/s, {settings['arrivals']}"
    )
    verdict = "passed" if result["passed"] else "failed"
    summary = f"{load}, {result['duration_s']:.0f} s, begun at {result['started_at']}: {verdict}."
    images = "\n".join(f'<img src="{escape(name)}" alt="{escape(title)}">' for name, title in pictures)
    return _PAGE.format(summary=escape(summary), text=escape(text.getvalue()), pictures=images)
