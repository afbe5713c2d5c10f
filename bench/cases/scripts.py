"""What cases share that run a script of bench/ as it stands."""

from pathlib import Path

from cases.outcome import Outcome

LONGEST_S = 3600.0


def missing(script: Path) -> Outcome:
    """The outcome where there is no such script."""
    return Outcome([], {}, [f"There is no {script.name} here."])
