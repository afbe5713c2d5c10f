"""One line of a check: what was looked at, whether it holds, what was seen, and what to do where it does not hold."""

from typing import NamedTuple


class Finding(NamedTuple):
    """`ok` is None where it could not be told; `advice` is what to do, "" where nothing is."""

    name: str
    ok: bool | None
    said: str
    advice: str = ""


def passed(findings: list[Finding]) -> bool:
    """Whether nothing was found that is wrong."""
    return all(finding.ok is not False for finding in findings)


def holds(name: str, said: str) -> Finding:
    """It is as it must be."""
    return Finding(name, ok=True, said=said)


def fails(name: str, said: str, advice: str) -> Finding:
    """It is not."""
    return Finding(name, ok=False, said=said, advice=advice)


def untold(name: str, said: str) -> Finding:
    """It could not be seen."""
    return Finding(name, ok=None, said=said)
