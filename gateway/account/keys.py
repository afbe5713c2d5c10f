"""`/v1/keys`: the API keys of a customer that may manage them. Documents, and the body of a new key."""

import time
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec

from gateway.account.jobs import seconds
from gateway.http.body.strict_json import check_duplicates, decode
from gateway.http.validation import PRINTABLE, invalid
from gateway.served_models import model_not_found, visible
from ledger.catalog.snapshot import Identity
from ledger.keys import KeyTerms, OwnKey
from scheduler.errors import RequestError

KEY_PAGE, MAX_KEY_PAGE = 20, 100
KEY_IDS = "^([a-z0-9]{12})?$"
MAX_MODELS = 100
MAX_QUOTAS = 10
MAX_TIME = 32_503_680_000  # The year 3000.

Rate = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]
Burst = Annotated[float, msgspec.Meta(ge=1, le=10_000_000)]
Time = Annotated[int, msgspec.Meta(gt=0, le=MAX_TIME)]
KeyName = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=PRINTABLE)]
Models = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_MODELS)]
Quotas = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_QUOTAS)]


class KeyBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of `POST /v1/keys`. What is absent or null is as of the calling key. `requests_per_second`: at most that of the account.
    `expires_at`: Unix seconds. `quotas`: such as `10/day` or `100 usd/month`; not if the calling key has quotas, which the new key then
    shares.
    """

    name: KeyName
    models: Models | None = None
    requests_per_second: Rate | None = None
    burst: Burst | None = None
    expires_at: Time | None = None
    quotas: Quotas | None = None


class KeyItem(msgspec.Struct, kw_only=True, gc=False):
    """A key, without its secret. Times are Unix seconds; null: never, or no own limit. `models`: null for those of the customer.
    `quotas`: beside those of the customer; null: none.
    """

    id: str
    name: str
    state: Literal["live", "expired", "revoked"]
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None
    requests_per_second: float | None
    burst: float | None
    models: list[str] | None
    quotas: list[str] | None
    object: Literal["key"] = "key"


class NewKeyItem(KeyItem, kw_only=True, gc=False):
    """A new key with its secret, `key`, which is not stored and never shown again."""

    key: str


_decoder = msgspec.json.Decoder(KeyBody)


def read_new_key(raw: bytes, identity: Identity, served: Collection[str]) -> tuple[str, KeyTerms]:
    """The name and the terms of the new key. `served`: all models. Raises RequestError that names the field."""
    try:
        body = decode(_decoder, raw)
    except RequestError as error:
        if error.param != "quotas":
            raise
        raise invalid("quotas", f'{error.message} An example is `["10/day", "100 usd/month"]`.') from None
    check_duplicates(raw)
    for name in body.models or ():
        if name not in visible(served, identity.models):
            raise model_not_found("models", served, identity.models)
    models = None if body.models is None else list(dict.fromkeys(body.models))
    expires_at = None if body.expires_at is None else datetime.fromtimestamp(body.expires_at, UTC)
    return body.name, KeyTerms(models, body.requests_per_second, body.burst, None, expires_at, body.quotas)


def key_item(row: OwnKey) -> KeyItem:
    """The item of a row."""
    expired = row.expires_at is not None and row.expires_at.timestamp() <= time.time()
    return KeyItem(
        id=row.id,
        name=row.name,
        state="revoked" if row.revoked_at is not None else "expired" if expired else "live",
        created_at=int(row.created_at.timestamp()),
        expires_at=seconds(row.expires_at),
        revoked_at=seconds(row.revoked_at),
        last_used_at=seconds(row.last_used_at),
        requests_per_second=row.requests_per_second,
        burst=row.burst,
        models=row.models,
        quotas=row.quotas,
    )


def new_key_item(row: OwnKey, key: str) -> NewKeyItem:
    """The item of a new key with its secret."""
    return NewKeyItem(key=key, **msgspec.structs.asdict(key_item(row)))
