"""The model of a chaos stack: sleeps, reverses its inputs, and logs the start of each run.

One batch in eight is much slower, so that faults happen during batches, and a worker that completes the batch of another
does so long before its owner. The first input of a batch decides whether it is slow.

The log has a JSON line for each input in a file of this process: the start on the monotonic clock of the machine, and the
duration. The checker uses it to find runs after the deadline.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

RUNS_VARIABLE = "CHAOS_RUNS"  # Without the prefix of settings, which are removed from the environment of models.
BATCH_S = 0.05
SLOW_S = 0.3
SLOW_ONE_IN = 8
MEAN_S = ((SLOW_ONE_IN - 1) * BATCH_S + SLOW_S) / SLOW_ONE_IN


class Echo:
    """The interface of function backends: `load`, `predict` and `warmup`."""

    version = "echo"

    def __init__(self) -> None:
        self._log: BinaryIO | None = None

    def load(self) -> None:
        """Open the log of this process, if a directory is configured."""
        if directory := os.environ.get(RUNS_VARIABLE):
            # Unbuffered, so that the log survives a SIGKILL of this process.
            self._log = (Path(directory) / f"{os.getpid()}-{time.monotonic_ns()}.jsonl").open("ab", buffering=0)

    def warmup(self) -> None:
        """No warm-up is needed."""

    def predict(self, inputs: list[str]) -> list[str]:
        """Log, sleep, reverse each input. Logged first, because a killed run counts as a run."""
        began, takes = time.monotonic(), seconds_of(inputs)
        if self._log is not None:
            lines = [
                json.dumps({"nonce": _nonce(text), "sent": _sent(text), "began": began, "takes": takes})
                for text in inputs
            ]
            self._log.write(("\n".join(lines) + "\n").encode())
        time.sleep(takes)
        return [text[::-1] for text in inputs]


def seconds_of(inputs: Sequence[str]) -> float:
    """The duration of a batch, always the same for the same inputs."""
    try:
        slow = int(_nonce(inputs[0]), 16) % SLOW_ONE_IN == 0
    except (IndexError, ValueError):  # A warm-up has no nonce.
        return BATCH_S
    return SLOW_S if slow else BATCH_S


def _nonce(text: str) -> str:
    return text.partition(":")[0]


def _sent(text: str) -> float | None:
    """The time of sending in the input."""
    try:
        return float(text.split(":", 2)[1])
    except (IndexError, ValueError):
        return None
