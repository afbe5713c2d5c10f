"""Runs llama.cpp's server, which xllamacpp has as a library: its routes are those of `llama-server`.

    python tools/bench/real_engines/llama_cpp_server.py MODEL.gguf PORT SLOTS CONTEXT NAME KEY

`SLOTS` sequences at a time, each with `CONTEXT` tokens. Clients need `KEY`, unless it is "". The parent ends it with a signal.
"""

import signal
import sys
from collections.abc import Sequence

import xllamacpp


def main(arguments: Sequence[str]) -> None:
    """Serve until SIGTERM or SIGINT, which end the process without Python's cleanup."""
    path, *numbers, name, key = arguments
    port, slots, context = map(int, numbers)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.model_alias = {name}
    params.api_keys = [key] if key else []
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * context
    params.kv_unified = False
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.n_gpu_layers = 0
    # Half precision makes the output of a sequence depend on what runs beside it.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    # Several threads wait for each other at every step, which takes long where other processes use the processors.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
