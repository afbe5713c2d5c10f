"""The stand-in engine and the load of chats: requests, streams, aborts, scripted faults, and the figures of a run."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine as engine_package
import pytest
from chat_load.connection import Answer
from chat_load.figures import answers_ended_in, engine_figures, latencies
from chat_load.generator import Ran, Span, run_loads
from chat_load.plan import Load
from engine.calls import output_text
from engine.process import RunningEngine, running_engine

MODEL = "stand-in"


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    """A fast engine with few slots."""
    with running_engine(slots=4, step_ms=2.0, sequence_ms=0.1) as running:
        yield running


def post(engine: RunningEngine, route: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of a response."""
    request = urllib.request.Request(f"{engine.api}{route}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def chat(**more: Any) -> dict[str, Any]:
    """A chat with one message."""
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, **more}


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def load(engine: RunningEngine, *loads: Load, seconds: float = 1.0) -> Ran:
    """Run loads for a short time."""
    return run_loads(engine.api, MODEL, loads, Span(0.0, seconds, 10.0))


def test_a_chat_has_exactly_as_many_tokens_as_asked_for(engine: RunningEngine) -> None:
    """Text and usage, streamed or not."""
    status, text = post(engine, "/chat/completions", chat())
    document = json.loads(text)
    assert status == 200
    assert document["choices"][0]["message"]["content"] == output_text("hello", 5)
    assert document["usage"]["completion_tokens"] == 5
    _, text = post(engine, "/chat/completions", chat(stream=True, stream_options={"include_usage": True}))
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    chunks = [json.loads(event) for event in events[:-1]]
    assert events[-1] == "[DONE]"
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    parts = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(parts) == output_text("hello", 5)
    assert len(parts) == 6


def test_a_list_of_texts_has_a_choice_for_each(engine: RunningEngine) -> None:
    """In the order of the texts."""
    _, text = post(engine, "/completions", {"prompt": ["a", "b"], "max_tokens": 2})
    assert [choice["text"] for choice in json.loads(text)["choices"]] == [output_text("a", 2), output_text("b", 2)]


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        ("/chat/completions", {"model": MODEL, "max_tokens": 1}, 400),
        ("/completions", {"max_tokens": 1}, 400),
        ("/chat/completions", chat(priority=1), 400),
        ("/chat/completions", chat(model="other"), 404),
        ("/embeddings", {"input": "a"}, 404),
    ],
)
def test_a_request_that_cannot_run_gets_an_error(
    engine: RunningEngine, route: str, body: dict[str, Any], expected: int
) -> None:
    """As vLLM answers: no input, a priority without the policy, an unknown model, no such route."""
    assert post(engine, route, body)[0] == expected


def test_a_client_that_leaves_frees_its_slot(engine: RunningEngine) -> None:
    """The sequence of a closed connection ends, also while its response is not streamed."""
    before = engine.state()["totals"]["aborted"]
    body = json.dumps(chat(max_tokens=10_000)).encode()
    with socket.create_connection(("127.0.0.1", int(engine.url.rsplit(":", 1)[1]))) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        until(lambda: engine.state()["running"] == 1)
    until(lambda: engine.state()["running"] == 0)
    assert engine.state()["totals"]["aborted"] == before + 1


def test_metrics_have_the_names_of_the_engine() -> None:
    """The names are vLLM's by default, or SGLang's; 404 without metrics."""
    with running_engine(metrics="none") as silent, running_engine(metrics="sglang") as sglang:
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            urllib.request.urlopen(f"{silent.url}/metrics", timeout=10)
        missing.value.close()
        page = urllib.request.urlopen(f"{sglang.url}/metrics", timeout=10).read().decode()
    assert "sglang:num_running_reqs{" in page


def test_a_load_is_the_same_in_each_run_and_right(engine: RunningEngine) -> None:
    """Lengths by seed; all texts are right; the engine's slots are all taken and the others wait."""
    runs = [load(engine, Load(clients=8, stream=True)) for _ in range(2)]
    for ran in runs:
        found = latencies(answers_ended_in(ran))
        assert (found["refused"], found["errors"]) == ({}, {})
        assert found["answers"] > 8
    first, second = ({answer.chat.number: answer.chat.tokens for answer in ran.answers} for ran in runs)
    common = first.keys() & second.keys()
    assert len(common) > 8
    assert all(first[number] == second[number] for number in common)
    figures = engine_figures(engine.history(), runs[1].begin_s + 0.5, runs[1].end_s, 4)
    assert figures["running"] == pytest.approx(4, abs=0.1)
    assert figures["waiting_max"] <= 4
    assert figures["queue_s"] > 0.4


def test_an_open_loop_sends_at_its_times(engine: RunningEngine) -> None:
    """Each scheduled request has one answer, whose latency counts from its time."""
    ran = load(engine, Load(rate=30.0, seed=2))
    assert ran.unanswered == 0
    assert len(ran.answers) == len({answer.chat.number for answer in ran.answers})
    assert 10 <= len(ran.answers) <= 60
    assert all(answer.ok and answer.due_s < ran.end_s for answer in ran.answers)


@pytest.mark.parametrize(
    ("fault", "undo", "expected"),
    [
        ({"refuse": 429}, {"refuse": 0}, lambda answer: answer.status == 429 and answer.refused),
        ({"refuse": 503, "refuse_above": 2}, {"refuse": 0}, lambda answer: answer.status == 503),
        ({"reset_share": 1.0}, {"reset_share": 0.0}, lambda answer: answer.code == "connection_lost"),
    ],
)
def test_scripted_faults_reach_the_clients(
    engine: RunningEngine, fault: dict[str, Any], undo: dict[str, Any], expected: Callable[[Answer], bool]
) -> None:
    """Refusals, above a number or always, and resets in the middle of streams."""
    engine.control(**fault)
    try:
        ran = load(engine, Load(clients=8, stream=True))
    finally:
        engine.control(**undo)
    assert any(expected(answer) for answer in ran.answers)


def test_a_stalled_engine_makes_no_step(engine: RunningEngine) -> None:
    """Tokens continue after the time of the stall."""
    engine.control(stall_s=0.5, forget=True)
    began = time.monotonic()
    assert post(engine, "/chat/completions", chat())[0] == 200
    assert time.monotonic() - began > 0.4


def test_the_engine_ends_with_the_process_that_started_it() -> None:
    """When standard input is closed."""
    command = [sys.executable, str(Path(engine_package.__file__).parent), "--until-stdin-ends"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"http://127.0.0.1:")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0
