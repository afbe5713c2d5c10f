"""How the admin verbs are declared: a function names what is its own, and gets the options that all of them have.

typer reads options from a signature, so signatures are made here: of a function's own parameters, of a table's
fields, and of what every verb takes. A declared function only says what to run; it is imported when it runs.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import typer

from tierlane.admin.fields import Field
from tierlane.command import Config, DataDir, Verb, carry_out, from_variable, no_variable, output
from tierlane.settings.descriptions import flag

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

OUTPUT_VARIABLE, LIMIT_VARIABLE, ACTOR_VARIABLE = "TIERLANE_ADMIN_OUTPUT", "TIERLANE_ADMIN_LIMIT", "TIERLANE_ACTOR"

Given: TypeAlias = dict[str, str | None]
"""The fields as they were given, by column; None where one was not."""

Name: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="Name of it.")]
CustomerName: TypeAlias = Annotated[str, typer.Argument(metavar="NAME_OR_ID", help="The customer, by name or id.")]
KeyId: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="Public part of the key: tl_<id>_...")]
Yes: TypeAlias = Annotated[bool, no_variable("--yes", "Do not ask.", "off")]
Limit: TypeAlias = Annotated[
    int,
    from_variable(
        "--limit", variable=LIMIT_VARIABLE, says="Most to show.", default="100", metavar="N", min=1, max=1_000_000
    ),
]

_Output: TypeAlias = Annotated[Literal["table", "json"], output(OUTPUT_VARIABLE)]
_DryRun: TypeAlias = Annotated[
    bool, no_variable("--dry-run", "Try it, say what would change, and change nothing.", "off")
]
Actor: TypeAlias = Annotated[
    str | None,
    from_variable(
        "--actor",
        variable=ACTOR_VARIABLE,
        says="Who makes the change, for the record in config_changes.",
        default="the user of this machine",
        metavar="NAME",
    ),
]


class Call(NamedTuple):
    """What every verb is called with besides its own parameters."""

    settings: "Settings"
    output: str
    dry_run: bool = False
    actor: str | None = None


Work: TypeAlias = Callable[[Call], Awaitable[int]]
"""What a verb does; returns the exit code."""
Declared: TypeAlias = Callable[..., Work]
"""A verb as it is declared: takes its parameters, checks them, returns what is to be done."""

_READS = {"output": (_Output, "table"), "config": (Config, None), "data_dir": (DataDir, None)}
_WRITES = {"dry_run": (_DryRun, False), "actor": (Actor, None), **_READS}


def reads(app: typer.Typer, name: str, *, says: str = "") -> Callable[[Declared], Declared]:
    """Add a verb that shows something; `says` is its help where its docstring is not."""
    return lambda declared: _add(app, name, declared, {}, _READS, says=says)


def writes(
    app: typer.Typer, name: str, fields: Sequence[Field] = (), *, new: bool = False, says: str = ""
) -> Callable[[Declared], Declared]:
    """Add a verb that changes something; one with `fields` is called with `given`, `new` when they are of a new row."""
    options = {field.name: (Annotated[str | None, _field_option(field, new=new)], None) for field in fields}
    return lambda declared: _add(app, name, declared, options, _WRITES, says=says)


def _field_option(field: Field, *, new: bool) -> Any:
    default = field.default if new else "unchanged"
    return no_variable(flag(field.name), field.help, default, metavar=field.metavar)


def _add(
    app: typer.Typer,
    name: str,
    declared: Declared,
    fields: dict[str, tuple[Any, Any]],
    all_have: dict[str, Any],
    *,
    says: str,
) -> Declared:
    own = [parameter for key, parameter in inspect.signature(declared).parameters.items() if key != "given"]

    def command(**values: Any) -> None:
        mine = {parameter.name: values[parameter.name] for parameter in own}
        if fields:
            mine["given"] = {key: values[key] for key in fields}
        call = {key: values[key] for key in Call._fields if key in values}
        carry_out(_prepared(declared, mine, call), values["config"], data_dir=values["data_dir"])

    parameters = own + [_parameter(key, *kind) for key, kind in (fields | all_have).items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name=name, help=says or declared.__doc__)(command)
    return declared


def _prepared(declared: Declared, mine: dict[str, Any], call: dict[str, Any]) -> Callable[[], Verb]:
    def prepare() -> Verb:
        # Help must be quick.
        from tierlane.admin.runner import conducted  # noqa: PLC0415

        work = declared(**mine)
        return lambda settings: conducted(work, Call(settings, **call))

    return prepare


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
