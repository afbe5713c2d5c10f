"""Numbers, rates, times and columns as text. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime

_MS_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"))


def number(value: float) -> str:
    """At least three significant digits where there are: 0.25, 38.5, 1,234."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    text = f"{value:,.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def rate(per_second: float) -> str:
    """Requests/s."""
    return f"{number(per_second)}/s"


def percent(part: float) -> str:
    """A part of a whole in percent; 0 and 100 are exact."""
    whole = round(part * 100)
    if whole == 0 and part > 0:
        return "under 1 %"
    if whole == 100 and part < 1:
        return "99 %"
    return f"{whole} %"


def span(ms: float) -> str:
    """A time in its two largest units: 75 ms, 1.5 s, 3 h 2 min."""
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{number(ms / 1000)} s"
    for i, (length, unit) in enumerate(_MS_UNITS):
        if ms >= length:
            whole, rest = divmod(int(ms), length)
            smaller, small_unit = _MS_UNITS[i + 1]
            return f"{whole} {unit} {rest // smaller} {small_unit}" if rest >= smaller else f"{whole} {unit}"
    raise ValueError(f"{ms} ms is not a time")


def moment(at_ms: int) -> str:
    """A time since the epoch, in UTC."""
    return f"{datetime.fromtimestamp(at_ms / 1000, tz=UTC):%Y-%m-%d %H:%M:%S}"


def count(how_many: int, one: str, many: str | None = None) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{how_many} {one if how_many == 1 else many or one + 's'}"


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
