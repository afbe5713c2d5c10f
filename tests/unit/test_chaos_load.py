"""The load of a chaos run: owner of an output, stalls, the log of the model, and the history file."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from eventually import eventually
from tierlane_tools.bench.http_client import ResponseParser
from tierlane_tools.chaos.echo import BATCH_S, RUNS_VARIABLE, SLOW_S
from tierlane_tools.chaos.history import (
    Answered,
    Event,
    FaultEvent,
    FaultPhase,
    History,
    Invoked,
    Stalled,
    Stray,
    Unanswered,
    request_input,
)
from tierlane_tools.chaos.load.messages import AnswerReading, read_answer
from tierlane_tools.chaos.load.stalls import watch_stalls

TEXT = request_input("0123456789abcdef", 12.5, "xyz")
OTHER = request_input("fedcba9876543210", 12.5, "")
ID, STORED_ID = "req_" + "1" * 32, "req_" + "2" * 32


def reading(status: int, body: str, headers: str = "") -> AnswerReading:
    raw = f"HTTP/1.1 {status} X\r\nx-request-id: {ID}\r\n{headers}Content-Length: {len(body)}\r\n\r\n{body}"
    response = ResponseParser().feed(raw.encode())
    assert response is not None
    return read_answer(response, TEXT)


@pytest.mark.parametrize(
    ("output", "owner"),
    [
        (TEXT[::-1], "0123456789abcdef"),
        (OTHER[::-1], "fedcba9876543210"),
        (TEXT, "?"),  # Not reversed.
        (OTHER[::-1][:10] + TEXT[::-1][10:], "?"),  # Mixed of two requests.
    ],
)
def test_the_owner_of_an_output(output: str, owner: str) -> None:
    """It is the request whose whole input comes back reversed, else unknown."""
    assert reading(200, f'{{"request_id":"{ID}","output":"{output}"}}').owner == owner


def test_a_replayed_answer() -> None:
    """It has the id of the first answer."""
    body = f'{{"request_id":"{STORED_ID}","output":"{TEXT[::-1]}"}}'
    replayed = reading(200, body, "Idempotent-Replayed: true\r\n")
    assert replayed == AnswerReading(200, "", STORED_ID, "0123456789abcdef", replayed=True)
    assert reading(200, "<html>") == AnswerReading(200, "", ID, "?", replayed=False)


async def test_a_stall_of_the_event_loop_is_reported() -> None:
    """The report has the begin and the end of the stall."""
    stalls: list[tuple[float, float]] = []
    watch = asyncio.create_task(watch_stalls(lambda since, until: stalls.append((since, until))))
    await asyncio.sleep(0)
    began = time.monotonic()
    time.sleep(0.1)  # noqa: ASYNC251  # this is the stall
    await eventually(lambda: stalls, "the stall is reported")
    watch.cancel()

    assert stalls[0][0] <= began <= stalls[0][1] - 0.1


def test_the_model_logs_each_run(tmp_path: Path) -> None:
    """It logs one line for each input; the first input decides whether a batch is slow."""
    inputs = [["0000000000000001:1.5:ab", "0000000000000008:2.5:cd"], ["0000000000000010:1.5:ab"]]
    code = "from tierlane_tools.chaos.echo import Echo; model = Echo(); model.load()\n"
    code += f"for batch in {inputs!r}: print(*model.predict(batch))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, RUNS_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )

    assert ran.stdout.split()[0] == "ba:5.1:1000000000000000"
    lines = [json.loads(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert [(line["nonce"], line["sent"], line["takes"]) for line in lines] == [
        ("0000000000000001", 1.5, BATCH_S),
        ("0000000000000008", 2.5, BATCH_S),
        ("0000000000000010", 1.5, SLOW_S),
    ]


EVENTS: list[Event] = [
    Invoked(at=1.0, nonce="a", turn=0, trace="t", gateway="gateway-1", tier="free", customer="c", key="k"),
    Answered(at=1.5, nonce="a", turn=0, seconds=0.5, status=200, code="", id="req_1", owner="a", replayed=True),
    Unanswered(at=2.0, nonce="b", turn=1, kind="reset", gateway="gateway-2", detail="Gone."),
    Stray(at=2.5, gateway="gateway-1", detail="?"),
    Stalled(at=3.0, since=2.9),
    FaultEvent(at=3.5, name="flushall", target="redis", what=FaultPhase.START, details="3 keys"),
]


def test_a_history_file_has_a_line_for_each_event(tmp_path: Path) -> None:
    """Every kind of event is kept; an existing file is not overwritten."""
    path = tmp_path / "history.jsonl"
    with History(path) as history:
        for event in EVENTS:
            history.add(event)
        assert history.events == EVENTS
    assert msgspec.json.Decoder(Event).decode_lines(path.read_bytes()) == EVENTS
    with pytest.raises(FileExistsError):
        History(path)
