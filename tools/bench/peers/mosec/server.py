"""The job on Mosec: a front in Rust, one Python process a GPU."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import time
from typing import Any

from mosec import Server, Worker
from reversal import BATCH, GPUS, SERVICE_S, WINDOW_MS, reversed_all


class Reverse(Worker):
    """One GPU."""

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One batch."""
        time.sleep(SERVICE_S)
        return [{"output": output} for output in reversed_all([item["input"] for item in data])]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Reverse, num=GPUS, max_batch_size=BATCH, max_wait_time=WINDOW_MS)
    server.run()
