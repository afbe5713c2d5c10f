"""Quotas, budgets in USD among them, and prices of models."""

from datetime import UTC

from sqlalchemy import select

from gateway.admin_api.bodies import Page, body_type, row_type, text_field
from gateway.admin_api.customers import OF_CUSTOMER
from gateway.admin_api.route import PAGES, AdminCall, AdminResult, change_route, etag_of, read_route
from gateway.http.validation import invalid
from gateway.openapi.model import Parameter
from gateway.openapi.schemas import NOT_EMPTY
from ledger.admin.changes import Row, fetch_one, find, missing, remove
from ledger.admin.columns import settable
from ledger.admin.customers import set_quota
from ledger.admin.errors import QUOTA_FORMS
from ledger.admin.rows import (
    find_customer,
    list_alerts,
    list_prices,
    list_quotas,
    list_tiers,
    remove_price,
    set_price,
    shown_alert,
)
from ledger.admin.values import time_of
from ledger.schema.audit import quota_alerts
from ledger.schema.catalog import customers, prices, quotas, tiers

_QUOTA = {"id": "The number of the quota."}
_PRICE = {"model": "The model, by name.", "valid_from": "When the price begins, as the list shows it."}
MOST_ID = 2**63 - 1

QuotaInList = row_type("QuotaInList", quotas, [("customer", str | None)])
QuotaRow = row_type("QuotaRow", quotas)
PriceRow = row_type("PriceRow", prices, [("state", str)])
AlertRow = row_type("QuotaAlert", quota_alerts, [("customer", str), ("unit", str), ("key_id", str | None)])
NewQuota = body_type(
    "NewQuota",
    settable(quotas),
    [
        text_field("customer", "The customer, by name or id; or `tier`."),
        text_field("tier", "Each customer of this tier has it; or `customer`."),
        text_field("quota", f"An amount and a period, such as {QUOTA_FORMS}.", required=True),
    ],
)
NewPrice = body_type(
    "NewPrice",
    settable(prices),
    [
        text_field("model", "The model, by name.", required=True),
        text_field("valid_from", "First time that it applies to, such as 2027-01-01, in UTC; default: now."),
    ],
)


async def get_quotas(call: AdminCall) -> AdminResult:
    """All quotas, those that apply to a customer, or those of a tier."""
    tier, customer = call.query.get("tier"), call.query.get("customer")
    if tier is not None and not await list_tiers(call.connection, tier):
        raise missing(tiers, tier)
    owner = None if customer is None else await find_customer(call.connection, customer)
    return call.page(await list_quotas(call.connection, owner, tier), lambda row: str(row["id"]))


async def get_quota(call: AdminCall) -> AdminResult:
    row = await _quota(call)
    return AdminResult(row, etag_of(quotas, row))


async def post_quota(call: AdminCall) -> AdminResult:
    """It replaces the quota of the same owner, period and unit."""
    values = dict(call.values)
    customer, tier, text = values.pop("customer", None), values.pop("tier", None), values.pop("quota")
    if (customer is None) == (tier is None):
        raise invalid("customer", "Specify `customer` or `tier`.")
    return call.changed(await set_quota(call.connection, customer, tier, text, values))


async def get_alerts(call: AdminCall) -> AdminResult:
    """The newest first; amounts in the unit of the quota."""
    customer, owner = call.query.get("customer"), None
    if customer is not None:
        owner = (await find_customer(call.connection, customer))["id"]
    rows = await list_alerts(call.connection, call.limit + 1, owner, after=call.query.get("after"))
    return call.part([shown_alert(row) for row in rows], lambda row: str(row["id"]))


async def delete_quota(call: AdminCall) -> AdminResult:
    """Its owner is locked first, as by every change of quotas."""
    row = await _quota(call)
    if row["customer_id"] is None:
        owner = f"tier {(await find(call.connection, tiers, row['tier']))['name']}"
    else:
        owner = (await find(call.connection, customers, row["customer_id"]))["name"]
    row = await call.lock(quotas, row["id"])
    return call.changed([await remove(call.connection, quotas, row, f"{row['quota']} of {owner}")])


async def _quota(call: AdminCall) -> Row:
    text = call.path["id"]
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else MOST_ID + 1
    found = number <= MOST_ID and await fetch_one(call.connection, select(quotas).where(quotas.c.id == number))
    if not found:
        raise missing(quotas, text)
    return found


async def get_prices(call: AdminCall) -> AdminResult:
    rows = await list_prices(call.connection, call.query.get("model"))
    return call.page(rows, lambda row: f"{row['model']}@{row['valid_from'].astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}")


async def post_price(call: AdminCall) -> AdminResult:
    values = dict(call.values)
    model, since = values.pop("model"), values.pop("valid_from", None)
    if not values:
        raise invalid(None, f"Specify {' or '.join(f'`{column.name}`' for column in settable(prices))}.")
    start = None if since is None else time_of("valid_from", since)
    return call.changed([await set_price(call.connection, model, values, start)])


async def delete_price(call: AdminCall) -> AdminResult:
    """The price before it applies instead."""
    start = time_of("valid_from", call.path["valid_from"])
    return call.changed(await remove_price(call.connection, call.path["model"], start))


ROUTES = [
    read_route(
        "/quotas",
        "List quotas and budgets",
        get_quotas,
        Page[QuotaInList],  # type: ignore[valid-type]
        query=(*PAGES, OF_CUSTOMER, Parameter("tier", "query", "Only quotas of this tier.", NOT_EMPTY)),
    ),
    change_route(
        "POST",
        "/quotas",
        "Set a quota or a budget; it replaces that of the same period and unit",
        post_quota,
        body=NewQuota,
        example={"customer": "acme", "quota": "100 usd/month"},
        status=201,
        etag=False,
    ),
    read_route("/quotas/{id}", "Show a quota", get_quota, QuotaRow, etag=True, parts=_QUOTA),
    change_route(
        "DELETE",
        "/quotas/{id}",
        "Remove a quota",
        delete_quota,
        parts=_QUOTA,
    ),
    read_route(
        "/quota-alerts",
        "List shares of quotas that customers reached, the newest first",
        get_alerts,
        Page[AlertRow],  # type: ignore[valid-type]
        query=(*PAGES, OF_CUSTOMER),
    ),
    read_route(
        "/prices",
        "List prices of models, the latest first",
        get_prices,
        Page[PriceRow],  # type: ignore[valid-type]
        query=(*PAGES, Parameter("model", "query", "Only of this model.", NOT_EMPTY)),
    ),
    change_route(
        "POST",
        "/prices",
        "Set the price of a model from now or a later time on",
        post_price,
        body=NewPrice,
        example={"model": "tiny", "usd_per_gpu_s": 0.002},
        status=201,
        etag=False,
    ),
    change_route(
        "DELETE",
        "/prices/{model}/{valid_from}",
        "Remove a price; the one before it applies instead",
        delete_price,
        parts=_PRICE,
    ),
]
