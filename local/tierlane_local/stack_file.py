"""The stack file, stack.json: the addresses, keys and processes of a running stack, for tools and tests."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from tierlane.connect import STACK_FILE, no_local_stack
from tierlane_local.up.data_dir import DataDir


class StackFileError(Exception):
    """The file cannot be used; the message is one sentence."""


class ProcessInfo(msgspec.Struct, frozen=True):
    """One process. `role` is gateway, scheduler, worker, model, admin, redis or postgres."""

    role: str
    name: str
    pid: int


class StackInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The file. For a system that `tierlane up` did not start, one with `keys` alone will do.

    `cells`: the URL of Redis by cell, the default cell first. `keys`: an API key by tier.
    """

    http_url: str = ""
    service_token: str = ""
    redis_url: str = ""
    cells: dict[str, str] = {}
    database_url: str = ""
    keys: dict[str, str]
    processes: tuple[ProcessInfo, ...] = ()


def read_stack(path: Path) -> StackInfo:
    """Read the file. Raises StackFileError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StackInfo)
    except FileNotFoundError:
        why = no_local_stack(path.parent, "start `tierlane up` first, or name its file with --stack")
        raise StackFileError(f"There is no {path}: {why}.") from None
    except OSError as error:
        raise StackFileError(f"Cannot read {path}: {error.strerror}.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StackFileError(f"{path} is not a stack file: {error}.") from None


class StackFile:
    """Writes stack.json once the stack is ready, and again when its processes change."""

    def __init__(self, data_dir: DataDir) -> None:
        """Remove the file of an earlier run: it exists only while a stack is ready."""
        self._data_dir = data_dir
        self._stack: StackInfo | None = None
        data_dir.remove(STACK_FILE)

    def serve(self, stack: StackInfo) -> None:
        """Mark the stack as ready: `update` writes from now on."""
        self._stack = stack

    def update(self, processes: Iterable[ProcessInfo]) -> None:
        """Write the file if the processes have changed."""
        now = tuple(processes)
        if self._stack and now != self._stack.processes:
            stack = msgspec.structs.replace(self._stack, processes=now)
            self._data_dir.write_json(STACK_FILE, msgspec.to_builtins(stack))
            self._stack = stack

    def remove(self) -> None:
        self._stack = None
        self._data_dir.remove(STACK_FILE)
