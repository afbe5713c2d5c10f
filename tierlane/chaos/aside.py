"""An event loop in a thread of its own, for what would hold up the load: starting a server takes a tenth of a second."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Aside:
    """Runs coroutines on that loop while the caller's loop goes on."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a process that is on its way out never waits for it.
        self._thread = threading.Thread(target=self._loop.run_forever, name="stack", daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there, and return or raise what it does; a cancel reaches it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        """End the thread; nothing may run there any more."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
