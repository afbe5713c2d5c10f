"""stack.json: what runs now, for tools and tests. It is replaced whenever a process is another one."""

from collections.abc import Iterable, Mapping
from typing import TypedDict

from tierlane.local_stack import STACK_FILE
from tierlane.up.data_dir import DataDir


class ProcessEntry(TypedDict):
    """One process. `role` is gateway, scheduler, worker, model, redis or postgres."""

    role: str
    name: str
    pid: int


class StackFile:
    """Writes the file once the stack is ready, and afterwards only when the processes differ."""

    def __init__(self, data_dir: DataDir, http_url: str, service_token: str) -> None:
        """Remove what an earlier run may have left: the file means that a stack is ready."""
        self._data_dir = data_dir
        self._fixed: dict[str, object] = {"http_url": http_url, "service_token": service_token}
        self._ready = False
        self._written: list[ProcessEntry] = []
        data_dir.remove(STACK_FILE)

    def serve(self, redis_url: str, database_url: str, keys: Mapping[str, str]) -> None:
        """Fill in the rest; from now on `update` writes."""
        self._fixed |= {"redis_url": redis_url, "database_url": database_url, "keys": dict(keys)}
        self._ready = True

    def update(self, processes: Iterable[ProcessEntry]) -> None:
        """Write the file when it would say something new."""
        now = list(processes)
        if self._ready and now != self._written:
            self._data_dir.write_json(STACK_FILE, {**self._fixed, "processes": now})
            self._written = now

    def remove(self) -> None:
        """Remove the file, since nothing runs any more."""
        self._ready = False
        self._data_dir.remove(STACK_FILE)
