"""A TCP proxy on loopback that delays both directions: a server as if it were far away.

By hand: `python tests/delay_proxy.py TARGET MS [PORT]` prints its port. TARGET is a port, or the path of a socket.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PIECE = 65536


class DelayProxy:
    """Connections to `target`: a port, or the path of a socket. `round_trip_s` applies to data that arrives later, too.

    A client is connected to the proxy at once, so the first data waits for one round trip more, as for a handshake.
    """

    def __init__(self, target: int | Path, round_trip_s: float, port: int = 0) -> None:
        self._target = target
        self.round_trip_s = round_trip_s
        self.port = port
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to = None
        try:
            if isinstance(self._target, Path):
                other, to = await asyncio.open_unix_connection(str(self._target))
            else:
                other, to = await asyncio.open_connection("127.0.0.1", self._target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, to, self.round_trip_s))
                group.create_task(self._carry(other, writer, 0.0))
        except* OSError:
            pass
        finally:
            for each in filter(None, (writer, to)):
                each.close()
                with suppress(OSError):
                    await each.wait_closed()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first_s: float) -> None:
        """Each piece arrives half a round trip after it was read; the end of a direction ends the connection."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        earliest = loop.time() + first_s

        async def write() -> None:
            while True:
                due, piece = await pieces.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not piece:
                    raise ConnectionResetError
                writer.write(piece)

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            piece = b"-"
            while piece:
                piece = b""
                with suppress(OSError):
                    piece = await reader.read(PIECE)
                pieces.put_nowait((max(loop.time(), earliest) + self.round_trip_s / 2, piece))


@contextmanager
def far_away(target: int | Path, round_trip_s: float) -> Iterator[int]:
    """The port of a proxy in a process of its own, while the block runs."""
    command = [sys.executable, __file__, str(target), str(1000 * round_trip_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


async def _main(target: str, round_trip_ms: str, port: str = "0") -> None:
    proxy = DelayProxy(int(target) if target.isdigit() else Path(target), float(round_trip_ms) / 1000, int(port))
    await proxy.start()
    print(proxy.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
