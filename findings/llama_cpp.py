"""llama.cpp's server with a small random model, for the scripts beside this file. Needs gguf and xllamacpp."""
# ruff: noqa: INP001 - found beside the scripts

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

SLOTS, CONTEXT = 4, 32_768
WIDTH, INNER = 32, 64
LETTERS = [chr(code) for code in range(33, 127)]
SERVE = """
import signal, sys, xllamacpp
signal.signal(signal.SIGTERM, signal.SIG_DFL)
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_parallel, params.n_ctx = int(sys.argv[2]), int(sys.argv[2]) * int(sys.argv[3])
params.endpoint_metrics = True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print("LISTENING", server.listening_address, flush=True)
signal.pause()
"""


def write_model(path: Path) -> None:
    """A Llama model of one layer whose vocabulary is printable ASCII. Each token of an output is one character."""
    import numpy as np  # noqa: PLC0415 - installed by the script
    from gguf import GGUFWriter, TokenType  # noqa: PLC0415

    random, tokens = np.random.default_rng(1), ["<s>", "</s>", *LETTERS, "Ġ"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(tokens) - 2))
    writer.add_token_merges(["i n"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    square, up = (WIDTH, WIDTH), (INNER, WIDTH)
    shapes = {"token_embd": (len(tokens), WIDTH), "output": (len(tokens), WIDTH)}
    shapes |= {f"blk.0.attn_{name}": square for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": up, "blk.0.ffn_up": up, "blk.0.ffn_down": (WIDTH, INNER)}
    for name, shape in shapes.items():
        weight = random.standard_normal(shape).astype(np.float32)
        if name == "output":
            weight[:2] = 0  # Logit 0 is never the highest: an output does not end by itself.
        writer.add_tensor(f"{name}.weight", weight)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Server:
    """A running server."""

    def __init__(self, address: str) -> None:
        self.address = address

    def begin(self, body: dict[str, Any]) -> HTTPConnection:
        """Send a completion, without reading its response."""
        connection = HTTPConnection(self.address, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """The response of a completion."""
        connection = self.begin(body)
        document: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return document

    def running(self) -> int:
        """Requests that are processed now, by the server's own count."""
        connection = HTTPConnection(self.address, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        found = re.search(r"^llamacpp:requests_processing (\d+)$", text, re.MULTILINE)
        assert found
        return int(found[1])


@contextlib.contextmanager
def running_server() -> Iterator[Server]:
    """A server until the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        write_model(model)
        command = [sys.executable, "-c", SERVE, str(model), str(SLOTS), str(CONTEXT)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ
        )
        try:
            assert process.stdout
            line = next(line for line in process.stdout if line.startswith("LISTENING"))
            yield Server(line.split("://")[1].strip())
        finally:
            process.terminate()
            process.wait(30)


def wait_for(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Poll a condition, which must become true."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)
