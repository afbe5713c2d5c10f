"""Runs a script with the real tritonclient in a process of its own: its protobuf module has the names of the gateway's."""

import asyncio
import json
import sys
from typing import Any

PRELUDE = """
import faulthandler, json, sys
faulthandler.dump_traceback_later(60, exit=True)  # Of all threads: where a call hangs. Open streams keep the process alive.
import numpy as np

def texts(*values, shape=None):
    tensor = triton.InferInput("text_input", shape or [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array(values, dtype=object).reshape(shape or [len(values)]), **BINARY)
    return [tensor]

def strings(result):
    return [each.decode() if isinstance(each, bytes) else each for each in result.as_numpy("text_output").flatten()]

address, key = sys.argv[1:]
headers = {"authorization": f"Bearer {key}"}
"""
KINDS = {
    "http": "import tritonclient.http as triton\nBINARY = {}\n",
    "json": "import tritonclient.http as triton\nBINARY = {'binary_data': False}\n",
    "grpc": "import tritonclient.grpc as triton\nBINARY = {}\n",
}


async def run_triton(kind: str, script: str, address: str, key: str) -> Any:
    """The JSON that the script prints. It has `address`, `key`, `headers`, `texts`, `strings` and `triton`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KINDS[kind] + PRELUDE + script, address, key),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-3000:]
    return json.loads(output)
