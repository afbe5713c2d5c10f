"""`tierlane model` as a command: its verbs and their options. What a verb does is imported when it is run."""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from tierlane.admin.fields import MODEL
from tierlane.admin.options import Given, Name, Work, reads, writes
from tierlane.verbs import run_group, verb_group

app = verb_group("Models, and how their batches are made. List, show, set, create, delete.")


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "model", argv)


@reads(app, "list")
def list_() -> Work:
    """Show all by name."""
    from tierlane.admin.models import MODELS

    return MODELS.show_all()


@reads(app, "show")
def show(name: Name) -> Work:
    """Show one, with what its columns mean."""
    from tierlane.admin.models import MODELS

    return MODELS.show_one(name)


@writes(app, "set", MODEL)
def set_(name: Name, given: Given) -> Work:
    """Change how batches of one are made, or switch it on or off."""
    from tierlane.admin.models import MODELS
    from tierlane.admin.values import changes_of

    return MODELS.alter(name, changes_of(MODEL, given))


@writes(app, "create", MODEL, new=True)
def create(name: Name, given: Given) -> Work:
    """Add one."""
    from tierlane.admin.models import MODELS
    from tierlane.admin.values import new_row

    return MODELS.create(name, new_row(MODEL, given))


@writes(app, "delete")
def delete(name: Name) -> Work:
    """Delete one; requests for it answer 404."""
    from tierlane.admin.models import MODELS

    return MODELS.delete(name)
