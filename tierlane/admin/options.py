"""Declarations of the admin verbs, and of the columns that they can set.

typer reads options from a signature, so the signature of a verb is built from its own parameters, the fields of a table,
and the common options. The fields of limits are those of `LIMIT_COLUMNS`, so a new limit needs no change here. Only the
standard library, typer and that list are imported, so that help is fast; a test compares texts and types with those of the
tables.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import typer

from ratelimit.limits import AUXILIARY_COLUMNS, LIMIT_COLUMNS, LimitColumn
from tierlane.command import (
    Config,
    DataDir,
    Verb,
    VerbCommand,
    carry_out,
    from_variable,
    no_variable,
    output,
    parameter,
    set_options,
    with_example,
)
from tierlane.settings.declaration import flag

if TYPE_CHECKING:
    from tierlane.settings.model import Settings


REQUIRED = "required"
"""The default of a field that a new row must have."""


def without_sql(comment: str) -> str:
    """The comment of a column with the values of the command line instead of those of SQL."""
    text = comment.replace("null: none", "none: no limit").replace("null", "none")
    return text.replace("True:", "on:").replace("False:", "off:")


@dataclass(frozen=True)
class Field:
    """A column: kind of value, comment in the database, whether `none` is allowed, and the default of a new row."""

    name: str
    kind: Literal["whole", "decimal", "switch", "text"]
    says: str
    none: bool = False
    default: str = REQUIRED

    @property
    def metavar(self) -> str:
        shown = {"whole": "N", "decimal": "X", "switch": "on|off", "text": "NAME"}[self.kind]
        return f"{shown}|none" if self.none else shown

    @property
    def help(self) -> str:
        return without_sql(self.says)


def _may_be_none(name: str, kind: Literal["whole", "decimal"], says: str) -> Field:
    return Field(name, kind, says, none=True, default="none")


def _limit(limit: LimitColumn, says: str, *, required: bool) -> Field:
    kind: Literal["whole", "decimal"] = "decimal" if limit.type == "double" else "whole"
    return Field(limit.name, kind, says) if required else _may_be_none(limit.name, kind, says)


TIER = (
    Field("priority", "whole", "Order of service, 1 first; unique."),
    Field("guaranteed_share", "decimal", "Part of the capacity under contention, 0..1."),
    *(_limit(limit, limit.tier_text, required=limit.required) for limit in (*LIMIT_COLUMNS, *AUXILIARY_COLUMNS)),
    Field("max_queue_depth", "whole", "Most requests in its queue."),
    _may_be_none("max_queue_ms", "whole", "Longest wait in its queue; null: by the backend of the pool."),
    _may_be_none("shed_depth", "whole", "Waiting requests of this tier and above that shed it; null: never."),
    _may_be_none("shed_wait_ms", "whole", "Predicted wait that sheds it; null: never."),
    Field(
        "shadow",
        "switch",
        "True: limits and shedding are counted, not enforced.",
        default="off",
    ),
    Field(
        "paused",
        "switch",
        "True: requests wait until it is resumed or their time is up.",
        default="off",
    ),
    _may_be_none("slo_ms", "whole", "Objective of the response time's p95."),
    _may_be_none("slo_success", "decimal", "Objective of the share of successful requests, such as 0.999."),
    Field(
        "interactive_jobs",
        "switch",
        "True: a job may ask for the priority of interactive requests.",
        default="off",
    ),
)

CUSTOMER = (
    Field("tier", "text", "Tier of all its keys."),
    Field(
        "weight",
        "decimal",
        "Part of its tier's GPU time, in proportion to the weights of others that wait.",
        default="1",
    ),
    *(_limit(limit, limit.customer_text, required=False) for limit in LIMIT_COLUMNS),
    _may_be_none("max_queue_ms", "whole", "Longest wait in the queue; null: the tier's."),
    Field(
        "callback_hosts",
        "text",
        "Hosts of its callbacks, separated by commas, empty: none; null: the deployment's list.",
        none=True,
        default="none",
    ),
    Field("cell", "text", "Its cell; null: chosen by its id.", none=True, default="none"),
    Field("spread", "whole", "Number of cells that it uses, each with a part of its limits.", default="1"),
)

CELL = (
    Field(
        "redis_url",
        "text",
        "Its server, without user and password: those of TIERLANE_REDIS_URL; null: that server.",
        none=True,
        default="none",
    ),
    Field(
        "weight",
        "decimal",
        "Its part of the customers, in proportion to the weights of the other open cells.",
        default="1",
    ),
)

KEY = (
    _may_be_none(
        "requests_per_second",
        "decimal",
        "Rate limit beside its customer's; null: none.",
    ),
    _may_be_none("burst", "decimal", "Bucket size, requests; null: no limit of its own."),
    _may_be_none(
        "weight", "decimal", "Part of its customer's GPU time, against its other keys; null: shared by those without."
    ),
)

MODEL = (
    Field("pool", "text", "GPU pool.", default="default"),
    Field("max_batch_size", "whole", "Most requests in a batch.", default="32"),
    _may_be_none("max_batch_tokens", "whole", "Most input tokens in a batch; null: no limit."),
    Field("max_wait_ms", "whole", "Longest wait for a batch to fill.", default="40"),
    Field("rps_per_gpu", "decimal", "Requests per second of a GPU: a guess until measured.", default="100"),
    Field(
        "rps_per_gpu_fixed",
        "switch",
        "True: rps_per_gpu counts, whatever is measured.",
        default="off",
    ),
    Field("target_utilization", "decimal", "Part of the measured capacity to use, 0..1.", default="0.8"),
    Field("cache_ttl_s", "whole", "Seconds that equal requests share a result; 0: never.", default="0"),
    Field(
        "cache_scope",
        "text",
        "Equal requests share within a customer, or global.",
        default="customer",
    ),
    _may_be_none(
        "tpot_ms",
        "decimal",
        "Objective for the milliseconds per token of an answer, in engines with slots; null: none.",
    ),
    Field("enabled", "switch", "False: requests get 404.", default="on"),
    Field(
        "capabilities",
        "text",
        "Capabilities of its server, separated by commas; text: none; null: all but extensions.",
        none=True,
        default="none",
    ),
)

PRICE = (
    Field("usd_per_gpu_s", "decimal", "USD for a second of GPU time.", default="0"),
    Field("usd_per_1000_tokens", "decimal", "USD for 1,000 tokens of input and output.", default="0"),
)


Given: TypeAlias = dict[str, str | None]
"""The text of each field's option by column; None if it was not given."""

Name: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="Its name.")]
CustomerName: TypeAlias = Annotated[str, typer.Argument(metavar="NAME_OR_ID", help="The customer, by name or id.")]
KeyId: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="Public part of the key: tl_<id>_...")]
Yes: TypeAlias = Annotated[bool, no_variable("--yes", "Do not ask for confirmation.", "off")]


def limit_option(variable: str, default: int, most: int) -> Any:
    """The option for the number of rows in a list."""
    return from_variable(
        "--limit", variable=variable, says="Most rows to show.", default=str(default), metavar="N", min=1, max=most
    )


Limit: TypeAlias = Annotated[int, limit_option("TIERLANE_ADMIN_LIMIT", 100, 1_000_000)]

_DryRun: TypeAlias = Annotated[
    bool, no_variable("--dry-run", "Check the change and show it, without making it.", "off")
]
Actor: TypeAlias = Annotated[
    str | None,
    from_variable(
        "--actor",
        variable="TIERLANE_ACTOR",
        says="Who makes the change, for the record in config_changes.",
        default="the user of this machine",
        metavar="NAME",
    ),
]


class VerbCall(NamedTuple):
    """The settings and the common options of a verb."""

    settings: "Settings"
    output: str = "table"
    dry_run: bool = False
    actor: str | None = None


Work: TypeAlias = Callable[[VerbCall], Awaitable[int]]
"""Runs a verb; returns the exit code."""
Declared: TypeAlias = Callable[..., Work]
"""A declared verb: checks its parameters and returns the work."""

CommonOptions: TypeAlias = dict[str, tuple[Any, Any]]
"""Annotation and default of options by name: fields of VerbCall, `config`, or settings."""

PLACE: CommonOptions = {"config": (Config, None), "data_dir": (DataDir, None)}


def read_options(variable: str) -> CommonOptions:
    """The common options of a verb that shows something; `variable` sets its output format."""
    return {"output": (Annotated[Literal["table", "json"], output(variable)], "table"), **PLACE}


_READS = read_options("TIERLANE_ADMIN_OUTPUT")
_WRITES: CommonOptions = {"dry_run": (_DryRun, False), "actor": (Actor, None), **_READS}


def reads(app: typer.Typer, name: str, example: str, *, says: str = "") -> Callable[[Declared], Declared]:
    """Add a verb that shows something; its help is `says` or its docstring, with `example`, a command line."""
    return lambda declared: add_verb(app, name, declared, _READS, example, says=says)


def writes(
    app: typer.Typer, name: str, example: str, fields: Sequence[Field] = (), *, new: bool = False, says: str = ""
) -> Callable[[Declared], Declared]:
    """Add a verb that changes something; with `fields` it is called with `given`, `new` for those of a new row."""
    options = {field.name: (Annotated[str | None, _field_option(field, new=new)], None) for field in fields}
    return lambda declared: add_verb(app, name, declared, _WRITES, example, fields=options, says=says)


def _field_option(field: Field, *, new: bool) -> Any:
    default = field.default if new else "unchanged"
    return no_variable(flag(field.name), field.help, default, metavar=field.metavar)


def add_verb(
    app: typer.Typer,
    name: str,
    declared: Declared,
    common: CommonOptions,
    example: str,
    *,
    fields: CommonOptions | None = None,
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
            return lambda settings: run_verb(work, VerbCall(settings, **call))

        carry_out(prepare, values["config"], **{key: values[key] for key in settings})

    set_options(command, own + [parameter(key, *kind) for key, kind in (fields | common).items()])
    app.command(name=name, help=says or declared.__doc__, epilog=with_example(example), cls=VerbCommand)(command)
    return declared
