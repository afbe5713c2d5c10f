"""How the actions of the page for on-call are described; they stand in the table of gateway/openapi/endpoints.py."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.openapi.model import inside
from gateway.openapi_door import Door
from gateway.operations.action_requests import (
    CordonBody,
    Cordoned,
    PurgeBody,
    Purged,
    RequeueBody,
    Requeued,
    UncordonBody,
)
from ledger.letter_groups import LetterGroups
from scheduler.errors import ErrorCode

WORKERS = "/internal/dashboard/workers"
LETTERS = "/internal/dashboard/dead-letters"
REFUSED = (
    ErrorCode.CROSS_SITE,
    ErrorCode.CATALOG_UNAVAILABLE,
    ErrorCode.REQUEST_TOO_LARGE,
    ErrorCode.UNSUPPORTED_ENCODING,
)
CONFIRMED = (
    "It carries what was confirmed, and is refused where that is not so any more. A browser sends its cookie, and must say by "
    "`Sec-Fetch-Site` or `Origin` that the page itself asks. A row of `config_changes` tells of it."
)
LETTER: Mapping[str, Any] = {"up_to": 41, "tier": "paid", "model": "tiny", "error_code": "worker_lost"}


def _acts(
    path: str, summary: str, body: type, says: tuple[str, Any], example: Mapping[str, Any], *more: ErrorCode
) -> Door:
    return replace(
        inside(path, summary, {200: says}, *REFUSED, *more),
        methods=("POST",),
        body=body,
        example=example,
        text=CONFIRMED,
    )


ACTION_DOORS: tuple[Door, ...] = (
    _acts(
        f"{WORKERS}/cordon",
        "No new work for a worker",
        CordonBody,
        ("It is cordoned.", Cordoned),
        {"worker": "worker-1", "healthy_left": 3, "reason": "its fan is loud"},
        ErrorCode.NOT_FOUND,
        ErrorCode.CHANGED_MEANWHILE,
    ),
    _acts(
        f"{WORKERS}/uncordon",
        "A worker may have work again",
        UncordonBody,
        ("It is not cordoned.", Cordoned),
        {"worker": "worker-1"},
        ErrorCode.NOT_FOUND,
    ),
    inside(
        LETTERS,
        "How many dead letters there are, by tier, model and cause",
        {200: ("Counted.", LetterGroups)},
        ErrorCode.CATALOG_UNAVAILABLE,
    ),
    _acts(
        f"{LETTERS}/requeue",
        "Run dead letters again: the oldest 32 of those that were confirmed",
        RequeueBody,
        ("How each ended.", Requeued),
        {"count": 2, "after": 0, **LETTER},
        ErrorCode.CHANGED_MEANWHILE,
    ),
    _acts(
        f"{LETTERS}/purge",
        "Delete dead letters for good",
        PurgeBody,
        ("They are gone.", Purged),
        {"count": 2, **LETTER},
        ErrorCode.CHANGED_MEANWHILE,
    ),
)
