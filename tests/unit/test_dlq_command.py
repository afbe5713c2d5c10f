"""`tierlane dlq` without servers: its help, its choices, its words."""

import re

import pytest
from typer.testing import CliRunner

from quick_help import shown_by
from scheduler.protocol.replies import Reply
from tierlane.operate.dead_letters import UsageError, printable
from tierlane.operate.dlq import app
from tierlane.operate.purge import Selection, age_s
from tierlane.operate.requeue import ending

VERBS = ("list", "show", "requeue", "purge")


@pytest.mark.parametrize("arguments", [["--help"], ["purge", "-h"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """It is shown at once: what the verbs need is loaded when they run."""
    shown = shown_by("dlq", *arguments)

    assert shown.out[0].startswith("Usage: tierlane dlq")
    assert shown.heavy == set()


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_shows_its_variable_and_default(verb: str) -> None:
    """As those of the other verbs do."""
    shown = CliRunner().invoke(app, [verb, "--help"]).stdout.partition("Options:")[2]
    options = [" ".join(text.split()) for text in re.split(r"\n  (?=-)", shown)[1:] if "--help" not in text]

    assert len(options) >= 3
    assert [line for line in options if "[env: " not in line or "[default: " not in line] == []


@pytest.mark.parametrize("verb", VERBS)
def test_secrets_have_no_option(verb: str) -> None:
    """Command lines are visible to every user of a host."""
    shown = CliRunner().invoke(app, [verb, "--help"]).stdout

    assert "-url" not in shown
    assert "token" not in shown


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ☃ text", "plain ☃ text"),
        ("a\x1b[31mb\x00\x7f", "a\\x1b[31mb\\x00\\x7f"),
        ("\u202eevil\u200b", "\\u202eevil\\u200b"),
        ("line\n\ttab", "line\\n\\ttab"),
    ],
)
def test_control_characters_are_shown_not_obeyed(text: str, shown: str) -> None:
    """An input is written by somebody else, and a terminal obeys what it prints."""
    assert printable(text) == shown
    assert printable("\n\t", keep="\n\t") == "\n\t"


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
    assert ending(None, 5.0) == "no end was seen within 5 s; the audit will have it."
