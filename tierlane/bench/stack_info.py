"""What `tierlane up` tells of its stack in stack.json: where it listens, keys by tier, processes by role."""

from collections.abc import Sequence
from pathlib import Path

import msgspec


class StackError(Exception):
    """The file cannot be used; the message is one sentence."""


class ProcessInfo(msgspec.Struct, frozen=True):
    """One process. `role` is gateway, scheduler, worker, model, redis or postgres."""

    role: str
    name: str
    pid: int


class StackInfo(msgspec.Struct, frozen=True):
    """The file. For a system that `tierlane up` did not start, one with `keys` alone will do."""

    keys: dict[str, str]
    http_url: str = ""
    database_url: str = ""
    processes: tuple[ProcessInfo, ...] = ()


def read_stack(path: Path) -> StackInfo:
    """Read the file. Raises StackError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StackInfo)
    except FileNotFoundError:
        raise StackError(f"There is no {path}; start `tierlane up` first, or name its file with --stack.") from None
    except OSError as error:
        raise StackError(f"Cannot read {path}: {error.strerror}.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StackError(f"{path} is not a stack file: {error}.") from None


def keys_for(stack: StackInfo, tiers: Sequence[str]) -> list[str]:
    """The keys of these tiers, in their order. Raises StackError, which names the tier without one."""
    for tier in tiers:
        if not stack.keys.get(tier):
            raise StackError(
                f"The stack file has no key for the tier {tier!r}; it has {', '.join(stack.keys) or 'none'}."
            )
    return [stack.keys[tier] for tier in tiers]
