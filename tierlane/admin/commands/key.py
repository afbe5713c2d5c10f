"""`tierlane key`: its verbs and options."""

from typing import Annotated, TypeAlias

import typer

from tierlane.admin.fields import KEY
from tierlane.admin.options import (
    CustomerName,
    CustomerOption,
    Given,
    KeyId,
    Limit,
    OnlyCustomer,
    Work,
    changes,
    reads,
    writes,
)
from tierlane.command import option, verb_group
from tierlane.lazy import customers, values

Purpose: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="The purpose of the key.")]
ExpiresIn: TypeAlias = Annotated[
    str | None, option("--expires-in", "Reject the key after this time, such as 30d.", "never", metavar="TIME")
]

app = verb_group("API keys: list, show, create, set, rotate, revoke.", "key create acme ci")


@reads(app, "list", "key list acme")
def key_list(customer: OnlyCustomer = None, named: CustomerOption = None, limit: Limit = 100) -> Work:
    """Show the newest keys, without their secrets, which are not stored."""
    return customers.show_keys(limit, values.one_of("CUSTOMER", customer, "--customer", named))


@reads(app, "show", "key show 0123456789ab")
def key_show(key: KeyId) -> Work:
    """Show a key."""
    return lambda call: customers.show_key(call, key)


@writes(app, "create", "key create acme ci --expires-in 90d", KEY, new=True)
def key_create(customer: CustomerName, name: Purpose, given: Given, expires_in: ExpiresIn = None) -> Work:
    """Issue a key and print it, only this once. A rate without a burst gets a burst of one second."""
    lifetime = None if expires_in is None else values.duration("--expires-in", expires_in)
    limit = customers.key_limit(values.new_row(KEY, given))
    return changes(lambda connection: customers.create_key(connection, customer, name, lifetime, limit))


@writes(app, "set", "key set 0123456789ab --models tiny,large", KEY)
def key_set(key: KeyId, given: Given) -> Work:
    """Change the limit, the weight or the models of a key; with `none` it has what its customer has."""
    values_given = values.changes_of(KEY, given)
    return changes(lambda connection: customers.alter_key(connection, key, values_given))


@writes(app, "rotate", "key rotate 0123456789ab --grace 24h")
def key_rotate(
    key: KeyId,
    grace: Annotated[str, option("--grace", "How long the old key stays valid.", "24h", metavar="TIME")] = "24h",
    expires_in: Annotated[
        str | None,
        option("--expires-in", "Reject the new key after this time.", "the lifetime of the old key", metavar="TIME"),
    ] = None,
) -> Work:
    """Issue a second key with the same name and limits. Both work until the old one expires after the grace time."""
    lifetime = None if expires_in is None else values.duration("--expires-in", expires_in)
    both = values.duration("--grace", grace)
    return changes(lambda connection: customers.rotate_key(connection, key, both, lifetime))


@writes(app, "revoke", "key revoke 0123456789ab")
def key_revoke(key: KeyId) -> Work:
    """Reject a key permanently."""
    return changes(lambda connection: customers.revoke_key(connection, key))
