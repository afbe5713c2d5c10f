"""Waiting in tests: poll a named condition instead of sleeping."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def eventually(condition: Callable[[], T | Awaitable[T]], what: str, timeout_s: float = 10.0) -> T:
    """Return the condition's first truthy value; fail with `what` when it does not come in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what} (last seen: {value!r})")
        await asyncio.sleep(0.01)
