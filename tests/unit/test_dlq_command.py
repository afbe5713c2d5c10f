"""`tierlane dlq` without servers: its help, its choices, its words."""

import pytest
from typer.testing import CliRunner

from scheduler.protocol.replies import Reply
from tierlane.connect import UsageError
from tierlane.operate.commands import dlq_app as app
from tierlane.operate.dead_letters import Selection, age_s
from tierlane.operate.requeue import ending


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["burn"],
        ["show"],
        ["requeue"],
        ["list", "--limit", "0"],
        ["list", "-o", "xml"],
        ["purge"],
        ["purge", "--all", "--older-than", "7d"],
        ["purge", "req_1", "--all"],
        ["purge", "--older-than", "soon"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    """Before anything is connected to."""
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("1s", 1), ("90m", 5400), ("12h", 43_200), ("7d", 604_800), ("2w", 1_209_600)]
)
def test_ages(text: str, seconds: float) -> None:
    """A number and a unit."""
    assert age_s(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "1.5h", "7 d", "7D", "1y", "9999999d"])
def test_what_is_no_age(text: str) -> None:
    """It is refused rather than guessed, for it deletes."""
    with pytest.raises(UsageError, match="is not an age"):
        age_s(text)


def test_a_selection_is_made_in_one_way() -> None:
    """Ids once each, or an age, or all."""
    assert Selection.of(["b", "a", "b"], None, everything=False) == (["b", "a"], None)
    assert Selection.of([], "1h", everything=False) == (None, 3600.0)
    assert Selection.of([], None, everything=True) == (None, None)
    with pytest.raises(UsageError):
        Selection.of([], None, everything=False)


def reply(**fields: object) -> Reply:
    whole = ("req_1", "c", "n", "completed", "", 1, 5.0, "b", 1, "w", 50.0, 5, "v", "a secret output", 3, "stop", "")
    values = dict(zip(Reply.__struct_fields__, whole, strict=True)) | fields
    return Reply(**values)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "completed after 62 ms and 1 run."),
        (
            {"state": "failed", "error_code": "worker_lost", "attempts": 3},
            "failed, worker_lost after 62 ms and 3 runs.",
        ),
        (
            {"state": "failed", "error_code": "queue_timeout", "attempts": 0},
            "failed, queue_timeout after 62 ms and 0 runs.",
        ),
    ],
)
def test_how_it_ended_is_said_without_the_output(fields: dict[str, object], said: str) -> None:
    """State, code, time and runs."""
    assert ending(reply(**fields), 0.0621) == said
    assert ending(None, 5.0) == "no result within 5 s; see the audit."
