"""`tierlane explain` without servers: its help and its usage."""

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tierlane.explain.command import app

HEAVY = {"pydantic", "pydantic_settings", "redis", "aiohttp", "torch", "sqlalchemy", "asyncpg", "rich", "psutil"}
IMPORTED = """
import sys
from tierlane.explain.command import main
main(["--help"])
print("IMPORTED", *sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_help_imports_nothing_heavy() -> None:
    """It is shown at once: what it needs is loaded when it runs."""
    shown = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True, timeout=30)

    *text, imported = shown.stdout.splitlines()
    assert text[0].startswith("Usage: tierlane explain [OPTIONS] {CUSTOMER_OR_REQUEST}")
    assert imported.startswith("IMPORTED ")
    assert not HEAVY & set(imported.split())


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
