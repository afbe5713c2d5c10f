"""`tierlane tier` as a command: its verbs and their options. What a verb does is imported when it is run."""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from tierlane.admin.fields import TIER
from tierlane.admin.options import Given, Name, Work, reads, writes
from tierlane.verbs import run_group, verb_group

app = verb_group("Tiers: the service classes. List, show, set, create, delete.")


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "tier", argv)


@reads(app, "list")
def list_() -> Work:
    """Show all in order of service."""
    from tierlane.admin.tiers import TIERS

    return TIERS.show_all()


@reads(app, "show")
def show(name: Name) -> Work:
    """Show one, with what its columns mean."""
    from tierlane.admin.tiers import TIERS

    return TIERS.show_one(name)


@writes(app, "set", TIER)
def set_(name: Name, given: Given) -> Work:
    """Change the limits of one; customers without limits of their own follow."""
    from tierlane.admin.tiers import TIERS
    from tierlane.admin.values import changes_of

    return TIERS.alter(name, changes_of(TIER, given))


@writes(app, "create", TIER, new=True)
def create(name: Name, given: Given) -> Work:
    """Add one."""
    from tierlane.admin.tiers import TIERS
    from tierlane.admin.values import new_row

    return TIERS.create(name, new_row(TIER, given))


@writes(app, "delete")
def delete(name: Name) -> Work:
    """Delete one that has no customers, and its quotas."""
    from tierlane.admin.tiers import TIERS

    return TIERS.delete(name)
