"""An `openai:URL` endpoint in front of a stand-in server: items, their answers, and what the endpoint reports."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest

from configs import endpoint_access
from endpoint_stand_in import StandIn, serving
from gpu_pool.backends.backend import Item, ItemResult
from gpu_pool.backends.openai_endpoint.endpoint import Endpoint, HandBack
from gpu_pool.backends.openai_endpoint.requests import CallProgress
from gpu_pool.backends.openai_endpoint.settings import read_address
from gpu_pool.config import Access
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage, encode_messages


class Reader:
    """A listener that records text, and leaves after so many characters."""

    late = False

    def __init__(self, leaves_after: int = 1_000_000) -> None:
        self.text = ""
        self._leaves_after = leaves_after

    @property
    def gone(self) -> bool:
        return len(self.text) >= self._leaves_after

    def emit(self, offset: int, text: str) -> None:
        assert offset == len(self.text)
        self.text += text


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """A server without faults."""
    with serving(StandIn()) as server:
        yield server


def items(*texts: str, seconds: float = 10.0, **parameters: object) -> list[Item]:
    return [Item(text, dict(parameters), until=time.monotonic() + seconds) for text in texts]


def chat(text: str, listener: Reader | None = None, seconds: float = 10.0) -> Item:
    return Item(encode_messages([PromptMessage("user", text)]), {}, Task.CHAT, listener, time.monotonic() + seconds)


@asynccontextmanager
async def loaded(
    server: StandIn, access: Access | None = None, fragment: str = "", within_s: float = 5.0
) -> AsyncIterator[tuple[Endpoint, list[str]]]:
    """A loaded endpoint, and its availability reports: "open", or why it is closed."""
    endpoint, reports = (
        Endpoint(read_address(f"openai:{server.url}{fragment}"), access or endpoint_access()),
        list[str](),
    )
    endpoint.availability.report = lambda wanted, why, brief: reports.append("open" if wanted else why)
    try:
        await endpoint.load(within_s)
        yield endpoint, reports
    finally:
        await endpoint.close()


async def answered(endpoint: Endpoint, batch: Sequence[Item]) -> list[ItemResult | HandBack]:
    """The answers to these requests, which run at the same time."""
    return list(await asyncio.gather(*(endpoint.answer(item, CallProgress()) for item in batch)))


async def answers(
    server: StandIn, *batches: Sequence[Item], access: Access | None = None
) -> list[list[ItemResult | HandBack]]:
    """The answers to these requests, one group after another."""
    async with loaded(server, access) as (endpoint, _):
        return [await answered(endpoint, batch) for batch in batches]


def codes(results: list[ItemResult | HandBack]) -> list[str]:
    """The error code of each result; "-" for one that was handed back."""
    return ["-" if isinstance(result, HandBack) else result.error_code for result in results]


def outputs(results: list[ItemResult | HandBack]) -> list[str]:
    return [result.reason if isinstance(result, HandBack) else result.output for result in results]
