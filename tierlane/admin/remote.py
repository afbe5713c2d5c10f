"""The catalog of the admin verbs: the functions of `ledger.admin` on a connection, or the same through the admin API with --url.

`either` makes one function of both. An `AdminClient` replaces the connection; functions that have no address in the admin
API raise NeedsServersError.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast
from urllib.parse import quote
from uuid import UUID

import aiohttp
import msgspec
from yarl import URL

from ledger.admin import changes, customers, operators, requests, rows
from ledger.admin.changes import Change, Row
from ledger.admin.errors import TABLES, BadValue, ChangeRejected
from ledger.postgres import Connection
from ledger.schema import metadata
from tierlane.admin.options import VerbCall
from tierlane.connect import NeedsServersError, UsageError, VerbError, database

PREFIX = "/admin/v1"
APPLICATION = "tierlane-admin"
MOST_ROWS = 1000
"""Of one response."""

TIMEOUT = aiohttp.ClientTimeout(total=90.0, sock_connect=5.0)
SPANS = ((604_800, "w"), (86_400, "d"), (3600, "h"), (60, "m"), (1, "s"))
P = ParamSpec("P")
T = TypeVar("T")


class NewSecret(NamedTuple):
    """A new key or token as the admin API returned it."""

    text: str


class AdminClient:
    """The admin API at `url` with the token of an operator. Methods raise VerbError, and ChangeRejected as `ledger.admin`."""

    def __init__(self, url: str, token: str, http: aiohttp.ClientSession, *, dry_run: bool) -> None:
        self._url = url.rstrip("/").removesuffix(PREFIX)
        self._headers = {"Authorization": f"Bearer {token}"}
        self._http = http
        self._dry_run = dry_run

    def __getattr__(self, name: str) -> Any:
        """What of a connection has no address in the admin API."""
        raise NeedsServersError(name)

    async def get(self, *path: object, **query: object) -> Any:
        """The document at an address; parameters of None are left out."""
        return await self._request("GET", path, query, None)

    async def rows(self, name: str, limit: int | None = None, **query: object) -> tuple[list[Row], int | None]:
        """The first rows of a list, all without `limit`; and 0, or None if there are more."""
        found, after = list[Row](), None
        while limit is None or len(found) < limit:
            most = MOST_ROWS if limit is None else min(MOST_ROWS, limit - len(found))
            page = await self.get(name, limit=most, after=after, **query)
            found += page["data"]
            after = page["next"]
            if after is None:
                return found, 0
        return found, None

    async def change(self, method: str, *path: object, **body: Any) -> tuple[list[Change], str]:
        """Make a change, or try it with --dry-run; its rows, and the new key or token."""
        query = {"dry_run": "true"} if self._dry_run else {}
        document = await self._request(method, path, query, None if method == "DELETE" else body)
        made = [
            Change(each["thing"], each["name"], _typed(table, each["old"]), _typed(table, each["new"]))
            for each in document["changes"]
            for table in [TABLES[each["thing"]]]
        ]
        return made, document.get("key") or document.get("token") or ""

    async def _request(
        self, method: str, path: Sequence[object], query: Mapping[str, object], body: Mapping[str, Any] | None
    ) -> Any:
        parts = "".join(f"/{quote(str(part), safe='')}" for part in path)
        url = URL(f"{self._url}{PREFIX}{parts}", encoded=True)
        url = url.with_query({name: str(value) for name, value in query.items() if value is not None})
        try:
            async with self._http.request(
                method, url, headers=self._headers, allow_redirects=False, json=body
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise VerbError(f"The admin API at {self._url} does not respond: {reason}.") from error
        try:
            document = msgspec.json.decode(raw)
            if response.status < 300:
                return document
            message, field = document["error"]["message"], document["error"]["param"]
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise VerbError(f"{self._url} is not an admin API: it returned status {response.status}.") from error
        if response.status == 400:
            raise BadValue(message, field)
        raise ChangeRejected(message) if response.status in (404, 409, 412) else VerbError(message)


@asynccontextmanager
async def catalog(call: VerbCall) -> AsyncIterator[Connection]:
    """The connection of a verb; with --url, an AdminClient that `either` takes instead. Raises UsageError and VerbError."""
    if call.url is None:
        async with database(call.settings, APPLICATION) as connection:
            yield connection
        return
    token = call.settings.admin_token.get_secret_value()
    if not token:
        raise UsageError("TIERLANE_ADMIN_TOKEN: is not set; --url needs the token of an operator")
    if not call.url.startswith(("http://", "https://")):
        raise UsageError(f"--url: must begin with http:// or https://, got {call.url!r}")
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
        yield cast("Connection", AdminClient(call.url, token, http, dry_run=call.dry_run))


def either(
    local: Callable[Concatenate[Connection, P], Awaitable[T]], remote: Callable[..., Awaitable[Any]]
) -> Callable[Concatenate[Connection, P], Awaitable[T]]:
    """A function of `ledger.admin`, and what it is through the admin API: with the same arguments and result."""

    async def function(connection: Connection, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if isinstance(connection, AdminClient):
            result: T = await remote(connection, *args, **kwargs)
            return result
        return await local(connection, *args, **kwargs)

    return function


def _typed(table: str, row: Row | None) -> Row | None:
    """A row of a response with the types that PostgreSQL's has."""
    if row is None:
        return None
    read: dict[type, Callable[[Any], Any]] = {
        datetime: datetime.fromisoformat,
        UUID: UUID,
        Decimal: lambda value: Decimal(str(value)),
    }
    columns = metadata.tables[table].c
    kinds = {name: read.get(columns[name].type.python_type) for name in row if name in columns}
    return {
        name: value if value is None or (convert := kinds.get(name)) is None else convert(value)
        for name, value in row.items()
    }


def _all_typed(table: str, found: Sequence[Row]) -> list[Row]:
    return [cast("Row", _typed(table, row)) for row in found]


def _span(length: timedelta | None) -> dict[str, str]:
    """The field for a lifetime, if there is one."""
    return {} if length is None else {"expires_in": _text(length)}


def _text(length: timedelta) -> str:
    seconds = int(length.total_seconds())
    return next(f"{seconds // unit}{name}" for unit, name in SPANS if seconds % unit == 0)


def _named_rows(name: str) -> Callable[[AdminClient, str | None], Awaitable[list[Row]]]:
    """The rows of a table, or the one with this name."""

    async def read(api: AdminClient, wanted: str | None = None) -> list[Row]:
        found, _ = await api.rows(name)
        return [row for row in _all_typed(name, found) if wanted in (None, row["name"])]

    return read


async def _list_customers(
    api: AdminClient, limit: int, tier: str | None, status: str | None
) -> tuple[list[Row], int | None]:
    found, more = await api.rows("customers", limit, tier=tier, status=status)
    return _all_typed("customers", found), more


async def _find_customer(api: AdminClient, name: str, **_: bool) -> Row:
    return cast("Row", _typed("customers", await api.get("customers", name)))


async def _list_keys(api: AdminClient, limit: int, owner: UUID | None = None) -> tuple[list[Row], int | None]:
    found, more = await api.rows("keys", limit, customer=owner)
    return _all_typed("api_keys", found), more


async def _find_key(api: AdminClient, key: str) -> Row:
    return cast("Row", _typed("api_keys", await api.get("keys", key)))


async def _list_quotas(api: AdminClient, customer: Row | None = None, tier: str | None = None) -> list[Row]:
    found, _ = await api.rows("quotas", customer=customer and customer["id"], tier=tier)
    return found


async def _check_tier(api: AdminClient, name: str) -> None:
    """The list of its quotas checks it."""


async def _count_of(api: AdminClient, customer: Row) -> tuple[int, int]:
    keys, _ = await api.rows("keys", customer=customer["id"])
    return len(keys), sum(row["customer"] is not None for row in await _list_quotas(api, customer))


async def _list_prices(api: AdminClient, model: str | None = None) -> list[Row]:
    found, _ = await api.rows("prices", model=model)
    return _all_typed("prices", found)


async def _set_price(api: AdminClient, model: str, values: Row, start: datetime | None) -> Change:
    since = {} if start is None else {"valid_from": start.isoformat()}
    made, _ = await api.change("POST", "prices", model=model, **values, **since)
    return made[-1]


async def _remove_price(api: AdminClient, model: str, start: datetime) -> list[Change]:
    return (await api.change("DELETE", "prices", model, start.isoformat()))[0]


async def _cordon(api: AdminClient, worker: str, reason: str) -> Change:
    made, _ = await api.change("PUT", "cordons", worker, reason=reason)
    return made[-1]


async def _uncordon(api: AdminClient, worker: str) -> Change | None:
    found, _ = await api.rows("cordons")
    if all(row["worker"] != worker for row in found):
        return None
    return (await api.change("DELETE", "cordons", worker))[0][-1]


async def _list_operators(api: AdminClient) -> list[Row]:
    found, _ = await api.rows("operators")
    return _all_typed("operators", found)


async def _list_config_changes(
    api: AdminClient, limit: int, *, since: timedelta | None = None, **query: str | None
) -> tuple[list[Row], int | None]:
    age = None if since is None else _text(since)
    found, more = await api.rows("config-changes", limit, since=age, **query)
    return _all_typed("config_changes", found), more


async def _search_requests(
    api: AdminClient, limit: int, since: datetime, until: datetime, *, customer_id: UUID | None = None, **wanted: str
) -> list[Row]:
    times = {"from": since.isoformat(), "to": until.isoformat()}
    found, _ = await api.rows("requests", limit, customer=customer_id, **times, **wanted)
    return _all_typed("requests", found)


async def _find(api: AdminClient, table: Any, key: str) -> Row:
    return cast("Row", _typed(table.name, await api.get(table.name, key)))


async def _add(api: AdminClient, table: Any, values: Row) -> Change:
    made, _ = await api.change("POST", table.name, **values)
    return made[-1]


async def _alter(api: AdminClient, table: Any, old: Row, values: Row) -> Change:
    made, _ = await api.change("PATCH", table.name, old["name"], **values)
    return made[-1]


async def _remove(api: AdminClient, table: Any, old: Row) -> Change:
    made, _ = await api.change("DELETE", table.name, old["name"])
    return made[-1]


async def _delete_tier(api: AdminClient, name: str) -> list[Change]:
    return (await api.change("DELETE", "tiers", name))[0]


async def _create_customer(api: AdminClient, name: str, values: Row) -> Change:
    made, _ = await api.change("POST", "customers", name=name, **values)
    return made[-1]


async def _alter_customer(api: AdminClient, name: str, values: Row) -> Change:
    made, _ = await api.change("PATCH", "customers", name, **values)
    return made[-1]


async def _create_key(
    api: AdminClient, customer: str, name: str, lifetime: timedelta | None, limit: Row
) -> tuple[NewSecret, Change]:
    made, key = await api.change("POST", "keys", customer=customer, name=name, **_span(lifetime), **limit)
    return NewSecret(key), made[-1]


async def _alter_key(api: AdminClient, key: str, values: Row) -> Change:
    made, _ = await api.change("PATCH", "keys", key, **values)
    return made[-1]


async def _rotate_key(
    api: AdminClient, key: str, grace: timedelta, lifetime: timedelta | None
) -> tuple[NewSecret, list[Change]]:
    made, new = await api.change("POST", "keys", key, "rotate", grace=_text(grace), **_span(lifetime))
    return NewSecret(new), made


async def _revoke_key(api: AdminClient, key: str) -> Change:
    made, _ = await api.change("DELETE", "keys", key)
    return made[-1]


async def _set_quota(
    api: AdminClient, customer: str | None, tier: str | None, text: str, values: Row | None = None
) -> list[Change]:
    owner = {"customer": customer} if customer is not None else {"tier": tier}
    return (await api.change("POST", "quotas", quota=text, **owner, **(values or {})))[0]


async def _shown_alerts(connection: Connection, limit: int, owner: UUID | None) -> list[Row]:
    return [rows.shown_alert(row) for row in await rows.list_alerts(connection, limit, owner)]


async def _list_alerts(api: AdminClient, limit: int, owner: UUID | None) -> list[Row]:
    found, _ = await api.rows("quota-alerts", limit, customer=owner)
    return _all_typed("quota_alerts", found)


async def _rotate_webhook_secret(api: AdminClient, customer: str, grace: timedelta) -> Change:
    made, _ = await api.change("POST", "customers", customer, "webhook-secret", "rotate", grace=_text(grace))
    return made[-1]


async def _remove_quota(api: AdminClient, customer: str | None, tier: str | None, text: str) -> list[Change]:
    owner = None if customer is None else await _find_customer(api, customer)
    have = [row for row in await _list_quotas(api, owner, tier) if tier is not None or row["customer"] is not None]
    gone = customers.quotas_named(have, text, f"tier {tier}" if owner is None else owner["name"])
    return [each for row in gone for each in (await api.change("DELETE", "quotas", row["id"]))[0]]


async def _create_operator(
    api: AdminClient, name: str, role: str, lifetime: timedelta | None
) -> tuple[NewSecret, Change]:
    made, token = await api.change("POST", "operators", name=name, role=role, **_span(lifetime))
    return NewSecret(token), made[-1]


async def _rotate_operator(api: AdminClient, name: str, lifetime: timedelta | None) -> tuple[NewSecret, Change]:
    made, token = await api.change("POST", "operators", name, "rotate", **_span(lifetime))
    return NewSecret(token), made[-1]


async def _revoke_operator(api: AdminClient, name: str) -> Change:
    made, _ = await api.change("DELETE", "operators", name)
    return made[-1]


list_tiers = either(rows.list_tiers, _named_rows("tiers"))
list_models = either(rows.list_models, _named_rows("models"))
list_customers = either(rows.list_customers, _list_customers)
find_customer = either(rows.find_customer, _find_customer)
list_keys = either(rows.list_keys, _list_keys)
find_key = either(rows.find_key, _find_key)
list_quotas = either(rows.list_quotas, _list_quotas)
check_tier = either(rows.check_tier, _check_tier)
count_of = either(rows.count_of, _count_of)
list_prices = either(rows.list_prices, _list_prices)
set_price = either(rows.set_price, _set_price)
remove_price = either(rows.remove_price, _remove_price)
cordon = either(rows.cordon, _cordon)
uncordon = either(rows.uncordon, _uncordon)
list_operators = either(operators.list_operators, _list_operators)
list_config_changes = either(rows.list_config_changes, _list_config_changes)
search_requests = either(requests.search_requests, _search_requests)
find = either(changes.find, _find)
add = either(changes.add, _add)
alter = either(changes.alter, _alter)
remove = either(changes.remove, _remove)
delete_tier = either(rows.delete_tier, _delete_tier)
create_customer = either(customers.create_customer, _create_customer)
alter_customer = either(customers.alter_customer, _alter_customer)
create_key = either(customers.create_key, _create_key)
alter_key = either(customers.alter_key, _alter_key)
rotate_key = either(customers.rotate_key, _rotate_key)
revoke_key = either(customers.revoke_key, _revoke_key)
set_quota = either(customers.set_quota, _set_quota)
list_alerts = either(_shown_alerts, _list_alerts)
rotate_webhook_secret = either(customers.rotate_webhook_secret, _rotate_webhook_secret)
remove_quota = either(customers.remove_quota, _remove_quota)
create_operator = either(operators.create_operator, _create_operator)
rotate_operator = either(operators.rotate_operator, _rotate_operator)
revoke_operator = either(operators.revoke_operator, _revoke_operator)
