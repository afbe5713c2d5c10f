"""The cost of a request with 100,000 customers beside that with 10.

Two stacks that differ only in the number of customers are loaded in short rounds. The order of the rounds rotates, so that
other work of the machine affects all cases alike. The cost is the CPU of the gateway and of Redis for a request.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

from cases.outcome import Check, Outcome, at_most, figure
from cases.stack import Stack, started

from ledger.catalog.api_key import checksum

FEW, MANY = 10, 100_000
RATE = 1000
MOST_MORE = 10.0
LOAD_S = 60.0
"""The time in which gateways must load all customers."""
ROLES = ("gateway", "redis")
TIERS = ("enterprise", "paid", "free")
# Id and secret of a key are its number, so that 100,000 keys need not be returned.
ADD = """
WITH new AS (
    INSERT INTO customers (name, tier, requests_per_second, burst, max_concurrency, tokens_per_minute)
    SELECT 'scale-' || n, (ARRAY['enterprise', 'paid', 'free'])[n % 3 + 1], 100000, 100000, 10000, 1000000000000
    FROM generate_series(1, {count}) AS n
    RETURNING id, substr(name, 7)::integer AS n
)
INSERT INTO api_keys (id, customer_id, name, secret_hash)
SELECT 's' || lpad(n::text, 11, '0'), id, 'scale', sha256(convert_to('S' || lpad(n::text, 27, '0'), 'UTF8')) FROM new
"""


class Case(NamedTuple):
    """A stack, and the number of its customers that send requests."""

    label: str
    stack: Stack
    active: int


def run(*, quick: bool) -> Outcome:
    """Measure both stacks side by side; the first case is the base of the others."""
    seconds, rounds = (2, 4) if quick else (4, 12)
    with ExitStack() as stacks:
        home = Path(stacks.enter_context(tempfile.TemporaryDirectory(prefix="tierlane-customers-")))
        few, many = (_filled(stacks.enter_context(started(workers=2, gateways=1)), count) for count in (FEW, MANY))
        cases = [
            Case("few customers", few, FEW),
            Case("many, few of them active", many, FEW),
            Case("few customers again: the noise", few, FEW),
            Case("many, all of them active", many, MANY),
        ]
        costs: dict[str, list[float]] = {case.label: [] for case in cases}
        for case in cases:
            _cost(case, home, seconds)  # Warm-up.
        for number in range(rounds):
            first = number % len(cases)
            for case in cases[first:] + cases[:first]:
                costs[case.label].append(_cost(case, home, seconds))
    base = costs[cases[0].label]
    data = {label: _ratio(several, base) for label, several in costs.items()}
    return Outcome(judge(data), data, [])


def judge(data: Mapping[str, float]) -> list[Check]:
    """The second case differs from the first only in the number of customers."""
    _, alike, *others = data.items()
    target = at_most(f"CPU more with {MANY:,} customers than with {FEW}", (alike[1] - 1) * 100, MOST_MORE, " %", 1)
    return [target, *(figure(f"the same: {label}", f"{(ratio - 1) * 100:+.1f} %") for label, ratio in others)]


def _ratio(costs: Sequence[float], base: Sequence[float]) -> float:
    """The median of the costs, each relative to the base of the same round."""
    return median(cost / other for cost, other in zip(costs, base, strict=True))


def _filled(stack: Stack, count: int) -> Stack:
    """Add the customers, and wait until the gateway knows the last one."""
    stack.sql(ADD.format(count=count))
    deadline = time.monotonic() + LOAD_S
    while stack.status_of(_key(count)) == 401:
        if time.monotonic() > deadline:
            raise RuntimeError(f"The gateway does not know {count:,} customers after {LOAD_S:.0f} s.")
        time.sleep(0.2)
    return stack


def _cost(case: Case, home: Path, seconds: int) -> float:
    """CPU of a request at the gateway and in Redis, in microseconds."""
    keys = home / f"{case.active}-keys"
    if not keys.exists():
        keys.write_text("".join(f"{TIERS[n % 3]},{_key(n)}\n" for n in range(1, case.active + 1)), "utf-8")
    mix = ",".join(f"{tier}=1" for tier in TIERS)
    found = case.stack.bench(rate=RATE, duration=seconds, warmup=0, connections=64, mix=mix, keys=keys, echo="off")
    return float(sum(found["cpu_seconds_per_1000"][role] for role in ROLES)) * 1000


def _key(number: int) -> str:
    body = f"tl_s{number:011d}_S{number:027d}"
    return body + checksum(body)
