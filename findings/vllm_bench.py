"""For the scripts beside it: the function of `vllm bench serve --backend openai-chat`, called with streams of a server here."""
# ruff: noqa: INP001 - found beside the scripts

import asyncio
import importlib.util
import json
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

FILE = Path(sysconfig.get_path("purelib")) / "vllm" / "benchmarks" / "lib" / "endpoint_request_func.py"
DONE = "data: [DONE]\n\n"


def event(
    delta: Mapping[str, str] | None = None, reason: str | None = None, usage: Mapping[str, int] | None = None
) -> str:
    """An event of a chat's stream, in text."""
    choices = [] if usage else [{"index": 0, "delta": delta or {}, "finish_reason": reason}]
    chunk = {
        "id": "1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": choices,
        "usage": usage,
    }
    return f"data: {json.dumps(chunk)}\n\n"


async def outputs(streams: Mapping[str, Sequence[str | float]], tokens: int) -> dict[str, Any]:
    """What the function makes of each stream, by name. A stream is a list of events, and numbers: seconds to wait."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length:")[1].split()[0])
        (message,) = json.loads(await reader.readexactly(size))["messages"]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for each in streams[message["content"][0]["text"]]:
            if isinstance(each, str):
                writer.write(b"%x\r\n%b\r\n" % (len(each), each.encode()))
            await asyncio.sleep(0.005 if isinstance(each, str) else each)
        writer.write(b"0\r\n\r\n")
        writer.close()

    specification = importlib.util.spec_from_file_location("endpoint_request_func", FILE)
    assert specification is not None
    assert specification.loader is not None
    functions = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(functions)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat/completions"
    found = {}
    for name in streams:
        asked = functions.RequestFuncInput(prompt=name, api_url=url, prompt_len=1, output_len=tokens, model="m")
        async with aiohttp.ClientSession() as session:
            found[name] = await functions.async_request_openai_chat_completions(asked, session)
    return found
