"""Direct batches: what gateways bring to a worker's own endpoint runs, with Redis away from the very start."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from eventually import eventually
from gpu_pool.worker.worker import Worker
from integration.gpu_pool_direct import DirectClient, StartHere, item, start_here, told
from integration.gpu_pool_fixtures import batch, faulty_models, replies
from pool import Pool
from scheduler.errors import RedisUnavailable
from scheduler.payload import Payload, add_context, encode_payload
from scheduler.protocol.direct import DirectBatch, DirectBusy, DirectResults
from scheduler.tracing import Context, Span

__all__ = ["faulty_models", "start_here"]


async def line_of(worker: Worker, count: int) -> list["asyncio.Task[DirectResults | DirectBusy]"]:
    """The first of these batches runs in the model, the others wait for it, each on a connection of its own."""
    asked = []
    for i in range(count):
        client = await DirectClient.welcomed(worker)
        asked.append(asyncio.create_task(client.ask(item(f"r{i}"))))
        await eventually(lambda i=i: worker._direct._waiting == i and worker._execution.running, "it is in line")
    return asked


async def test_a_batch_is_answered_without_redis(start_here: StartHere) -> None:
    """One outcome for each item, with time, tokens and version; the same connection serves the next batch, ids and all."""
    client = await DirectClient.welcomed(await start_here("simulated:20"))

    for _ in range(2):
        outcomes = await client.outcomes(item("one two"), item("three"))

        assert told(outcomes) == {"one two": "owt eno", "three": "eerht"}
        assert (outcomes["one two"].tokens_used, outcomes["one two"].model_version) == (2, "simulated-20ms")
        assert outcomes["three"].gpu_ms >= 20


async def test_a_direct_batch_is_traced_like_any_other(start_here: StartHere, faulty_models: Path) -> None:
    """A batch with its run under the sampled request; one whose model died is told as that, and its parts once more."""
    spans: list[Span] = []
    client = await DirectClient.welcomed(await start_here("faulty_models:dies_on_bad", spans=spans.extend))
    good, bad = Context("a" * 32, "b" * 16), Context("c" * 32, "d" * 16)

    await client.outcomes(item("plain"), item("a1", body=traced("a1", good)))
    await client.outcomes(item("bad", body=traced("bad", bad)), item("b2"))

    first, run, *lost = spans
    assert [(span.name, span.failed) for span in (first, run)] == [("batch", False), ("infer", False)]
    assert (first.parent, first.links, run.parent) == (good, [good], first.context)
    assert first.attributes["tierlane.batch_size"] == 2
    assert {span.context.trace_id for span in lost} == {bad.trace_id}
    assert [span.failed for span in lost if span.name == "batch"] == [True] * 3


def traced(text: str, context: Context) -> bytes:
    return add_context(encode_payload(Payload("m", text, {})), context)


async def test_one_bad_item_never_costs_its_neighbours(start_here: StartHere, faulty_models: Path) -> None:
    """Poison, junk for a body and a deadline that is over end alone."""
    client = await DirectClient.welcomed(await start_here("faulty_models:picky"))

    outcomes = await client.outcomes(item("a1"), item("bad"), item("junk", body=b"\xc1"), item("late", 0), item("b2"))

    codes = {"bad": "poison_request", "junk": "invalid_request", "late": "deadline_exceeded"}
    assert {name: outcome.error_code for name, outcome in outcomes.items() if outcome.error_code} == codes
    assert {outcomes["a1"].output, outcomes["b2"].output} == {"1a", "2b"}


async def test_an_item_is_not_started_with_less_time_than_a_run_needs(start_here: StartHere) -> None:
    """The p95 that the queue's batches are held to holds here, too."""
    worker = await start_here("simulated:60")
    client = await DirectClient.welcomed(worker)
    for _ in range(20):
        worker._execution.service.record(2, 60.0)

    outcomes = await client.outcomes(item("short", 55), item("long"))

    assert told(outcomes) == {"short": "deadline_exceeded", "long": "gnol"}
    assert outcomes["short"].gpu_ms == -1.0


async def test_each_item_ends_when_its_time_is_over(start_here: StartHere) -> None:
    """The answer comes at the last deadline though the model goes on, and tells of no output that was too late."""
    client = await DirectClient.welcomed(await start_here("simulated:400"))

    assert told(await client.outcomes(item("short", 200), item("long"))) == {
        "short": "deadline_exceeded",
        "long": "gnol",
    }
    asked_at = time.monotonic()
    assert told(await client.outcomes(item("a", 150), item("b", 100))) == {
        "a": "deadline_exceeded",
        "b": "deadline_exceeded",
    }
    assert time.monotonic() - asked_at < 0.35
    assert told(await client.outcomes(item("next"))) == {"next": "txen"}


async def test_four_batches_wait_and_the_next_is_refused(start_here: StartHere) -> None:
    """Over all connections; those that wait are answered in their turn."""
    worker = await start_here("simulated:300")
    asked = await line_of(worker, 5)

    refused = await (await DirectClient.welcomed(worker)).ask(item("one too many"))

    assert refused == DirectBusy(1, "Too many direct batches wait for this worker.")
    assert all(isinstance(answer, DirectResults) for answer in await asyncio.gather(*asked))


async def test_what_kills_the_model_is_alone_in_the_end(start_here: StartHere, faulty_models: Path) -> None:
    """Two halves after the first loss, one by one after the second; the third ends the one, the others complete."""
    client = await DirectClient.welcomed(await start_here("faulty_models:dies_on_bad"))

    outcomes = await client.outcomes(*[item(text, 30_000) for text in ("ab", "bad", "cd", "ef")])

    assert told(outcomes) == {"ab": "ba", "bad": "worker_lost", "cd": "dc", "ef": "fe"}
    assert (faulty_models / "deaths").read_text() == "4 2 1 "


async def test_a_killed_model_process_costs_a_direct_batch_nothing_but_time(start_here: StartHere) -> None:
    """SIGKILL in the middle of its run: it is run again by the next process."""
    worker = await start_here("simulated:300")
    (asked,) = await line_of(worker, 1)
    assert worker._supervisor.model is not None

    os.kill(worker._supervisor.model.pid, signal.SIGKILL)

    answer = await asked
    assert isinstance(answer, DirectResults)
    assert [outcome.output for outcome in answer.outcomes] == ["0r"]


async def test_a_batch_that_waited_behind_a_lost_model_goes_elsewhere(start_here: StartHere) -> None:
    """It saw nothing of the model, so another worker may take it at once."""
    worker = await start_here("simulated:500")
    asked = await line_of(worker, 2)
    assert worker._supervisor.model is not None

    os.kill(worker._supervisor.model.pid, signal.SIGKILL)

    assert await asked[1] == DirectBusy(1, "The model of this worker was lost before the batch began.")
    assert isinstance(await asked[0], DirectResults)


async def test_a_worker_without_its_model_takes_nothing(start_here: StartHere) -> None:
    """The answer is at once, so that the gateway may ask another."""
    worker = await start_here("simulated:20")
    client = await DirectClient.welcomed(worker)
    assert worker._supervisor.model is not None
    os.kill(worker._supervisor.model.pid, signal.SIGKILL)
    await eventually(lambda: worker._supervisor.model is None, "the model is lost")

    assert await client.ask(item("a")) == DirectBusy(1, "The model of this worker is not ready.")
    await eventually(worker._supervisor.ready.is_set, "the model is back")
    assert told(await client.outcomes(item("abc"))) == {"abc": "cba"}


async def test_a_hang_is_a_gpu_timeout(start_here: StartHere, faulty_models: Path) -> None:
    """The model is killed at its cap, and the next batch runs in a fresh process."""
    worker = await start_here("faulty_models:hangs_on_bad", gpu_timeout_ms=400)
    client = await DirectClient.welcomed(worker)

    assert told(await client.outcomes(item("bad"), item("a"))) == {"bad": "gpu_timeout", "a": "gpu_timeout"}
    await eventually(worker._supervisor.ready.is_set, "the model is back")
    assert told(await client.outcomes(item("ab"))) == {"ab": "ba"}


async def test_a_draining_worker_answers_what_it_has_and_takes_nothing(start_here: StartHere) -> None:
    """The batch that runs is answered; the next one is refused and its connection ends; no new one is let in."""
    worker = await start_here("simulated:400")
    idle = await DirectClient.welcomed(worker)
    address = worker._endpoint.address
    (asked,) = await line_of(worker, 1)

    worker.drain()
    await eventually(lambda: not worker._endpoint.address, "it is not announced any more")

    assert await idle.ask(item("late")) == DirectBusy(1, "This worker is shutting down.")
    assert await idle.closed()
    assert isinstance(await asked, DirectResults)
    host, _, port = address.rpartition(":")
    with pytest.raises(ConnectionError):
        await asyncio.open_connection(host, int(port))


async def test_what_cannot_end_before_the_worker_does_goes_elsewhere(start_here: StartHere) -> None:
    """The time for draining is up: whoever waits is told so instead of an end of the connection."""
    worker = await start_here("simulated:3000", drain_ms=200)
    asked = await line_of(worker, 2)

    worker.drain()

    busy = DirectBusy(1, "This worker is shutting down.")
    assert await asyncio.gather(*asked) == [busy, busy]


async def test_a_queued_batch_keeps_its_lease_while_direct_ones_run(
    pool: Pool, redis_url: str, start_here: StartHere
) -> None:
    """It waits its turn behind 1.5 s of direct batches, with a lease of 600 ms, under the eyes of a reaper."""
    worker = await start_here("simulated:500", redis_url=redis_url)
    await eventually(worker._heartbeat.working.is_set, "redis is reached")
    asked = await line_of(worker, 3)
    ids = await batch(pool, "hello")

    async def answered() -> bool:
        with contextlib.suppress(RedisUnavailable):  # A machine that stands still for 0.25 s is not the subject.
            await pool.gateway_lives("g1")
            await pool.terminations.reap(0)
            return await pool.results.fetch(ids) != [None]
        return False

    await eventually(answered, "the queued batch ended under the reaper's eyes")
    (reply,) = await replies(pool, ids)
    assert (reply.output, reply.attempts) == ("olleh", 1)
    assert all(isinstance(answer, DirectResults) for answer in await asyncio.gather(*asked))


async def test_a_queued_batch_that_was_lost_while_it_waited_is_not_run(
    pool: Pool, redis_url: str, start_here: StartHere
) -> None:
    """Its lease tells before the model sees any of it: somebody else has it by now."""
    worker = await start_here("simulated:500", redis_url=redis_url)
    await eventually(worker._heartbeat.working.is_set, "redis is reached")
    asked = await line_of(worker, 2)
    ids = await batch(pool, "one", "two", "three")
    await eventually(lambda: worker._pipeline.in_flight == 3, "the batch is claimed, and waits")

    await pool.client.hset(pool.keys.batch("b1"), "token", "another")

    assert all(isinstance(answer, DirectResults) for answer in await asyncio.gather(*asked))
    await eventually(lambda: worker._pipeline.in_flight == 0, "the batch is dropped")
    assert worker._execution._last_size == 1
    assert await pool.states(ids) == ["processing"] * 3


async def test_a_direct_batch_waits_for_a_queued_one(pool: Pool, redis_url: str, start_here: StartHere) -> None:
    """One model, one batch at a time, whichever way it came."""
    worker = await start_here("simulated:400", redis_url=redis_url)
    client = await DirectClient.welcomed(worker)
    ids = await batch(pool, "hello")
    await eventually(lambda: worker._execution.running, "the queued batch runs")

    asked_at = time.monotonic()
    outcomes = await client.outcomes(item("abc"))

    assert told(outcomes) == {"abc": "cba"}
    assert time.monotonic() - asked_at > 0.45
    assert [reply.output for reply in await replies(pool, ids)] == ["olleh"]


async def test_the_heartbeat_tells_where_the_endpoint_is(pool: Pool, redis_url: str, start_here: StartHere) -> None:
    """Gateways read it while Redis is there, for when it is not."""
    worker = await start_here(redis_url=redis_url)

    async def announced() -> str:
        return next((view.direct for view in (await pool.presence.observe(["free"])).workers), "")

    assert await eventually(announced, "a heartbeat arrived") == worker._endpoint.address
    assert worker._endpoint.address.startswith("127.0.0.1:")


@pytest.mark.parametrize("changes", [{"service_token": ""}, {"direct_host": ""}])
async def test_without_a_token_or_a_host_there_is_no_endpoint(start_here: StartHere, changes: dict[str, str]) -> None:
    """Nothing listens, nothing is announced."""
    worker = await start_here(**changes)

    assert worker._endpoint.address == ""
    assert worker._endpoint._server is None
    assert worker._beat().direct == ""


async def test_batches_of_one_connection_are_answered_in_their_order(start_here: StartHere) -> None:
    """A gateway that sends ahead is served one after the other."""
    client = await DirectClient.welcomed(await start_here("simulated:20"))

    for seq in (7, 8, 9):
        client.send(DirectBatch(seq, [item("a")]))

    assert [(await client.receive()).seq for _ in range(3)] == [7, 8, 9]


async def test_what_came_during_a_standstill_is_not_run(start_here: StartHere) -> None:
    """The process stood still: nothing says how long a batch lay in the socket, so it is refused; the next one runs."""
    client = await DirectClient.welcomed(await start_here("simulated:20"))
    client.send(DirectBatch(7, [item("old")]))

    time.sleep(0.4)  # noqa: ASYNC251 - the worker lives in this very loop: it is to stand still

    answer = await client.receive()
    assert isinstance(answer, DirectBusy)
    assert (answer.seq, "stood still" in answer.reason) == (7, True)

    async def taken() -> bool:
        return isinstance(await client.ask(item("new")), DirectResults)

    await eventually(taken, "the next batch runs")
