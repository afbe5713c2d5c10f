"""Identities of tokens: a token names a customer, and the customer's row decides about limits and access."""

import asyncio

import pytest

from gateway.auth.jwt_customers import MAX_IDENTITIES, STEP, JwtCustomers
from gateway.auth.jwt_verifier import Claims
from jwt_issuer import LiteralCustomers, customer
from ledger.catalog.snapshot import Identity
from scheduler.errors import ErrorCode, RequestError

CLAIMS = Claims("acme", "jwt:0123456789abcdef01234567", 2e9)


def code(customers: JwtCustomers, name: str = "acme") -> ErrorCode:
    """The code of the rejection."""
    with pytest.raises(RequestError) as error:
        customers.identity(CLAIMS._replace(customer=name))
    return error.value.code


def test_an_identity_has_the_customers_limits_and_no_key_limits() -> None:
    """It has the token's key id. A customer's id takes precedence over an equal name."""
    customers = JwtCustomers(LiteralCustomers(customer(), customer("id-acme")))

    assert customers.identity(CLAIMS) == Identity(
        key_id="jwt:0123456789abcdef01234567",
        customer_id="id-acme",
        customer_name="acme",
        tier="free",
        limits=(10.0, 20.0, 8, 6000),
        max_queue_ms=2000,
        quotas=(("1day", 1000),),
    )
    assert customers.identity(CLAIMS._replace(customer="id-acme")).customer_name == "acme"


def test_catalog_changes_apply_to_cached_tokens_at_once() -> None:
    """New limits, suspension and deletion; an unchanged row keeps its identity object."""
    row = customer()
    catalog = LiteralCustomers(row)
    customers = JwtCustomers(catalog)
    first = customers.identity(CLAIMS)
    catalog.set(row, customer("globex"))
    assert customers.identity(CLAIMS) is first

    catalog.set(customer(tier="enterprise", requests_per_second=500.0, quotas=()))
    found = customers.identity(CLAIMS)
    assert (found.tier, found.limits[0], found.quotas) == ("enterprise", 500.0, ())
    catalog.set(customer(suspended=True))
    assert code(customers) is ErrorCode.ACCOUNT_SUSPENDED
    catalog.set(customer())
    assert customers.identity(CLAIMS).customer_id == "id-acme"
    catalog.set(customer("globex"))
    assert code(customers) is ErrorCode.INVALID_API_KEY
    assert code(customers, "nobody") is ErrorCode.INVALID_API_KEY


def test_a_name_that_moved_to_another_customer_is_followed() -> None:
    """The cached customer id is checked against the name."""
    catalog = LiteralCustomers(customer("acme", id="id-1"), customer("old", id="id-2"))
    customers = JwtCustomers(catalog)
    assert customers.identity(CLAIMS).customer_id == "id-1"

    catalog.set(customer("gone", id="id-1"), customer("acme", id="id-2"))

    assert customers.identity(CLAIMS).customer_id == "id-2"


def test_an_unknown_customer_is_503_while_postgresql_is_unavailable() -> None:
    """It may be new. Known customers are served until the catalog is no longer usable."""
    catalog = LiteralCustomers(customer())
    customers = JwtCustomers(catalog)
    catalog.all_known = False

    assert code(customers, "new") is ErrorCode.CATALOG_UNAVAILABLE
    assert customers.identity(CLAIMS)
    catalog.usable = False
    assert code(customers) is ErrorCode.CATALOG_UNAVAILABLE


async def test_a_large_catalog_is_indexed_in_the_background() -> None:
    """Until the index is complete, a name gets 503 and does not block other requests; ids and known names need no index."""
    rows = [customer(f"customer-{number}") for number in range(STEP + 1)]
    catalog = LiteralCustomers(*rows)
    customers = JwtCustomers(catalog)
    by_name = CLAIMS._replace(customer=f"customer-{STEP}")
    assert customers.identity(CLAIMS._replace(customer="id-customer-0"))
    assert code(customers, f"customer-{STEP}") is ErrorCode.CATALOG_UNAVAILABLE

    task = asyncio.create_task(customers.run())
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    assert customers.identity(by_name).customer_id == f"id-customer-{STEP}"
    assert code(customers, "nobody") is ErrorCode.INVALID_API_KEY

    catalog.set(*rows[:-1], customer(f"customer-{STEP}", tier="paid"), customer("new"))
    assert customers.identity(by_name).tier == "paid"
    assert code(customers, "new") is ErrorCode.CATALOG_UNAVAILABLE


def test_the_number_of_cached_identities_is_bounded() -> None:
    """However many subjects one customer has."""
    customers = JwtCustomers(LiteralCustomers(customer()))

    for number in range(MAX_IDENTITIES + 5):
        customers.identity(CLAIMS._replace(key_id=f"jwt:{number}"))

    assert len(customers._cached) == MAX_IDENTITIES
