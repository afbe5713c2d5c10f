"""Sessions of browsers in the admin API.

A session belongs to the token of an operator, whose role and state it has at any time, or to a person whom an identity
provider signed in. Only the SHA-256 of its secret is stored. The table is shared by all processes of the admin API.
"""

import secrets
from datetime import datetime, timedelta
from hashlib import sha256
from typing import NamedTuple

from sqlalchemy import delete, func, insert, or_, select

from ledger.admin.changes import fetch, fetch_one
from ledger.admin.operators import Operator, find_operator
from ledger.postgres import Connection
from ledger.schema.catalog import operator_sessions, operators

LIFETIME_S = 8 * 3600
MOST_SESSIONS = 100
"""Of one token or person; a further one ends the oldest."""


class OperatorSession(NamedTuple):
    """A session, and the operator that it belongs to."""

    operator: Operator
    expires_at: datetime


def session_hash(secret: str) -> bytes:
    """What is stored of the secret of a session."""
    return sha256(secret.encode("utf-8", "surrogatepass")).digest()


async def begin_session(connection: Connection, owner: Operator | bytes) -> str:
    """Begin a session, and delete those that have expired; the secret, which is not stored.

    `owner`: a person, or the hash of the token of an operator, with which the session expires.
    """
    table, secret = operator_sessions, secrets.token_urlsafe(32)
    expires_at = func.now() + timedelta(seconds=LIFETIME_S)
    values = {"session_hash": session_hash(secret), "expires_at": expires_at}
    if isinstance(owner, bytes):
        mine = table.c.token_hash == owner
        expiry = select(operators.c.expires_at).where(operators.c.token_hash == owner).scalar_subquery()
        values |= {"token_hash": owner, "expires_at": func.least(expires_at, expiry)}
    else:
        mine = table.c.person == owner.name
        values |= {"person": owner.name, "role": owner.role}
    newest = select(table.c.session_hash).where(mine).order_by(table.c.created_at.desc()).offset(MOST_SESSIONS - 1)
    ended = or_(table.c.expires_at <= func.now(), table.c.session_hash.in_(newest))
    await fetch(connection, delete(table).where(ended))
    await fetch(connection, insert(table).values(**values))
    return secret


async def find_session(connection: Connection, hashed: bytes) -> OperatorSession | None:
    """The session with this hash, unless it has expired or the token that it belongs to is not valid."""
    live = (operator_sessions.c.session_hash == hashed, operator_sessions.c.expires_at > func.now())
    row = await fetch_one(connection, select(operator_sessions).where(*live))
    if row is None:
        return None
    if row["token_hash"] is None:
        return OperatorSession(Operator(row["person"], row["role"]), row["expires_at"])
    operator = await find_operator(connection, row["token_hash"])
    return None if operator is None else OperatorSession(operator, row["expires_at"])


async def end_session(connection: Connection, hashed: bytes) -> None:
    """End the session with this hash, if there is one."""
    await fetch(connection, delete(operator_sessions).where(operator_sessions.c.session_hash == hashed))
