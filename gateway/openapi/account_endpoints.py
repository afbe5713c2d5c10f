"""The description of the endpoints of a customer's own account: limits, usage, jobs, keys and the webhook secret."""

from typing import Any

from gateway.account.jobs import JOB_IDS, JOB_PAGE, MAX_JOB_PAGE, JobItem
from gateway.account.keys import KEY_IDS, KEY_PAGE, MAX_KEY_PAGE, KeyBody, KeyItem, NewKeyItem
from gateway.account.usage import DEFAULT_DAYS, GROUPS, MOST_DAYS, PAGE, UsageItem
from gateway.account.webhook_secret import SecretRotation, WebhookSecretItem
from gateway.api.account_document import Account
from gateway.http.pages import ObjectList
from gateway.openapi.endpoint_kinds import account_endpoint, page_parameters
from gateway.openapi.model import ApiEndpoint, Parameter
from gateway.openapi.schemas import NOT_EMPTY, only
from scheduler.errors import ErrorCode

_DAY = {"type": "string", "format": "date", "pattern": "^20[0-9]{2}-[0-9]{2}-[0-9]{2}$"}


def _keys(path: str, summary: str, kind: Any, *errors: ErrorCode, **fields: Any) -> ApiEndpoint:
    """An endpoint for customers that may manage their keys."""
    codes = (ErrorCode.PERMISSION_DENIED, ErrorCode.DRAINING, *errors)
    return account_endpoint(path, summary, kind, *codes, headers=("Cache-Control",), **fields)


ACCOUNT: tuple[ApiEndpoint, ...] = (
    account_endpoint("/v1/me", "Current limits, what is left, usage of 24 hours", Account, headers=("Cache-Control",)),
    account_endpoint(
        "/v1/usage",
        "Requests, tokens and cost by day, model or key",
        ObjectList[UsageItem],
        ErrorCode.DRAINING,
        headers=("Cache-Control",),
        parameters=(
            Parameter(
                "from", "query", f"The first day, in UTC; {DEFAULT_DAYS} days by default, {MOST_DAYS} at most.", _DAY
            ),
            Parameter("to", "query", "The last day, in UTC; it is included. Today by default.", _DAY),
            Parameter("by", "query", "The groups, `day` by default.", only(*GROUPS)),
            *page_parameters(PAGE, PAGE),
        ),
    ),
    account_endpoint(
        "/v1/jobs",
        "List the asynchronous jobs",
        ObjectList[JobItem],
        ErrorCode.DRAINING,
        headers=("Cache-Control",),
        parameters=page_parameters(JOB_PAGE, MAX_JOB_PAGE, JOB_IDS),
    ),
    _keys(
        "/v1/keys",
        "List the own keys",
        ObjectList[KeyItem],
        parameters=page_parameters(KEY_PAGE, MAX_KEY_PAGE, KEY_IDS),
    ),
    _keys(
        "/v1/keys",
        "Create a key",
        NewKeyItem,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.QUOTA_EXCEEDED,
        ErrorCode.REQUEST_TOO_LARGE,
        ErrorCode.UNSUPPORTED_MEDIA_TYPE,
        ErrorCode.UNSUPPORTED_ENCODING,
        methods=("POST",),
        body=KeyBody,
        example={"name": "ci"},
        description="It has at most the rights of the calling key. `key` is shown only in this response.",
    ),
    _keys(
        "/v1/keys/{id}",
        "Revoke a key",
        KeyItem,
        ErrorCode.NOT_FOUND,
        methods=("DELETE",),
        parameters=(Parameter("id", "path", "The id of a key, its public part.", NOT_EMPTY),),
    ),
    _keys("/v1/webhook-secret", "Read the secret that signs callbacks", WebhookSecretItem, ErrorCode.NOT_FOUND),
    _keys(
        "/v1/webhook-secret/rotate",
        "Replace the secret that signs callbacks",
        WebhookSecretItem,
        ErrorCode.NOT_FOUND,
        ErrorCode.QUOTA_EXCEEDED,
        ErrorCode.REQUEST_TOO_LARGE,
        ErrorCode.UNSUPPORTED_MEDIA_TYPE,
        ErrorCode.UNSUPPORTED_ENCODING,
        methods=("POST",),
        body=SecretRotation,
        body_required=False,
        example={"grace_s": 86400},
        description="Until the grace time is over, callbacks are signed with the earlier secrets as well.",
    ),
)
"""The own account."""
