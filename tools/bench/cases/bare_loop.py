"""A bare loop around the model `tiny`: `python bare_loop.py BATCH SECONDS` prints items/s."""

import sys
import time

from gpu_pool.backends.backend import Item
from gpu_pool.model_process.backend_registry import select_backend

FILLER = "once upon a time in a small"
WARM = 2


def main(batch: int, seconds: float) -> None:
    """Run batches of different inputs, as `tierlane bench` sends them."""
    backend = select_backend("tiny", "cpu", 1)
    backend.load()
    done = 0
    for round_ in range(WARM):
        backend.run(items(round_ * batch, batch), lambda: None)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        backend.run(items(1_000_000 + done, batch), lambda: None)
        done += batch
    sys.stdout.write(f"{done / (time.monotonic() - began)}\n")


def items(first: int, count: int) -> list[Item]:
    """Inputs with consecutive numbers."""
    return [Item(f"{number:015d}{FILLER}", {}) for number in range(first, first + count)]


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
