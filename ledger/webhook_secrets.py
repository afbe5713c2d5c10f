"""The webhook secrets of a customer that manages its keys. Plain SQL, since SQLAlchemy would cost each gateway 15 MB."""

from datetime import timedelta
from typing import Any

from ledger.admin.transaction import as_actor
from ledger.catalog.snapshot import Identity
from ledger.catalog.webhook_secret import WebhookSecrets
from ledger.keys import actor, check_manages_keys
from ledger.postgres import Connection, statement


async def read_webhook_secrets(connection: Connection, caller: Identity) -> WebhookSecrets:
    """Those of the caller's customer. Raises KeysNotManaged."""
    row: Any = await connection.fetchrow(statement("webhook_secrets"), caller.customer_id)
    return _secrets(row).current(row["now"])


async def rotate_webhook_secret(connection: Connection, caller: Identity, grace: timedelta) -> WebhookSecrets:
    """Add a secret; those that are valid stay valid for `grace`. Raises KeysNotManaged and TooManySecrets.

    A call that is repeated adds a further one.
    """
    async with as_actor(connection, actor(caller)):
        row: Any = await connection.fetchrow(statement("lock_webhook_secrets"), caller.customer_id)
        secrets = _secrets(row).rotated(grace, row["now"])
        await connection.execute(statement("set_webhook_secrets"), caller.customer_id, *secrets)
    return secrets


def _secrets(row: Any) -> WebhookSecrets:
    check_manages_keys(row and row["manages_keys"])
    return WebhookSecrets(*(row[name] for name in WebhookSecrets._fields))
