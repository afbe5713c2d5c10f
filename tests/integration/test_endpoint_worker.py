"""A worker before an endpoint: answers and streams go through, and what the endpoint asks for reaches the pool."""

from collections.abc import Iterator
from contextlib import ExitStack

import openai
import psutil
import pytest

from endpoint_stand_in import MODEL, StandIn, serving
from eventually import eventually
from gpu_pool.config import Access
from integration.gateway_fixtures import Stack
from integration.gpu_pool_direct import DirectClient, StartHere, item, start_here, told
from integration.gpu_pool_fixtures import StartWorker, batch, faulty_models, replies, start_worker
from integration.streaming_fixtures import caller, reading, stack
from pool import Pool
from scheduler.protocol.direct import DirectBusy

__all__ = ["caller", "faulty_models", "stack", "start_here", "start_worker"]


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """A server without faults, for a test to spoil."""
    with serving(StandIn()) as server:
        yield server


async def test_a_batch_is_answered_in_the_name_of_the_endpoint_s_model(
    pool: Pool, start_worker: StartWorker, stand_in: StandIn
) -> None:
    """The worker says what it stands before; the version is what the endpoint calls its model."""
    worker = await start_worker(backend=f"openai:{stand_in.url}")
    view = await worker.reaches("ready")

    first, second = await replies(pool, await batch(pool, "hello", "unfit"))

    assert (view.backend, view.model_version) == (f"openai:{stand_in.url}", MODEL)
    assert (first.output, first.tokens_used, first.model_version) == ("olleh", 12, MODEL)
    assert (second.state, second.error_code) == ("failed", "invalid_request")


async def test_the_key_is_in_no_command_line(pool: Pool, start_worker: StartWorker, stand_in: StandIn) -> None:
    """Of the worker it is a setting, of its model process the environment."""
    stand_in.api_key = "sk-for-nobody-s-eyes"
    worker = await start_worker(backend=f"openai:{stand_in.url}", endpoint=Access(stand_in.api_key))
    await worker.reaches("ready")

    (reply,) = await replies(pool, await batch(pool, "hello"))

    assert reply.output == "olleh"
    assert worker.model_pid is not None
    assert stand_in.api_key not in " ".join(psutil.Process(worker.model_pid).cmdline())


async def test_a_worker_whose_endpoint_is_busy_counts_for_nothing_meanwhile(
    pool: Pool, start_worker: StartWorker, stand_in: StandIn
) -> None:
    """It pauses, the pool has no healthy GPU, and its batch waits again without an attempt lost."""
    stand_in.retry_after = "1"
    faults = iter(["429"])
    stand_in.fault = lambda route, body: next(faults, "") if body else ""
    worker = await start_worker(backend=f"openai:{stand_in.url}")
    await worker.reaches("ready")

    ids = await batch(pool, "hello", "world")
    paused = await worker.reaches("paused")
    assert (paused.healthy, paused.pausing) == (False, True)
    found = await replies(pool, ids)

    assert [(reply.output, reply.attempts) for reply in found] == [("olleh", 1), ("dlrow", 1)]
    assert (await worker.reaches("ready")).healthy


async def test_a_worker_outlives_its_endpoint(pool: Pool, start_worker: StartWorker) -> None:
    """While it is away nothing is lost; when it is back the worker is, in the same process."""
    server = StandIn()
    with ExitStack() as up:
        up.enter_context(serving(server))
        worker = await start_worker(backend=f"openai:{server.url}", endpoint=Access(connect_ms=200))
        await worker.reaches("ready")
        model_pid = worker.model_pid
    ids = await batch(pool, "hello")

    async def shut() -> bool:
        if await pool.depth("free"):
            await pool.form([("free", 1)])
        view = await worker.view()
        return view is not None and view.status == "away"

    await eventually(shut, "the worker says that it is away", 20.0)
    with serving(server):
        (reply,) = await replies(pool, ids)
        await worker.reaches("ready")

    assert (reply.output, reply.attempts, worker.model_pid) == ("olleh", 1, model_pid)


async def test_a_stalled_endpoint_ends_the_request_and_not_the_model_process(
    pool: Pool, start_worker: StartWorker, stand_in: StandIn
) -> None:
    """The call is given up in the batch's time, before the watchdog would see a hang."""
    worker = await start_worker(backend=f"openai:{stand_in.url}", gpu_timeout_ms=1000)
    await worker.reaches("ready")
    model_pid = worker.model_pid
    stand_in.fault = lambda route, body: "stall" if body else ""

    (reply,) = await replies(pool, await batch(pool, "hello"))

    assert (reply.error_code, reply.attempts, worker.model_pid) == ("gpu_timeout", 1, model_pid)


async def test_a_connection_that_breaks_costs_an_attempt(
    pool: Pool, start_worker: StartWorker, stand_in: StandIn
) -> None:
    """The endpoint may have run it; who breaks it again and again is the one that ends."""
    stand_in.fault = lambda route, body: "half" if "evil" in str(body) else ""
    worker = await start_worker(backend=f"openai:{stand_in.url}")
    await worker.reaches("ready")

    good, bad = await replies(pool, await batch(pool, "hello", "evil"))

    assert (good.output, good.attempts) == ("olleh", 2)
    assert (bad.error_code, bad.attempts) == ("worker_lost", 3)


async def test_a_stream_comes_through_and_ends_with_its_reader(
    stack: Stack, caller: openai.AsyncOpenAI, start_worker: StartWorker, stand_in: StandIn
) -> None:
    """Pieces arrive as the endpoint sends them; and where the client leaves, so do we, upstream."""
    worker = await start_worker(backend=f"openai:{stand_in.url}", gpu_timeout_ms=20_000)
    await worker.reaches("ready")
    pieces = [c.choices[0].text async for c in await reading(caller, "hello") if c.choices]
    stand_in.fault = lambda route, body: "endless" if body else ""

    stream = await reading(caller, "x" * 5000)
    first = await anext(aiter(stream))
    await stream.close()

    assert "".join(pieces) == "olleh"
    assert set(first.choices[0].text) <= {"x"}
    await eventually(lambda: stand_in.ended == 1, "the endpoint saw its reader leave", 20.0)


async def test_a_stopping_worker_lets_its_calls_end(pool: Pool, start_worker: StartWorker, stand_in: StandIn) -> None:
    """What runs is answered; the exit code is 0."""
    stand_in.slow_s = 0.5
    worker = await start_worker(backend=f"openai:{stand_in.url}")
    await worker.reaches("ready")
    ids = await batch(pool, "hello")
    await eventually(lambda: stand_in.asked("completions"), "the call is under way")

    assert await worker.stop() == 0
    (reply,) = await replies(pool, ids)

    assert (reply.output, reply.attempts) == ("olleh", 1)


@pytest.mark.parametrize(("models", "said"), [(["a"], "has no model 'm', but a")])
async def test_a_worker_refuses_an_endpoint_without_its_model(
    start_worker: StartWorker, stand_in: StandIn, models: list[str], said: str
) -> None:
    """One sentence, and the worker ends: only another setting helps."""
    stand_in.models = models
    worker = await start_worker(backend=f"openai:{stand_in.url}#m")

    assert await worker.process.wait() == 1
    assert worker.process.stderr is not None
    assert said in (await worker.process.stderr.read()).decode()


async def test_batches_run_together_while_the_endpoint_gets_no_slower(
    pool: Pool, start_worker: StartWorker, stand_in: StandIn
) -> None:
    """One worker, one call a batch: more of them at a time after each round, never more than allowed, none twice."""
    stand_in.slow_s = 0.05
    worker = await start_worker(backend=f"openai:{stand_in.url}", endpoint=Access(max_batches=4))
    await worker.reaches("ready")
    batches = [await batch(pool, f"a{n}", f"b{n}") for n in range(40)]

    found = await replies(pool, [request_id for ids in batches for request_id in ids])

    assert [reply.output for reply in found] == [text for n in range(40) for text in (f"a{n}"[::-1], f"b{n}"[::-1])]
    assert {reply.attempts for reply in found} == {1}
    assert 2 <= stand_in.most_at_once <= 4
    assert len(stand_in.asked("completions")) == 40


async def test_each_of_several_batches_has_its_own_end(
    pool: Pool, start_worker: StartWorker, stand_in: StandIn
) -> None:
    """One is turned away while others run: it is handed back, they are answered, nothing is run twice that was answered."""
    stand_in.slow_s = 0.05
    stand_in.fault = lambda route, body: "429" if "c" in str(body.get("prompt")) and len(stand_in.calls) < 20 else ""
    worker = await start_worker(backend=f"openai:{stand_in.url}", endpoint=Access(max_batches=4))
    await worker.reaches("ready")
    ids = [(await batch(pool, f"{'c' if n in (9, 13) else 'a'}{n}"))[0] for n in range(30)]

    found = await replies(pool, ids)

    assert {reply.error_code for reply in found} == {""}
    assert {reply.attempts for reply in found} == {1}
    asked = [body["prompt"] for body in stand_in.asked("completions")]
    texts = [text for prompt in asked for text in ([prompt] if isinstance(prompt, str) else prompt)]
    assert all(texts.count(f"a{n}") == 1 for n in range(30) if n not in (9, 13))


async def test_a_direct_batch_that_is_turned_away_may_be_taken_elsewhere(
    start_here: StartHere, stand_in: StandIn
) -> None:
    """The gateway is told so at once, and while the endpoint wants to be left alone nothing more is sent there."""
    stand_in.retry_after = "20"
    stand_in.fault = lambda route, body: "429" if body else ""
    client = await DirectClient.welcomed(await start_here(f"openai:{stand_in.url}"))

    first, second = await client.ask(item("hello")), await client.ask(item("hello"))

    assert isinstance(first, DirectBusy)
    assert isinstance(second, DirectBusy)
    assert len(stand_in.asked("completions")) == 1


async def test_a_direct_batch_that_breaks_is_run_in_parts(start_here: StartHere, stand_in: StandIn) -> None:
    """As after a lost model process: who breaks the connection again and again ends, its neighbour does not."""
    stand_in.fault = lambda route, body: "half" if "evil" in str(body) else ""
    client = await DirectClient.welcomed(await start_here(f"openai:{stand_in.url}"))

    outcomes = await client.outcomes(item("hello"), item("evil"))

    assert told(outcomes) == {"hello": "olleh", "evil": "worker_lost"}
