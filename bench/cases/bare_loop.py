"""A bare loop around the model that ships with the project: `python bare_loop.py BATCH SECONDS`, items/s on stdout.

What an engineer would write without Tierlane: load, then batch after batch, with nothing in between.
"""

import sys
import time

from gpu_pool.backends.backend import Item
from gpu_pool.model_process.backend_registry import select_backend

FILLER = "once upon a time in a small"
WARM = 2


def main(batch: int, seconds: float) -> None:
    """Every input differs, as those of the generator do."""
    backend = select_backend("tiny", "cpu", 1)
    backend.load()
    done = 0
    for round_ in range(WARM):
        backend.run(items(round_ * batch, batch), _nothing)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        backend.run(items(1_000_000 + done, batch), _nothing)
        done += batch
    sys.stdout.write(f"{done / (time.monotonic() - began)}\n")


def items(first: int, count: int) -> list[Item]:
    """So many inputs, each with a number of its own."""
    return [Item(f"{number:015d}{FILLER}", {}) for number in range(first, first + count)]


def _nothing() -> None:
    """Nobody watches."""


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
