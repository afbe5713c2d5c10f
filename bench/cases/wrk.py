"""wrk as a load: so many connections, each with its next request as soon as the last one is answered."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).with_name("post.lua")
THREADS = 2


class Figures(NamedTuple):
    """What came back. `refused`: answers that were no success; `broken`: connections that failed or timed out."""

    requests: int
    seconds: float
    refused: int
    broken: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.requests / self.seconds


def installed() -> bool:
    """Whether wrk can be used."""
    return shutil.which("wrk") is not None


def load(url: str, connections: int, seconds: int, keys: Sequence[str]) -> Figures:
    """Load a gateway, or an echo."""
    command = ["wrk", f"-t{THREADS}", f"-c{connections}", f"-d{seconds}s", "--timeout", "10s", "-s", str(SCRIPT), url]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "KEYS": " ".join(keys)}
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"wrk: {(ended.stderr or ended.stdout)[-500:]}")
    return Figures(**json.loads(lines[0].removeprefix("RESULT ")))
