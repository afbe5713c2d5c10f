"""Several seeds in one call: which seeds a text names, and what one row says of a run."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from chaos_story import RequestTimeline
from tierlane.chaos.command import MAX_SEEDS, read_options, seed_range
from tierlane.chaos.history import FaultEvent, Recovery, RunInfo, What
from tierlane.chaos.report import document
from tierlane.chaos.series import Summary, markdown, series_document, summary_of, summary_table

START = FaultEvent(3.0, "stop-redis", "redis", What.START)
NOT_DONE = FaultEvent(3.0, "kill-worker", "worker-1", What.START, error="It is down already.")
HEAL = FaultEvent(4.0, "stop-redis", "redis", What.HEAL)
INFO = RunInfo(
    seed=7,
    duration_s=12.0,
    rate=50.0,
    versions={},
    shape="2 gateways",
    events=(START, NOT_DONE, HEAL),
    recoveries=(Recovery(HEAL, 1.5), Recovery(HEAL, 4.5), Recovery(HEAL, None)),
    drained_s=2.0,
)


def summary(*, broken: bool = False) -> Summary:
    """A run in which one told timeout was excused, and, where it is `broken`, an answer was somebody else's."""
    story = RequestTimeline()
    story.fault("stop-redis", "redis", 3.0, 4.0)
    story.sent(2, 2.0)
    story.answered(2, 3.5, 504, "deadline_exceeded")
    story.row(2)
    if broken:
        story.sent(1, 1.0)
        story.answered(1, 1.1, owner="f" * 16)
        story.row(1)
    evidence = type(story.evidence)(rows=tuple(story.rows), runs=tuple(story.runs))
    return summary_of(document(INFO, story.events, evidence, story.judged()), 75.25)


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("1-3", (1, 2, 3)), ("5", (5,)), ("3, 7-9", (3, 7, 8, 9)), ("2,1-3", (2, 1, 3)), ("0-0", (0,))],
)
def test_seeds_of_a_text(text: str, seeds: tuple[int, ...]) -> None:
    """Single ones and ranges, each seed once, in the order in which they are named."""
    assert seed_range(text) == seeds
    assert read_options({"seeds": text}).seeds == seeds


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "3-1", "1--2", "1,,2", "1.5", f"0-{MAX_SEEDS}", "9" * 19])
def test_a_text_that_names_no_seeds(text: str) -> None:
    """Refused rather than guessed at; a series that would take a day is a slip of the pen."""
    with pytest.raises(ValueError, match="seed"):
        seed_range(text)


def test_a_summary() -> None:
    """The figures of one run, with what was excused by name and the slowest recovery."""
    row = summary()
    assert (row.seed, row.passed, row.sent, row.accepted, row.completed, row.faults) == (7, True, 3, 3, 3, 1)
    assert (row.excused, row.breaches) == ({"told timeout": 1}, {})
    assert (row.recovery_worst_s, row.not_recovered, row.drained_s, row.wall_s) == (4.5, 1, 2.0, 75.25)
    assert (row.verdicts["lost"], row.verdicts["recovery"]) == ("holds", "not measured")


def test_a_summary_of_a_run_that_failed() -> None:
    """What was broken, and how often."""
    row = summary(broken=True)
    assert not row.passed
    assert row.breaches == {"crosstalk": 1}
    assert row.verdicts["crosstalk"] == "BROKEN 1"


def test_an_interrupted_run_has_not_passed() -> None:
    """What was done held, but it was not what was asked for."""
    story = RequestTimeline()
    info = replace(INFO, interrupted=True)
    row = summary_of(document(info, story.events, story.evidence, story.judged()))
    assert (row.passed, row.error, row.breaches) == (False, "interrupted", {})


def test_the_rows_as_they_are_shown() -> None:
    """One line for each run, on a terminal and in a document; one that could not be started says why."""
    rows = [summary(), summary(broken=True), Summary(9, passed=False, error="cannot start: [no] port")]
    output = io.StringIO()
    Console(file=output, width=200).print(summary_table(rows))
    shown, written = output.getvalue().splitlines(), markdown(rows).splitlines()

    assert len(shown) == 4
    assert len(written) == 5
    for lines in (shown, written):
        assert "1 told timeout" in lines[-3]
        assert "4.5 s (1 never)" in lines[-3]
        assert "passed" in lines[-3]
        assert "FAILED: 1 crosstalk" in lines[-2]
        assert "FAILED: cannot start: [no] port" in lines[-1]


def test_the_document_of_a_series() -> None:
    """It is red where one run is, and until the last one was done; JSON can say it."""
    found = json.loads(json.dumps(series_document([7, 7], [summary(), summary(broken=True)])))
    assert not found["passed"]
    assert [row["passed"] for row in found["rows"]] == [True, False]
    assert series_document([7], [summary()])["passed"]
    assert not series_document([7, 8], [summary()])["passed"]
