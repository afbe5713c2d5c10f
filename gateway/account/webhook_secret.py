"""`/v1/webhook-secret`: the secret that signs the callbacks of a customer that may manage its keys."""

from datetime import timedelta
from typing import Annotated, Literal

import msgspec

from gateway.account.jobs import seconds
from gateway.http.body.strict_json import check_duplicates, decode
from gateway.jobs.webhook_security import customer_key, secret_text
from ledger.catalog.webhook_secret import GRACE, LEAST_GRACE, MOST_GRACE, WebhookSecrets

GRACE_S = int(GRACE.total_seconds())

Grace = Annotated[int, msgspec.Meta(ge=int(LEAST_GRACE.total_seconds()), le=int(MOST_GRACE.total_seconds()))]


class SecretRotation(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of `POST /v1/webhook-secret/rotate`. `grace_s`: seconds for which earlier secrets stay valid."""

    grace_s: Grace = GRACE_S


class WebhookSecretItem(msgspec.Struct, kw_only=True, gc=False):
    """The secret and its number, which a rotation increments. Until `earlier_valid_until`, Unix seconds, earlier secrets sign
    callbacks as well; null: none does.
    """

    secret: str
    number: int
    earlier_valid_until: int | None
    object: Literal["webhook_secret"] = "webhook_secret"


_decoder = msgspec.json.Decoder(SecretRotation)


def read_grace(raw: bytes) -> timedelta:
    """The grace time of a body, which may be empty. Raises RequestError that names the field."""
    if not raw:
        return GRACE
    body = decode(_decoder, raw)
    check_duplicates(raw)
    return timedelta(seconds=body.grace_s)


def webhook_secret_item(deployment: bytes, customer_id: str, secrets: WebhookSecrets) -> WebhookSecretItem:
    """The item of the newest secret. `deployment`: the secret of the deployment."""
    number = secrets.webhook_secret
    secret = secret_text(customer_key(deployment, customer_id, number))
    return WebhookSecretItem(secret=secret, number=number, earlier_valid_until=seconds(secrets.webhook_secret_until))
