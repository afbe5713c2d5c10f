"""Quotas: what the text of one says, and which of them hold for a customer. Pure.

The notation is that of the table's CHECK: an amount, its unit unless it counts requests, and a period. A quota is held in
fixed windows, named by its period and unit alone, so that who changes the amount does not hand out what was spent already.
"""

import re
from datetime import MAXYEAR, UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache

from ledger.catalog.snapshot import Quota
from ratelimit.quotas import NOTATIONS, PERIOD_S, period_of, period_parts
from scheduler.errors import TierlaneError

MOST_AMOUNT = 10**15 - 1  # As the table's CHECK; still exact in the doubles that Lua counts with.
MOST_PERIODS = 9999

Held = tuple[tuple[str, int], ...]
"""Name and amount of each quota that holds for a customer, such as ("1day", 10000); each name once.

Names and amounts are those of ratelimit/quotas.py.
"""

_Term = tuple[int, str, int]
"""How long a period is at most, in seconds, the name of the quota, and the amount."""
_QUOTA = re.compile(
    rf"([0-9]+(?:\.[0-9]+)?)(?: ({'|'.join(NOTATIONS)}))? ?(?:/|per) ?([0-9]+)? ?({'|'.join(PERIOD_S)})s?"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MONDAY = datetime(1969, 12, 29, tzinfo=UTC)  # The week of the epoch, a Thursday, begins here.
_MONTHS = {"month": 1, "year": 12}


class BadCatalogRow(TierlaneError):
    """A row of the catalog makes no sense; the message names its table and key."""


def parse_quota(customer_id: str | None, tier: str | None, text: str) -> Quota:
    """`10000/day`, `0.5 usd per 2 hours`: one quota of one customer or of each customer of a tier. Raises BadCatalogRow."""
    terms = _terms(text)
    if terms is None or (customer_id is None) == (tier is None):
        raise BadCatalogRow(f"quotas row {text!r} is not a quota of one customer or one tier, such as 10000/day.")
    amount, every, unit, mark = terms
    return Quota(customer_id, tier, amount, every, unit, text, mark)


@lru_cache(maxsize=4096)  # A hundred thousand rows have few different values.
def _terms(text: str) -> tuple[int, int, str, str] | None:
    """Amount, number of units of time, that unit, and the mark of what is counted; None for what is not one quota."""
    found = _QUOTA.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    number, word, every, unit = found.groups()
    mark, parts = NOTATIONS[word] if word else ("", 1)
    amount, count = Decimal(number) * parts, int(every or 1)
    usable = 0 < amount <= MOST_AMOUNT and amount == int(amount) and 0 < count <= MOST_PERIODS
    return (int(amount), count, unit, mark) if usable else None


def name_of(quota: Quota) -> str:
    """The name of its windows, such as 1day or 1day:gpu: all that is counted goes by it."""
    period = f"{quota.every}{quota.unit}"
    return f"{period}:{quota.mark}" if quota.mark else period


def _term_of(quota: Quota) -> _Term:
    return quota.every * PERIOD_S[quota.unit], name_of(quota), quota.amount


class QuotaBook:
    """Who has which quotas, while a snapshot is made."""

    def __init__(self) -> None:
        self.quotas: list[Quota] = []
        # Tuples of plain values: of lists, or of structs, the garbage collector would visit a hundred thousand.
        self._own: dict[str, tuple[_Term, ...]] = {}
        self._of_tier: dict[str, tuple[_Term, ...]] = {}
        self._same: dict[Held, Held] = {}  # So that equal ones are one object.

    def add(self, customer_id: str | None, tier: str | None, text: str) -> None:
        """Take in one row. Raises BadCatalogRow."""
        quota = parse_quota(customer_id, tier, text)
        self.quotas.append(quota)
        if customer_id is not None:
            self._own[customer_id] = (*self._own.get(customer_id, ()), _term_of(quota))
        elif tier is not None:
            self._of_tier[tier] = (*self._of_tier.get(tier, ()), _term_of(quota))

    def held(self, customer_id: str, tier: str) -> Held:
        """What holds for a customer: its own quotas and its tier's."""
        own, of_tier = self._own.get(customer_id, ()), self._of_tier.get(tier, ())
        if not own and not of_tier:
            return ()
        least: dict[str, int] = {}  # Of one name the smallest amount; the shortest period first.
        for _, name, amount in sorted((*own, *of_tier)):
            least.setdefault(name, amount)
        held = tuple(least.items())
        return self._same.setdefault(held, held)


def window_number(name: str, now: datetime) -> int:
    """Which window of a quota holds `now`, counted from 1970 in UTC as ratelimit/lua/quota.lua counts.

    A week begins on Monday; months and years are those of the calendar. Raises KeyError for an unknown unit.
    """
    every, unit = period_parts(period_of(name))
    now = now.astimezone(UTC)
    if unit in _MONTHS:
        return ((now.year - 1970) * 12 + now.month - 1) // (every * _MONTHS[unit])
    return (now - _origin(unit)) // timedelta(seconds=every * PERIOD_S[unit])


def window_start(name: str, number: int) -> datetime:
    """When a window of a quota begins. Raises KeyError for an unknown unit."""
    every, unit = period_parts(period_of(name))
    if unit in _MONTHS:
        years, month = divmod(number * every * _MONTHS[unit], 12)
        return _EPOCH.replace(year=min(1970 + years, MAXYEAR), month=month + 1)
    return _origin(unit) + number * timedelta(seconds=every * PERIOD_S[unit])


def _origin(unit: str) -> datetime:
    return _MONDAY if unit == "week" else _EPOCH
