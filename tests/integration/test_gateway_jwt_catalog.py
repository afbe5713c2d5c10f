"""Tokens and the real catalog: what SQL says of a customer holds for its tokens within a second, quotas included."""

import time
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest

from eventually import eventually
from gateway.auth.jwks import JwksSource
from gateway.auth.jwt_customers import JwtIdentities
from integration.ledger_fixtures import database_url, db, postgres_server
from jwt_issuer import LiteralSource, config, token
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import Identity
from scheduler.errors import ErrorCode, RequestError

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
WITHIN_S = 2.0


@pytest.fixture
async def tokens(database_url: str, db: Connection) -> AsyncIterator[JwtIdentities]:
    """Tokens for the customers of a started catalog; acme is one, in the tier paid."""
    await db.execute("INSERT INTO customers (name, tier) VALUES ('acme', 'paid')")
    catalog = Catalog(database_url)
    await catalog.start()
    yield JwtIdentities(catalog, config(), source=cast("JwksSource", LiteralSource()))
    await catalog.stop()


def who(tokens: JwtIdentities, **changes: Any) -> Identity | ErrorCode:
    """The identity of a fresh token, or why there is none."""
    try:
        return tokens.identify(token(now=time.time(), **changes), time.time())
    except RequestError as error:
        return error.code


def known(tokens: JwtIdentities) -> Identity:
    found = who(tokens)
    assert isinstance(found, Identity)
    return found


async def test_a_token_has_what_the_customers_keys_have(tokens: JwtIdentities, db: Connection) -> None:
    """Limits and quotas, of its own and of its tier, whether it is named by name or by id."""
    await db.execute("INSERT INTO quotas (customer_id, quota) SELECT id, '1000/day' FROM customers WHERE name = 'acme'")
    await eventually(lambda: known(tokens).quotas == (("1day", 1000),), "the quota is there", WITHIN_S)
    customer_id = await db.fetchval("SELECT id::text FROM customers WHERE name = 'acme'")

    found = known(tokens)

    assert (found.customer_id, found.customer_name, found.tier) == (customer_id, "acme", "paid")
    assert (found.key_rate, found.key_burst) == (0.0, 0.0)
    by_id = who(tokens, sub=customer_id)
    assert isinstance(by_id, Identity)
    assert msgspec.structs.replace(by_id, key_id=found.key_id) == found


async def test_the_audit_takes_the_key_id_of_a_token(tokens: JwtIdentities, db: Connection) -> None:
    """The columns of requests and jobs are text without a rule that only an API key's id would pass."""
    rows = await db.fetch(
        "SELECT pg_get_constraintdef(oid) AS rule FROM pg_constraint WHERE contype IN ('c', 'f')"
        " AND conrelid IN ('requests'::regclass, 'jobs'::regclass)"
    )

    assert not [row["rule"] for row in rows if "api_key_id" in row["rule"]]
    assert known(tokens).key_id.startswith("jwt:")
