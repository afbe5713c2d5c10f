"""How the admin verbs are declared, and the columns that they can set, as `--help` shows them.

typer reads options from a signature, so signatures are made here: of a function's own parameters, of a table's fields,
and of what every verb takes. A declared function only says what to run; it is imported when it runs. Only the standard
library and typer are used, because help must not wait for SQLAlchemy; a test holds texts and types to those of the
tables.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import typer

from tierlane.command import Config, DataDir, Verb, carry_out, from_variable, no_variable, output
from tierlane.settings.declaration import flag

if TYPE_CHECKING:
    from tierlane.settings.model import Settings


REQUIRED = "required"
"""Stands for the default of what a new row cannot go without."""


@dataclass(frozen=True)
class Field:
    """One column: kind of value, its comment in the database, whether `none` is one, and the default of a new row."""

    name: str
    kind: Literal["whole", "decimal", "switch", "text"]
    says: str
    none: bool = False
    default: str = REQUIRED

    @property
    def metavar(self) -> str:
        """What stands for the value in help."""
        shown = {"whole": "N", "decimal": "X", "switch": "on|off", "text": "NAME"}[self.kind]
        return f"{shown}|none" if self.none else shown

    @property
    def help(self) -> str:
        """What it says, in the words of the command line instead of SQL's."""
        text = self.says.replace("null = none", "none = no limit").replace("null", "none")
        return text.replace("True:", "on:").replace("False:", "off:")


def _may_be_none(name: str, kind: Literal["whole", "decimal"], says: str) -> Field:
    return Field(name, kind, says, none=True, default="none")


TIER = (
    Field("priority", "whole", "Order of service, 1 first; no two tiers share one."),
    Field("guaranteed_share", "decimal", "Fraction of the capacity that is this tier's under contention, 0..1."),
    Field("requests_per_second", "decimal", "Default rate limit of each customer, requests per second."),
    Field("burst", "decimal", "Default bucket size of each customer, requests."),
    Field("max_concurrency", "whole", "Default limit of each customer's requests under way at a time."),
    _may_be_none("tokens_per_minute", "whole", "Default token limit of each customer per minute; null = none."),
    Field("max_queue_depth", "whole", "Requests that may wait in the tier's queue before it is full."),
    Field("max_queue_ms", "whole", "Longest wait in the tier's queue, milliseconds."),
    _may_be_none("shed_depth", "whole", "Waiting requests of this tier and above that shed it; null = never."),
    _may_be_none("shed_wait_ms", "whole", "Predicted wait that sheds this tier, milliseconds; null = never."),
    Field(
        "shadow",
        "switch",
        "True: its limits and its shedding are judged and counted, but not enforced.",
        default="off",
    ),
    Field(
        "paused",
        "switch",
        "True: what waits in its queue stays there until it is resumed or its time is up.",
        default="off",
    ),
)

CUSTOMER_TIER = Field("tier", "text", "The tier that all of the customer's keys get.")
CUSTOMER_LIMITS = (
    CUSTOMER_TIER,
    _may_be_none("requests_per_second", "decimal", "Own rate limit, requests per second; null = the tier's."),
    _may_be_none("burst", "decimal", "Own bucket size, requests; null = the tier's."),
    _may_be_none("max_concurrency", "whole", "Own limit of requests under way; null = the tier's."),
    _may_be_none("tokens_per_minute", "whole", "Own token limit per minute; null = the tier's."),
    _may_be_none("max_queue_ms", "whole", "Own longest wait in the queue, milliseconds; null = the tier's."),
)
CUSTOMER_HOSTS = Field(
    "callback_hosts",
    "text",
    "Hosts that its callbacks may go to, separated by commas, empty for no callbacks; null = the deployment's list.",
    none=True,
    default="none",
)

CUSTOMER = (*CUSTOMER_LIMITS, CUSTOMER_HOSTS)

KEY = (
    _may_be_none(
        "requests_per_second",
        "decimal",
        "The key's own rate limit beside its customer's, requests per second; null = none.",
    ),
    _may_be_none("burst", "decimal", "The key's own bucket size, requests; null where it has no limit of its own."),
)

MODEL = (
    Field("pool", "text", "The worker pool that runs it.", default="default"),
    Field("max_batch_size", "whole", "Most requests in one batch.", default="32"),
    _may_be_none("max_batch_tokens", "whole", "Most input tokens in one batch; null = no such limit."),
    Field("max_wait_ms", "whole", "Longest wait for a batch to fill, milliseconds.", default="40"),
    Field("gpu_timeout_ms", "whole", "Hard cap of one batch's run, milliseconds.", default="3000"),
    Field("rps_per_gpu", "decimal", "Requests per second of one GPU: a guess until measured.", default="100"),
    Field(
        "rps_per_gpu_fixed",
        "switch",
        "True: capacity is rps_per_gpu of each healthy GPU, whatever is measured.",
        default="off",
    ),
    Field("target_utilization", "decimal", "Fraction of the measured capacity to sell, 0..1.", default="0.8"),
    Field("cache_ttl_s", "whole", "How long equal requests share a result, seconds; 0 = never.", default="0"),
    Field(
        "cache_scope",
        "text",
        "Among whom equal requests share: customer (each for itself) or global.",
        default="customer",
    ),
    Field("enabled", "switch", "False: requests for it answer 404.", default="on"),
)

OF_TABLE = {"tiers": TIER, "customers": CUSTOMER, "api_keys": KEY, "models": MODEL}
"""The fields by the table whose columns they are."""


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


class VerbCall(NamedTuple):
    """What every verb is called with besides its own parameters."""

    settings: "Settings"
    output: str
    dry_run: bool = False
    actor: str | None = None


Work: TypeAlias = Callable[[VerbCall], Awaitable[int]]
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
        call = {key: values[key] for key in VerbCall._fields if key in values}
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
        return lambda settings: conducted(work, VerbCall(settings, **call))

    return prepare


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
