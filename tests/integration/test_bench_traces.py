"""`tierlane bench --trace` before a stand-in engine: times, lengths, prefixes and customers of the trace, first tokens, tokens."""

import io
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from engine.process import RunningEngine, running_engine
from rich.console import Console

from bench_stand_in import KEYS, write_stack
from tierlane_local.stack_file import read_stack
from tierlane_tools.bench.command import main
from tierlane_tools.bench.plan.plan import BenchUsageError, read_address, read_plan
from tierlane_tools.bench.report.document import Document, document
from tierlane_tools.bench.run import with_trace
from tierlane_tools.bench.runner import ProgressDisplay, measure
from tierlane_tools.traces.formats import read_requests
from tierlane_tools.traces.samples import sample_requests, write_samples

MIX = "enterprise=1,paid=3,free=6"
SAMPLE = sample_requests(3.0, 60.0)
ANSWERED = [each for each in SAMPLE if not each.failed]
STEP_S = 0.002
CHARACTERS_PER_TOKEN = 4


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    """A fast engine with many slots."""
    with running_engine(slots=256, step_ms=1000 * STEP_S, sequence_ms=0.0) as running:
        yield running


@pytest.fixture
def samples(tmp_path: Path) -> dict[str, Path]:
    return write_samples(tmp_path / "samples", SAMPLE)


class Recorder:
    """A server that answers each stream at once, and keeps the requests with their times."""

    def __init__(self) -> None:
        self.url = ""
        self.received: list[tuple[float, str, dict[str, Any]]] = []
        self.fails = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        at_s, body = time.perf_counter(), await request.json()
        self.received.append((at_s, request.headers["Authorization"], body))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        if self.fails:
            await response.write(b'data: {"error":{"message":"No.","code":"worker_lost"}}\n\n')
        await response.write(b'data: {"choices":[{"delta":{"content":"x"},"text":"x"}]}\n\ndata: [DONE]\n\n')
        await response.write_eof()
        return response


@asynccontextmanager
async def recorder() -> AsyncIterator[Recorder]:
    server, app = Recorder(), web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/chat/completions", server.handle)
    app.router.add_post("/v1/completions", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


async def replay(url: str, folder: Path, trace: Path, **options: Any) -> Document:
    """A run over the whole trace."""
    stack_file = write_stack(folder / "stack.json")
    defaults = {"stack": str(stack_file), "warmup": "0", "seed": "1", "trace": str(trace), "mix": MIX}
    plan = with_trace(read_plan({**defaults, **options}))
    progress = ProgressDisplay(Console(file=io.StringIO()), 1.0)
    found = await measure(plan, read_address(url, plan.trace_api.path), read_stack(stack_file), progress)
    return document(plan, url, found)


@pytest.mark.parametrize("name", ["azure", "mooncake", "vllm"])
async def test_arrivals_and_lengths_are_those_of_the_file(name: str, samples: dict[str, Path], tmp_path: Path) -> None:
    """Every request arrives, in order, with the length of its prompt and answer; the report has the delay of the generator."""
    async with recorder() as server:
        found = await replay(server.url, tmp_path, samples[name], model="m")
    expected = [each for each in read_requests(samples[name]) if not each.failed]

    assert found["faults"] == []
    assert found["completed"] == len(expected) == len(server.received)
    for (_, _, body), each in zip(server.received, expected, strict=True):
        assert len(body["messages"][0]["content"]) == CHARACTERS_PER_TOKEN * each.input_tokens
        assert body["max_tokens"] == each.output_tokens
        assert body["stream"]
        assert body["stream_options"] == {"include_usage": True}
    late = [
        (at_s - server.received[0][0]) - (each.at_s - expected[0].at_s)
        for (at_s, _, _), each in zip(server.received, expected, strict=True)
    ]
    # What both ends measured; how fast this machine is decides the rest.
    assert max(late) - min(late) < 0.05 + found["lag_ms"]["max"] / 1000
    assert found["lag_ms"]["p99"] is not None
    assert found["settings"]["trace"]["api"] == "chat"


async def test_first_tokens_and_tokens_are_reported(
    engine: RunningEngine, samples: dict[str, Path], tmp_path: Path
) -> None:
    """The engine's own counts are those of the report; the model's name comes from the server."""
    before = engine.state()["totals"]
    found = await replay(engine.url, tmp_path, samples["azure"], trace_api="completions", ignore_eos=True)
    after = engine.state()["totals"]

    assert found["faults"] == []
    wanted = sum(each.written for each in ANSWERED)
    assert found["total_output_tokens"] == found["wanted_output_tokens"] == wanted
    assert after["generated_tokens"] - before["generated_tokens"] == wanted
    assert after["prompt_tokens"] - before["prompt_tokens"] == sum(each.read for each in ANSWERED)
    assert 1000 * STEP_S / 2 < found["median_ttft_ms"] < found["median_e2el_ms"]
    assert found["output_throughput"] > 0
    assert sum(tier["completed"] for tier in found["tiers"].values()) == found["completed"]
    assert set(found["tiers"]) == set(KEYS)


async def test_a_session_has_one_key_and_one_text(samples: dict[str, Path], tmp_path: Path) -> None:
    """The prompts of its turns begin alike, those of others differ; all end differently."""
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{tier},tl_{tier}_{number}\n" for tier in KEYS for number in range(3)))
    async with recorder() as server:
        found = await replay(server.url, tmp_path, samples["burstgpt"], model="m", keys=str(keys))
    expected = [each for each in read_requests(samples["burstgpt"]) if not each.failed]
    of_session: dict[str, list[tuple[str, str]]] = {}
    for (_, key, body), each in zip(server.received, expected, strict=True):
        of_session.setdefault(each.session, []).append((key, body["messages"][0]["content"]))

    assert found["faults"] == []
    single = [text for _, text in of_session.pop("") if len(text) > 100]
    assert len({text[:60] for text in single}) == len(single)
    for turns in of_session.values():
        assert len({key for key, _ in turns}) == 1
        texts = [text for _, text in turns if len(text) > 100]
        common = min(len(text) for text in texts) - 16
        assert len({text[:common] for text in texts}) == 1
        assert len({text[-16:] for text in texts}) == len(texts)


async def test_equal_blocks_are_equal_texts(samples: dict[str, Path], tmp_path: Path) -> None:
    """All prompts of the sample share their first block, and those of a session more."""
    async with recorder() as server:
        await replay(server.url, tmp_path, samples["mooncake"], model="m")
    expected = list(read_requests(samples["mooncake"]))
    block = 512 * CHARACTERS_PER_TOKEN
    texts = [body["messages"][0]["content"] for _, _, body in server.received]
    by_block: dict[tuple[int, int], set[str]] = {}
    for each, text in zip(expected, texts, strict=True):
        for place, number in enumerate(each.blocks):
            if (place + 1) * block <= len(text) - 16:
                by_block.setdefault((place, number), set()).add(text[place * block : (place + 1) * block])

    assert all(len(found) == 1 for found in by_block.values())
    assert len(by_block) > 20
    assert len({text for found in by_block.values() for text in found}) == len(by_block)


async def test_a_stream_that_fails_is_an_error_with_its_code(samples: dict[str, Path], tmp_path: Path) -> None:
    """Although its status was 200."""
    async with recorder() as server:
        server.fails = True
        found = await replay(server.url, tmp_path, samples["azure"], model="m", trace_to="1")

    assert found["completed"] == 0
    assert {each["code"] for tier in found["tiers"].values() for each in tier["errors"]} == {"worker_lost"}


async def test_objectives_of_the_first_token(engine: RunningEngine, samples: dict[str, Path], tmp_path: Path) -> None:
    """Beside those of whole answers."""
    slo = "all.first_token_p95=10s,all.first_token_p50=1us"
    found = await replay(engine.url, tmp_path, samples["azure"], trace_to="2", slo=slo)

    assert [each["met"] for each in found["slo"]] == [True, False]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "closed"}, "--mode"),
        ({"verify": "reversed"}, "--verify"),
        ({"echo": "on"}, "--echo"),
        ({"trace_api": "images"}, "--trace-api"),
        ({"token_bytes": "0"}, "--token-bytes"),
        ({"warmup": "60"}, "--warmup"),
    ],
)
def test_what_does_not_fit_a_trace(options: dict[str, str], sentence: str, samples: dict[str, Path]) -> None:
    """One sentence with the option."""
    with pytest.raises(BenchUsageError, match=re.escape(sentence)):
        with_trace(read_plan({"trace": str(samples["azure"]), **options}))


def test_defaults_with_a_trace(samples: dict[str, Path]) -> None:
    """Answers may take minutes, and many are under way; the run is as long as the trace unless the option is given."""
    whole = with_trace(read_plan({"trace": str(samples["azure"]), "warmup": "1"}))
    part = with_trace(read_plan({"trace": str(samples["azure"]), "warmup": "1", "duration": "1", "timeout": "5"}))

    assert (whole.connections, whole.timeout, part.timeout) == (4096, 600.0, 5.0)
    assert whole.duration == pytest.approx(ANSWERED[-1].at_s - ANSWERED[0].at_s - 1, abs=0.01)
    assert part.duration == 1.0
    assert read_plan({}).duration == 60.0


def test_the_command(
    engine: RunningEngine, samples: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its tables and its file; a trace that cannot be used is wrong usage."""
    stack_file, result = write_stack(tmp_path / "stack.json"), tmp_path / "result.json"
    argv = ["--stack", str(stack_file), "--url", engine.url, "--trace", str(samples["vllm"]), "--trace-to", "2"]
    assert main([*argv, "--warmup", "0", "--json", str(result), "--mix", MIX]) == 0
    shown = capsys.readouterr().out

    assert "first token" in shown
    assert "without an answer" in shown
    assert msgspec.json.decode(result.read_bytes())["settings"]["trace"]["file"] == str(samples["vllm"])
    assert main(["--stack", str(stack_file), "--url", engine.url, "--trace", str(stack_file)]) == 2
    assert "is not known" in capsys.readouterr().err
