"""The history file: everything comes back as it was, and a run that was cut short can still be read."""

from pathlib import Path

import pytest

from tierlane.chaos.history import (
    Answered,
    Event,
    FaultEvent,
    FaultRecord,
    History,
    HistoryError,
    Invoked,
    Stalled,
    Stray,
    Unanswered,
    What,
    read_history,
)

EVENTS: list[Event] = [
    Invoked(at=1.0, nonce="a", turn=0, trace="t", gateway="gateway-1", tier="free", customer="c", key="k"),
    Answered(at=1.5, nonce="a", turn=0, seconds=0.5, status=200, code="", id="req_1", owner="a", replayed=True),
    Unanswered(at=2.0, nonce="b", turn=1, kind="reset", gateway="gateway-2", detail="Gone."),
    Stray(at=2.5, gateway="gateway-1", detail="?"),
    Stalled(at=3.0, since=2.9),
    FaultRecord(at=3.5, name="flushall", target="redis", what="start", details="3 keys"),
]


def written(path: Path, events: list[Event]) -> Path:
    with History(path) as history:
        for event in events:
            history.add(event)
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Every kind of event, in order, from memory and from the file."""
    path = tmp_path / "history.jsonl"
    with History(path) as history:
        for event in EVENTS:
            history.add(event)
        assert history.events == EVENTS
    assert read_history(path) == EVENTS
    assert len(path.read_text().splitlines()) == len(EVENTS)


def test_without_a_file_it_is_kept_in_memory() -> None:
    """A run that keeps nothing is judged all the same."""
    with History() as history:
        history.add(EVENTS[0])
        assert history.events == EVENTS[:1]


def test_a_fault_is_noted_with_its_error() -> None:
    """What the conductor tells becomes an event."""
    history = History()
    history.fault(FaultEvent(1.0, "cut", "gateway-1>redis", What.START, "3 connections", error="No."))
    assert history.events == [
        FaultRecord(at=1.0, name="cut", target="gateway-1>redis", what="start", details="3 connections", error="No.")
    ]


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path, cut: int) -> None:
    """The tool may be killed in the middle of a write."""
    path = written(tmp_path / "history.jsonl", EVENTS)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_history(path) == EVENTS[:-1]


@pytest.mark.parametrize("line", [b"{}", b"nonsense", b'{"event":"invoke","at":1}', b"\xff"])
def test_a_bad_line_is_named(tmp_path: Path, line: bytes) -> None:
    """A file that is not a history must not be judged as an empty one."""
    path = written(tmp_path / "history.jsonl", EVENTS[:1])
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(HistoryError, match="Line 2 is not an event"):
        read_history(path)


def test_a_history_is_never_overwritten(tmp_path: Path) -> None:
    """Two runs in one file would be judged as one."""
    path = written(tmp_path / "history.jsonl", EVENTS[:1])
    with pytest.raises(FileExistsError):
        History(path)
