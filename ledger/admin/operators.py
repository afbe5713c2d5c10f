"""Operators of the admin API: their tokens `tlo_<secret><checksum>`, and their rows.

A token has a secret and a checksum as an API key has (`ledger.catalog.api_key`); only the SHA-256 of its secret is stored.
Functions that change rows raise ChangeRejected.
"""

import re
from datetime import datetime, timedelta
from hashlib import sha256
from typing import NamedTuple

from sqlalchemy import case, func, select, update

from ledger.admin.changes import Change, Row, add, alter, fetch, fetch_one, find, seen, transaction_time
from ledger.catalog.api_key import CHECKSUM_LENGTH, SECRET_LENGTH, checksum, new_secret
from ledger.postgres import Connection
from ledger.schema.catalog import operators

USED_EVERY = timedelta(minutes=1)
"""Between two updates of last_used_at."""

_FORM = re.compile(rf"(tlo_([0-9A-Za-z]{{{SECRET_LENGTH}}}))([0-9A-Za-z]{{{CHECKSUM_LENGTH}}})", re.ASCII)
_state = case(
    (operators.c.revoked_at.is_not(None), "revoked"), (operators.c.expires_at <= func.now(), "expired"), else_="live"
).label("state")


class NewToken(NamedTuple):
    """A new token. `text` is shown once; `token_hash` is stored."""

    text: str
    token_hash: bytes


class Operator(NamedTuple):
    """The operator that a token belongs to."""

    name: str
    role: str

    @property
    def actor(self) -> str:
        """The name for config_changes."""
        return f"operator:{self.name}"


def mint_token() -> NewToken:
    """Create a token from the operating system's random source."""
    secret = new_secret()
    body = f"tlo_{secret}"
    return NewToken(body + checksum(body), sha256(secret.encode()).digest())


def hash_of(presented: str) -> bytes | None:
    """The hash of a token; None if its form or its checksum is invalid."""
    form = _FORM.fullmatch(presented)
    if form is None or checksum(form[1]) != form[3]:
        return None
    return sha256(form[2].encode()).digest()


async def find_operator(connection: Connection, token_hash: bytes) -> Operator | None:
    """The operator with this token, unless it is revoked or expired. Its last use is recorded once a minute."""
    mine = operators.c.token_hash == token_hash
    used = (operators.c.last_used_at > func.now() - USED_EVERY).label("used")
    row = await fetch_one(connection, select(operators.c.name, operators.c.role, used).where(mine, _state == "live"))
    if row is None:
        return None
    if not row["used"]:
        await fetch(
            connection, update(operators).where(mine).values(last_used_at=func.now()).returning(operators.c.name)
        )
    return Operator(row["name"], row["role"])


async def list_operators(connection: Connection, name: str | None = None) -> list[Row]:
    """All operators by name, or the one named `name`, with their state: live, expired or revoked."""
    wanted = [] if name is None else [operators.c.name == name]
    return await fetch(connection, select(*seen(operators), _state).where(*wanted).order_by(operators.c.name))


async def create_operator(
    connection: Connection, name: str, role: str, lifetime: timedelta | None
) -> tuple[NewToken, Change]:
    token = mint_token()
    values = {"name": name, "role": role, "token_hash": token.token_hash}
    return token, await add(connection, operators, values | await _expiry(connection, lifetime))


async def rotate_operator(connection: Connection, name: str, lifetime: timedelta | None) -> tuple[NewToken, Change]:
    """Replace the token of an operator at once, also one that is expired or revoked.

    Without `lifetime` the new token gets that of the old one.
    """
    token = mint_token()
    old = await find(connection, operators, name)
    if lifetime is None and old["expires_at"] is not None:
        lifetime = old["expires_at"] - old["created_at"]
    now = await transaction_time(connection)
    values = {"token_hash": token.token_hash, "created_at": now, "revoked_at": None, "last_used_at": None}
    values |= await _expiry(connection, lifetime)
    return token, await alter(connection, operators, old, values)


async def revoke_operator(connection: Connection, name: str) -> Change:
    """Revoke the token of an operator, if it is not revoked yet."""
    old = await find(connection, operators, name)
    return await alter(
        connection, operators, old, {"revoked_at": old["revoked_at"] or await transaction_time(connection)}
    )


async def _expiry(connection: Connection, lifetime: timedelta | None) -> dict[str, datetime | None]:
    return {"expires_at": None if lifetime is None else await transaction_time(connection) + lifetime}
