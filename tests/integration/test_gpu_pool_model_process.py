"""The model process and its handle: batches, faults of models, hangs, crashes, and the end with its worker."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from eventually import eventually
from gpu_pool.backends.backend import ItemResult
from gpu_pool.model_process.handle import ModelLost, ModelProcess
from gpu_pool.model_process.launch import ModelLaunch
from gpu_pool.model_process.messages import Done, Piece, Ready, Refused
from gpu_pool.model_process.watchdog import ModelHung, run_watched
from hf_models import change_config, make_causal
from integration.gpu_pool_fixtures import ended
from scheduler.errors import StartError, TierlaneError
from scheduler.payload import Payload, encode_payload

MODELS = """
import asyncio, os, re, signal, sys, time

class AcceleratorError(RuntimeError): pass

def reverse(texts): return [t[::-1] for t in texts]
def short(texts): return texts[1:] if "bad" in texts else reverse(texts)
def sleepy(texts):
    open(os.environ["STARTED_MARK"], "w").close()
    time.sleep(60)
def slow(texts):
    time.sleep(0.2)
    return reverse(texts)
def holds_the_gil(texts):
    open(os.environ["STARTED_MARK"], "w").close()
    return [str(re.match("(a+)+$", 50 * "a" + "b"))]
def dies(texts): os.kill(os.getpid(), signal.SIGKILL)
def exits(texts): sys.exit(3) if "bad" in texts else None; return reverse(texts)
def sticky(texts): raise AcceleratorError("CUDA error: device-side assert triggered")
def prints(texts): print("noise"); sys.stdout.flush(); return reverse(texts)
def environment(texts): return [",".join(sorted(k for k in os.environ if k.startswith("TIERLANE_"))) for _ in texts]
class Answers:
    async def answer(self, item):
        if item.input == "poison": raise ValueError
        for word in item.input.split():
            item.emit(word + " ")
            await asyncio.sleep(0.3 if word == "slow" else 0)
class CannotLoad:
    def load(self): raise OSError("weights are not readable")
    def predict(self, texts): return texts
class SlowLoad:
    def load(self): time.sleep(60)
    def predict(self, texts): return texts
"""

Start = Callable[[str], Awaitable[ModelProcess]]


@pytest.fixture
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that only model processes can import."""
    (tmp_path / "faulty_models.py").write_text(MODELS)
    monkeypatch.setenv("STARTED_MARK", str(tmp_path / "started"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
async def start(_models: None) -> AsyncIterator[Start]:
    """Start model processes that end with the test; a name is a model of this file."""
    started: list[ModelProcess] = []

    async def start(name: str) -> ModelProcess:
        backend = name if ":" in name or name == "tiny" else f"faulty_models:{name}"
        started.append(await ModelProcess.spawn(ModelLaunch(backend, "cpu", dtype="float32")))
        return started[-1]

    yield start
    for model in started:
        model.kill()
        await model.close()


async def ready(start: Start, name: str) -> ModelProcess:
    model = await start(name)
    await model.ready()
    return model


def stored(text: str, **parameters: object) -> bytes:
    return encode_payload(Payload("m", text, parameters))


async def run(model: ModelProcess, *texts: str) -> list[tuple[str, str]]:
    done = await model.run([stored(text) for text in texts], 3000)
    return [(result.output, result.error_code) for result in done.results]


async def test_batches_are_answered_in_order(start: Start) -> None:
    """With time and version; junk fails alone; 8 MB in both directions; an idle process exits with 0 when closed."""
    model = await start("simulated:30")
    assert await model.ready() == "simulated-30ms"

    done = await model.run([stored("one two"), b"\xc1", stored("three")], 3000)
    junk = await model.run([b"", b"\x91" * 100_000], 3000)
    large = [chr(97 + i) * 1_000_000 for i in range(8)]

    assert [done.results[0], done.results[2]] == [ItemResult("owt eno", 2), ItemResult("eerht", 1)]
    assert 30 <= done.gpu_ms < 200
    assert [r.error_code for r in [done.results[1], *junk.results]] == ["invalid_request"] * 3
    assert await run(model, *large) == [(text, "") for text in large]
    await model.close()
    assert model._process.returncode == 0


async def test_model_does_not_get_the_settings(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and connection strings are not in its environment."""
    monkeypatch.setenv("TIERLANE_SERVICE_TOKEN", "secret")

    assert await run(await ready(start, "environment"), "a") == [("", "")]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nothing_here:f", StartError, "the module 'nothing_here' is not found"),
        ("missing", StartError, "has no 'missing'"),
        ("CannotLoad", ModelLost, "did not load: OSError: weights are not readable"),
    ],
)
async def test_model_that_does_not_load(start: Start, name: str, error: type[Exception], message: str) -> None:
    """A StartError where a restart cannot help, else ModelLost."""
    model = await start(name)

    with pytest.raises(error, match=message):
        await model.ready()


async def test_killed_process_is_detected_at_once(start: Start) -> None:
    """The running and the next call raise ModelLost."""
    model = await ready(start, "sleepy")
    task = asyncio.create_task(run(model, "a"))
    await eventually(lambda: model._seq == 1, "the batch is sent")

    killed_at = time.monotonic()
    os.kill(model.pid, signal.SIGKILL)
    with pytest.raises(ModelLost):
        await task

    assert time.monotonic() - killed_at < 0.25
    with pytest.raises(ModelLost):
        await run(model, "b")


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("dies", -signal.SIGKILL, "The model process was ended by signal 9."),
        ("sticky", 70, "The device is lost after AcceleratorError."),
    ],
)
async def test_model_that_ends_its_process(start: Start, name: str, code: int, why: str) -> None:
    """As by a segmentation fault, or after a sticky device error: no other batch runs."""
    model = await ready(start, name)

    with pytest.raises(ModelLost):
        await run(model, "a", "b")
    await model.close()
    assert (model._process.returncode, model.why_lost) == (code, why)


@pytest.mark.parametrize("name", ["sleepy", "holds_the_gil", "simulated:0"])
async def test_hang_is_killed_at_its_cap(start: Start, name: str) -> None:
    """In a system call, in a C call that holds the GIL, or stopped by SIGSTOP."""
    model = await ready(start, name)
    if name == "simulated:0":
        os.kill(model.pid, signal.SIGSTOP)

    began = time.monotonic()
    with pytest.raises(ModelHung):
        await run_watched(model, [stored("a")], cap_ms=300, timeout_ms=3000, budget_ms=3000)

    assert 0.3 <= time.monotonic() - began < 1.0
    await eventually(lambda: ended(model.pid), "the process is gone")


async def test_item_that_takes_too_long_costs_no_process(start: Start, tmp_path: Path) -> None:
    """Generation ends at the item's deadline with gpu_timeout; its neighbour and the process go on."""
    folder = make_causal(tmp_path / "endless")
    change_config(folder, max_position_embeddings=100_000, eos_token_id=99_999)
    change_config(folder, "generation_config.json", eos_token_id=99_999)
    change_config(folder, "tokenizer_config.json", eos_token=None)
    model = await ready(start, f"hf:{folder}")
    bodies = [stored("Once", max_tokens=4096), stored("Once", max_tokens=3)]

    done = await run_watched(model, bodies, cap_ms=3000, timeout_ms=3000, budget_ms=3000, left_ms=[700, 3000])
    after = await model.run(bodies[1:], 5000)

    assert [result.error_code for result in done.results] == ["gpu_timeout", ""]
    assert after.results == done.results[1:]


class SlotRecord:
    """What a request in a slot got."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.end: Done | Refused | TierlaneError | None = None

    def on_piece(self, piece: Piece) -> None:
        self.pieces.append(piece.text)

    def over(self, answer: Done | Refused | TierlaneError) -> None:
        self.end = answer


@pytest.mark.parametrize("name", ["tiny", "faulty_models:Answers"])
async def test_slots(start: Start, name: str) -> None:
    """Requests end one by one; the client of a running one can leave, another be withdrawn, and streams get their text."""
    model = await ready(start, name)
    long = {"max_tokens": 250} if name == "tiny" else {}
    texts = ["slow one", "slow two", "slow three slow", "short"]
    streamed = encode_payload(Payload("m", texts[2], long, stream="g n"))
    bodies = [stored(texts[0], **long), stored(texts[1], **long), streamed, stored(texts[3])]
    runs = [SlotRecord() for _ in bodies]
    seqs = [model.start(body, 9000, run) for body, run in zip(bodies, runs, strict=True)]
    await eventually(lambda: bool(runs[2].pieces), "the stream has begun")
    model.drop(seqs[0])
    model.withdraw(seqs[1:3])

    await eventually(lambda: all(run.end is not None for run in runs), "all have ended")

    withdrawn = runs[1].end
    assert isinstance(withdrawn, Refused)
    assert not withdrawn.counted
    dropped, stream, short = (runs[n].end.results[0] for n in (0, 2, 3) if isinstance(runs[n].end, Done))
    assert dropped.error_code == "cancelled"
    assert (stream.error_code, short.error_code) == ("", "")
    assert stream.output.startswith("".join(runs[2].pieces))
    assert len(runs[2].pieces) > 1
    if name != "tiny":
        assert await run(model, "poison", "fine") == [
            ("The model cannot process this input.", "poison_request"),
            ("fine ", ""),
        ]


@pytest.mark.usefixtures("_models")
async def test_slots_are_limited_by_the_worker() -> None:
    """`max_slots` of the launch; a model of batches has none."""
    ready = []
    for backend in ("tiny", "faulty_models:reverse"):
        model = await ModelProcess.spawn(ModelLaunch(backend, "cpu", max_slots=3))
        ready.append(await model._loaded)
        await model.close()

    assert [message.slots for message in ready if isinstance(message, Ready)] == [3, 0]


WORKER = """
import asyncio, sys
from gpu_pool.model_process.handle import ModelLaunch, ModelProcess
from scheduler.payload import Payload, encode_payload

async def main():
    model = await ModelProcess.spawn(ModelLaunch(sys.argv[1], "cpu"))
    if sys.argv[2] == "run":
        await model.ready()
        asyncio.create_task(model.run([encode_payload(Payload("m", "a", {}))], 3000))
    await asyncio.sleep(0)
    print(model.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""

PHASES = [("sleepy", "run"), ("reverse", "idle"), ("SlowLoad", "load")]
if sys.platform == "linux":
    PHASES.append(("holds_the_gil", "run"))  # Needs PR_SET_PDEATHSIG.


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize(("name", "phase"), PHASES)
async def test_model_process_ends_with_its_worker(name: str, phase: str, tmp_path: Path) -> None:
    """SIGKILL of the worker ends it while it runs, idles or loads."""
    command = [sys.executable, "-c", WORKER, f"faulty_models:{name}", phase]
    worker = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    pid = int(await worker.stdout.readline())
    if phase == "run":
        await eventually((tmp_path / "started").exists, "the batch runs")
    assert not ended(pid)

    worker.kill()
    await worker.wait()

    await eventually(lambda: ended(pid), "the model process is gone", timeout_s=2.0)
