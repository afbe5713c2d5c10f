"""The verb `tierlane usage export`: requests, tokens, GPU time and cost of customers, from the audit, as CSV or JSON."""

import csv
import re
import sys
from collections.abc import Iterable
from datetime import date
from decimal import Decimal
from typing import Any

import msgspec

from ledger.audit.queries import UsageLine, usage_lines, with_statement_timeout
from tierlane.admin.options import VerbCall, Work
from tierlane.connect import UsageError, database

TIMEOUT_MS = 600_000
"""Of one statement, which reads a day, or with `--by total` all days."""

MOST_DAYS = 3660

_DAY = re.compile(r"20\d\d-\d\d-\d\d")
_encode = msgspec.json.Encoder(decimal_format="number").encode


def export(first: str, last: str, *, daily: bool) -> Work:
    """Print the usage of the days from `first` to `last`. Raises UsageError."""
    begin, end = _day("--from", first), _day("--to", last)
    if end < begin:
        raise UsageError(f"--to: must not be before --from ({begin}), got {end}.")
    if (end - begin).days >= MOST_DAYS:
        raise UsageError(f"--to: must be less than {MOST_DAYS:,} days after --from ({begin}), got {end}.")

    async def work(call: VerbCall) -> int:
        write = _write_json if call.output == "json" else _write_csv
        columns = UsageLine._fields if daily else UsageLine._fields[1:]
        async with (
            database(call.settings, "tierlane-usage") as connection,
            with_statement_timeout(connection, TIMEOUT_MS),
        ):
            count = 0
            async for line in usage_lines(connection, begin, end, daily=daily):
                write(columns, [_plain(value) for value in (line if daily else line[1:])], count)
                count += 1
        _end_output(call.output, columns, count)
        return 0

    return work


def _day(option: str, text: str) -> date:
    try:
        if _DAY.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise UsageError(f"{option}: must be a day as YYYY-MM-DD, such as 2026-11-01, got {text!r}.")


def _plain(value: Any) -> Any:
    """Without zeros after the last digit of a sum."""
    return value.normalize() if isinstance(value, Decimal) else value


def _write_csv(columns: Iterable[str], values: list[Any], number: int) -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    if number == 0:
        out.writerow(columns)
    out.writerow([f"{value:f}" if isinstance(value, Decimal) else value for value in values])


def _write_json(columns: Iterable[str], values: list[Any], number: int) -> None:
    document = _encode(dict(zip(columns, values, strict=True))).decode()
    sys.stdout.write(f"{',' if number else '['}\n{document}")


def _end_output(form: str, columns: Iterable[str], count: int) -> None:
    if form == "json":
        sys.stdout.write("\n]\n" if count else "[]\n")
    elif not count:
        csv.writer(sys.stdout, lineterminator="\n").writerow(columns)
