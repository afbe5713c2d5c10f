"""A worker in front of an endpoint: results, streams, pauses, outages, and many requests at a time, each by itself."""

import asyncio
from contextlib import ExitStack

import openai
import psutil
import pytest

from configs import endpoint_access
from endpoint_stand_in import MODEL, StandIn, serving
from eventually import eventually
from integration.endpoint_fixtures import stand_in
from integration.gateway_fixtures import Stack
from integration.gpu_pool_direct import DirectClient, StartHere, item, start_here
from integration.gpu_pool_fixtures import RunningWorker, StartWorker, batch, faulty_models, replies, start_worker
from integration.streaming_fixtures import caller, reading, stack
from pool import Pool
from scheduler.protocol.direct import DirectBusy
from scheduler.protocol.pool_view import WorkerView

__all__ = ["caller", "faulty_models", "stack", "stand_in", "start_here", "start_worker"]


async def ready(start_worker: StartWorker, server: StandIn, **changes: object) -> RunningWorker:
    worker = await start_worker(backend=f"openai:{server.url}", **changes)
    await worker.reaches("ready")
    return worker


async def test_batch_is_answered_with_the_model_and_key_of_the_endpoint(
    pool: Pool, start_worker: StartWorker, stand_in: StandIn
) -> None:
    """The version is the endpoint's model; the key is in no command line; a running call ends before the worker does."""
    stand_in.api_key, stand_in.slow_s = "sk-endpoint-key", 0.5
    worker = await ready(start_worker, stand_in, endpoint=endpoint_access(stand_in.api_key))
    assert worker.model_pid is not None
    assert stand_in.api_key not in " ".join(psutil.Process(worker.model_pid).cmdline())
    ids = await batch(pool, "hello", "unfit")
    await eventually(lambda: stand_in.asked("completions"), "the call is under way")

    assert await worker.stop() == 0
    first, second = await replies(pool, ids)

    assert (first.output, first.tokens_used, first.model_version, first.attempts) == ("olleh", 12, MODEL, 1)
    assert (second.state, second.error_code) == ("failed", "invalid_request")


async def test_a_worker_that_cannot_start_leaves_its_reason(start_worker: StartWorker, stand_in: StandIn) -> None:
    """Its last heartbeat stays when it has ended, with the reason and its cause, until the worker is started again."""
    stand_in.api_key = "right"
    backend = f"openai:{stand_in.url}"
    worker = await start_worker(backend=backend, endpoint=endpoint_access("wrong"))
    async with asyncio.timeout(20):
        assert await worker.process.wait() != 0

    view = await worker.view()
    assert view is not None
    assert (view.status, view.healthy, view.cause) == ("failed", False, "key_rejected")
    assert view.reason.startswith("The endpoint rejects the key: set TIERLANE_ENDPOINT_API_KEY.")

    await (await start_worker(backend=backend, endpoint=endpoint_access("right"))).reaches("ready")


async def test_worker_outlives_its_endpoint(pool: Pool, start_worker: StartWorker) -> None:
    """While the endpoint is away the batch is handed back uncounted; afterwards the same model process serves it."""
    server = StandIn()
    with ExitStack() as up:
        up.enter_context(serving(server))
        worker = await ready(start_worker, server, endpoint=endpoint_access(connect_ms=200))
        model_pid = worker.model_pid
    ids = await batch(pool, "hello")

    async def away() -> bool:
        if await pool.depth("free"):
            await pool.form([("free", 1)])
        view = await worker.view()
        return view is not None and view.status == "away" and view.cause == "connection_refused"

    await eventually(away, "the worker is away", 20.0)
    with serving(server):
        (reply,) = await replies(pool, ids)
        await worker.reaches("ready")

    assert (reply.output, reply.attempts, worker.model_pid) == ("olleh", 1, model_pid)


async def test_stream_ends_with_its_client(
    stack: Stack, caller: openai.AsyncOpenAI, start_worker: StartWorker, stand_in: StandIn
) -> None:
    """Chunks arrive as the endpoint sends them; a client that leaves ends the call to the endpoint."""
    await ready(start_worker, stand_in, gpu_timeout_ms=20_000)
    chunks = [c.choices[0].text async for c in await reading(caller, "hello") if c.choices]
    stand_in.fault = lambda route, body: "endless" if body else ""

    stream = await reading(caller, "x" * 5000)
    first = await anext(aiter(stream))
    await stream.close()

    assert "".join(chunks) == "olleh"
    assert set(first.choices[0].text) <= {"x"}
    await eventually(lambda: stand_in.aborted_streams == 1, "the call is ended", 20.0)


async def test_requests_run_concurrently(pool: Pool, start_worker: StartWorker, stand_in: StandIn) -> None:
    """Many at a time, at most max_calls; a refused one is handed back alone, uncounted."""
    rejected = {"a9", "a13"}
    stand_in.slow_s = 0.05

    def fault(route: str, body: dict[str, object]) -> str:
        text = str(body.get("prompt"))
        if text not in rejected:
            return ""
        rejected.discard(text)
        return "429"

    stand_in.fault = fault
    await ready(start_worker, stand_in, endpoint=endpoint_access(max_calls=4))
    ids = await batch(pool, *(f"a{n}" for n in range(40)))

    results = await replies(pool, ids)

    assert [(reply.output, reply.attempts) for reply in results] == [(f"a{n}"[::-1], 1) for n in range(40)]
    assert 2 <= stand_in.max_concurrent <= 4
    texts = [str(body["prompt"]) for body in stand_in.asked("completions")]
    assert {text: texts.count(text) for text in texts if texts.count(text) > 1} == {"a9": 2, "a13": 2}


async def test_a_batch_of_more_requests_than_slots(pool: Pool, start_worker: StartWorker, stand_in: StandIn) -> None:
    """It was formed before the slots were known, or there are fewer now: requests without a slot are handed back, uncounted."""
    stand_in.slow_s = 0.05
    ids = await batch(pool, *(f"a{n}" for n in range(8)))
    await ready(start_worker, stand_in, endpoint=endpoint_access(max_calls=2))

    results = await replies(pool, ids)

    assert [(reply.output, reply.attempts) for reply in results] == [(f"a{n}"[::-1], 1) for n in range(8)]
    assert stand_in.max_concurrent <= 2


async def test_direct_batches(start_here: StartHere, stand_in: StandIn) -> None:
    """An input that breaks connections again, while others are answered, fails alone; a rejected batch is refused at once and may run elsewhere."""
    stand_in.fault = lambda route, body: "half" if "evil" in str(body) else ""
    client = await DirectClient.connected(await start_here(f"openai:{stand_in.url}"))
    assert await client.outputs(item("hello"), item("evil")) == {"hello": "olleh", "evil": "poison_request"}

    stand_in.retry_after = "20"
    stand_in.fault = lambda route, body: "429" if body else ""
    before = len(stand_in.calls)
    assert [type(await client.run(item("hello"))) for _ in range(2)] == [DirectBusy, DirectBusy]
    assert len(stand_in.calls) - before == 1


@pytest.mark.parametrize(("retry_after", "status", "pausing"), [("1.5", "paused", True), ("20", "away", False)])
async def test_pause(
    pool: Pool, start_worker: StartWorker, stand_in: StandIn, retry_after: str, status: str, pausing: bool
) -> None:
    """The worker is unhealthy meanwhile, and pausing only for a short Retry-After; the batch is handed back uncounted."""
    faults = iter(["429"])
    stand_in.retry_after = retry_after
    stand_in.fault = lambda route, body: next(faults, "") if body else ""
    worker = await ready(start_worker, stand_in)
    ids = await batch(pool, "hello")

    async def handed_back() -> WorkerView | None:
        queued, view = await pool.states(ids) == ["queued"], await worker.view()
        return view if queued and view is not None and view.status == status else None

    view = await eventually(handed_back, f"the worker is {status} and the batch is queued", 20.0)

    assert (view.healthy, view.pausing) == (False, pausing)
    if pausing:
        assert [(reply.output, reply.attempts) for reply in await replies(pool, ids)] == [("olleh", 1)]
        assert (await worker.reaches("ready")).healthy
