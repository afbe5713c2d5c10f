"""Customers and their API keys."""

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import asdict

from gateway.admin_api.bodies import IssuedKey, Page, body_type, row_type, text_field
from gateway.admin_api.roles import Action
from gateway.admin_api.route import DURATION, PAGES, AdminCall, AdminResult, change_route, etag_of, read_route
from gateway.jobs.webhook_security import customer_key, secret_text
from gateway.openapi.model import Parameter
from gateway.openapi.schemas import NOT_EMPTY, only
from ledger.admin.changes import Row, remove
from ledger.admin.columns import settable
from ledger.admin.customers import (
    alter_customer,
    alter_key,
    create_customer,
    create_key,
    key_limit,
    revoke_key,
    rotate_key,
    rotate_webhook_secret,
)
from ledger.admin.errors import ChangeRejected
from ledger.admin.quota_usage import CountedQuota, quota_usage
from ledger.admin.rows import find_customer, find_key, list_customers, list_keys
from ledger.admin.values import duration_of
from ledger.schema.catalog import api_keys, customers

STATUS = ("active", "suspended")
GRACE = "24h"
OF_CUSTOMER = Parameter("customer", "query", "Only of this customer, by name or id.", NOT_EMPTY)
_CUSTOMER = {"customer": "The customer, by name or id."}
_KEY = {"id": "Public part of the key: tl_<id>_..."}
_EXPIRES_IN = text_field("expires_in", "Reject the key after this time, such as 30d; default: never.", pattern=DURATION)

_LISTED = (
    *PAGES,
    Parameter("tier", "query", "Only customers of this tier.", NOT_EMPTY),
    Parameter("status", "query", "Only customers with this status.", only(*STATUS)),
    Parameter("search", "query", "Only customers whose name has this part, in either case.", NOT_EMPTY),
)

Customer = row_type("Customer", customers)
CustomerInList = row_type("CustomerInList", customers, [("live_keys", int)])
NewCustomer = body_type(
    "NewCustomer", settable(customers), [text_field("name", "Unique name.", required=True)], new=True
)
CustomerChanges = body_type(
    "CustomerChanges",
    settable(customers),
    [
        (
            "status",
            Annotated[Literal["active", "suspended"], Meta(description=customers.c.status.comment)] | UnsetType,
            UNSET,
        )
    ],
)
SecretGrace = body_type(
    "SecretGrace",
    [],
    [text_field("grace", f"How long the earlier secrets stay valid, 1h to 7d; default: {GRACE}.")],
)
Key = row_type("Key", api_keys, [("customer", str), ("state", Literal["live", "expired", "revoked", "suspended"])])
NewKeyBody = body_type(
    "NewKey",
    settable(api_keys),
    [
        text_field("customer", "The customer, by name or id.", required=True),
        text_field("name", "Purpose of the key.", required=True),
        _EXPIRES_IN,
    ],
)
KeyChanges = body_type(
    "KeyChanges",
    settable(api_keys),
    [
        text_field("name", "Purpose of the key."),
        (
            "expires_at",
            Annotated[datetime, Meta(tz=True, description=api_keys.c.expires_at.comment)] | None | UnsetType,
            UNSET,
        ),
    ],
)
Rotation = body_type(
    "Rotation",
    [],
    [
        text_field("grace", f"How long the old key stays valid, such as 24h; default: {GRACE}.", pattern=DURATION),
        text_field(
            "expires_in",
            "Reject the new key after this time; default: the lifetime of the old one.",
            pattern=DURATION,
        ),
    ],
)


class WebhookSecretShown(Struct):
    """The newest webhook secret of a customer, and its number."""

    customer: str
    secret: str
    number: int


class QuotasOfCustomer(Struct):
    """The quotas that apply to a customer."""

    customer: str
    customer_id: UUID
    quotas: list[CountedQuota]


async def _listed(call: AdminCall) -> list[Row]:
    tier, status = call.query.get("tier"), call.choice("status", STATUS)
    after, search = call.query.get("after"), call.query.get("search")
    rows, _ = await list_customers(call.connection, call.limit + 1, tier, status, after=after, search=search)
    return rows


async def get_customers(call: AdminCall) -> AdminResult:
    return call.part(await _listed(call), lambda row: str(row["name"]))


async def get_quota_usage(call: AdminCall) -> AdminResult:
    """Of the customers of the same part of `GET /customers`, or of one customer."""
    customer = call.query.get("customer")
    rows = await _listed(call) if customer is None else [await find_customer(call.connection, customer)]
    used = await quota_usage(call.connection, rows[: call.limit])
    parts = [
        {
            "customer": row["name"],
            "customer_id": row["id"],
            "quotas": [asdict(each) for each in used.get(row["id"], [])],
        }
        for row in rows
    ]
    return call.part(parts, lambda row: str(row["customer"]))


async def get_customer(call: AdminCall) -> AdminResult:
    row = await find_customer(call.connection, call.path["customer"])
    return AdminResult(row, etag_of(customers, row))


async def post_customer(call: AdminCall) -> AdminResult:
    values = dict(call.values)
    return call.changed([await create_customer(call.connection, values.pop("name"), values)], customers)


async def patch_customer(call: AdminCall) -> AdminResult:
    row = await find_customer(call.connection, call.path["customer"], lock=True)
    call.check(customers, row)
    return call.changed([await alter_customer(call.connection, row["name"], call.values)], customers)


async def get_webhook_secret(call: AdminCall) -> AdminResult:
    if not call.callback_secret:
        raise ChangeRejected("TIERLANE_CALLBACK_SECRET is not set here. Set it to the value of the gateways.")
    row = await find_customer(call.connection, call.path["customer"])
    key = customer_key(call.callback_secret, str(row["id"]), row["webhook_secret"])
    return AdminResult(
        WebhookSecretShown(row["name"], secret_text(key), row["webhook_secret"]), etag_of(customers, row)
    )


async def post_secret_rotation(call: AdminCall) -> AdminResult:
    grace = duration_of("grace", call.values.get("grace", GRACE))
    row = await find_customer(call.connection, call.path["customer"], lock=True)
    call.check(customers, row)
    return call.changed([await rotate_webhook_secret(call.connection, row["name"], grace)], customers)


async def delete_customer(call: AdminCall) -> AdminResult:
    row = await find_customer(call.connection, call.path["customer"], lock=True)
    call.check(customers, row)
    return call.changed([await remove(call.connection, customers, row)])


async def get_keys(call: AdminCall) -> AdminResult:
    customer, owner = call.query.get("customer"), None
    if customer is not None:
        owner = (await find_customer(call.connection, customer))["id"]
    rows, _ = await list_keys(call.connection, call.limit + 1, owner, after=call.query.get("after"))
    return call.part(rows, lambda row: str(row["id"]))


async def get_key(call: AdminCall) -> AdminResult:
    row = await find_key(call.connection, call.path["id"])
    return AdminResult(row, etag_of(api_keys, row))


async def post_key(call: AdminCall) -> AdminResult:
    values = dict(call.values)
    customer, name = values.pop("customer"), values.pop("name")
    values.pop("expires_in", None)
    key, change = await create_key(call.connection, customer, name, call.duration("expires_in"), key_limit(values))
    return call.changed([change], api_keys, key=key.text)


async def post_rotation(call: AdminCall) -> AdminResult:
    grace = call.duration("grace") or duration_of("grace", GRACE)
    lifetime = call.duration("expires_in")
    await call.lock(api_keys, call.path["id"])
    key, changes = await rotate_key(call.connection, call.path["id"], grace, lifetime)
    return call.changed(changes, key=key.text)


async def patch_key(call: AdminCall) -> AdminResult:
    row = await call.lock(api_keys, call.path["id"])
    return call.changed([await alter_key(call.connection, row["id"], call.values)], api_keys)


async def delete_key(call: AdminCall) -> AdminResult:
    """The row of a revoked key stays."""
    await call.lock(api_keys, call.path["id"])
    return call.changed([await revoke_key(call.connection, call.path["id"])], api_keys)


ROUTES = [
    read_route(
        "/customers",
        "List customers by name",
        get_customers,
        Page[CustomerInList],  # type: ignore[valid-type]
        query=_LISTED,
    ),
    read_route(
        "/quota-usage",
        "List what customers have used of their quotas and budgets, by the audit",
        get_quota_usage,
        Page[QuotasOfCustomer],
        query=(*_LISTED, OF_CUSTOMER),
    ),
    change_route(
        "POST",
        "/customers",
        "Create a customer",
        post_customer,
        body=NewCustomer,
        example={"name": "acme", "tier": "paid"},
        status=201,
    ),
    read_route("/customers/{customer}", "Show a customer", get_customer, Customer, etag=True, parts=_CUSTOMER),
    change_route(
        "PATCH",
        "/customers/{customer}",
        "Change a customer; suspend or activate it",
        patch_customer,
        body=CustomerChanges,
        example={"tier": "enterprise", "burst": None},
        fields=frozenset({"status"}),
        action_of_fields=Action.SUSPEND_CUSTOMER,
        parts=_CUSTOMER,
    ),
    read_route(
        "/customers/{customer}/webhook-secret",
        "Show the secret that signs the callbacks of a customer",
        get_webhook_secret,
        WebhookSecretShown,
        action=Action.ADMINISTER,
        etag=True,
        parts=_CUSTOMER,
    ),
    change_route(
        "POST",
        "/customers/{customer}/webhook-secret/rotate",
        "Make a new webhook secret; until the grace time is over, the earlier ones sign callbacks as well",
        post_secret_rotation,
        body=SecretGrace,
        body_required=False,
        example={"grace": "24h"},
        parts=_CUSTOMER,
    ),
    change_route(
        "DELETE",
        "/customers/{customer}",
        "Delete a customer with its keys and quotas; the audit of its requests is kept",
        delete_customer,
        parts=_CUSTOMER,
    ),
    read_route(
        "/keys",
        "List API keys, the newest first",
        get_keys,
        Page[Key],  # type: ignore[valid-type]
        query=(*PAGES, OF_CUSTOMER),
    ),
    change_route(
        "POST",
        "/keys",
        "Issue an API key; it is shown only in this response",
        post_key,
        body=NewKeyBody,
        example={"customer": "acme", "name": "ci", "expires_in": "90d"},
        result=IssuedKey,
        status=201,
    ),
    read_route("/keys/{id}", "Show an API key, without its secret", get_key, Key, etag=True, parts=_KEY),
    change_route(
        "PATCH",
        "/keys/{id}",
        "Change the name, the expiry, the limits, quotas or models of an API key",
        patch_key,
        body=KeyChanges,
        example={"expires_at": "2027-01-01T00:00:00Z"},
        parts=_KEY,
    ),
    change_route(
        "DELETE",
        "/keys/{id}",
        "Revoke an API key; its row is kept",
        delete_key,
        action=Action.REVOKE_KEY,
        parts=_KEY,
        etag=True,
    ),
    change_route(
        "POST",
        "/keys/{id}/rotate",
        "Issue a second key; both work until the old one expires after the grace time",
        post_rotation,
        body=Rotation,
        body_required=False,
        example={"grace": "24h"},
        result=IssuedKey,
        status=201,
        parts=_KEY,
        etag=False,
    ),
]
