"""Whether a request costs more where there are 100,000 customers than where there are 10: bench/limits_at_scale.py asks."""

import argparse
import asyncio
from collections.abc import Mapping
from contextlib import ExitStack

import limits_at_scale
import scaled_stack
from cases.outcome import Check, Outcome, at_most, told

FEW, MANY = 10, 100_000
MOST_MORE = 10.0


def run(*, quick: bool) -> Outcome:
    """Two stacks side by side, in turns."""
    arguments = argparse.Namespace(rate=1000.0, seconds=2.0 if quick else 4.0, rounds=4 if quick else 12, revocations=1)
    with ExitStack() as stacks:
        small = stacks.enter_context(scaled_stack.started("few", FEW))
        large = stacks.enter_context(scaled_stack.started("many", MANY))
        found = asyncio.run(limits_at_scale.measure(small, large, arguments))
    base = next(iter(found.rounds.values()))
    data = {case.says: limits_at_scale.ratio(rounds, base) for case, rounds in found.rounds.items()}
    return Outcome(judge(data), data, [])


def judge(data: Mapping[str, float]) -> list[Check]:
    """The second case is the one that differs from the first by the number of customers alone."""
    _, alike, *others = data.items()
    target = at_most(f"CPU more with {MANY:,} customers than with {FEW}", (alike[1] - 1) * 100, MOST_MORE, " %", 1)
    return [target, *(told(f"the same: {says}", f"{(ratio - 1) * 100:+.1f} %") for says, ratio in others)]
