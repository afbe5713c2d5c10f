"""`tierlane check model` without a model: its usage, and what it prints."""

import pytest
from typer.testing import CliRunner

from tierlane.check.model import sizes_of
from tierlane.check.model_report import Report, Timed, document, fails, holds, lines_of, suggest, summary, untold
from tierlane.cli import app
from tierlane.connect import UsageError

TIMED = [Timed(1, 10.0), Timed(8, 20.0)]
REPORT = Report(
    "shout:shout",
    "v1",
    [holds("load", "in 0.2 s"), untold("isolation", "not known"), fails("length", "1 for 2\x1b[2J", "Return all.")],
    TIMED,
    suggest(TIMED),
)


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "model"],
        ["check", "model", "simulated", "-o", "xml"],
        ["check", "model", "simulated", "--batch-sizes", "1,zero"],
        ["check", "model", "simulated", "--batch-sizes", "0"],
        ["check", "model", "simulated", "--device", "gpu"],
        ["check", "model", "simulated", "--actor", ""],
        ["check", "model", "simulated", "--write", "tiny"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    """Before any model is loaded: --write without a database is told at once, too."""
    env = {"TIERLANE_DATABASE_URL": "", "TIERLANE_DATA_DIR": "/nonexistent"}
    shown = CliRunner().invoke(app, arguments, env=env)

    assert (shown.exit_code, shown.stdout) == (2, "")


def test_sizes() -> None:
    """Numbers with commas, in any order."""
    assert sizes_of("1,2, 64") == [1, 2, 64]
    with pytest.raises(UsageError, match=r"must be numbers from 1 to 4096 with commas, got '4097'"):
        sizes_of("4097")


def test_the_report_for_people() -> None:
    """A mark a line, advice below, a table with bars, the suggestion; nothing reaches the terminal's controls."""
    text = [line for finding in REPORT.findings for line in lines_of(finding)] + summary(REPORT)

    assert text[0] == "  ✓ load         in 0.2 s"
    assert text[1] == "  - isolation    not known"
    assert text[2] == "  ✗ length       1 for 2\\x1b[2J"
    assert text[3].strip() == "Return all."
    assert [line.split() for line in text[5:8]] == [
        ["SIZE", "P50", "MS", "ITEMS/S"],
        ["1", "10.00", "100.0", "#" * 10],
        ["8", "20.00", "400.0", "#" * 40],
    ]
    assert [line.split() for line in text[-3:]] == [
        ["max_batch_size", "8"],
        ["max_wait_ms", "9"],
        ["rps_per_gpu", "400"],
    ]


def test_the_report_for_programs() -> None:
    """The same as a document."""
    told = document(REPORT, None)

    assert (told["ok"], told["written"], told["version"]) == (False, None, "v1")
    assert [check["ok"] for check in told["checks"]] == [True, None, False]
    assert told["sizes"][1] == {"size": 8, "p50_ms": 20.0, "items_per_s": 400.0}
    assert told["suggestion"]["max_batch_size"] == 8
