"""Requests of a worker on an endpoint, by the messages between both: runs that end before they began."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.openai_endpoint.requests import CallProgress
from gpu_pool.backends.openai_endpoint.serving import EndpointServing
from gpu_pool.model_process.listeners import AT_ONCE_S, Listeners
from gpu_pool.model_process.messages import Done, Drop, ModelMessage, Refused, Run, Withdraw, WorkerMessage
from scheduler.errors import ErrorCode
from scheduler.payload import Payload, Task, encode_payload


class SilentEndpoint:
    """Never answers; counts its calls."""

    def __init__(self) -> None:
        self.availability = SimpleNamespace(report=None)
        self.replaced: Any = None
        self.policy = SimpleNamespace(count=8, source="test")
        self.calls = 0

    async def answer(self, item: Item, progress: CallProgress) -> ItemResult:
        del item, progress
        self.calls += 1
        await asyncio.Event().wait()
        raise AssertionError

    def left(self, item: Item | None, progress: CallProgress) -> ItemResult:
        del item, progress
        return ItemResult("", 0, ErrorCode.CANCELLED)


class Serving(EndpointServing):
    """Keeps the messages to the worker."""

    def __init__(self) -> None:
        self.sent: list[ModelMessage] = []
        self.endpoint = SilentEndpoint()
        super().__init__(self.endpoint, Listeners(lambda _: None, AT_ONCE_S), 0)  # type: ignore[arg-type]

    def send(self, message: ModelMessage) -> None:
        self.sent.append(message)

    def take(self, *messages: WorkerMessage) -> None:
        for message in messages:
            self._take(message)


BODY = encode_payload(Payload("m", "hello", {}, Task.COMPLETE))


@pytest.mark.parametrize("begun", [False, True])
async def test_every_run_is_answered_also_one_that_ends_before_it_began(*, begun: bool) -> None:
    """A run and its end may arrive together: without an answer the worker would count the slot as taken for ever."""
    serving = Serving()
    serving.take(Run(1, 60_000, [BODY]), Run(2, 60_000, [BODY]))
    if begun:
        await asyncio.sleep(0)
    serving.take(Drop(1, []), Withdraw([2]))
    for _ in range(3):
        await asyncio.sleep(0)

    answers = {message.seq: message for message in serving.sent if isinstance(message, Done | Refused)}
    assert isinstance(answers[1], Done)
    assert answers[1].results[0].error_code == ErrorCode.CANCELLED
    assert isinstance(answers[2], Refused)
    assert not answers[2].counted
    assert serving.endpoint.calls == (2 if begun else 0)
