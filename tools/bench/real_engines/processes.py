"""Engines as processes of a bench or test: started with the random model, awaited, always stopped."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

from real_engines.model import CONTEXT, write_directory, write_gguf

MODEL = "random"
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
VLLM = Path(sys.prefix) / "vllm"
"""Where `make engines` installs vLLM, whose versions are not those of the tests."""
START_S = 600.0
STOP_S = 15.0
CALL_S = 10.0


class Place(NamedTuple):
    """An empty folder, a free port, the number of sequences that may run at a time, the name of the model, and the key that
    clients need, "" for none.
    """

    home: Path
    port: int
    slots: int
    model: str = MODEL
    key: str = ""


class Engine(NamedTuple):
    """One engine. `running`, `waiting`, `generated`: its metrics of sequences and output tokens. `backend`: the value of
    `--backend` for Tierlane, without the address of the server.
    """

    name: str
    running: str
    waiting: str
    generated: str
    command: Callable[[Place], Sequence[str]]
    environment: Mapping[str, str]
    health: str = "/health"
    backend: str = f"openai:{{}}/v1#{MODEL}"


def _llama_cpp(place: Place) -> Sequence[str]:
    model = write_gguf(place.home / "model.gguf")
    script = Path(__file__).with_name("llama_cpp_server.py")
    numbers = map(str, (place.port, place.slots, CONTEXT))
    return [sys.executable, str(script), str(model), *numbers, place.model, place.key]


def _vllm(place: Place) -> Sequence[str]:
    model = write_directory(place.home / "model")
    # Its command `vllm` asks for the version of a package of that name, which the build for CPUs is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", place.model, "--host", "127.0.0.1", "--port", str(place.port)]
    command += ["--api-key", place.key] if place.key else []
    return [*command, "--max-num-seqs", str(place.slots), "--dtype", "float32", "--enforce-eager", *TOOLS]


LLAMA_CPP = Engine(
    "llama_cpp",
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
    "llamacpp:tokens_predicted_total",
    _llama_cpp,
    {},
)
VLLM_CPU = Engine(
    "vllm",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:generation_tokens_total",
    _vllm,
    {"PYTHONPATH": str(VLLM), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
)
ENGINES = {engine.name: engine for engine in (LLAMA_CPP, VLLM_CPU)}


class Load(NamedTuple):
    """Sequences that run and wait, and tokens generated since the start."""

    running: int
    waiting: int
    generated: int


class RunningEngine:
    """A running engine. Calls are blocking."""

    def __init__(self, engine: Engine, url: str, pid: int) -> None:
        self.engine = engine
        self.url = url
        self.pid = pid

    @property
    def api(self) -> str:
        """Its base URL for OpenAI clients."""
        return f"{self.url}/v1"

    @property
    def backend(self) -> str:
        """The value of `--backend` for Tierlane."""
        return self.engine.backend.format(self.url)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a response. Raises OSError."""
        connection = HTTPConnection(self.url.removeprefix("http://"), timeout=CALL_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def load(self) -> Load:
        """What its metrics show now."""
        _, text = self.get("/metrics")
        engine = self.engine
        return Load(*(int(_metric(text, name)) for name in (engine.running, engine.waiting, engine.generated)))


def _metric(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"The engine has no metric {name}.")
    return float(found[1])


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_engine(
    engine: Engine, home: Path, slots: int = 8, *, port: int = 0, model: str = MODEL, key: str = ""
) -> Iterator[RunningEngine]:
    """Run an engine until the end of the block, on this or a free port; its output is in `<home>/engine.log`.

    Raises RuntimeError.
    """
    home.mkdir(parents=True, exist_ok=True)
    place, log = Place(home, port or free_port(), slots, model, key), home / "engine.log"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            engine.command(place),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment | dict(engine.environment),
            start_new_session=True,
        )
    running = RunningEngine(engine, f"http://127.0.0.1:{place.port}", process.pid)
    try:
        _wait_for(running, process, log)
        yield running
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        # vLLM has processes of its own, which must not stay.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(running: RunningEngine, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not _healthy(running):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{running.engine.name} does not start:\n{log.read_text('utf-8', 'replace')[-2000:]}")
        time.sleep(0.05)


def _healthy(running: RunningEngine) -> bool:
    try:
        return running.get(running.engine.health)[0] == 200
    except OSError:
        return False
