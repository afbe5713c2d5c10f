"""The load of an engine, read from texts and from servers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from configs import endpoint_access
from gpu_pool.backends.openai_endpoint.client import Transport
from gpu_pool.backends.openai_endpoint.engine_load import FAULTS, EngineLoad, LoadReader, prometheus_load
from gpu_pool.backends.openai_endpoint.settings import read_address

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b, c} d"} 12.0
vllm:num_requests_running{engine="1",model_name="a b, c} d"} 10.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a b, c} d"} 3.0
vllm:num_requests_waiting{engine="1",model_name="a b, c} d"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
"""


@pytest.mark.parametrize(
    ("text", "load"),
    [
        (VLLM, EngineLoad(22, 3, None, 0.5, "vLLM")),
        (
            (
                b'vllm:num_requests_running{model_name="m"} 5\nvllm:num_requests_waiting{model_name="m"} 2\n'
                b'vllm:gpu_cache_usage_perc{model_name="m"} 0.875'
            ),
            EngineLoad(5, 2, None, 0.875, "vLLM"),
        ),
        (
            (
                b'sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 4.0\nsglang:num_running_reqs{dp_rank="0",tp_rank="1"} 4.0\n'
                b'sglang:num_running_reqs{dp_rank="1",tp_rank="2"} 6.0\nsglang:num_queue_reqs{dp_rank="0",tp_rank="0"} 1.0\n'
                b'sglang:num_queue_reqs{dp_rank="1",tp_rank="2"} 1.0\nsglang:token_usage{dp_rank="0",tp_rank="0"} 0.5\n'
            ),
            EngineLoad(10, 2, None, 0.5, "SGLang"),
        ),
        (b"tgi_batch_current_size 7\ntgi_queue_size 3 1700000000\n", EngineLoad(7, 3, None, None, "TGI")),
        (b"llamacpp:requests_processing 4\nllamacpp:requests_deferred 1\n", EngineLoad(4, 1, source="llama.cpp")),
        (
            (
                b'lmdeploy:num_requests_running{engine="0"} 4\nlmdeploy:num_requests_waiting{engine="0"} 1\n'
                b'lmdeploy:num_api_requests_waiting{engine="0"} 2\n'
            ),
            EngineLoad(4, 3, source="LMDeploy"),
        ),
        (
            b"trtllm_num_requests_running 3.0\ntrtllm_num_requests_waiting 2.0\n",
            EngineLoad(3, 2, None, None, "TensorRT-LLM"),
        ),
        (b"vllm:num_requests_running NaN\nvllm:num_requests_waiting x\n", EngineLoad(0, 0, source="vLLM")),
        (b"vllm:num_requests_running_total 3\n", None),
        (b"python_info 1\n", None),
        (b"", None),
    ],
)
def test_the_load_in_a_prometheus_text(text: bytes, load: EngineLoad | None) -> None:
    """Sums over data-parallel ranks; tensor-parallel ranks report the same requests."""
    assert prometheus_load(text) == load


async def _with_reader(documents: dict[str, Any], check: Callable[[LoadReader], Awaitable[None]]) -> None:
    """Run a check with a reader of a server that has these documents: a text, or an object that is sent as JSON."""

    async def get(request: web.Request) -> web.Response:
        document = documents.get(request.path)
        if document is None:
            raise web.HTTPNotFound
        return web.Response(text=document) if isinstance(document, str) else web.json_response(document)

    app = web.Application()
    app.router.add_get("/{path:.*}", get)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = read_address(f"openai:http://127.0.0.1:{runner.addresses[0][1]}/v1")
    transport = Transport(address, endpoint_access())
    await transport.open()
    try:
        await check(LoadReader(transport, address.root, clock=lambda: clock[0]))
    finally:
        await transport.close()
        await runner.cleanup()


clock = [0.0]

PER_RANK = {"num_waiting_reqs": 1, "token_usage": 0.5}
SLOTS = [{"id": 0, "is_processing": True}, {"id": 1, "is_processing": False}]


@pytest.mark.parametrize(
    ("documents", "load"),
    [
        ({"/metrics": VLLM.decode()}, EngineLoad(22, 3, None, 0.5, "vLLM")),
        ({"/prometheus/metrics": "trtllm_num_requests_running 3\n"}, EngineLoad(3, 0, source="TensorRT-LLM")),
        (
            {"/metrics": [{"numActiveRequests": 9}, {"numActiveRequests": 5, "numQueuedRequests": 3}]},
            EngineLoad(5, 3, source="TensorRT-LLM"),
        ),
        ({"/metrics": []}, EngineLoad(0, 0, source="TensorRT-LLM")),
        (
            {"/v1/loads": {"loads": [{"num_running_reqs": 3, **PER_RANK}, {"num_running_reqs": 4, **PER_RANK}]}},
            EngineLoad(7, 2, None, 0.5, "SGLang"),
        ),
        ({"/get_load": [{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2}]}, EngineLoad(3, 2, source="SGLang")),
        ({"/slots": SLOTS, "/props": {"total_slots": 2}}, EngineLoad(1, None, 2, None, "llama.cpp")),
        (
            {"/metrics": "llamacpp:requests_processing 2\n", "/props": {"total_slots": 4}},
            EngineLoad(2, 0, 4, None, "llama.cpp"),
        ),
        ({"/metrics": "<html>", "/slots": {"error": "disabled"}, "/props": "?"}, None),
        ({}, None),
    ],
)
def test_the_source_is_found(documents: dict[str, Any], load: EngineLoad | None) -> None:
    """Whichever of its documents a server has."""

    async def check(reader: LoadReader) -> None:
        assert await reader.detect() is (load is not None)
        assert await reader.read() == load

    asyncio.run(_with_reader(documents, check))


def test_a_source_that_fails_is_looked_for_again() -> None:
    """After some failed reads, not before a pause."""
    documents: dict[str, Any] = {"/metrics": VLLM.decode()}

    async def check(reader: LoadReader) -> None:
        assert await reader.detect()
        del documents["/metrics"]
        assert [await reader.read() for _ in range(FAULTS)] == [None] * FAULTS
        documents["/metrics"] = "tgi_batch_current_size 1\n"
        assert await reader.read() is None
        clock[0] += 60
        assert await reader.read() == EngineLoad(1, 0, source="TGI")

    asyncio.run(_with_reader(documents, check))


def test_the_queue_of_tgi_is_the_least_of_several_readings() -> None:
    """It lets waiting requests join every few steps only."""
    documents: dict[str, Any] = {"/metrics": "tgi_batch_current_size 8\ntgi_queue_size 0\n"}

    async def check(reader: LoadReader) -> None:
        assert await reader.detect()
        documents["/metrics"] = "tgi_batch_current_size 8\ntgi_queue_size 9\n"
        loads = [await reader.read() for _ in range(4)]
        assert [load.waiting for load in loads if load] == [0, 0, 0, 9]

    asyncio.run(_with_reader(documents, check))
