"""`openai:URL` against a faulty server: results, retries, streams, availability, priorities, start, TLS."""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from configs import endpoint_access
from endpoint_stand_in import MODEL, StandIn, serving
from eventually import eventually
from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.openai_endpoint.endpoint import HandBack
from gpu_pool.backends.openai_endpoint.errors import NO_KEY
from gpu_pool.backends.openai_endpoint.faults import FaultCause, cause_of
from gpu_pool.backends.openai_endpoint.requests import CallProgress
from gpu_pool.config import Access
from integration.endpoint_fixtures import Reader, answered, answers, chat, codes, items, loaded, outputs, stand_in
from scheduler.payload import Task
from scheduler.tracing import Context
from scheduler.vectors import read_vector

__all__ = ["stand_in"]


async def test_requests_of_all_tasks(stand_in: StandIn) -> None:
    """Texts, chats and embeddings use their routes, each with a call of its own."""
    vector = Item("four", task=Task.EMBED)
    (results,) = await answers(stand_in, [chat("hi"), *items("abc", "de", max_tokens=4), vector])

    assert results[:3] == [
        ItemResult("ih", 6, "", 3, "stop"),
        ItemResult("cba", 8, "", 4, "length"),
        ItemResult("ed", 6, "", 3, "length"),
    ]
    assert read_vector(outputs(results)[3]) == [4.0, 1.0]
    texts = [{"model": MODEL, "max_tokens": 4, "prompt": text} for text in ("abc", "de")]
    assert sorted(stand_in.asked("completions"), key=str) == texts


async def test_sampled_calls_have_a_traceparent(stand_in: StandIn) -> None:
    """That of its request, streamed or not; none for one that is not sampled."""
    one, other = Context("a" * 32, "b" * 16), Context("c" * 32, "d" * 16)
    plain, traced = items("ab", "cd")

    await answers(
        stand_in, [plain], [replace(traced, trace=one)], [replace(chat("hi"), trace=other, listener=Reader())]
    )

    assert stand_in.traceparents[-3:] == ["", one.traceparent(), other.traceparent()]


@pytest.mark.parametrize(("bad", "code"), [("unfit", "invalid_request"), ("crash", "poison_request")])
async def test_bad_text_fails_alone(stand_in: StandIn, bad: str, code: str) -> None:
    """Its error does not quote the server. A failure of the server is the input's if the server has answered others."""
    _, found = await answers(stand_in, items("gh", "ij"), items("ab", bad, "ef"))

    assert codes(found) == ["", code, ""]
    assert "secret" not in outputs(found)[1]


@pytest.mark.parametrize(
    ("fault", "code", "access", "seconds"),
    [
        ("junk", "invalid_output", endpoint_access(), 0.6),
        ("count", "invalid_output", endpoint_access(), 0.6),
        ("stall", "gpu_timeout", endpoint_access(), 0.6),
        ("stall", "gpu_timeout", endpoint_access(first_byte_ms=100), 30),
        ("stall", "gpu_timeout", endpoint_access(total_ms=100), 30),
    ],
)
async def test_unusable_response(stand_in: StandIn, fault: str, code: str, access: Access, seconds: float) -> None:
    """The item fails within the batch's time, or within the configured timeout."""
    stand_in.fault = lambda route, body: fault
    began = time.monotonic()

    (results,) = await answers(stand_in, [chat("ab", seconds=seconds)], access=access)

    assert codes(results) == [code]
    assert time.monotonic() - began < min(seconds, 5)


@pytest.mark.parametrize(
    ("fault", "counted"),
    [("429", False), ("503", False), ("401", False), ("500", True), ("half", True), ("reset", True)],
)
async def test_request_without_an_answer_is_handed_back(stand_in: StandIn, fault: str, counted: bool) -> None:
    """It counts as an attempt if the server may have run it; the reason does not quote the server."""
    stand_in.fault = lambda route, body: fault if body else ""

    ((found,),) = await answers(stand_in, items("ab"))

    assert isinstance(found, HandBack)
    assert found.counted is counted
    assert "secret" not in found.reason


async def test_request_that_may_have_run_is_not_sent_again(stand_in: StandIn) -> None:
    """The server's runs are those that are counted as attempts."""
    faults = iter(["reset"])
    stand_in.fault = lambda route, body: next(faults, "") if body else ""

    ((found,),) = await answers(stand_in, items("ab"))

    assert isinstance(found, HandBack)
    assert (found.counted, len(stand_in.asked("completions"))) == (True, 1)


@pytest.mark.parametrize("media_type", ["text/plain; charset=utf-8", "application/octet-stream"])
async def test_stream_of_another_media_type(stand_in: StandIn, media_type: str) -> None:
    """Servers that name none, or plain text, send events too."""
    reader = Reader()
    stand_in.media_type = media_type

    ((result,),) = await answers(stand_in, [chat("hello", reader)])

    assert (outputs([result]), reader.text) == (["olleh"], "olleh")


@pytest.mark.parametrize("never_streams", [False, True])
async def test_streams(stand_in: StandIn, never_streams: bool) -> None:
    """Chunks reach the listener with tokens and reason at the end; a server without streams sends one chunk."""
    stand_in.never_streams = never_streams
    readers = Reader(), Reader()
    text = Item("abc", {}, Task.COMPLETE, readers[1], time.monotonic() + 10)

    (results,) = await answers(stand_in, [chat("hello", readers[0]), text])

    assert results == [ItemResult("olleh", 12, "", 6, "stop"), ItemResult("cba", 8, "", 4, "stop")]
    assert [reader.text for reader in readers] == ["olleh", "cba"]


async def test_stream_options_are_omitted_once_rejected(stand_in: StandIn) -> None:
    """Older servers do not know the option."""
    stand_in.usage_option = False

    first, second = await answers(stand_in, [chat("ab", Reader())], [chat("cd", Reader())])

    assert (outputs(first), outputs(second)) == (["ba"], ["dc"])
    assert ["stream_options" in body for body in stand_in.asked("chat/completions")] == [True, False, False]


async def test_a_stream_without_an_end_is_limited(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the size of a whole response."""
    monkeypatch.setattr("gpu_pool.backends.openai_endpoint.requests.MAX_ANSWER_BYTES", 3)
    reader = Reader()

    (results,) = await answers(stand_in, [chat("hello", reader)])

    assert (codes(results), reader.text) == (["worker_lost"], "olle")


@pytest.mark.parametrize(("fault", "code"), [("cut", "worker_lost"), ("silent", "gpu_timeout")])
async def test_broken_stream_is_not_retried(stand_in: StandIn, fault: str, code: str) -> None:
    """The client has received a part of it."""
    reader = Reader()
    stand_in.fault = lambda route, body: fault

    (results,) = await answers(stand_in, [chat("hello", reader, seconds=1)])

    assert (codes(results), reader.text) == ([code], "ol")
    assert len(stand_in.asked("chat/completions")) == 1


@pytest.mark.parametrize("fault", ["endless", "silent"])
async def test_call_ends_when_its_task_is_cancelled(stand_in: StandIn, fault: str) -> None:
    """Whether the server sends or not: the connection is closed, so that an engine stops generating."""
    stand_in.fault = lambda route, body: fault
    reader, progress = Reader(), CallProgress()

    async with loaded(stand_in) as (endpoint, _):
        call = asyncio.create_task(endpoint.answer(chat("x" * 5000, reader, seconds=60), progress))
        await eventually(lambda: len(reader.text) >= 2, "the stream has begun")
        call.cancel()
        await asyncio.wait([call])
        await eventually(lambda: stand_in.aborted_streams == 1, "the server sees the end of the connection")

    assert (progress.has_sent, endpoint.policy.in_flight) == (True, 0)
    assert progress.completion is not None
    assert progress.completion.length > 0


async def test_refusal_of_one_request_does_not_pause_others(stand_in: StandIn) -> None:
    """While the server runs others, it is full, not busy: the refused one is handed back, and the number of slots falls."""
    stand_in.fault = lambda route, body: "429" if "ab" in str(body) else "stall"

    async with loaded(stand_in) as (endpoint, reports):
        others = asyncio.create_task(answered(endpoint, items("cd", "ef", seconds=60)))
        await eventually(lambda: len(stand_in.asked("completions")) == 2, "two calls are under way")
        before = endpoint.policy.count
        (refused,) = await answered(endpoint, items("ab"))
        assert isinstance(refused, HandBack)
        assert (reports, endpoint.policy.count < before, others.done()) == ([], True, False)
        others.cancel()


async def test_missing_routes_and_forbidden_texts_are_client_errors(stand_in: StandIn) -> None:
    """A 403 is the client's error if a probe shows that the key is accepted; the endpoint stays open."""
    stand_in.absent = frozenset({"chat/completions"})
    stand_in.fault = lambda route, body: "403" if "ab" in str(body) else ""

    first, second = await answers(stand_in, [chat("hi"), *items("ab")], items("cd"))

    assert (codes(first), outputs(first)[0]) == (["invalid_request"] * 2, "This model has no chat.")
    assert codes(second) == [""]


async def test_busy_server_is_left_alone_for_its_retry_after(stand_in: StandIn) -> None:
    """No call is made meanwhile; then the endpoint opens by itself."""
    stand_in.retry_after = "0.3"
    faults = iter(["429"])
    stand_in.fault = lambda route, body: next(faults, "") if body else ""

    async with loaded(stand_in) as (endpoint, reports):
        began = time.monotonic()
        assert codes(await answered(endpoint, items("ab"))) == ["-"]
        assert codes(await answered(endpoint, items("ab"))) == ["-"]
        assert len(stand_in.asked("completions")) == 1
        await eventually(lambda: reports[1:] == ["open"], "the endpoint is open")
        assert 0.3 <= time.monotonic() - began < 3
        assert outputs(await answered(endpoint, items("ab"))) == ["ba"]


@pytest.mark.parametrize("fault", ["429", "500", "half", "reset"])
async def test_requests_of_one_customer_do_not_close_the_endpoint(stand_in: StandIn, fault: str) -> None:
    """Whatever they get; those of others are answered meanwhile."""
    stand_in.fault = lambda route, body: fault if "ab" in str(body) else ""
    (bad,), (good,) = (
        [replace(item, customer=customer) for item in items(text)] for customer, text in ((1, "ab"), (2, "cd"))
    )

    async with loaded(stand_in) as (endpoint, reports):
        for _ in range(5):
            await answered(endpoint, [bad])
        assert outputs(await answered(endpoint, [good])) == ["dc"]
        assert reports == []


async def test_junk_for_one_customer_says_nothing_about_the_model(stand_in: StandIn) -> None:
    """A proxy may answer some texts with a page of its own. Junk for several customers in a row is the model's."""
    stand_in.fault = lambda route, body: "junk" if body else ""
    async with loaded(stand_in) as (endpoint, _):
        found = [
            (await answered(endpoint, [replace(item, customer=customer) for item in items("ab")]))[0]
            for customer in (1, 1, 1, 2, 1)
        ]

    assert codes(found) == ["invalid_output"] * 5
    assert [isinstance(each, ItemResult) and each.by_input for each in found] == [True, True, True, False, False]


@pytest.mark.parametrize("status", ["401", "407"])
async def test_a_text_that_is_answered_like_a_wrong_key_does_not_close_the_endpoint(
    stand_in: StandIn, status: str
) -> None:
    """A proxy passes on the status of a server behind it, such as that of an image: a check shows that the key is right.

    For several customers in a row the key is wrong.
    """
    stand_in.fault = lambda route, body: status if body.get("prompt") == "image" else ""
    async with loaded(stand_in) as (endpoint, reports):
        found = [await answered(endpoint, [replace(items("image")[0], customer=customer)]) for customer in (1, 1, 2)]
        assert [codes(each) for each in found] == [["invalid_request"], ["invalid_request"], ["-"]]
        assert reports == [NO_KEY]


async def test_failures_of_one_customer_are_verified_by_a_probe(stand_in: StandIn) -> None:
    """The server may have failed for everybody."""
    (item,) = (replace(item, customer=1) for item in items("ab"))
    async with loaded(stand_in) as (endpoint, reports):
        stand_in.fault = lambda route, body: "reset" if body else "500"
        for _ in range(3):
            await answered(endpoint, [item])
        await eventually(lambda: len(reports) == 1, "the endpoint is closed")
        stand_in.fault = lambda route, body: ""
        await eventually(lambda: reports[1:] == ["open"], "the endpoint is open")


async def test_request_that_is_refused_while_others_are_answered_ends(stand_in: StandIn) -> None:
    """It may cost more than the server takes; it does not wait until its deadline."""
    stand_in.fault = lambda route, body: "429" if "ab" in str(body) else ""
    (bad,), (good,) = (
        [replace(item, customer=customer) for item in items(text)] for customer, text in ((1, "ab"), (2, "cd"))
    )

    async with loaded(stand_in) as (endpoint, _):
        found = []
        for _ in range(8):
            found += await answered(endpoint, [bad])
            assert outputs(await answered(endpoint, [good])) == ["dc"]

    assert codes(found) == ["-"] * 7 + ["no_capacity"]


@pytest.mark.parametrize("fault", ["reset", "half"])
async def test_input_that_breaks_connections_ends(stand_in: StandIn, fault: str) -> None:
    """Once the server has answered others before and after; the first time it is only run again."""
    stand_in.fault = lambda route, body: fault if "ab" in str(body) else ""
    (bad,), (good,) = (
        [replace(item, customer=customer) for item in items(text)] for customer, text in ((1, "ab"), (2, "cd"))
    )

    async with loaded(stand_in) as (endpoint, reports):
        found = []
        for _ in range(3):
            assert outputs(await answered(endpoint, [good])) == ["dc"]
            found += await answered(endpoint, [bad])

    assert (codes(found), reports) == (["-", "poison_request", "-"], [])


async def test_input_that_breaks_connections_beside_a_stream_ends(stand_in: StandIn) -> None:
    """Its runs are at once one after the other; the stream of another customer goes on between them."""
    stand_in.chunk_s = 0.02
    stand_in.fault = lambda route, body: "reset" if "bad" in str(body) else ""
    (bad,) = (replace(item, customer=1) for item in items("bad"))
    reader = Reader(leaves_after=50)
    async with loaded(stand_in) as (endpoint, reports):
        stream = asyncio.create_task(answered(endpoint, [chat("x" * 100, reader)]))
        await eventually(lambda: bool(reader.text), "the stream has begun")
        found = [(await answered(endpoint, [bad]))[0] for _ in range(2)]
        assert not stream.done()
        await stream

    assert (codes(found), reports) == (["-", "poison_request"], [])


async def test_input_on_which_the_server_fails_and_closes_the_connection(stand_in: StandIn) -> None:
    """The second call is not sent on that connection, whose end would hide whose fault it is."""
    stand_in.fault = lambda route, body: "500 and close" if "ab" in str(body) else ""
    async with loaded(stand_in) as (endpoint, _):
        assert outputs(await answered(endpoint, items("cd"))) == ["dc"]
        assert codes(await answered(endpoint, items("ab"))) == ["poison_request"]


async def test_an_answered_input_did_not_break_its_connection(stand_in: StandIn) -> None:
    """When its connection is lost again, as at a restart of the server, that is the first time."""
    faults = iter(["", "reset", "", "reset"])
    stand_in.fault = lambda route, body: next(faults) if "ab" in str(body) else ""
    async with loaded(stand_in) as (endpoint, _):
        found = []
        for _ in range(4):
            found += await answered(endpoint, items("ab"))
            assert outputs(await answered(endpoint, items("cd"))) == ["dc"]

    assert codes(found) == ["", "-", "", "-"]


async def test_unreachable_server_closes_the_endpoint_until_it_is_back() -> None:
    """After three lost requests, also with others between them that are rejected without a call; then only probes."""
    server = StandIn()
    with ExitStack() as up:
        up.enter_context(serving(server))
        async with loaded(server, endpoint_access(connect_ms=200)) as (endpoint, reports):
            up.close()
            for number in range(3):
                assert reports == []
                found, rejected = await answered(endpoint, [*items("ab"), *items("cd", logit_bias=1)])
                assert isinstance(found, HandBack)
                # The first may be sent on a connection whose end is not known yet.
                assert not (found.counted and number)
                assert codes([rejected]) == ["invalid_request"]
            assert reports == ["The endpoint cannot be reached: connection refused."]
            assert cause_of(reports[0]) == FaultCause.REFUSED
            before = server.model_list_calls
            with serving(server):
                await eventually(lambda: reports[1:] == ["open"], "the endpoint is open")
                assert server.model_list_calls > before
                assert outputs(await answered(endpoint, items("ab"))) == ["ba"]


@pytest.mark.parametrize("change", [{"api_key": "another"}, {"absent": frozenset({"completions"})}])
async def test_rejected_key_or_missing_route_closes_the_endpoint(stand_in: StandIn, change: dict[str, object]) -> None:
    """At once and uncounted, until a probe succeeds."""
    healthy = {name: getattr(stand_in, name) for name in change}
    async with loaded(stand_in) as (endpoint, reports):
        vars(stand_in).update(change)
        (found,) = await answered(endpoint, items("ab"))
        assert isinstance(found, HandBack)
        assert (found.counted, len(reports)) == (False, 1)
        vars(stand_in).update(healthy)
        await eventually(lambda: reports[1:] == ["open"], "the endpoint is open")
        assert outputs(await answered(endpoint, items("ab"))) == ["ba"]


async def test_the_context_length_is_learnt(stand_in: StandIn) -> None:
    """At the start; a server that returns with another one is loaded by a new process, as another model is."""
    stand_in.context = 4096
    async with loaded(stand_in) as (endpoint, _):
        replaced: list[int] = []
        endpoint.replaced = lambda: replaced.append(endpoint.context_tokens)
        assert endpoint.context_tokens == 4096
        stand_in.context = 8192
        assert (await endpoint.probe(), replaced) == ("", [8192])


@pytest.mark.parametrize(
    ("told_s", "form", "is_used"),
    [(0, "", True), (1, "timeout={}, max=100", False), (1, 'max=100, Timeout = "{}"', False), (60, "timeout={}", True)],
)
async def test_a_connection_is_not_used_once_the_server_may_close_it(
    stand_in: StandIn, told_s: int, form: str, is_used: bool
) -> None:
    """That is after half the time that the server tells: no request is sent on a connection that is just being closed."""
    stand_in.idle_s, stand_in.idle_form = told_s, form
    async with loaded(stand_in) as (endpoint, _):
        for pause_s in (0.0, 0.6):
            await asyncio.sleep(pause_s)
            assert outputs(await answered(endpoint, items("ab"))) == ["ba"]

    *earlier, last = stand_in.connections
    assert (last in earlier) is is_used
