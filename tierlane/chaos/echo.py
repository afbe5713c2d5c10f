"""The model of a chaos stack: reverses its inputs, takes its time, and writes down when it ran each.

Most batches take as long as those of a simulated model; one in eight takes much longer, so that faults hit batches in
the middle, and who ends the batch of somebody else does so long before its owner. Which batch is slow is drawn by its
first input, not one by one: with eight inputs to a batch most batches would have a slow one among them.

The log is one JSON line for each item, in a file of this process: what it began to run, when, on the clock that all
processes of this machine share, and how long it will take. It is how a run after its deadline is found.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

RUNS_VARIABLE = "CHAOS_RUNS"  # Without the prefix of settings, which model processes do not get.
BATCH_S = 0.05
SLOW_S = 0.3
SLOW_ONE_IN = 8
MEAN_S = ((SLOW_ONE_IN - 1) * BATCH_S + SLOW_S) / SLOW_ONE_IN


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
    """How long a batch of these takes; the same batch always takes as long."""
    try:
        slow = int(_nonce(inputs[0]), 16) % SLOW_ONE_IN == 0
    except (IndexError, ValueError):  # A warm-up has no nonce.
        return BATCH_S
    return SLOW_S if slow else BATCH_S


def _nonce(text: str) -> str:
    return text.partition(":")[0]


def _sent(text: str) -> float | None:
    """When the client sent it, as the input itself says."""
    try:
        return float(text.split(":", 2)[1])
    except (IndexError, ValueError):
        return None
