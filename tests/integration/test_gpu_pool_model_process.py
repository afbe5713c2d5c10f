"""The model process as its supervisor meets it: answers, hangs, crashes, and ends with its parent."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from eventually import eventually
from gpu_pool.backends.backend import ItemResult
from gpu_pool.model_process.handle import ModelHung, ModelLaunch, ModelLost, ModelProcess, run_watched
from integration.gpu_pool_fixtures import ended
from scheduler.errors import StartError
from scheduler.payload import Payload, encode_payload

MODELS = """
import asyncio, os, re, signal, sys, time

class AcceleratorError(RuntimeError): pass

def reverse(texts): return [t[::-1] for t in texts]
def picky(texts):
    if "bad" in texts: raise ValueError("bad: " + " ".join(texts))
    return reverse(texts)
def short(texts): return texts[1:] if "bad" in texts else reverse(texts)
def numbers(texts): return [1 if t == "bad" else t[::-1] for t in texts]
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
async def later(texts):
    await asyncio.sleep(0.01)
    return reverse(texts)
class Loads:
    version = "loads-2"
    def load(self): self.text = "loaded"
    def warmup(self): self.text += ", warm"
    def predict(self, texts): return [self.text for _ in texts]
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
    """A module of models that only model processes can import."""
    (tmp_path / "faulty_models.py").write_text(MODELS)
    monkeypatch.setenv("STARTED_MARK", str(tmp_path / "started"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
async def start(_models: None) -> AsyncIterator[Start]:
    """Start model processes; none outlives its test."""
    started: list[ModelProcess] = []

    async def start(backend: str) -> ModelProcess:
        model = await ModelProcess.spawn(ModelLaunch(backend, "cpu"))
        started.append(model)
        return model

    yield start
    for model in started:
        model.kill()
        await model.close()


async def ready(start: Start, name: str) -> ModelProcess:
    model = await start(name if name.startswith("simulated") else f"faulty_models:{name}")
    await model.ready()
    return model


def stored(text: str, **parameters: object) -> bytes:
    return encode_payload(Payload("m", text, parameters))


async def answers(model: ModelProcess, *texts: str) -> list[tuple[str, str]]:
    done = await model.run([stored(text) for text in texts], 3000)
    return [(result.output, result.error_code) for result in done.results]


async def test_a_batch_is_answered_in_order_with_its_time(start: Start) -> None:
    """The simulated model reverses each input and takes its 30 ms once for the batch."""
    model = await start("simulated:30")

    version = await model.ready()
    done = await model.run([stored("one two"), stored("three")], 3000)

    assert version == "simulated-30ms"
    assert done.results == [ItemResult("owt eno", 2), ItemResult("eerht", 1)]
    assert 30 <= done.gpu_ms < 200


async def test_a_stored_request_that_cannot_be_read_fails_alone(start: Start) -> None:
    """Junk is told from its neighbours inside the model process; a batch of nothing else does not reach the model."""
    model = await ready(start, "reverse")

    done = await model.run([stored("a1"), b"\xc1", stored("b2")], 3000)
    junk = await model.run([b"", b"\x91" * 100_000], 3000)

    assert [(r.output, r.error_code) for r in done.results if not r.error_code] == [("1a", ""), ("2b", "")]
    assert done.results[1].error_code == "invalid_request"
    assert [r.error_code for r in junk.results] == ["invalid_request"] * 2


async def test_a_large_batch_passes_the_socket(start: Start) -> None:
    """Eight megabytes there and back, in frames far larger than a socket's buffer."""
    model = await ready(start, "simulated:0")
    texts = [chr(97 + i) * 1_000_000 for i in range(8)]

    assert await answers(model, *texts) == [(text, "") for text in texts]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reverse", [("a1", ""), ("dab", ""), ("c3", "")]),
        ("later", [("a1", ""), ("dab", ""), ("c3", "")]),
        ("picky", [("a1", ""), ("The model cannot process this input.", "poison_request"), ("c3", "")]),
        ("exits", [("a1", ""), ("The model cannot process this input.", "poison_request"), ("c3", "")]),
        ("short", [("a1", ""), ("The model returned 0 answers for 1 inputs.", "invalid_output"), ("c3", "")]),
        ("numbers", [("a1", ""), ("The model's answer is not a string.", "invalid_output"), ("c3", "")]),
        ("prints", [("a1", ""), ("dab", ""), ("c3", "")]),
        ("Loads", [("loaded, warm", "")] * 3),
    ],
)
async def test_one_bad_item_never_costs_its_neighbours(
    start: Start, name: str, expected: list[tuple[str, str]]
) -> None:
    """Exceptions, sys.exit, wrong lengths and wrong types end the one item; and the process goes on."""
    model = await ready(start, name)

    assert await answers(model, "1a", "bad", "3c") == expected
    assert len(await answers(model, "again")) == 1


async def test_a_model_sees_none_of_our_settings(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connection strings and tokens stay out of the model process."""
    monkeypatch.setenv("TIERLANE_SERVICE_TOKEN", "secret")
    model = await ready(start, "environment")

    assert await answers(model, "a") == [("", "")]


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("nothing_here:f", "the module 'nothing_here' is not found"),
        ("faulty_models:missing", "has no 'missing'"),
    ],
)
async def test_what_no_retry_can_help_is_a_start_error(start: Start, backend: str, message: str) -> None:
    """The supervisor gets the sentence that the operator needs."""
    model = await start(backend)

    with pytest.raises(StartError, match=message):
        await model.ready()


async def test_a_model_that_cannot_load_is_lost_and_says_why(start: Start) -> None:
    """Weights may be readable a moment later, so this is worth another try."""
    model = await start("faulty_models:CannotLoad")

    with pytest.raises(ModelLost, match="did not load: OSError: weights are not readable"):
        await model.ready()
    assert model.why_lost == "The model did not load: OSError: weights are not readable"


async def test_a_kill_in_the_middle_of_a_batch_is_seen_at_once(start: Start) -> None:
    """SIGKILL from outside: the batch's caller knows at once."""
    model = await ready(start, "sleepy")
    running = asyncio.create_task(answers(model, "a"))
    await eventually(lambda: model._seq == 1, "the batch is sent")

    killed_at = time.monotonic()
    os.kill(model.pid, signal.SIGKILL)
    with pytest.raises(ModelLost):
        await running

    assert time.monotonic() - killed_at < 0.25  # Under 50 ms on a machine that has nothing else to do.
    with pytest.raises(ModelLost):
        await answers(model, "b")


async def test_a_model_that_kills_itself_is_lost(start: Start) -> None:
    """As a segmentation fault would."""
    model = await ready(start, "dies")

    with pytest.raises(ModelLost):
        await answers(model, "a")
    await model.close()
    assert model.why_lost == "The model process was ended by signal 9."


async def test_a_sticky_device_error_ends_the_process_with_70(start: Start) -> None:
    """It says why, and never runs another batch on the broken context."""
    model = await ready(start, "sticky")

    with pytest.raises(ModelLost, match="The device is lost after AcceleratorError"):
        await answers(model, "a", "b")
    await model.close()
    assert model._process.returncode == 70


@pytest.mark.parametrize("name", ["sleepy", "holds_the_gil"])
async def test_a_hang_is_killed_at_its_cap(start: Start, name: str) -> None:
    """Asleep or busy inside a C call with the interpreter's lock held: no progress is no progress."""
    model = await ready(start, name)

    started = time.monotonic()
    with pytest.raises(ModelHung):
        await run_watched(model, [stored("a")], cap_ms=300, timeout_ms=3000, budget_ms=3000)

    assert 0.3 <= time.monotonic() - started < 1.0
    await eventually(lambda: ended(model.pid), "the process is gone")


async def test_a_stopped_process_is_killed_at_its_cap(start: Start) -> None:
    """SIGSTOP looks like any hang, and SIGKILL works on it."""
    model = await ready(start, "simulated:0")
    os.kill(model.pid, signal.SIGSTOP)

    with pytest.raises(ModelHung):
        await run_watched(model, [stored("a")], cap_ms=200, timeout_ms=3000, budget_ms=3000)
    await eventually(lambda: ended(model.pid), "the process is gone")


async def test_progress_puts_the_cap_off_but_not_the_timeout(start: Start) -> None:
    """300 texts are three calls of 0.2 s, each telling progress: a cap over one call and under all three is kept."""
    model = await ready(start, "slow")
    done = await run_watched(model, [stored("ab")] * 300, cap_ms=450, timeout_ms=3000, budget_ms=3000)

    assert len(done.results) == 300
    with pytest.raises(ModelHung):
        await run_watched(model, [stored("ab")] * 300, cap_ms=450, timeout_ms=450, budget_ms=3000)


async def test_an_idle_process_ends_by_itself_when_closed(start: Start) -> None:
    """End-of-file on its socket is enough; its exit code is 0."""
    model = await ready(start, "simulated:0")

    await model.close()

    assert model._process.returncode == 0


SUPERVISOR = """
import asyncio, sys
from gpu_pool.model_process.handle import ModelProcess
from gpu_pool.model_process.handle import ModelLaunch
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


MOMENTS = [("sleepy", "run"), ("reverse", "idle"), ("SlowLoad", "load")]
if sys.platform == "linux":
    MOMENTS.append(("holds_the_gil", "run"))  # Only a kernel that tells of the parent's death can end this.


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize(("name", "moment"), MOMENTS)
async def test_a_model_process_dies_with_its_supervisor(name: str, moment: str, tmp_path: Path) -> None:
    """SIGKILL of the supervisor ends it while it computes, idles or loads."""
    command = [sys.executable, "-c", textwrap.dedent(SUPERVISOR), f"faulty_models:{name}", moment]
    supervisor = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    pid = int(await supervisor.stdout.readline())
    if moment == "run":
        await eventually((tmp_path / "started").exists, "the batch runs")
    assert not ended(pid)

    supervisor.kill()
    await supervisor.wait()

    await eventually(lambda: ended(pid), "the model process is gone", timeout_s=2.0)


@pytest.mark.parametrize(
    "module",
    [
        "gpu_pool",
        "gpu_pool.worker.worker",
        "gpu_pool.model_process.main",
        "gpu_pool.model_process.backend_registry",
        "gpu_pool.backends.tiny.backend",
    ],
)
def test_torch_is_imported_where_a_model_loads_and_nowhere_else(module: str) -> None:
    """A supervisor, and a model process of another backend, never pay for torch."""
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_tiny_answers_and_refuses_bad_parameters_alone(start: Start) -> None:
    """The real model: text comes back, and a parameter out of range ends its own request only."""
    model = await start("tiny")

    assert (await model.ready()).startswith("tiny")
    bodies = [
        stored("Once upon a time", max_tokens=8),
        stored("x", temperature=9),
        stored("The", max_tokens=8),
    ]
    done = await model.run(bodies, 3000)

    assert [result.error_code for result in done.results] == ["", "invalid_request", ""]
    assert all(done.results[i].output and done.results[i].tokens_used > 8 for i in (0, 2))
    assert done.results[1].output == "parameters.temperature must be from 0 to 2."
