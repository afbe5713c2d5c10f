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
    service_token: str = ""
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


def keys_for(stack: StackInfo, tiers: Sequence[str]) -> list[list[str]]:
    """The keys of these tiers, in their order: one each. Raises StackError, which names the tier without one."""
    return _of_tiers(tiers, {tier: [key] for tier, key in stack.keys.items() if key}, "The stack file")


def read_keys(path: Path, tiers: Sequence[str]) -> list[list[str]]:
    """The keys of these tiers, in their order, from lines `tier,key`. Raises StackError."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StackError(f"Cannot read the keys in {path}: {error}.") from None
    keys: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        tier, comma, key = (piece.strip() for piece in line.partition(","))
        if line.strip() and not (tier and comma and key):
            raise StackError(f"{path}, line {number}: must be TIER,KEY.")  # Without the line, which may hold a key.
        keys.setdefault(tier, []).append(key)
    return _of_tiers(tiers, keys, str(path))


def _of_tiers(tiers: Sequence[str], keys: dict[str, list[str]], where: str) -> list[list[str]]:
    for tier in tiers:
        if not keys.get(tier):
            names = ", ".join(name for name in keys if name)
            raise StackError(f"{where} has no key for the tier {tier!r}; it has {names or 'none'}.")
    return [keys[tier] for tier in tiers]
