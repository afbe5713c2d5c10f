"""`openai:URL` before a server with every fault: what each item gets, what is sent again, and when the door shuts."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest

from endpoint_stand_in import MODEL, StandIn, serving
from eventually import eventually
from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.openai_endpoint.backend import Endpoint, EndpointBackend
from gpu_pool.backends.openai_endpoint.requests import HandBack
from gpu_pool.backends.openai_endpoint.settings import read_address
from gpu_pool.config import Access
from integration.endpoint_scene import Reader, answers, chat, codes, items, outputs, stand_in
from scheduler.payload import Task, read_vector
from scheduler.tracing import Context

__all__ = ["stand_in"]


async def test_texts_are_one_call_and_their_tokens_are_shared_out(stand_in: StandIn) -> None:
    """A list where the server takes it; parameters are passed on."""
    (found,) = await answers(stand_in, items("abc", "de", max_tokens=4))

    assert found == [ItemResult("cba", 8, "", 4, "length"), ItemResult("ed", 6, "", 3, "length")]
    assert stand_in.asked("completions") == [{"model": MODEL, "max_tokens": 4, "prompt": ["abc", "de"]}]


async def test_only_sampled_texts_tell_the_server_of_their_trace(stand_in: StandIn) -> None:
    """The call says whose run it is, of several the first one's; without one it has no header."""
    one, other = Context("a" * 32, "b" * 16), Context("c" * 32, "d" * 16)
    plain, *traced = items("ab", "cd", "ef")
    traced = [replace(item, trace=trace) for item, trace in zip(traced, (one, other), strict=True)]

    await answers(stand_in, [plain], [plain, *traced], [replace(chat("hi"), trace=other, listener=Reader())])

    assert stand_in.traced[-3:] == ["", one.traceparent(), other.traceparent()]


async def test_a_mixed_batch_has_each_task_done(stand_in: StandIn) -> None:
    """Texts, conversations and vectors, each at its own route, all in their order."""
    vector = Item("four", task=Task.EMBED)
    (found,) = await answers(stand_in, [chat("hi"), *items("abc"), vector, chat("yo")])

    assert not isinstance(found, HandBack)
    assert [found[0].output, found[1].output, found[3].output] == ["ih", "cba", "oy"]
    assert read_vector(found[2].output) == [4.0, 1.0]


async def test_a_server_without_lists_is_asked_text_by_text(stand_in: StandIn) -> None:
    """After the first that it refuses no list is sent any more."""
    stand_in.lists = False

    first, second = await answers(stand_in, items("ab", "cd"), items("ef", "gh"))

    assert (outputs(first), outputs(second)) == (["ba", "dc"], ["fe", "hg"])
    assert [body["prompt"] for body in stand_in.asked("completions")] == [["ab", "cd"], "ab", "cd", "ef", "gh"]


async def test_lists_that_are_answered_wrongly_are_given_up(stand_in: StandIn) -> None:
    """Wrong counts cost a second call for each text, three times; then lists are over."""
    stand_in.fault = lambda route, body: "count" if isinstance(body.get("prompt"), list) else ""

    found = await answers(stand_in, *(items("ab", "cd") for _ in range(4)))

    assert all(outputs(each) == ["ba", "dc"] for each in found)
    assert sum(isinstance(body["prompt"], list) for body in stand_in.asked("completions")) == 3


async def test_one_bad_text_fails_alone_and_lists_go_on(stand_in: StandIn) -> None:
    """The caller's fault is the caller's error, in words of ours."""
    first, second = await answers(stand_in, items("ab", "unfit", "ef"), items("gh", "ij"))

    assert codes(first) == ["", "invalid_request", ""]
    assert outputs(first)[1] == "The model does not accept this request."
    assert outputs(second) == ["hg", "ji"]
    assert stand_in.asked("completions")[-1]["prompt"] == ["gh", "ij"]


async def test_a_text_that_breaks_the_server_is_poison_beside_good_ones(stand_in: StandIn) -> None:
    """Alone with its error it would be the server's; and what the server wrote stays out of it."""
    (found,) = await answers(stand_in, items("ab", "crash"))

    assert codes(found) == ["", "poison_request"]
    assert "secret" not in outputs(found)[1]


@pytest.mark.parametrize(
    ("fault", "code"), [("junk", "invalid_output"), ("count", "invalid_output"), ("stall", "gpu_timeout")]
)
async def test_what_cannot_be_used_has_its_code(stand_in: StandIn, fault: str, code: str) -> None:
    """Every item gets one, in the batch's time."""
    stand_in.fault = lambda route, body: fault
    began = time.monotonic()

    (found,) = await answers(stand_in, [chat("ab", seconds=0.6)])

    assert codes(found) == [code]
    assert time.monotonic() - began < 0.6


@pytest.mark.parametrize(
    "access", [Access(first_byte_ms=100), Access(total_ms=100)], ids=["until the first byte", "in all"]
)
async def test_a_stalled_server_is_not_waited_for_longer_than_is_set(stand_in: StandIn, access: Access) -> None:
    """Also where the batch has more time."""
    stand_in.fault = lambda route, body: "stall"
    began = time.monotonic()

    (found,) = await answers(stand_in, items("ab", seconds=30), access=access)

    assert codes(found) == ["gpu_timeout"]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("fault", "counted"),
    [("429", False), ("503", False), ("401", False), ("500", True), ("half", True), ("reset", True)],
)
async def test_a_batch_of_which_nothing_was_answered_is_handed_back(
    stand_in: StandIn, fault: str, counted: bool
) -> None:
    """As an attempt where the server may have run it; and without the server's words."""
    stand_in.fault = lambda route, body: fault if body else ""

    (found,) = await answers(stand_in, items("ab", "cd"))

    assert isinstance(found, HandBack)
    assert found.counted is counted
    assert "secret" not in found.reason


async def test_a_call_that_nobody_answered_is_made_once_more(stand_in: StandIn) -> None:
    """A connection that was reset before any byte of an answer."""
    faults = iter(["reset"])
    stand_in.fault = lambda route, body: next(faults, "") if body else ""

    (found,) = await answers(stand_in, items("ab"))

    assert outputs(found) == ["ba"]
    assert len(stand_in.asked("completions")) == 2


async def test_a_few_that_were_turned_away_wait_where_the_others_were_answered(stand_in: StandIn) -> None:
    """The batch cannot be handed back any more, so they are asked for again after the time that the server wants."""
    faults = iter(["429", "", "429"])
    stand_in.fault = lambda route, body: next(faults, "") if body else ""

    (found,) = await answers(stand_in, [chat("ab"), chat("cd"), chat("ef")])

    assert sorted(outputs(found)) == ["ba", "dc", "fe"]
    assert len(stand_in.asked("chat/completions")) == 5


async def test_those_for_whom_no_time_is_left_are_told_to_come_again(stand_in: StandIn) -> None:
    """Never longer than the batch has."""
    stand_in.fault = lambda route, body: "429" if "ab" in str(body) else ""
    stand_in.retry_after = "30"

    (found,) = await answers(stand_in, [chat("ab", seconds=1), chat("cd", seconds=1)])

    assert codes(found) == ["no_capacity", ""]


async def test_a_stream_is_heard_piece_by_piece(stand_in: StandIn) -> None:
    """With its tokens and its reason at the end."""
    readers = Reader(), Reader()
    text = Item("abc", {}, Task.COMPLETE, readers[1], time.monotonic() + 10)

    (found,) = await answers(stand_in, [chat("hello", readers[0]), text])

    assert found == [ItemResult("olleh", 12, "", 6, "stop"), ItemResult("cba", 8, "", 4, "stop")]
    assert [reader.heard for reader in readers] == ["olleh", "cba"]


async def test_a_server_that_tells_no_tokens_in_streams_is_asked_for_none(stand_in: StandIn) -> None:
    """From the second stream on the option is left out."""
    stand_in.usage_option = False

    first, second = await answers(stand_in, [chat("ab", Reader())], [chat("cd", Reader())])

    assert (outputs(first), outputs(second)) == (["ba"], ["dc"])
    assert ["stream_options" in body for body in stand_in.asked("chat/completions")] == [True, False, False]


async def test_a_server_without_streams_says_all_at_once(stand_in: StandIn) -> None:
    """Its whole answer is one piece."""
    reader = Reader()
    stand_in.never_streams = True

    (found,) = await answers(stand_in, [chat("hello", reader)])

    assert (outputs(found), reader.heard) == (["olleh"], "olleh")


@pytest.mark.parametrize(("fault", "code"), [("cut", "worker_lost"), ("silent", "gpu_timeout")])
async def test_a_stream_that_breaks_off_is_never_begun_again(stand_in: StandIn, fault: str, code: str) -> None:
    """Somebody has heard a part of it."""
    reader = Reader()
    stand_in.fault = lambda route, body: fault

    (found,) = await answers(stand_in, [chat("hello", reader, seconds=1)])

    assert (codes(found), reader.heard) == ([code], "ol")
    assert len(stand_in.asked("chat/completions")) == 1


@pytest.mark.parametrize("fault", ["endless", "silent"])
async def test_a_call_ends_when_its_reader_leaves(stand_in: StandIn, fault: str) -> None:
    """However talkative or silent the server is; the text so far is the answer."""
    stand_in.fault = lambda route, body: fault

    (found,) = await answers(stand_in, [chat("x" * 5000, Reader(leaves_after=2), seconds=60)])

    assert codes(found) == [""]
    assert 2 <= len(outputs(found)[0]) < 10
    await eventually(lambda: stand_in.ended == 1, "the server saw its reader leave")


async def test_no_more_calls_than_allowed_are_under_way(stand_in: StandIn) -> None:
    """The others wait for their turn."""
    stand_in.slow_s = 0.05

    (found,) = await answers(stand_in, [chat(f"{n}") for n in range(10)], access=Access(max_calls=3))

    assert outputs(found) == [f"{n}" for n in range(10)]
    assert stand_in.most_at_once == 3


async def test_what_the_endpoint_cannot_do_is_the_caller_s_news(stand_in: StandIn) -> None:
    """A server for embeddings alone holds no conversations, and is not broken for that."""
    stand_in.absent = frozenset({"completions", "chat/completions"})

    first, second = await answers(stand_in, [chat("hi"), *items("ab")], [Item("abc", task=Task.EMBED)])

    assert codes(first) == ["invalid_request"] * 2
    assert outputs(first)[0] == "This model holds no conversations."
    assert codes(second) == [""]


async def test_a_text_that_is_forbidden_does_not_shut_the_door(stand_in: StandIn) -> None:
    """A proxy's 403 is the caller's where a look finds that our key is good."""
    stand_in.fault = lambda route, body: "403" if "ab" in str(body) else ""

    first, second = await answers(stand_in, items("ab"), items("cd"))

    assert (codes(first), codes(second)) == (["invalid_request"], [""])


Judged = Callable[[Endpoint, list[str]], Awaitable[None]]


async def judged(server: StandIn, scene: Judged) -> None:
    """An endpoint whose door tells what it does."""
    endpoint, told = Endpoint(read_address(f"openai:{server.url}"), Access(connect_ms=200)), []
    endpoint.door.tell = lambda wanted, why, brief: told.append("open" if wanted else why)
    await endpoint.load()
    try:
        await scene(endpoint, told)
    finally:
        await endpoint.close()


async def test_a_server_that_is_busy_is_left_alone_as_long_as_it_asks(stand_in: StandIn) -> None:
    """No call is made meanwhile; then the door opens by itself."""
    stand_in.retry_after = "0.3"
    faults = iter(["429"])
    stand_in.fault = lambda route, body: next(faults, "") if body else ""

    async def scene(endpoint: Endpoint, told: list[str]) -> None:
        began = time.monotonic()
        assert isinstance(await endpoint.answer(items("ab"), lambda: None), HandBack)
        assert isinstance(await endpoint.answer(items("ab"), lambda: None), HandBack)
        assert len(stand_in.asked("completions")) == 1
        await eventually(lambda: told[1:] == ["open"], "the door is open")
        assert 0.3 <= time.monotonic() - began < 3
        assert outputs(await endpoint.answer(items("ab"), lambda: None)) == ["ba"]
        assert told[0] == "The endpoint takes no more requests for now."

    await judged(stand_in, scene)


async def test_a_server_that_goes_away_shuts_the_door_until_it_is_back() -> None:
    """Three batches that reach nobody, then only looks; the first that succeeds opens."""
    server = StandIn()

    async def scene(endpoint: Endpoint, told: list[str]) -> None:
        up.close()
        for _ in range(3):
            assert told == []
            found = await endpoint.answer(items("ab"), lambda: None)
            assert isinstance(found, HandBack)
            assert not found.counted
        assert told == ["The endpoint cannot be reached: ClientConnectorError."]
        before = server.looks
        with serving(server):
            await eventually(lambda: told[1:] == ["open"], "the door is open")
            assert server.looks > before
            assert outputs(await endpoint.answer(items("ab"), lambda: None)) == ["ba"]

    with ExitStack() as up:
        up.enter_context(serving(server))
        await judged(server, scene)


async def test_a_key_that_is_refused_shuts_the_door_at_once(stand_in: StandIn) -> None:
    """It is ours to mend: callers are not blamed, and work goes on as soon as it is taken again."""

    async def scene(endpoint: Endpoint, told: list[str]) -> None:
        stand_in.api_key = "another"
        found = await endpoint.answer(items("ab"), lambda: None)
        assert isinstance(found, HandBack)
        assert (found.counted, len(told)) == (False, 1)
        stand_in.api_key = ""
        await eventually(lambda: told[1:] == ["open"], "the door is open")

    await judged(stand_in, scene)


async def test_a_route_that_is_gone_is_waited_for(stand_in: StandIn) -> None:
    """What the endpoint could do at the start it is asked for: callers are not told that it never could."""

    async def scene(endpoint: Endpoint, told: list[str]) -> None:
        stand_in.absent = frozenset({"completions"})
        found = await endpoint.answer(items("ab"), lambda: None)
        assert isinstance(found, HandBack)
        assert (found.counted, told) == (False, ["The endpoint answers 404."])
        stand_in.absent = frozenset()
        await eventually(lambda: told[1:] == ["open"], "the door is open")
        assert outputs(await endpoint.answer(items("ab"), lambda: None)) == ["ba"]

    await judged(stand_in, scene)


async def test_a_model_that_is_gone_is_waited_for(stand_in: StandIn) -> None:
    """Another one in its place is loaded anew, by another process."""

    async def scene(endpoint: Endpoint, told: list[str]) -> None:
        replaced: list[str] = []
        endpoint.replaced = lambda: replaced.append(endpoint.model)
        stand_in.fault = lambda route, body: "404" if body else ""
        stand_in.models = []
        assert isinstance(await endpoint.answer(items("ab"), lambda: None), HandBack)
        assert told == ["The endpoint answers 404."]
        stand_in.models = ["other"]
        await eventually(lambda: replaced == ["other"], "another model is seen")

    await judged(stand_in, scene)


async def test_the_backend_by_itself_answers_every_item(stand_in: StandIn) -> None:
    """Without a supervisor to hand a batch back to, that is each item's error; progress is told."""
    steps: list[None] = []

    def alone() -> tuple[list[ItemResult], list[ItemResult], str]:
        backend = EndpointBackend(f"openai:{stand_in.url}")
        backend.load()
        backend.warmup()
        good = backend.run(items("ab", "cd"), lambda: steps.append(None))
        stand_in.fault = lambda route, body: "429"
        bad = backend.run(items("ab", "cd"), lambda: None)
        backend.close()
        return good, bad, backend.version

    good, bad, version = await asyncio.to_thread(alone)

    assert (outputs(good), codes(bad), version) == (["ba", "dc"], ["no_capacity"] * 2, MODEL)
    assert steps
