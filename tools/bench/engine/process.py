"""The engine as a process of a bench or test: started, controlled, always stopped.

with running_engine(slots=64, metrics="none") as engine:
    engine.control(factor=4.0)
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from engine.steps import Sample

STOP_S = 5.0
CALL_S = 10.0


class RunningEngine:
    """A running engine. Calls are blocking."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid

    @property
    def api(self) -> str:
        """Its base URL for OpenAI clients."""
        return f"{self.url}/v1"

    @property
    def backend(self) -> str:
        """The value of `--backend` for Tierlane."""
        return f"openai:{self.api}"

    def control(self, **change: object) -> dict[str, Any]:
        """Apply a change (`faults.Change`); returns the state. Raises RuntimeError for an unknown field."""
        return dict(self._call("POST", "/control", change))

    def state(self) -> dict[str, Any]:
        """Clock, running, waiting, pace and totals."""
        return dict(self._call("GET", "/control", None))

    def history(self, since_s: float = 0.0) -> list[Sample]:
        """The samples since a time of the engine's clock, one for each step."""
        return [Sample(*sample) for sample in self._call("GET", f"/control/history?since={since_s}", None)]

    def _call(self, method: str, path: str, body: object) -> Any:
        connection = HTTPConnection(self.url.removeprefix("http://"), timeout=CALL_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            found = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"The engine answers {response.status}: {found[:200].decode()}")
        return json.loads(found)


@contextmanager
def running_engine(port: int = 0, **options: object) -> Iterator[RunningEngine]:
    """Run an engine until the end of the block; it also ends with this process. `options` are those of the command line."""
    command = [sys.executable, str(Path(__file__).parent), "--until-stdin-ends", "--port", str(port)]
    for name, value in options.items():
        if value is not False:
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError("The engine does not start.")
        yield RunningEngine(url, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
