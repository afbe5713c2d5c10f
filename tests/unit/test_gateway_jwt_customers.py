"""A token names a customer; what the customer may do is what its row says at this moment."""

import asyncio

import pytest

from gateway.auth.jwt_customers import MAX_IDENTITIES, STEP, JwtCustomers
from gateway.auth.jwt_verifier import Claims
from jwt_issuer import LiteralCustomers, customer
from ledger.catalog.snapshot import Identity
from scheduler.errors import ErrorCode, RequestError

CLAIMS = Claims("acme", "jwt:0123456789abcdef01234567", 2e9)


def code(customers: JwtCustomers, claims: Claims = CLAIMS) -> ErrorCode:
    """Why nobody is identified."""
    with pytest.raises(RequestError) as error:
        customers.identity(claims)
    return error.value.code


def test_the_identity_has_the_customers_limits_and_quotas_and_none_of_a_key() -> None:
    """Field by field, with the token's key id."""
    found = JwtCustomers(LiteralCustomers(customer())).identity(CLAIMS)

    assert found == Identity(
        key_id="jwt:0123456789abcdef01234567",
        customer_id="id-acme",
        customer_name="acme",
        tier="free",
        limits=(10.0, 20.0, 8, 6000),
        max_queue_ms=2000,
        quotas=(("1day", 1000),),
    )


def test_a_customer_may_be_named_by_its_id() -> None:
    """Which goes before a name that reads the same."""
    customers = JwtCustomers(LiteralCustomers(customer("acme"), customer("id-acme")))

    assert customers.identity(CLAIMS._replace(customer="id-acme")).customer_name == "acme"


def test_the_same_token_gets_the_same_identity_while_the_row_is_the_same() -> None:
    """Also in a newer snapshot, which takes over rows that did not change."""
    row = customer()
    catalog = LiteralCustomers(row)
    customers = JwtCustomers(catalog)
    first = customers.identity(CLAIMS)

    catalog.set(row, customer("globex"))

    assert customers.identity(CLAIMS) is first


def test_another_tier_and_other_limits_are_obeyed_at_once() -> None:
    """Although the token is remembered."""
    catalog = LiteralCustomers(customer())
    customers = JwtCustomers(catalog)
    customers.identity(CLAIMS)

    catalog.set(customer(tier="enterprise", requests_per_second=500.0, quotas=()))
    found = customers.identity(CLAIMS)

    assert (found.tier, found.limits[0], found.quotas) == ("enterprise", 500.0, ())


def test_a_suspended_customer_is_told_so_at_once_and_let_in_again() -> None:
    """403, as with its keys."""
    catalog = LiteralCustomers(customer())
    customers = JwtCustomers(catalog)
    customers.identity(CLAIMS)

    catalog.set(customer(suspended=True))
    assert code(customers) is ErrorCode.ACCOUNT_SUSPENDED
    catalog.set(customer())

    assert customers.identity(CLAIMS).customer_id == "id-acme"


def test_an_unknown_or_deleted_customer_is_refused() -> None:
    """401."""
    catalog = LiteralCustomers(customer())
    customers = JwtCustomers(catalog)
    customers.identity(CLAIMS)

    catalog.set(customer("globex"))

    assert code(customers) is ErrorCode.INVALID_API_KEY
    assert code(customers, CLAIMS._replace(customer="nobody")) is ErrorCode.INVALID_API_KEY


def test_a_name_that_moved_to_another_customer_is_followed() -> None:
    """The remembered id is only a hint."""
    catalog = LiteralCustomers(customer("acme", id="id-1"), customer("old", id="id-2"))
    customers = JwtCustomers(catalog)
    assert customers.identity(CLAIMS).customer_id == "id-1"

    catalog.set(customer("gone", id="id-1"), customer("acme", id="id-2"))

    assert customers.identity(CLAIMS).customer_id == "id-2"


def test_while_postgresql_is_away_an_unknown_customer_may_be_a_new_one() -> None:
    """503; known ones go on until nothing can be said of them either."""
    catalog = LiteralCustomers(customer())
    customers = JwtCustomers(catalog)
    catalog.all_known = False

    assert code(customers, CLAIMS._replace(customer="new")) is ErrorCode.CATALOG_UNAVAILABLE
    assert customers.identity(CLAIMS)
    catalog.usable = False

    assert code(customers) is ErrorCode.CATALOG_UNAVAILABLE


async def test_a_large_catalog_is_indexed_beside_the_requests() -> None:
    """Until it is, a name gets 503 instead of holding everybody up; an id never waits."""
    catalog = LiteralCustomers(*(customer(f"customer-{number}") for number in range(STEP + 1)))
    customers = JwtCustomers(catalog)
    by_name = CLAIMS._replace(customer=f"customer-{STEP}")
    assert customers.identity(CLAIMS._replace(customer="id-customer-0"))
    assert code(customers, by_name) is ErrorCode.CATALOG_UNAVAILABLE

    task = asyncio.create_task(customers.run())
    for _ in range(5):
        await asyncio.sleep(0)

    assert customers.identity(by_name).customer_id == f"id-customer-{STEP}"
    assert code(customers, CLAIMS._replace(customer="nobody")) is ErrorCode.INVALID_API_KEY
    task.cancel()


def test_known_names_need_no_new_index() -> None:
    """A new snapshot of a large catalog holds up nobody whose row is still there under its name."""
    rows = [customer(f"customer-{number}") for number in range(STEP)]
    catalog = LiteralCustomers(*rows)
    customers = JwtCustomers(catalog)
    known = CLAIMS._replace(customer="customer-7")
    customers.identity(known)

    catalog.set(*rows[:7], customer("customer-7", tier="paid"), *rows[8:], customer("new"))

    assert customers.identity(known).tier == "paid"
    assert code(customers, CLAIMS._replace(customer="new")) is ErrorCode.CATALOG_UNAVAILABLE


def test_the_memory_of_identities_is_bounded() -> None:
    """However many subjects one customer has."""
    customers = JwtCustomers(LiteralCustomers(customer()))

    for number in range(MAX_IDENTITIES + 5):
        customers.identity(CLAIMS._replace(key_id=f"jwt:{number}"))

    assert len(customers._cached) == MAX_IDENTITIES
