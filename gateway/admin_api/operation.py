"""Cells, cordoned workers, pools and operators."""

from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.admin_api.bodies import IssuedToken, Page, body_type, row_type, text_field
from gateway.admin_api.roles import Action
from gateway.admin_api.route import DURATION, PAGES, AdminCall, AdminResult, change_route, etag_of, read_route
from ledger.admin.changes import Change, Row, add, alter, missing
from ledger.admin.errors import ChangeRejected
from ledger.admin.operators import create_operator, list_operators, revoke_operator, rotate_operator
from ledger.admin.rows import (
    DEFAULT_ROW,
    cordon,
    count_residents,
    drain_cell,
    list_cells,
    list_cordons,
    list_models,
    locked_cells,
    open_cell,
    uncordon,
)
from ledger.audit.queries import recent_workers
from ledger.schema.catalog import cells, cordons, operators

RECENT_S = 600
WORKERS_TIMEOUT_MS = 10_000
"""Of the statement that finds the workers in the audit."""

_CELL = {"name": "Name of the cell."}
_WORKER = {"worker": "Id of the worker."}
_OPERATOR = {"name": "Name of the operator."}
_ROLE = Annotated[Literal["viewer", "operator", "admin"], Meta(description=operators.c.role.comment)]
_EXPIRES_IN = text_field(
    "expires_in", "Reject the token after this time, such as 90d; default: never.", pattern=DURATION
)

CellInList = row_type("CellInList", cells, [("customers", int)])
CellChanges = body_type(
    "CellChanges",
    [cells.c.weight],
    [("state", Annotated[Literal["open", "draining"], Meta(description=cells.c.state.comment)] | UnsetType, UNSET)],
)
CordonRow = row_type("CordonRow", cordons)
CordonReason = body_type("CordonReason", [cordons.c.reason])
OperatorRow = row_type("OperatorRow", operators, [("state", Literal["live", "expired", "revoked"])])
NewOperator = body_type(
    "NewOperator", [], [text_field("name", "Its name.", required=True), ("role", _ROLE), _EXPIRES_IN]
)
OperatorChanges = body_type("OperatorChanges", [], [("role", _ROLE)])
NewToken = body_type("NewTokenBody", [], [_EXPIRES_IN])


class WorkerOfAudit(msgspec.Struct):
    """A worker, its requests of the last ten minutes by the audit, and its cordon or null."""

    worker: str
    requests: int
    last_request_at: datetime | None
    cordon: CordonRow | None  # type: ignore[valid-type]


class PoolOfModels(msgspec.Struct):
    """A pool, as far as the catalog has it: the models that name it."""

    name: str
    models: list[str]
    enabled_models: list[str]


async def get_cells(call: AdminCall) -> AdminResult:
    return call.page(await _counted_cells(call), lambda row: str(row["name"]))


async def get_cell(call: AdminCall) -> AdminResult:
    row = _named(await _counted_cells(call), call.path["name"])
    if row is None:
        raise missing(cells, call.path["name"])
    return AdminResult(row, etag_of(cells, row))


async def patch_cell(call: AdminCall) -> AdminResult:
    """Drain, open again, or change the weight. The default cell may have no row yet."""
    name, state, changes = call.path["name"], call.values.get("state"), list[Change]()
    old = (await locked_cells(call.connection)).get(name)
    if old is None and name != DEFAULT_ROW["name"]:
        raise missing(cells, name)
    call.check(cells, DEFAULT_ROW if old is None else old)
    if old is not None and old["state"] == "closed":
        raise ChangeRejected(f"Cell {name} is closed; `tierlane cell open` checks its server and opens it again.")
    if "weight" in call.values:
        weight = {"weight": call.values["weight"]}
        if old is None:
            changes.append(await add(call.connection, cells, {"name": name, **weight}))
        else:
            changes.append(await alter(call.connection, cells, old, weight))
    if state == "draining":
        changes.append(await drain_cell(call.connection, name))
    elif state == "open":
        changes.append(await open_cell(call.connection, name, {}))
    return call.changed(changes, cells)


async def get_cordons(call: AdminCall) -> AdminResult:
    return call.page(await list_cordons(call.connection), lambda row: str(row["worker"]))


async def get_cordon(call: AdminCall) -> AdminResult:
    found = [row for row in await list_cordons(call.connection) if row["worker"] == call.path["worker"]]
    if not found:
        raise missing(cordons, call.path["worker"])
    return AdminResult(found[0], etag_of(cordons, found[0]))


async def put_cordon(call: AdminCall) -> AdminResult:
    if call.if_match is not None:
        await call.lock(cordons, call.path["worker"])
    return call.changed([await cordon(call.connection, call.path["worker"], call.values.get("reason", ""))], cordons)


async def delete_cordon(call: AdminCall) -> AdminResult:
    await call.lock(cordons, call.path["worker"])
    change = await uncordon(call.connection, call.path["worker"])
    return call.changed([] if change is None else [change])


async def get_workers(call: AdminCall) -> AdminResult:
    """By the audit and the cordons: the admin API does not read Redis, which has the heartbeats."""
    cordoned = {row["worker"]: row for row in await list_cordons(call.connection)}
    recent = await recent_workers(call.connection, RECENT_S, timeout_ms=WORKERS_TIMEOUT_MS)
    found = {each.worker: each for each in recent}
    rows = []
    for worker in sorted(cordoned.keys() | found.keys()):
        ran, cordon_row = found.get(worker), cordoned.get(worker)
        rows.append(
            {
                "worker": worker,
                "requests": ran.requests if ran else 0,
                "last_request_at": ran.last_request_at if ran else None,
                "cordon": cordon_row,
            }
        )
    return call.page(rows, lambda row: str(row["worker"]))


async def get_pools(call: AdminCall) -> AdminResult:
    found: dict[str, PoolOfModels] = {}
    for row in await list_models(call.connection):
        pool = found.setdefault(row["pool"], PoolOfModels(row["pool"], [], []))
        pool.models.append(row["name"])
        pool.enabled_models += [row["name"]] if row["enabled"] else []
    return call.page([msgspec.structs.asdict(found[name]) for name in sorted(found)], lambda row: str(row["name"]))


async def get_operators(call: AdminCall) -> AdminResult:
    return call.page(await list_operators(call.connection), lambda row: str(row["name"]))


async def get_operator(call: AdminCall) -> AdminResult:
    row = _named(await list_operators(call.connection, call.path["name"]), call.path["name"])
    if row is None:
        raise missing(operators, call.path["name"])
    return AdminResult(row, etag_of(operators, row))


async def post_operator(call: AdminCall) -> AdminResult:
    lifetime = call.duration("expires_in")
    token, change = await create_operator(call.connection, call.values["name"], call.values["role"], lifetime)
    return call.changed([change], operators, token=token.text)


async def patch_operator(call: AdminCall) -> AdminResult:
    row = await call.lock(operators, call.path["name"])
    return call.changed([await alter(call.connection, operators, row, call.values)], operators)


async def post_operator_rotation(call: AdminCall) -> AdminResult:
    lifetime = call.duration("expires_in")
    token, change = await rotate_operator(call.connection, call.path["name"], lifetime)
    return call.changed([change], operators, token=token.text)


async def delete_operator(call: AdminCall) -> AdminResult:
    """The row of a revoked operator stays."""
    await call.lock(operators, call.path["name"])
    return call.changed([await revoke_operator(call.connection, call.path["name"])], operators)


async def _counted_cells(call: AdminCall) -> list[Row]:
    """All cells, each with the number of its customers."""
    rows = await list_cells(call.connection)
    residents = await count_residents(call.connection, rows)
    return [row | {"customers": residents[row["name"]]} for row in rows]


def _named(rows: list[Row], name: str) -> Row | None:
    return next((row for row in rows if row["name"] == name), None)


ROUTES = [
    read_route("/cells", "List cells", get_cells, Page[CellInList], query=PAGES),  # type: ignore[valid-type]
    read_route("/cells/{name}", "Show a cell", get_cell, CellInList, etag=True, parts=_CELL),
    change_route(
        "PATCH",
        "/cells/{name}",
        "Drain a cell, open a draining one again, or change its weight",
        patch_cell,
        body=CellChanges,
        example={"state": "draining"},
        fields=frozenset({"state"}),
        action_of_fields=Action.DRAIN_CELL,
        parts=_CELL,
    ),
    read_route("/cordons", "List cordoned workers", get_cordons, Page[CordonRow], query=PAGES),  # type: ignore[valid-type]
    read_route("/cordons/{worker}", "Show a cordon", get_cordon, CordonRow, etag=True, parts=_WORKER),
    change_route(
        "PUT",
        "/cordons/{worker}",
        "Send no new work to a worker, also after a restart",
        put_cordon,
        action=Action.CORDON,
        body=CordonReason,
        body_required=False,
        example={"reason": "its fan is loud"},
        parts=_WORKER,
    ),
    change_route(
        "DELETE",
        "/cordons/{worker}",
        "Send new work to a worker again",
        delete_cordon,
        action=Action.CORDON,
        parts=_WORKER,
    ),
    read_route(
        "/workers",
        "List workers that ran requests in the last ten minutes, by the audit, or are cordoned",
        get_workers,
        Page[WorkerOfAudit],
        query=PAGES,
    ),
    read_route("/pools", "List the pools that models name", get_pools, Page[PoolOfModels], query=PAGES),
    read_route("/operators", "List operators", get_operators, Page[OperatorRow], query=PAGES),  # type: ignore[valid-type]
    read_route("/operators/{name}", "Show an operator", get_operator, OperatorRow, etag=True, parts=_OPERATOR),
    change_route(
        "POST",
        "/operators",
        "Add an operator; the token is shown only in this response",
        post_operator,
        body=NewOperator,
        example={"name": "ann", "role": "operator", "expires_in": "90d"},
        result=IssuedToken,
        status=201,
    ),
    change_route(
        "PATCH",
        "/operators/{name}",
        "Change the role of an operator",
        patch_operator,
        body=OperatorChanges,
        example={"role": "viewer"},
        parts=_OPERATOR,
    ),
    change_route(
        "POST",
        "/operators/{name}/rotate",
        "Replace the token of an operator at once, also one that is revoked",
        post_operator_rotation,
        body=NewToken,
        body_required=False,
        result=IssuedToken,
        status=201,
        parts=_OPERATOR,
    ),
    change_route(
        "DELETE",
        "/operators/{name}",
        "Revoke the token of an operator; its row is kept",
        delete_operator,
        parts=_OPERATOR,
        etag=True,
    ),
]
