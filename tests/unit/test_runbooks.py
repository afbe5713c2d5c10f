"""The pages of the runbooks."""

import pytest

from gateway.operations.health.advice import ADVICE
from gateway.operations.runbooks import Runbooks, runbook_html


def test_every_code_has_a_page_whose_links_are_served() -> None:
    """A link is to another runbook; other documents are named only."""
    pages = {name: page.body.decode() for name, page in Runbooks().pages.items()}
    linked = {part.split('"')[0] for page in pages.values() for part in page.split('href="')[1:]}

    assert {advice.runbook for advice in ADVICE.values()} <= pages.keys()
    assert len(linked) > 5
    assert linked <= pages.keys()


@pytest.mark.parametrize(
    ("markdown", "html"),
    [
        ("# A <b>\n\n**Do.** `a < b`", "<h1>A &lt;b&gt;</h1>\n<p><strong>Do.</strong> <code>a &lt; b</code></p>\n"),
        ("* one\n  more\n* two", "<ul>\n<li>one more</li>\n<li>two</li>\n</ul>\n"),
        ("[a](A.md) [b](../b.md)", '<p><a href="A">a</a> b</p>\n'),
    ],
)
def test_markdown(markdown: str, html: str) -> None:
    """The few forms that runbooks use; everything else is escaped."""
    assert html in runbook_html(markdown)
