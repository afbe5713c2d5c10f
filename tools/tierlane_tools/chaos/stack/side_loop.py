"""An event loop in another thread, for work that would stall the load."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SideLoop:
    """Runs coroutines on an event loop in another thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon thread, so that the exit of the process does not wait for it.
        self._thread = threading.Thread(target=self._loop.run_forever, name="stack", daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on that loop; returns its result. A cancel is passed on."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        """End the thread, which must be idle."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
