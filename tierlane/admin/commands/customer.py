"""`tierlane customer`: its verbs and options."""

from typing import Annotated, Literal

from tierlane.admin.fields import CUSTOMER
from tierlane.admin.options import CustomerName, Given, Limit, Name, Work, Yes, changes, reads, writes
from tierlane.command import option, verb_group
from tierlane.lazy import customers, values

app = verb_group(
    "Customers: list, show, create, set, suspend, activate, rotate-secret, delete.", "customer create acme --tier paid"
)


@reads(app, "list", "customer list --tier paid --status active")
def customer_list(
    limit: Limit = 100,
    tier: Annotated[str | None, option("--tier", "Only customers of this tier.", metavar="NAME")] = None,
    status: Annotated[
        Literal["active", "suspended"] | None, option("--status", "Only customers with this status.")
    ] = None,
) -> Work:
    """Show customers in the order of their names, with their own limits."""
    return customers.show_customers(limit, tier, status)


@reads(app, "show", "customer show acme")
def customer_show(
    name: CustomerName,
    webhook_secret: Annotated[  # noqa: FBT002 - typer reads switches from the signature
        bool, option("--webhook-secret", "Show only the secret that signs its callbacks.", "off")
    ] = False,
) -> Work:
    """Show a customer's base limits and their sources, quotas and keys; or the secret that signs its callbacks."""
    show = customers.show_secret if webhook_secret else customers.show_customer
    return lambda call: show(call, name)


@writes(app, "create", "customer create acme --tier paid --requests-per-second 50", CUSTOMER, new=True)
def customer_create(name: Name, given: Given) -> Work:
    """Create a customer; it inherits the limits that are not given from its tier."""
    row = values.new_row(CUSTOMER, given)
    return changes(lambda connection: customers.create_customer(connection, name, row))


@writes(app, "set", "customer set acme --tier enterprise --burst none", CUSTOMER)
def customer_set(name: CustomerName, given: Given) -> Work:
    """Change the tier or own limits of a customer; with `none` it inherits the limit of its tier."""
    row = values.changes_of(CUSTOMER, given)
    return changes(lambda connection: customers.alter_customer(connection, name, row))


@writes(app, "suspend", "customer suspend acme")
def customer_suspend(name: CustomerName) -> Work:
    """Reject all requests of a customer with 403."""
    return changes(lambda connection: customers.alter_customer(connection, name, {"status": "suspended"}))


@writes(app, "activate", "customer activate acme")
def customer_activate(name: CustomerName) -> Work:
    """Accept requests of a suspended customer again."""
    return changes(lambda connection: customers.alter_customer(connection, name, {"status": "active"}))


@writes(app, "rotate-secret", "customer rotate-secret acme --grace 24h")
def customer_rotate_secret(
    name: CustomerName,
    grace: Annotated[
        str, option("--grace", "How long the earlier secrets stay valid, 1h to 7d.", "24h", metavar="TIME")
    ] = "24h",
) -> Work:
    """Make a new secret that signs its callbacks. Until the grace time is over, the earlier ones sign them as well."""
    both = values.duration("--grace", grace)
    return changes(lambda connection: customers.rotate_secret(connection, name, both))


@writes(app, "delete", "customer delete acme --dry-run")
def customer_delete(name: CustomerName, yes: Yes = False) -> Work:  # noqa: FBT002 - typer reads switches from the signature
    """Delete a customer with its keys and quotas. The audit of its requests is kept."""
    return lambda call: customers.delete_customer(call, name, sure=yes)
