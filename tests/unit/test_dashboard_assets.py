"""The files of the page for on-call: all there, the library for charts as it was released, and nothing that a policy refuses."""

from hashlib import sha256
from importlib.resources import files

from gateway.operations.dashboard import ASSETS, asset_pages

UPLOT = {
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""uPlot 1.6.32 of the npm registry: dist/uPlot.iife.min.js and dist/uPlot.min.css."""

HERE = files("gateway").joinpath("static", "dashboard")


def test_every_file_that_is_offered_is_there() -> None:
    """The charts, too: a gateway without them works, but was built badly."""
    assert set(asset_pages()) == set(ASSETS)


def test_the_charts_are_drawn_by_what_was_released() -> None:
    """Unchanged, and with its licence beside it."""
    assert {name: sha256(HERE.joinpath(name).read_bytes()).hexdigest() for name in UPLOT} == UPLOT
    assert "MIT License" in HERE.joinpath("uplot-LICENSE.txt").read_text("utf-8")


def test_our_scripts_write_text_and_no_markup() -> None:
    """What a worker calls itself cannot become an element, whatever it is."""
    ours = [name for name in ASSETS if name.endswith(".js") and name != "uplot.js"]
    banned = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage")
    found = [(name, word) for name in ours for word in banned if word in HERE.joinpath(name).read_text("utf-8")]

    assert len(ours) >= 4
    assert found == []
