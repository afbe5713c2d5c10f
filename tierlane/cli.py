"""The command line: verbs, their flags, exit codes. The code of a verb is imported when it runs.

So that `--help` is fast, this module imports only typer and the declared settings. Flags are passed to the settings as
text, so that invalid flags and invalid variables give the same errors.

Exit codes: 0 done, 1 failed, 2 wrong usage or an invalid setting.
"""
# ruff: noqa: PLC0415, FBT001, FBT002 - verbs import what they run, and typer reads switches from the signature

import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierlane.command import (
    CONFIG_OPTION,
    STYLE,
    USAGE_ERROR,
    CompleteHelp,
    HelpOption,
    Verb,
    VerbCommand,
    parameter,
    run_group,
    set_options,
    setting,
    with_example,
)
from tierlane.settings.declaration import flag, settings_of, variable
from tierlane.settings.gateway_sections import (
    AutoscaleSettings,
    BatchSettings,
    GatewaySettings,
    JobSettings,
    MetricsSettings,
    TraceSettings,
)
from tierlane.settings.role_sections import (
    AuditorSettings,
    EndpointSettings,
    PoolTimeSettings,
    SchedulerSettings,
    WorkerSettings,
)
from tierlane.settings.sections import SETTINGS

if TYPE_CHECKING:
    from tierlane.settings.model import Settings


UNUSED = ("rich", "better_exceptions", "opentelemetry.sdk.metrics")
"""Modules that structlog (for coloured tracebacks) and redis (for its metrics) import if installed, and no role uses."""


@contextmanager
def lean_imports() -> Iterator[None]:
    """In the block, UNUSED modules count as not installed, and garbage collection is off. A role starts in a third less time.

    After the block, the modules can be imported, for example for traces.
    """
    hidden = [name for name in UNUSED if name not in sys.modules]
    collecting = gc.isenabled()
    gc.disable()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None marks a module that cannot be imported
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if collecting:
            gc.enable()


LOGGING = ("log_format", "log_level")
GATEWAY_SECTIONS = (
    GatewaySettings,
    JobSettings,
    BatchSettings,
    AutoscaleSettings,
    MetricsSettings,
    TraceSettings,
    PoolTimeSettings,
)
UP_FLAGS = (
    "port", "grpc_port", "gateways", "schedulers", "workers", "autoscale", "backend", "pools", "max_batch_size", "cluster", "cells", "data_dir", "ephemeral", "replace",
    *LOGGING,
)  # fmt: skip

TOOLS = (
    ("tier", "tierlane.admin.commands:tier_app", "List, show or change tiers, the service classes."),
    ("customer", "tierlane.admin.commands:customer_app", "List, show or change customers."),
    ("key", "tierlane.admin.commands:key_app", "List, issue, rotate or revoke API keys."),
    ("quota", "tierlane.admin.commands:quota_app", "List or change quotas per day, week, month or other period."),
    ("model", "tierlane.admin.commands:model_app", "List, show or change models."),
    ("price", "tierlane.admin.commands:price_app", "List or change prices of models, for usage and budgets."),
    ("config-changes", "tierlane.admin.commands:config_changes_app", "Show who changed which row from what to what."),
    ("cell", "tierlane.operate.commands:cell_app", "List, open, drain or close cells, each with a Redis of its own."),
    ("gpu", "tierlane.operate.commands:gpu_app", "List, cordon or uncordon GPUs and their workers."),
    ("queue", "tierlane.operate.commands:queue_app", "List, pause or resume tier queues."),
    ("top", "tierlane.operate.commands:top_app", "Watch a running system in the terminal."),
    ("check", "tierlane.check.command:main", "Check all servers and components."),
    ("explain", "tierlane.explain.command:main", "Show limits and their sources, or why a request was rejected."),
    ("dlq", "tierlane.operate.commands:dlq_app", "List, show, requeue or purge dead letters."),
    ("batch", "tierlane.operate.commands:batch_app", "List, show or cancel batches of /v1/batches."),
    ("usage", "tierlane.operate.commands:usage_app", "Export requests, tokens, GPU time and cost by customer."),
    ("bench", "tierlane.bench.command:main", "Load test a gateway with requests of all tiers."),
    ("simulate", "tierlane.simulate.command:main", "Simulate a scenario or recorded requests in virtual time."),
    ("chaos", "tierlane.chaos.command:main", "Cause faults under load, and check all guarantees."),
)
"""Verbs with their own options: name, module and function or typer application, help."""

app = typer.Typer(
    name="tierlane",
    help="A multi-tenant gateway and scheduler in front of an existing GPU model.",
    epilog=with_example(
        "up\nexplain acme",
        "Precedence: flag > environment > file > default. Exit codes: 0 done, 1 failed, 2 wrong usage.",
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # Plain help takes half the time.
    pretty_exceptions_enable=False,
    context_settings=STYLE,
)


def main() -> None:
    """Run the command line and exit."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tierlane {version('tierlane')}")
        raise typer.Exit


@app.callback(add_help_option=False)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    help_: HelpOption = False,
) -> None:
    pass


def verb(*, example: str, flags: Sequence[str], required: Sequence[str] = ()) -> Callable[[Verb], Verb]:
    """Register a verb that is called with the settings and returns the exit code.

    `flags`: settings that get a flag, unless they are secret. `required`: settings that must be set; secret ones are
    variables, which the help names.
    """

    def register(function: Verb) -> Verb:
        def command(config: Path | None = None, **given: object) -> None:
            raise typer.Exit(_run(function, config, given, required))

        shown = [name for name in flags if not SETTINGS[name].secret]
        config_option = parameter("config", Annotated[Path | None, CONFIG_OPTION])
        set_options(command, [config_option, *(_flag_parameter(name) for name in shown)])
        variables = ", ".join(variable(name) for name in required)
        needs = f"Required: {variables}, from the environment or the settings file." if variables else ""
        epilog = with_example(example, needs)
        app.command(name=function.__name__, help=function.__doc__, epilog=epilog, cls=VerbCommand)(command)
        return function

    return register


def _run(function: Verb, config: Path | None, given: dict[str, object], required: Sequence[str]) -> int:
    from tierlane.settings.model import SettingsError, load_settings

    try:
        settings = load_settings(given, config=config, required=required)
    except SettingsError as error:
        typer.echo(str(error), err=True)
        return USAGE_ERROR
    return function(settings)


def _flag_parameter(name: str) -> inspect.Parameter:
    if SETTINGS[name].switch:
        option = typer.Option(flag(name), help=SETTINGS[name].help(variable(name)))
        return parameter(name, Annotated[bool | None, option])
    return parameter(name, Annotated[str | None, setting(name)])


def _role(name: str) -> Verb:
    with lean_imports():
        run: Verb = import_module(f"tierlane.roles.{name}").run
    return run


@verb(example="up\nup --port 9000 --workers 4 --ephemeral", flags=UP_FLAGS)
def up(settings: "Settings") -> int:
    """Start everything on this machine; Ctrl-C stops it."""
    from tierlane.up.command import run

    return run(settings)


@verb(
    example="gateway --host 0.0.0.0 --port 8080",
    flags=[*settings_of(*GATEWAY_SECTIONS), "pool", "serve_pools", "data_dir", *LOGGING],
    required=("redis_url", "database_url", "service_token"),
)
def gateway(settings: "Settings") -> int:
    """Run one gateway, the HTTP edge."""
    return _role("gateway")(settings)


@verb(
    example="scheduler",
    flags=[*settings_of(SchedulerSettings, AuditorSettings, PoolTimeSettings), "pool", "serve_pools", *LOGGING],
    required=("redis_url", "database_url"),
)
def scheduler(settings: "Settings") -> int:
    """Run one scheduler, with the reaper and the auditor."""
    return _role("scheduler")(settings)


@verb(
    example="worker --backend tiny --worker-id worker-1",
    flags=[*settings_of(WorkerSettings, EndpointSettings, PoolTimeSettings), "traces_endpoint", "pool", *LOGGING],
    required=("redis_url",),
)
def worker(settings: "Settings") -> int:
    """Run one worker, with its model process."""
    return _role("worker")(settings)


@verb(example="migrate", flags=LOGGING, required=("database_url",))
def migrate(settings: "Settings") -> int:
    """Bring the database to the newest schema."""
    from tierlane.roles.migrate import run

    return run(settings)


def _add_tool(name: str, place: str, help_text: str) -> None:
    @app.command(
        name=name,
        help=help_text,
        cls=CompleteHelp,
        # All arguments are passed on, --help included.
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def command(context: typer.Context) -> None:
        for word in context.args:
            # A terminal with another encoding gives surrogates, which servers reject.
            if any("\ud800" <= character <= "\udfff" for character in word):
                typer.echo(f"{word!r} is not text in UTF-8", err=True)
                raise typer.Exit(USAGE_ERROR)
        module, _, attribute = place.partition(":")
        tool = getattr(import_module(module), attribute)
        if isinstance(tool, typer.Typer):
            raise typer.Exit(run_group(tool, name, context.args))
        raise typer.Exit(tool(context.args))


for _name, _place, _help_text in TOOLS:
    _add_tool(_name, _place, _help_text)
