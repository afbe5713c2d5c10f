"""Declarations of the admin verbs.

typer reads options from a signature, so the signature of a verb is built from its own parameters, the fields of a table,
and the common options.
"""

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import typer

from tierlane.admin.fields import Field
from tierlane.command import (
    Config,
    DataDir,
    Verb,
    VerbCommand,
    carry_out,
    option,
    output,
    parameter,
    parameters,
    set_options,
    with_example,
)
from tierlane.settings.declaration import Option

if TYPE_CHECKING:
    from ledger.postgres import Connection
    from tierlane.admin.change_result import ChangeResult
    from tierlane.settings.model import Settings

Given: TypeAlias = dict[str, str | None]
"""The text of each field's option by column; None if it was not given."""

Name: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="Its name.")]
CustomerName: TypeAlias = Annotated[str, typer.Argument(metavar="NAME_OR_ID", help="The customer, by name or id.")]
OnlyCustomer: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="CUSTOMER", help="Only of this customer, by name or id.", show_default=False)
]
CustomerOption: TypeAlias = Annotated[
    str | None, option("--customer", "The same as the argument.", metavar="NAME_OR_ID")
]
KeyId: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="Public part of the key: tl_<id>_...")]
Yes: TypeAlias = Annotated[bool, option("--yes", "Do not ask for confirmation.", "off")]

_DryRun: TypeAlias = Annotated[bool, option("--dry-run", "Check the change and show it, without making it.", "off")]
Actor: TypeAlias = Annotated[
    str | None,
    option(
        "--actor",
        "Who makes the change, for the record in config_changes.",
        "the user of this machine",
        variable="TIERLANE_ACTOR",
        metavar="NAME",
    ),
]

Url: TypeAlias = Annotated[
    str | None,
    option("--url", "Use the admin API there instead of PostgreSQL, with TIERLANE_ADMIN_TOKEN.", "none", metavar="URL"),
]

CommonOptions: TypeAlias = dict[str, tuple[Any, Any]]
"""Annotation and default of options by name: fields of VerbCall, `config`, or settings."""

NO_SERVERS = {"database_url": "", "database_direct_url": "", "redis_url": ""}
"""Settings with --url, so that no verb uses servers beside the admin API."""

REMOTE: CommonOptions = {"url": (Url, None)}
PLACE: CommonOptions = {"config": (Config, None), "data_dir": (DataDir, None)}


def limit_option(variable: str, default: int, most: int) -> Any:
    """The option for the number of rows in a list."""
    return option("--limit", "Most rows to show.", str(default), variable=variable, metavar="N", min=1, max=most)


Limit: TypeAlias = Annotated[int, limit_option("TIERLANE_ADMIN_LIMIT", 100, 1_000_000)]


class VerbCall(NamedTuple):
    """The settings and the common options of a verb. `url`: of the admin API that is used instead of PostgreSQL."""

    settings: "Settings"
    output: str = "table"
    dry_run: bool = False
    actor: str | None = None
    url: str | None = None
    verb: str = ""


Work: TypeAlias = Callable[[VerbCall], Coroutine[Any, Any, int]]
"""Runs a verb; returns the exit code."""
Declared: TypeAlias = Callable[..., Work]
"""A declared verb: checks its parameters and returns the work."""


def changes(change: "Callable[[Connection], Awaitable[ChangeResult]]") -> Work:
    """Make a change in a transaction, or roll it back with --dry-run, and print it."""

    async def work(call: VerbCall) -> int:
        # Help must be fast.
        from tierlane.admin.runner import apply  # noqa: PLC0415

        return await apply(call, change)

    return work


def read_options(variable: str) -> CommonOptions:
    """The common options of a verb that shows something; `variable` sets its output format."""
    return {"output": (Annotated[Literal["table", "json"], output(variable)], "table"), **PLACE}


_READS: CommonOptions = {**read_options("TIERLANE_ADMIN_OUTPUT"), **REMOTE}
_WRITES: CommonOptions = {"dry_run": (_DryRun, False), "actor": (Actor, None), **_READS}


def reads(app: typer.Typer, name: str, example: str, *, says: str = "") -> Callable[[Declared], Declared]:
    """Add a verb that shows something; its help is `says` or its docstring, with `example`, a command line."""
    return lambda declared: add_verb(app, name, declared, _READS, example, says=says)


def writes(
    app: typer.Typer, name: str, example: str, fields: Sequence[Field] = (), *, new: bool = False, says: str = ""
) -> Callable[[Declared], Declared]:
    """Add a verb that changes something; with `fields` it is called with `given`, `new` for those of a new row."""
    options = {each.name: each if new else replace(each, default="unchanged") for each in fields}
    return lambda declared: add_verb(app, name, declared, _WRITES, example, fields=options, says=says)


def add_verb(
    app: typer.Typer,
    name: str,
    declared: Declared,
    common: CommonOptions,
    example: str,
    *,
    fields: Mapping[str, Option] | None = None,
    says: str = "",
) -> Declared:
    """Add a verb with its own parameters, `fields`, and `common` options."""
    fields = fields or {}
    own = [each for key, each in inspect.signature(declared).parameters.items() if key != "given"]
    settings = common.keys() - {*VerbCall._fields, "config"}

    def command(**values: Any) -> None:
        def prepare() -> Verb:
            # Help must be fast.
            from tierlane.admin.runner import run_verb  # noqa: PLC0415

            arguments = {each.name: values[each.name] for each in own}
            if fields:
                arguments["given"] = {key: values[key] for key in fields}
            work = declared(**arguments)
            call = {key: values[key] for key in VerbCall._fields if key in common}
            if call.get("url") is None:
                return lambda settings: run_verb(work, VerbCall(settings, **call))
            words = example.split()
            call["verb"] = " ".join(words[: words.index(name) + 1])
            return lambda settings: run_verb(work, VerbCall(settings.model_copy(update=NO_SERVERS), **call))

        given = {key: values[key] for key in settings}
        carry_out(prepare, values["config"], database=values.get("url") is None, **given)

    set_options(command, own + parameters(fields) + [parameter(key, *kind) for key, kind in common.items()])
    app.command(name=name, help=says or declared.__doc__, epilog=with_example(example), cls=VerbCommand)(command)
    return declared
