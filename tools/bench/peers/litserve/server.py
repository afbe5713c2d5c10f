"""The job on LitServe: two API servers, four worker processes, the faster of its queues."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import time
from typing import Any

import litserve
from reversal import BATCH, PORT, SERVICE_S, WINDOW_S, reversed_all

WORKERS = 4
API_SERVERS = 2


class Reverse(litserve.LitAPI):
    """One GPU."""

    def setup(self, device: str) -> None:
        """There is nothing to load."""

    def decode_request(self, request: dict[str, Any]) -> str:
        """A request's input."""
        return str(request["input"])

    def batch(self, inputs: list[str]) -> list[str]:
        """A batch is a list."""
        return inputs

    def predict(self, x: list[str]) -> list[str]:
        """One batch."""
        time.sleep(SERVICE_S)
        return reversed_all(x)

    def unbatch(self, output: list[str]) -> list[str]:
        """A batch is a list."""
        return output

    def encode_response(self, output: str) -> dict[str, str]:
        """One answer."""
        return {"output": output}


if __name__ == "__main__":
    api = Reverse(max_batch_size=BATCH, batch_timeout=WINDOW_S, api_path="/inference")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=WORKERS, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=PORT,
        num_api_servers=API_SERVERS,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
