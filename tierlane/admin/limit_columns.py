"""The columns of the limits of a tier or a customer in a table of the output."""

from ratelimit.limits import LIMIT_COLUMNS
from tierlane.output import Column

_SHORT = {
    "requests_per_second": "rps",
    "_per_second": "/s",
    "_per_minute": "/min",
    "_per_hour": "/h",
    "max_": "",
    "_": " ",
}
"""Parts of the names of limits as headings of columns have them."""


def _heading(name: str) -> str:
    for part, short in _SHORT.items():
        name = name.replace(part, short)
    return name.upper()


LIMITS = tuple(Column(limit.name, _heading(limit.name)) for limit in LIMIT_COLUMNS)
"""The columns of the limits of a tier or a customer."""
