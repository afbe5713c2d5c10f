"""Classes that answer requests one by one: order, faults, streams, cancellation."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from gpu_pool.backends.answering import WAIT_S, AnswerBackend
from gpu_pool.backends.backend import TOO_LATE, InvalidOutput, Item, ItemResult
from gpu_pool.backends.function import find_target
from integration.endpoint_fixtures import Reader
from scheduler.errors import StartError


class Model:
    """Requests that wait for each other, fail, or write in pieces."""

    slots = 3

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.cancelled: list[str] = []

    async def answer(self, item: Any) -> str | None:
        if item.input == "opens":
            self.open.set()
        elif item.input == "raises":
            raise ValueError
        elif item.input == "exits":
            raise SystemExit
        elif item.input == "wrong":
            return 7  # type: ignore[return-value]
        elif item.input == "writes":
            item.emit("é")
            item.emit(f"{item.parameters}")
            return None
        else:
            item.emit("partly")
            try:
                await self.open.wait()
            except asyncio.CancelledError:
                self.cancelled.append(item.input)
                raise
        return f"{item.input}!"


class AsyncGenerator:
    continuous = True

    async def generate(self, item: Any) -> AsyncIterator[Any]:
        for piece in item.input.split():
            await asyncio.sleep(0)
            yield 7 if piece == "bad" else piece


class Generator:
    continuous = True

    def __init__(self) -> None:
        self.order: list[str] = []

    def generate(self, item: Any) -> Iterator[str]:
        for letter in item.input:
            self.order.append(letter)
            yield letter


@pytest.fixture
def backend() -> Iterator[AnswerBackend]:
    backend = AnswerBackend("m:Model", Model)
    backend.load()
    yield backend
    backend.close()


def step_until(backend: AnswerBackend, *keys: int) -> dict[int, Any]:
    results: dict[int, Any] = {}
    while not set(keys) <= results.keys():
        results.update(backend.step(lambda: None))
    return results


def test_requests_run_at_the_same_time_and_fail_alone(backend: AnswerBackend) -> None:
    """The first waits for the last; what a request raises is its own result, for a model that exits too."""
    for key, text in enumerate(["waits", "raises", "exits", "wrong", "writes", "opens"]):
        backend.add(key, Item(text, {"a": 1}))

    results = step_until(backend, *range(6))

    assert (backend.slots, results[0], results[5]) == (3, ItemResult("waits!"), ItemResult("opens!"))
    assert [type(results[key]) for key in (1, 2)] == [ValueError, RuntimeError]
    assert (results[3].error_code, results[4].output) == ("invalid_output", "é{'a': 1}")


def test_cancellation(backend: AnswerBackend) -> None:
    """A request that is removed, late or without its client is cancelled; only the last has the text so far."""
    reader = Reader(leaves_after=3)
    backend.add(0, Item("removed"))
    backend.add(1, Item("late", until=time.monotonic() + 0.01))
    backend.add(2, Item("left", listener=reader))
    results = dict(backend.step(lambda: None))
    backend.remove(0)
    backend.remove(0)
    while results.keys() != {1, 2}:
        results.update(backend.step(lambda: None))

    assert results == {1: TOO_LATE, 2: ItemResult("partly")}
    assert reader.text == "partly"
    assert sorted(backend._target.cancelled) == ["late", "left", "removed"]


def test_message_of_the_worker_ends_a_step(backend: AnswerBackend) -> None:
    """A step that would wait returns when the socket is readable; else it ends after 50 ms, with progress."""
    ours, theirs = os.pipe()
    backend.add(0, Item("waits"))
    backend.step(lambda: None)
    backend.step(lambda: None)
    began, steps = time.monotonic(), list[None]()
    assert backend.step(lambda: steps.append(None)) == []
    waited = time.monotonic() - began
    backend.interrupt_on(ours)
    os.write(theirs, b"x")

    for _ in range(100):
        assert backend.step(lambda: None) == []

    assert waited >= 0.9 * WAIT_S
    assert time.monotonic() - began - waited < 100 * WAIT_S
    assert steps == [None]
    backend.remove(0)
    os.close(ours)
    os.close(theirs)


def test_generators_take_turns() -> None:
    """After each piece; a piece that is no text fails its request."""
    backend = AnswerBackend("m:Generator", Generator)
    backend.load()
    assert [result.output for result in backend.run([Item("abc"), Item("de")], lambda: None)] == ["abc", "de"]
    assert "".join(backend._target.order) == "adbec"
    backend.close()

    backend = AnswerBackend("m:AsyncGenerator", AsyncGenerator)
    backend.load()
    assert backend.run([Item("a b")], lambda: None) == [ItemResult("ab")]
    with pytest.raises(InvalidOutput):
        backend.run([Item("a bad c"), Item("x")], lambda: None)
    backend.close()


def test_class_needs_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` without the mark is not enough."""
    monkeypatch.setattr(Generator, "continuous", False)
    assert find_target(f"{__name__}:Model") is Model
    with pytest.raises(StartError, match=r"or async answer\(item\)"):
        find_target(f"{__name__}:Generator")
