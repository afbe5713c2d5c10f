"""The text of one setting. Only the standard library is used: `--help` is built from these."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """One setting for readers: default as text ("" for none), description, and what stands for the value in help."""

    default: str
    description: str
    metavar: str = "TEXT"


def number(default: str, description: str) -> Text:
    """Return the text of a setting whose value is an integer."""
    return Text(default, description, "N")
