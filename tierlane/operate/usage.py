"""The verb `tierlane usage export`: requests, tokens, GPU time and cost of customers, from the audit, as CSV or JSON."""

import csv
import sys
from decimal import Decimal

import msgspec

from ledger.audit.queries import UsageLine, usage_lines, with_statement_timeout
from tierlane.admin.options import VerbCall, Work
from tierlane.admin.values import day
from tierlane.connect import UsageError, database

TIMEOUT_MS = 600_000
"""Of one statement, which reads a day, or with `--by total` all days."""

MOST_DAYS = 3660

_encode = msgspec.json.Encoder(decimal_format="number").encode


def export(first: str, last: str, *, daily: bool) -> Work:
    """Print the usage of the days from `first` to `last`. Raises UsageError."""
    begin, end = day("--from", first), day("--to", last)
    if end < begin:
        raise UsageError(f"--to: must not be before --from ({begin}), got {end}.")
    if (end - begin).days >= MOST_DAYS:
        raise UsageError(f"--to: must be less than {MOST_DAYS:,} days after --from ({begin}), got {end}.")

    async def work(call: VerbCall) -> int:
        columns = UsageLine._fields if daily else UsageLine._fields[1:]
        rows, count = csv.writer(sys.stdout, lineterminator="\n"), 0
        async with (
            database(call.settings, "tierlane-usage") as connection,
            with_statement_timeout(connection, TIMEOUT_MS),
        ):
            async for line in usage_lines(connection, begin, end, daily=daily):
                # Without zeros after the last digit of a sum.
                values = [
                    each.normalize() if isinstance(each, Decimal) else each for each in (line if daily else line[1:])
                ]
                if call.output == "json":
                    document = _encode(dict(zip(columns, values, strict=True))).decode()
                    sys.stdout.write(f"{',' if count else '['}\n{document}")
                else:
                    if not count:
                        rows.writerow(columns)
                    rows.writerow([f"{each:f}" if isinstance(each, Decimal) else each for each in values])
                count += 1
        if call.output == "json":
            sys.stdout.write("\n]\n" if count else "[]\n")
        elif not count:
            rows.writerow(columns)
        return 0

    return work
