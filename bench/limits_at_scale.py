"""What it costs that there are many: admission with 100,000 customers and keys beside admission with 10, in one run.

Two stacks stand side by side, alike but for the number of customers. They are loaded in turns, a few seconds each, and
which one begins changes, so that what else the machine does hits both. Compared is CPU time of the gateway and of Redis
per request, as the system counts it, with requests from a few customers in both, then in the large one from as many
customers as there are requests. At the end keys are revoked in the large one: how long until the gateway refuses them.

Exit codes: 0 all within bounds, 1 not so.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import argparse
import asyncio
import gc
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from scaled_stack import ROLES, Round, Subject, started

MOST_MORE = 0.10
MOST_REFUSED = 0.01  # By the capacity, when this machine was busy with something else.
REVOKED_WITHIN_S = 1.0


class Case(NamedTuple):
    """A stack, and how many of its customers send."""

    says: str
    subject: Subject
    active: int


class Findings(NamedTuple):
    """Rounds by case, the first case being what the others are compared with, and the rest of what was measured."""

    rounds: dict[Case, list[Round]]
    loading_s: dict[str, float]
    rss_mb: dict[str, float]
    revocations_s: list[float]


async def measure(small: Subject, large: Subject, arguments: argparse.Namespace) -> Findings:
    """All rounds, and the revocations."""
    loading_s = {subject.name: await subject.fill() for subject in (small, large)}
    cases = [
        Case("few customers", small, small.customers),
        Case("many, few of them active", large, small.customers),
        Case(
            "few customers again: the noise", small, small.customers
        ),  # And no stack has more to forget than the other.
        Case("many, all of them active", large, large.customers),
    ]
    for case in cases:
        await _round(case, arguments)  # What is compiled, connected and measured once.
    gc.collect()
    gc.disable()
    rounds: dict[Case, list[Round]] = {case: [] for case in cases}
    for number in range(arguments.rounds):
        turn = number % len(cases)
        for case in cases[turn:] + cases[:turn]:
            rounds[case].append(await _round(case, arguments))
    rss_mb = {subject.name: subject.gateway().memory_info().rss / 1e6 for subject in (small, large)}
    revocations_s = [await large.revoked(large.customers - n) for n in range(arguments.revocations)]
    return Findings(rounds, loading_s, rss_mb, revocations_s)


async def _round(case: Case, arguments: argparse.Namespace) -> Round:
    return await case.subject.loaded(arguments.rate, arguments.seconds, case.active)


def ratio(rounds: Sequence[Round], base: Sequence[Round]) -> float:
    """The median of what each round cost beside the one of the base that was measured just before or after it."""
    return statistics.median(one.total / other.total for one, other in zip(rounds, base, strict=True))


def show(console: Console, found: Findings) -> bool:
    """Print everything; whether all bounds hold."""
    base = next(iter(found.rounds.values()))
    ratios = {case: ratio(rounds, base) for case, rounds in found.rounds.items()}
    refused = {case: sum((one.refused for one in rounds), Counter[str]()) for case, rounds in found.rounds.items()}
    table = Table(
        "", "customers", "of them active", *[f"{role} us" for role in ROLES], "cost beside the first", "not 200"
    )
    for case, rounds in found.rounds.items():
        figures = [statistics.median(one.microseconds[role] for one in rounds) for role in ROLES]
        shown = [case.says, f"{case.subject.customers:,}", f"{case.active:,}", *(f"{figure:.1f}" for figure in figures)]
        table.add_row(*shown, f"{ratios[case]:.3f}", str(dict(refused[case]) or "none"))
    console.print(table)
    for name, rss_mb in found.rss_mb.items():
        console.print(f"{name}: known {found.loading_s[name]:.2f} s after the INSERT, gateway RSS {rss_mb:.0f} MB")
    console.print(f"revoked keys refused after {', '.join(f'{s * 1000:.0f}' for s in found.revocations_s)} ms")
    sent = {case: sum(one.answered for one in rounds) for case, rounds in found.rounds.items()}
    served = all(refused[case].total() <= MOST_REFUSED * sent[case] for case in sent)
    alike = all(
        found_ratio <= 1 + MOST_MORE for case, found_ratio in ratios.items() if case.active == base_active(found)
    )
    return served and alike and max(found.revocations_s) < REVOKED_WITHIN_S


def base_active(found: Findings) -> int:
    """How many customers send in the first case: only with as many is another one the same but for who is loaded."""
    return next(iter(found.rounds)).active


def read_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Cost of admission with many customers beside that with few.")
    parser.add_argument("--customers", type=int, default=100_000, help="In the large stack. [default: 100000]")
    parser.add_argument("--few", type=int, default=10, help="In the small one, and active in both. [default: 10]")
    parser.add_argument("--rate", type=float, default=1000.0, help="Requests a second. [default: 1000]")
    parser.add_argument("--seconds", type=float, default=4.0, help="Of each round. [default: 4]")
    parser.add_argument("--rounds", type=int, default=12, help="Of each case. [default: 12]")
    parser.add_argument("--revocations", type=int, default=5, help="Keys to revoke at the end. [default: 5]")
    return parser.parse_args()


def main() -> int:
    """Run it; return the exit code."""
    arguments = read_arguments()
    console = Console(width=120)
    with ExitStack() as stacks:
        small = stacks.enter_context(started("few", arguments.few))
        large = stacks.enter_context(started("many", arguments.customers))
        found = asyncio.run(measure(small, large, arguments))
        within = show(console, found)
    console.print("within bounds" if within else "NOT within bounds")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
