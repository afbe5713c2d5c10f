"""Units of quotas: requests, and the metered units, whose use is known only when a request ends: GPU time, tokens, money.

The name of a quota is its period, such as `1day`, for a metered unit also its mark: `1day:gpu`, and for a quota of an API key
the id of the key: `1day@key`, `1day:gpu@key`. Amounts are whole numbers of the smallest part of a unit, so that sums of doubles
in Lua are exact. Pure.
"""

from typing import NamedTuple

NOTATIONS = {
    "gpu-ms": ("gpu", 10**3),
    "gpu-s": ("gpu", 10**6),
    "gpu-h": ("gpu", 3600 * 10**6),
    "tokens": ("tokens", 1),
    "usd": ("usd", 10**9),
}
"""The words for units in rows of `quotas`: the mark, and its smallest parts in one."""

PERIOD_S = {
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86_400,
    "week": 7 * 86_400,
    "month": 31 * 86_400,
    "year": 366 * 86_400,
}
"""The units of periods, and the most seconds of one: months and years differ in length."""


class QuotaUnit(NamedTuple):
    """`mark`: in names, "" for requests. `parts`: smallest parts in one `word`; `header_parts`: in one `header`."""

    mark: str
    word: str
    parts: int = 1
    header: str = ""  # The `qu` parameter of RateLimit-Policy; "": requests.
    header_parts: int = 1


UNITS = (
    QuotaUnit("", "requests"),
    QuotaUnit("gpu", "gpu-s", 10**6, "gpu-ms", 10**3),
    QuotaUnit("tokens", "tokens", header="tokens"),
    QuotaUnit("usd", "usd", 10**9, "usd-micros", 10**3),
)


_BY_MARK = {unit.mark: unit for unit in UNITS}


class Meter(NamedTuple):
    """What metered quotas charge for a request of one model: GPU time in µs until its customer's mean is known; prices."""

    gpu_us: int = 100_000
    usd_per_gpu_s: float = 0.0
    usd_per_1000_tokens: float = 0.0

    def units(self, mark: str, tokens: int) -> int:
        """The estimated cost of a request, in smallest parts of the unit, as `metered_units` in Lua."""
        if mark == "gpu":
            return self.gpu_us
        if mark == "tokens":
            return tokens
        return round(self.gpu_us * self.usd_per_gpu_s * 1e3 + tokens * self.usd_per_1000_tokens * 1e6)


def of_key(name: str, key_id: str) -> str:
    """The name of the same quota of an API key."""
    return f"{name}@{key_id}"


def key_of(name: str) -> str:
    """The id of the API key whose quota it is; "" for a quota of a customer."""
    return name.partition("@")[2]


def without_key(name: str) -> str:
    """The name of the same quota of a customer."""
    return name.partition("@")[0]


def period_of(name: str) -> str:
    """The period of a quota: `1day`."""
    return without_key(name).partition(":")[0]


def unit_of(name: str) -> QuotaUnit:
    """The unit that a quota counts; for one of a newer version, its mark."""
    mark = without_key(name).partition(":")[2]
    return _BY_MARK.get(mark) or QuotaUnit(mark, mark)


def is_metered(name: str) -> bool:
    return ":" in name


def quota_name(name: str) -> str:
    """The name of its policy in headers: `1day` is day, `2month:usd` is 2months-usd, `1day@...` is key-day."""
    whole, _, key_id = name.partition("@")
    period, _, mark = whole.partition(":")
    every, unit = period_parts(period)
    words = unit if every == 1 else f"{every}{unit}s"
    return f"{'key-' if key_id else ''}{words}{f'-{mark}' if mark else ''}"


def period_parts(period: str) -> tuple[int, str]:
    """`3month` is 3 and month."""
    unit = period.lstrip("0123456789")
    every = period[: len(period) - len(unit)]
    return int(every) if every else 1, unit


def shown_amount(name: str, amount: float) -> int | float:
    """An amount in the unit for users."""
    unit = unit_of(name)
    return amount / unit.parts if unit.parts > 1 else int(amount)


def quota_words(name: str, amount: float) -> str:
    """The quota for users: `10000 requests per day`, `3600 gpu-s per day`."""
    shown = f"{shown_amount(name, amount):.9f}".rstrip("0").rstrip(".")
    return f"{shown} {unit_of(name).word} per {quota_name(period_of(name))}"


def quota_title(name: str) -> str:
    """Its name in lists of limits: `quota per day`, `quota of gpu-s per day`."""
    unit = f"quota of {unit_of(name).word}" if is_metered(name) else "quota"
    unit = f"key's {unit}" if key_of(name) else unit
    return f"{unit} per {quota_name(period_of(name))}"
