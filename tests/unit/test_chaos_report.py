"""What is shown and written of a run: the table with its verdicts, every breach with its story, and the document."""

import io
import json

import pytest
from rich.console import Console

from chaos_story import RequestTimeline, nonce_of
from tierlane.chaos.history import FaultEvent, Recovery, RunInfo, What
from tierlane.chaos.report import document, show

EVENT = FaultEvent(2.0, "flushall", "redis", What.START, "3 keys")
INFO = RunInfo(
    seed=7,
    duration_s=12.0,
    rate=50.0,
    versions={"tierlane": "1"},
    shape="2 gateways",
    schedule=("   2.0 s  flushall redis-1",),
    events=(EVENT,),
    recoveries=(Recovery(EVENT, 1.5),),
    drained_s=2.0,
    notes=("Something [odd].",),
)


def broken_story() -> RequestTimeline:
    story = RequestTimeline()
    story.sent(1, 1.0)
    story.answered(1, 1.1, owner="f" * 16)
    story.row(1)
    story.fault("stop-redis", "redis", 3.0, 4.0)
    story.sent(2, 2.0)
    story.answered(2, 3.5, 504, "deadline_exceeded")
    story.row(2)
    return story


def shown(story: RequestTimeline, colour: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=150, force_terminal=colour, _environ={} if colour else {"NO_COLOR": "1"}
    )
    show(console, INFO, story.judged())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_that_passed() -> None:
    """Every invariant with its verdict; no schedule and no stories, which nobody needs."""
    text = shown(RequestTimeline())
    for name in ("lost", "unanswered", "duplicated", "crosstalk", "mismatch", "late execution", "recovery"):
        assert name in text
    assert "BROKEN" not in text
    assert "flushall redis-1" not in text
    assert "note Something [odd]." in text
    assert text.rstrip().endswith("passed, seed 7")


def test_a_run_that_failed() -> None:
    """The breach, the request's story, and the schedule with the seed to look for it again."""
    text = shown(broken_story())
    line = next(line for line in text.splitlines() if line.startswith("crosstalk"))
    assert line.split()[1:3] == ["1", "BROKEN"]
    assert f"The output carries the nonce {'f' * 16}, unknown to this run.  {nonce_of(1)}" in text
    assert "try 0: sent to gateway-1" in text
    assert "2.0 s  flushall redis-1" in text
    assert text.rstrip().endswith("failed, seed 7")


def test_what_was_excused_is_told() -> None:
    """A reader sees how much a rule has let pass."""
    line = next(line for line in shown(broken_story()).splitlines() if line.startswith("mismatch"))
    assert "holds" in line
    assert "excused: 1 told timeout" in line


@pytest.mark.parametrize("colour", [True, False])
def test_colour_only_where_it_is_wanted(colour: bool) -> None:
    """NO_COLOR is honoured."""
    assert ("\x1b[3" in shown(broken_story(), colour)) is colour


def test_the_document() -> None:
    """Stable names, and nothing that JSON cannot say."""
    story = broken_story()
    evidence = type(story.evidence)(rows=tuple(story.rows), runs=tuple(story.runs))
    found = json.loads(json.dumps(document(INFO, story.events, evidence, story.judged())))

    assert (found["passed"], found["seed"], found["requests"], found["tries"]) == (False, 7, 4, 4)
    assert {"status": 504, "code": "deadline_exceeded", "count": 1} in found["answers"]
    assert found["tiers"]["free"]["completed"] == 3
    assert found["tiers"]["free"]["p95_ms"] == pytest.approx(100.0, rel=0.01)
    assert found["audit"]["outcomes"] == [{"status": "completed", "code": "", "count": 4}]
    assert found["faults"][0]["what"] == "start"
    assert found["recoveries"] == [{"name": "flushall", "target": "redis", "seconds": 1.5}]
    crosstalk = next(verdict for verdict in found["verdicts"] if verdict["name"] == "crosstalk")
    assert (crosstalk["holds"], crosstalk["count"], len(crosstalk["examples"])) == (False, 1, 1)
    assert crosstalk["examples"][0]["timeline"]


def test_at_most_five_examples() -> None:
    """A thousand breaches of one kind need no thousand stories."""
    story = RequestTimeline()
    for number in range(1, 9):
        story.sent(number, 1.0)
        story.silent(number, 7.0, "timeout")
    verdict = story.verdict("unanswered")
    assert (verdict.count, len(verdict.examples)) == (8, 5)
