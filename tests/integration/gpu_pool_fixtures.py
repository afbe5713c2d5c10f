"""Workers as processes of their own, faulty models, and helpers for batches and replies."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs import worker_config
from eventually import eventually
from pool import TIERS, Pool
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.pool_view import WorkerView
from scheduler.protocol.replies import Reply

WORKER = """
import msgspec, sys, structlog, uvloop
from gpu_pool.worker.worker import WorkerConfig, run_worker
from scheduler.errors import StartError
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
try:
    sys.exit(uvloop.run(run_worker(msgspec.json.decode(sys.argv[1], type=WorkerConfig))))
except StartError as error:
    sys.exit(f"refused: {error}")
"""

MODELS = """
import asyncio, os, signal, time

class AcceleratorError(RuntimeError): pass
class OutOfMemoryError(RuntimeError): pass

def reverse(texts): return [t[::-1] for t in texts]
def dies_on_bad(texts):
    if "bad" in texts:
        with open(os.environ["DEATHS"], "a") as deaths: deaths.write(f"{len(texts)} ")
        os.kill(os.getpid(), signal.SIGKILL)
    return reverse(texts)
def hangs_on_bad(texts):
    if "bad" in texts: time.sleep(60)
    return reverse(texts)
def asserts_on_bad(texts):
    if "bad" in texts: raise AcceleratorError("CUDA error: device-side assert triggered")
    return reverse(texts)
def holds_three(texts):
    if len(texts) > 3: raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    time.sleep(0.02)
    return reverse(texts)
def sick(texts):
    return [float("nan")] * len(texts) if os.path.exists(os.environ["SICK"]) else reverse(texts)
class Writer:
    # Writes as many words as the file STEPS allows, and creates the file LEFT when no reader is left.
    words = [f"{n} " for n in range(20)]
    def predict(self, texts): return ["".join(self.words)] * len(texts)
    def generate(self, texts, tell):
        done = 0
        while done < len(self.words):
            if "stumble" in texts and done: raise ValueError
            ready = done < int(open(os.environ["STEPS"]).read() or 0)
            wanted = tell([self.words[done] if ready else ""] * len(texts))
            done += ready
            if not any(wanted):
                open(os.environ["LEFT"], "w").close()
                break
            if not ready: time.sleep(0.01)
        return ["".join(self.words[:done])] * len(texts)
def waits(texts):
    time.sleep(float(open(os.environ["DELAY"]).read()))
    return reverse(texts)
def stumbles(texts):
    if "bad" in texts: raise KeyError("text of an input")
    return reverse(texts)
class Stumbler:
    slots = 2
    def answer(self, item): return stumbles([item.input])[0]
class Talker:
    slots = 2
    async def answer(self, item):
        for _ in range(10):
            await asyncio.sleep(0.1)
            item.emit("word ")
class Blocker:
    slots = 2
    async def answer(self, item): time.sleep(1.0)
class DiesWhileLoading:
    def load(self): os._exit(9)
    def predict(self, texts): return texts
"""


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class RunningWorker:
    """A worker process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, pool: Pool) -> None:
        self.name = name
        self.process = process
        self._pool = pool

    @property
    def model_pid(self) -> int | None:
        for child in psutil.Process(self.process.pid).children():
            if child.status() != psutil.STATUS_ZOMBIE and "gpu_pool.model_process.main" in child.cmdline():
                return child.pid
        return None

    async def view(self) -> WorkerView | None:
        workers = (await self._pool.presence.observe(TIERS)).workers
        return next((worker for worker in workers if worker.id == self.name), None)

    async def reaches(self, status: str, timeout_s: float = 20.0) -> WorkerView:
        async def reached() -> WorkerView | None:
            view = await self.view()
            return view if view and view.status == status else None

        return await eventually(reached, f"{self.name} is {status}", timeout_s)

    async def stop(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        async with asyncio.timeout(20):
            return await self.process.wait()


StartWorker = Callable[..., Awaitable[RunningWorker]]


@pytest.fixture
def faulty_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that only model processes can import; the directory of its files `sick`, `deaths`, `steps`, `left`, `delay`."""
    (tmp_path / "faulty_models.py").write_text(MODELS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("sick", "deaths", "steps", "left", "delay"):
        monkeypatch.setenv(name.upper(), str(tmp_path / name))
    (tmp_path / "steps").write_text("")
    return tmp_path


@pytest.fixture
async def start_worker(pool: Pool, redis_url: str, faulty_models: Path) -> AsyncIterator[StartWorker]:
    """Start workers that end with the test."""
    started: list[RunningWorker] = []

    async def start(name: str = "w1", backend: str = "simulated:20", **changes: Any) -> RunningWorker:
        values = {"redis_url": redis_url, "worker_id": name, "backend": backend, "device": "cpu"} | changes
        config = worker_config(**values)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER, json.dumps(asdict(config)), stderr=asyncio.subprocess.PIPE
        )
        started.append(RunningWorker(name, process, pool))
        return started[-1]

    yield start
    for worker in started:
        if worker.process.returncode is None:
            worker.process.kill()
        _, log = await worker.process.communicate()
        sys.stderr.write(log.decode())


async def batch(pool: Pool, *texts: str, total_ms: int = 60_000) -> list[str]:
    """Form one batch of these texts; the ids of its requests."""
    await pool.gateway_stays("g1")  # Longer than a worker takes to start.
    submissions = [
        pool.submission(body=encode_payload(Payload("m", text, {})), total_ms=total_ms, queue_ms=total_ms)
        for text in texts
    ]
    await pool.admit(submissions)
    await pool.form([("free", len(texts))])
    return [submission.id for submission in submissions]


async def replies(pool: Pool, ids: list[str], timeout_s: float = 20.0) -> list[Reply]:
    """Wait for the replies; requests that were handed back are formed into a batch again."""

    async def all_there() -> list[Reply]:
        await pool.gateway_lives("g1")
        if await pool.depth("free"):
            await pool.form([("free", len(ids))])
        found = [reply for reply in await pool.results.fetch(ids) if reply is not None]
        return found if len(found) == len(ids) else []

    return await eventually(all_there, "every request has its reply", timeout_s)


async def running(pool: Pool, request_id: str) -> bool:
    """Whether the request's batch is claimed: its attempt is counted."""
    await pool.gateway_lives("g1")  # Requests of a silent gateway are not run.
    return await pool.attempts(request_id) == 1
