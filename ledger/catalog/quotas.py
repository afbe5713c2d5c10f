"""Quotas: what the text of one says, and which of them hold for a customer. Pure.

The notation is that of the table's CHECK: an amount, its unit unless it counts requests, and a period. A quota is held in
fixed windows, named by its period and unit alone, so that who changes the amount does not hand out what was spent already.
"""

import re
from collections.abc import Iterable
from decimal import Decimal
from functools import lru_cache

from ledger.catalog.snapshot import Quota
from ratelimit.quotas import NOTATIONS, PERIOD_S, of_key
from scheduler.errors import TierlaneError

MOST_AMOUNT = 10**15 - 1  # As the table's CHECK; still exact in the doubles that Lua counts with.
MOST_PERIODS = 9999

Held = tuple[tuple[str, int], ...]
"""Name and amount of each quota that holds for a customer, such as ("1day", 10000); each name once.

Names and amounts are those of ratelimit/quotas.py.
"""

AlertShares = tuple[float, ...]
"""Shares of a quota that raise an alert."""

_Term = tuple[int, str, int, AlertShares | None]
"""How long a period is at most, in seconds, the name of the quota, the amount, and its own alert shares."""
_QUOTA = re.compile(
    rf"([0-9]+(?:\.[0-9]+)?)(?: ({'|'.join(NOTATIONS)}))? ?(?:/|per) ?([0-9]+)? ?({'|'.join(PERIOD_S)})s?"
)
_REQUESTS = re.compile(r"^([0-9]+) requests?(?= ?(?:/|per))")


class BadCatalogRow(TierlaneError):
    """A row of the catalog makes no sense; the message names its table and key."""


def parse_quota(
    customer_id: str | None, tier: str | None, text: str, alert_shares: Iterable[float] | None = None
) -> Quota:
    """`10000/day`, `0.5 usd per 2 hours`: one quota of one customer or of each customer of a tier. Raises BadCatalogRow."""
    terms = _terms(text)
    if terms is None or (customer_id is None) == (tier is None):
        raise BadCatalogRow(f"quotas row {text!r} is not a quota of one customer or one tier, such as 10000/day.")
    amount, every, unit, mark = terms
    shares = None if alert_shares is None else tuple(sorted(set(alert_shares)))
    if not all(0 < share <= 1 for share in shares or ()):
        raise BadCatalogRow(f"quotas row {text!r} has an alert share that is not above 0 and at most 1.")
    return Quota(customer_id, tier, amount, every, unit, text, mark, shares)


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
    return quota.every * PERIOD_S[quota.unit], name_of(quota), quota.amount, quota.alert_shares


def stored_quota(text: str) -> str:
    """The text in the notation of the tables, which do not name the unit of requests: `10 requests per day` is `10 per day`."""
    return _REQUESTS.sub(r"\1", text)


def key_quotas_problem(texts: Iterable[str]) -> str | None:
    """Why these cannot be the quotas of a key, as the end of a sentence: one is invalid, or two are of one period and unit."""
    known: dict[str, str] = {}
    for text in texts:
        try:
            name = name_of(parse_quota(None, "any", text))
        except BadCatalogRow:
            return f"{text!r} is not an amount and a period, such as 10000/day or 100 usd/month"
        if name in known:
            return f"{known[name]!r} and {text!r} are for the same period and unit"
        known[name] = text
    return None


def key_quotas(key_id: str, owner: str, texts: Iterable[str]) -> Held:
    """The quotas of a key beside its customer's, which are counted under the key `owner`. Raises BadCatalogRow."""
    found: dict[str, int] = {}
    for text in texts:
        try:
            quota = parse_quota(None, "any", text)
        except BadCatalogRow as error:
            raise BadCatalogRow(f"api_keys row {key_id!r}: {error}") from None
        name = of_key(name_of(quota), owner)
        found[name] = min(quota.amount, found.get(name, quota.amount))
    return tuple(found.items())


class QuotaBook:
    """Who has which quotas, while a snapshot is made."""

    def __init__(self) -> None:
        self.quotas: list[Quota] = []
        # Tuples of plain values: of lists, or of structs, the garbage collector would visit a hundred thousand.
        self._own: dict[str, tuple[_Term, ...]] = {}
        self._of_tier: dict[str, tuple[_Term, ...]] = {}
        self._same: dict[Held, Held] = {}  # So that equal ones are one object.

    def add(
        self, customer_id: str | None, tier: str | None, text: str, alert_shares: Iterable[float] | None = None
    ) -> None:
        """Take in one row. Raises BadCatalogRow."""
        quota = parse_quota(customer_id, tier, text, alert_shares)
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
        for _, name, amount, _ in sorted((*own, *of_tier), key=_of_term):
            least.setdefault(name, amount)
        held = tuple(least.items())
        return self._same.setdefault(held, held)

    def alert_shares(self, customer_id: str, tier: str) -> tuple[tuple[str, AlertShares], ...]:
        """The quotas of a customer whose row has alert shares of its own."""
        own, of_tier = self._own.get(customer_id, ()), self._of_tier.get(tier, ())
        if all(term[3] is None for term in (*own, *of_tier)):
            return ()
        least: dict[str, AlertShares | None] = {}
        for _, name, _, shares in sorted((*own, *of_tier), key=_of_term):
            least.setdefault(name, shares)
        return tuple((name, shares) for name, shares in least.items() if shares is not None)


def _of_term(term: _Term) -> tuple[int, str, int]:
    return term[:3]
