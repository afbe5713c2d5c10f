"""What the verbs of `tierlane quota` do."""

from collections.abc import Sequence

from ledger.admin.changes import Row
from ledger.admin.customers import remove_quota, set_quota
from ledger.admin.rows import check_tier, find_customer, list_quotas
from ledger.postgres import Connection
from tierlane.admin.options import VerbCall, Work
from tierlane.admin.runner import ChangeResult, changed, looked
from tierlane.connect import UsageError
from tierlane.output import Column, print_rows

COLUMNS = (Column("tier", "TIER"), Column("customer", "CUSTOMER"), Column("quota", "QUOTA"))


def show_all(customer: str | None, tier: str | None) -> Work:
    """Print all, or those that hold for one customer, or those of a tier. The work raises Refused."""

    async def read(connection: Connection) -> list[Row]:
        if tier is not None:
            await check_tier(connection, tier)
        owner = await find_customer(connection, customer) if customer is not None else None
        return await list_quotas(connection, owner, tier)

    async def work(call: VerbCall) -> int:
        rows = await looked(call, read)
        print_rows(call.output, COLUMNS, rows, "quotas")
        return 0

    return work


def give(words: Sequence[str], tier: str | None) -> Work:
    """Set one of a customer or tier. The work raises Refused."""
    customer, text = owner_and_quota(words, tier)

    async def make(connection: Connection) -> ChangeResult:
        return ChangeResult(await set_quota(connection, customer, tier, text))

    return lambda call: changed(call, make)


def take(words: Sequence[str], tier: str | None) -> Work:
    """Remove one of a customer or tier. The work raises Refused where there is none."""
    customer, text = owner_and_quota(words, tier)

    async def make(connection: Connection) -> ChangeResult:
        return ChangeResult(await remove_quota(connection, customer, tier, text))

    return lambda call: changed(call, make)


def owner_and_quota(words: Sequence[str], tier: str | None) -> tuple[str | None, str]:
    """The customer, None with a tier, and the quota. Raises UsageError for any other number of words."""
    if len(words) != (2 if tier is None else 1):
        raise UsageError("Say whose quota and which: CUSTOMER QUOTA, or --tier TIER QUOTA, such as acme 10000/day.")
    return (words[0], words[1]) if tier is None else (None, words[0])
