"""The model of a chaos stack: takes as long as a simulated one, reverses its inputs, and writes down when it ran each.

The log is one JSON line for each item, in a file of this process: what it began to run, and when, on the clock that
all processes of this machine share. It is how a run after its deadline is found.
"""

import json
import os
import time
from pathlib import Path
from typing import BinaryIO

RUNS_VARIABLE = "CHAOS_RUNS"  # Without the prefix of settings, which model processes do not get.
BATCH_S = 0.05


class Echo:
    """`load`, `predict` and `warmup`, as function backends have them."""

    version = "echo"

    def __init__(self) -> None:
        self._log: BinaryIO | None = None

    def load(self) -> None:
        """Open the log of this process, where a directory for it is named."""
        if directory := os.environ.get(RUNS_VARIABLE):
            # Unbuffered: what was written survives the SIGKILL of this process.
            self._log = (Path(directory) / f"{os.getpid()}-{time.monotonic_ns()}.jsonl").open("ab", buffering=0)

    def warmup(self) -> None:
        """There is nothing to warm."""

    def predict(self, inputs: list[str]) -> list[str]:
        """Write down, sleep, reverse each input. Written before: a run that is killed was a run all the same."""
        began = time.monotonic()
        if self._log is not None:
            lines = [json.dumps({"nonce": _nonce(text), "sent": _sent(text), "began": began}) for text in inputs]
            self._log.write(("\n".join(lines) + "\n").encode())
        time.sleep(BATCH_S)
        return [text[::-1] for text in inputs]


def _nonce(text: str) -> str:
    return text.partition(":")[0]


def _sent(text: str) -> float | None:
    """When the client sent it, as the input itself says."""
    try:
        return float(text.split(":", 2)[1])
    except (IndexError, ValueError):
        return None
