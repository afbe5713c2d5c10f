"""`tierlane tier` and `tierlane model`: their verbs and options."""

from collections.abc import Callable, Sequence

import typer

from tierlane.admin.fields import MODEL, TIER, Field
from tierlane.admin.options import Given, Name, Work, changes, reads, writes
from tierlane.command import verb_group
from tierlane.lazy import tiers_and_models, values

tier_app = verb_group("Tiers: list, show, set, create, delete.", "tier set free --requests-per-second 50 --burst 100")

model_app = verb_group("Models and their batch settings: list, show, set, create, delete.", "model list")


def _add_verbs(
    app: typer.Typer,
    fields: Sequence[Field],
    rows: Callable[[], "tiers_and_models.NamedRows"],
    texts: tuple[str, str, str],
    name_and_options: tuple[str, str, str, str],
) -> None:
    """Add list, show, set, create and delete to a group; `texts` are the helps of list, set and delete.

    `name_and_options`, for the examples: the noun, a name, options of `set`, options of `create`.
    """
    list_help, set_help, delete_help = texts
    noun, example, set_options, create_options = name_and_options

    @reads(app, "list", f"{noun} list", says=list_help)
    def list_() -> Work:
        return rows().show_all()

    @reads(app, "show", f"{noun} show {example}", says="Show one with the meaning of its columns.")
    def show(name: Name) -> Work:
        return lambda call: rows().show_one(call, name)

    @writes(app, "set", f"{noun} set {example} {set_options}", fields, says=set_help)
    def set_(name: Name, given: Given) -> Work:
        changed = values.changes_of(fields, given)
        return changes(lambda connection: rows().alter(connection, name, changed))

    @writes(app, "create", f"{noun} create {create_options}", fields, new=True, says="Create one.")
    def create(name: Name, given: Given) -> Work:
        new = values.new_row(fields, given)
        return changes(lambda connection: rows().create(connection, name, new))

    @writes(app, "delete", f"{noun} delete {example} --dry-run", says=delete_help)
    def delete(name: Name) -> Work:
        return changes(lambda connection: rows().delete(connection, name))


_add_verbs(
    tier_app,
    TIER,
    lambda: tiers_and_models.TIERS,
    (
        "Show all tiers in order of priority.",
        "Change the limits of a tier; customers without their own limits follow.",
        "Delete a tier without customers, and its quotas.",
    ),
    (
        "tier",
        "free",
        "--requests-per-second 50 --burst 100",
        (
            "trial --priority 4 --guaranteed-share 0 \\\n"
            "  --requests-per-second 5 --burst 10 --max-concurrency 2 \\\n"
            "  --max-queue-depth 100 --max-queue-ms 1000"
        ),
    ),
)

_add_verbs(
    model_app,
    MODEL,
    lambda: tiers_and_models.MODELS,
    (
        "Show all models in the order of their names.",
        "Change the batch settings of a model, or enable or disable it.",
        "Delete a model. Requests for it get 404.",
    ),
    ("model", "tiny", "--max-batch-size 16 --max-wait-ms 20", "big --pool default --max-batch-size 8"),
)
