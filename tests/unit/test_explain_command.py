"""`tierlane explain` without servers: its help and its usage."""

import re

import pytest
from typer.testing import CliRunner

from quick_help import shown_by
from tierlane.explain.command import app


def test_help_imports_nothing_heavy() -> None:
    """It is shown at once: what it needs is loaded when it runs."""
    shown = shown_by("explain", "--help")

    assert shown.out[0].startswith("Usage: tierlane explain [OPTIONS] {CUSTOMER_OR_REQUEST}")
    assert shown.heavy == set()


def test_every_option_shows_its_variable_and_default() -> None:
    """As those of the other verbs do."""
    shown = CliRunner().invoke(app, ["--help"]).stdout.partition("Options:")[2]
    options = [" ".join(text.split()) for text in re.split(r"\n  (?=-)", shown)[1:] if "--help" not in text]

    assert len(options) == 5
    assert [line for line in options if "[env: " not in line or "[default: " not in line] == []
    assert "-url" not in shown
    assert "token" not in shown


@pytest.mark.parametrize("arguments", [[], ["acme", "other"], ["acme", "-o", "xml"], ["acme", "--refusals", "-1"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    """Before anything is connected to."""
    assert CliRunner().invoke(app, arguments).exit_code == 2
