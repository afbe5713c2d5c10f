"""`oip:URL` against a faulty server: joined calls, failing inputs, errors, states of the server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from configs import endpoint_access
from endpoint_stand_in import serving
from eventually import eventually
from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.open_inference.endpoint import OpenInferenceEndpoint
from gpu_pool.backends.openai_endpoint.endpoint import Endpoint, HandBack
from gpu_pool.backends.openai_endpoint.requests import CallProgress
from gpu_pool.backends.openai_endpoint.settings import read_address
from integration.endpoint_fixtures import answered, chat, codes, items, outputs
from open_inference_stand_in import ROWS, OpenInferenceStandIn, tensor
from scheduler.errors import StartError
from scheduler.payload import Task
from scheduler.vectors import read_vector


@pytest.fixture
def server() -> Iterator[OpenInferenceStandIn]:
    """A server without faults."""
    with serving(OpenInferenceStandIn()) as running:
        yield running


@asynccontextmanager
async def loaded(
    server: OpenInferenceStandIn, fragment: str = "#model-1", key: str = ""
) -> AsyncIterator[tuple[Endpoint, list[str]]]:
    """A loaded endpoint, and its availability reports: "open", or why it is closed."""
    endpoint, reports = (
        OpenInferenceEndpoint(read_address(f"oip:{server.url}{fragment}"), endpoint_access(key)),
        list[str](),
    )
    endpoint.availability.report = lambda wanted, why, brief: reports.append("open" if wanted else why)
    try:
        await endpoint.load(2.0)
        yield endpoint, reports
    finally:
        await endpoint.close()


async def answers(server: OpenInferenceStandIn, *batches: list[Item]) -> list[list[ItemResult | HandBack]]:
    """The answers to these requests, one group after another."""
    async with loaded(server) as (endpoint, _):
        return [await answered(endpoint, batch) for batch in batches]


async def test_requests_of_all_tasks(server: OpenInferenceStandIn) -> None:
    """Texts, chats as named turns, and vectors of a text model with an output of numbers."""
    assert outputs((await answers(server, [chat("hi"), *items("abc")]))[0]) == [":tnatsissa\nih :resu", "cba"]

    server.outputs = [tensor("vector", "FP32", -1, 2)]
    server.compute = lambda body: [{**server.outputs[0], "shape": [1, 2], "data": [0.5, 1.0]}]
    (found,) = await answers(server, [Item("abc", task=Task.EMBED)])
    assert read_vector(outputs(found)[0]) == [0.5, 1.0]


async def test_waiting_requests_are_joined(server: OpenInferenceStandIn) -> None:
    """While two calls run, the others wait for one call; each gets its own output. The slots fill three calls."""
    server.slow_s = 0.05
    texts = [f"text {number}" for number in range(20)]

    async with loaded(server) as (endpoint, _):
        both = [asyncio.create_task(answered(endpoint, items(text))) for text in ("first", "second")]
        await eventually(lambda: len(server.calls) >= 1, "a call runs")
        found = await answered(endpoint, items(*texts))
        await asyncio.gather(*both)
        load = await endpoint.read_load()
        assert load is not None
        assert load.most == 96

    assert outputs(found) == [text[::-1] for text in texts]
    assert len(server.calls) < 10


async def test_requests_are_not_joined_without_a_dimension_for_it(server: OpenInferenceStandIn) -> None:
    """One call for each, several at a time."""
    server.inputs = [tensor("text", "BYTES", 1)]

    (found,) = await answers(server, items(*"abcde"))

    assert outputs(found) == list("abcde")
    assert [each["inputs"][0]["shape"] for each in server.calls] == [[1]] * 5


@pytest.mark.parametrize(("status", "code"), [("400", "invalid_request"), ("500", "poison_request")])
async def test_bad_input_fails_alone(server: OpenInferenceStandIn, status: str, code: str) -> None:
    """It is found by running the parts of its call apart; the others succeed in the same attempt."""
    server.fault = lambda body: status if "bad" in body["inputs"][0]["data"] else ""
    texts = [*"abcdefg", "bad", *"hij"]

    _, found = await answers(server, items("before"), items(*texts))

    assert codes(found) == ["" if text != "bad" else code for text in texts]
    bad = outputs(found)[texts.index("bad")]
    assert (bad.startswith("The model does not accept this input. Its inputs are: `text`")) == (status == "400")


async def test_input_that_does_not_fit_is_not_sent(server: OpenInferenceStandIn) -> None:
    """The sentence names the tensor."""
    server.inputs = ROWS

    (found,) = await answers(server, items("[1, 2]", "[1, 2, 3]"))

    assert codes(found) == ["invalid_request", ""]
    assert "`x` (FP32 [-1, 3])" in outputs(found)[0]
    assert outputs(found)[1] == "[2,4,6]"


async def test_outputs_without_a_row_for_each_input(server: OpenInferenceStandIn) -> None:
    """Then each request has a call of its own."""
    server.compute = lambda body: [{**body["inputs"][0], "shape": [1], "data": body["inputs"][0]["data"][:1]}]

    (found,) = await answers(server, items(*"abc"))

    assert outputs(found) == list("abc")


@pytest.mark.parametrize(
    ("fault", "counted"), [("429", False), ("503", False), ("reset", True), ("502", True), ("401", False)]
)
async def test_requests_without_an_answer_are_handed_back(
    server: OpenInferenceStandIn, fault: str, counted: bool
) -> None:
    """All of the call; they count as attempts if the server may have run them."""
    server.fault = lambda body: fault

    (found,) = await answers(server, items("a", "b"))

    assert [isinstance(each, HandBack) and each.counted for each in found] == [counted] * 2
    assert codes(found) == ["-", "-"]


async def test_call_ends_when_all_its_requests_have_left(server: OpenInferenceStandIn) -> None:
    """The connection is closed; a call that others wait for goes on."""
    server.fault = lambda body: "stall"
    async with loaded(server) as (endpoint, _):
        tasks = [asyncio.create_task(endpoint.answer(item, CallProgress())) for item in items("a", "b")]
        await eventually(lambda: len(server.calls) == 1, "the joined call runs")
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert server.aborted == 0
        tasks[1].cancel()
        await eventually(lambda: server.aborted == 1, "the server sees the end of the connection")


def no_others(server: OpenInferenceStandIn) -> None:
    server.name, server.lists = "other", False


def renamed(server: OpenInferenceStandIn) -> None:
    server.name, server.others = "model-2", ["model-3"]


def loading(server: OpenInferenceStandIn) -> None:
    server.state = "LOADING"


def loading_unlisted(server: OpenInferenceStandIn) -> None:
    server.state, server.lists = "LOADING", False


def new_key(server: OpenInferenceStandIn) -> None:
    server.api_key = "sk-new"


def stopped(server: OpenInferenceStandIn) -> None:
    server.silent = True


def redirecting(server: OpenInferenceStandIn) -> None:
    server.instead = 301, ""


KEY = "The endpoint rejects the key: set TIERLANE_ENDPOINT_API_KEY."
STATES: list[tuple[Callable[[OpenInferenceStandIn], None], str]] = [
    (renamed, "The server has no model 'model-1'; it has model-2, model-3."),
    (no_others, "The server has no model 'model-1'."),
    (loading, "The server has not loaded the model 'model-1': LOADING."),
    (loading_unlisted, "The server is loading its models: it answers 503 to GET /health/ready."),
    (new_key, KEY),
    (stopped, "The endpoint does not respond."),
    (redirecting, "The endpoint redirects GET /models (301): its URL must be the one that it redirects to."),
]


@pytest.mark.parametrize(("change", "reason"), STATES, ids=lambda value: getattr(value, "__name__", ""))
async def test_states_of_a_running_server(
    server: OpenInferenceStandIn, change: Callable[[OpenInferenceStandIn], None], reason: str
) -> None:
    """Each has its reason; the endpoint opens again when the state has ended."""
    before = replace(server, calls=[])
    async with loaded(server) as (endpoint, reports):
        change(server)
        found = await answered(endpoint, items("a", "b", "c", seconds=0.5))
        assert {"-" if isinstance(each, HandBack) else each.error_code for each in found} <= {"-", "gpu_timeout"}
        await eventually(lambda: reason in reports, f"the reason {reason!r} is reported", 20.0)
        for name in ("name", "others", "state", "lists", "api_key", "silent", "instead"):
            setattr(server, name, getattr(before, name))
        await eventually(lambda: reports[-1] == "open", "the endpoint is open", 20.0)
        assert outputs(await answered(endpoint, items("ab"))) == ["ba"]


@pytest.mark.parametrize(
    ("changes", "fragment", "sentence"),
    [
        ({"others": ["model-2"]}, "#model-7", "The server has no model 'model-7'; it has model-1, model-2."),
        ({"api_key": "sk-1"}, "#model-1", KEY),
    ],
)
async def test_start_that_only_other_settings_can_help(
    server: OpenInferenceStandIn, changes: dict[str, Any], fragment: str, sentence: str
) -> None:
    """The worker ends with one sentence."""
    for name, value in changes.items():
        setattr(server, name, value)

    with pytest.raises(StartError) as error:
        async with loaded(server, fragment):
            pass

    assert str(error.value) == f"{sentence} ({server.url}/v2)"


async def test_server_with_a_key(server: OpenInferenceStandIn) -> None:
    """It is that of an endpoint."""
    server.api_key = "sk-1"

    async with loaded(server, key="sk-1") as (endpoint, _):
        assert outputs(await answered(endpoint, items("ab"))) == ["ba"]
