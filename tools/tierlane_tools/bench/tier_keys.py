"""The API keys with which the load of each tier is sent."""

from collections.abc import Sequence
from pathlib import Path

from tierlane_local.stack_file import StackFileError, StackInfo


def keys_for(stack: StackInfo, tiers: Sequence[str]) -> list[list[str]]:
    """The keys of these tiers, in their order: one each. Raises StackError, which names the tier without one."""
    return _of_tiers(tiers, {tier: [key] for tier, key in stack.keys.items() if key}, "The stack file")


def read_keys(path: Path, tiers: Sequence[str]) -> list[list[str]]:
    """The keys of these tiers, in their order, from lines `tier,key`. Raises StackError."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StackFileError(f"Cannot read the keys in {path}: {error}.") from None
    keys: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        tier, comma, key = (piece.strip() for piece in line.partition(","))
        if line.strip() and not (tier and comma and key):
            raise StackFileError(f"{path}, line {number}: must be TIER,KEY.")  # Without the line, which may hold a key.
        keys.setdefault(tier, []).append(key)
    return _of_tiers(tiers, keys, str(path))


def _of_tiers(tiers: Sequence[str], keys: dict[str, list[str]], where: str) -> list[list[str]]:
    for tier in tiers:
        if not keys.get(tier):
            names = ", ".join(name for name in keys if name)
            raise StackFileError(f"{where} has no key for the tier {tier!r}; it has {names or 'none'}.")
    return [keys[tier] for tier in tiers]
