"""The command line: verbs, their flags, exit codes. What a verb does is imported when it is run, never before.

`--help` must be quick, so this module imports typer and the declared settings only: no validation, no client libraries, no
torch. Flags reach the settings as text, so that a bad one is reported like a bad variable is. A role is imported
without what no role uses: a third of the time until it serves.

Exit codes: 0 done, 1 failed, 2 wrong usage or a bad setting.
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

from tierlane.settings.declaration import CONFIG_VARIABLE, DEFAULT_CONFIG_FILE, flag, settings_of, variable
from tierlane.settings.gateway_sections import (
    AutoscaleSettings,
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
"""What structlog (for tracebacks in colour) and redis (for its own metrics) import where it is installed."""


@contextmanager
def lean_imports() -> Iterator[None]:
    """Inside, what is unused counts as not installed, and no garbage is looked for, since imports leave none.

    Afterwards both are as before: who does need such a library (traces, for example) can import it.
    """
    hidden = [name for name in UNUSED if name not in sys.modules]
    collecting = gc.isenabled()
    gc.disable()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is how Python marks what cannot be imported
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if collecting:
            gc.enable()


USAGE_ERROR = 2
LOGGING = ("log_format", "log_level")
GATEWAY_SECTIONS = (GatewaySettings, JobSettings, AutoscaleSettings, MetricsSettings, TraceSettings, PoolTimeSettings)
UP_FLAGS = (
    "port", "gateways", "schedulers", "workers", "autoscale", "backend", "pools", "max_batch_size", "data_dir", "ephemeral", "replace",
    *LOGGING,
)  # fmt: skip

TOOLS = (
    ("tier", "tierlane.admin.commands:tier_main", "List, show or change tiers, the service classes."),
    ("customer", "tierlane.admin.commands:customer_main", "List, show or change customers."),
    ("key", "tierlane.admin.commands:key_main", "List, issue, rotate or revoke API keys."),
    ("quota", "tierlane.admin.commands:quota_main", "List or change quotas per day, month, ..."),
    ("model", "tierlane.admin.commands:model_main", "List, show or change models."),
    ("gpu", "tierlane.operate.commands:gpu_main", "List, cordon or uncordon GPUs and their workers."),
    ("queue", "tierlane.operate.commands:queue_main", "List, pause or resume tier queues."),
    ("top", "tierlane.operate.commands:top_main", "Watch a running system in the terminal."),
    ("check", "tierlane.check.command:main", "Look whether all that a system stands on is as it must be."),
    ("explain", "tierlane.explain.command:main", "Take a limit apart, or say why a request was rejected."),
    ("dlq", "tierlane.operate.dlq:main", "List, show, requeue or purge dead letters."),
    ("bench", "tierlane.bench.command:main", "Load a gateway over all tiers, show what came back."),
    ("chaos", "tierlane.chaos.command:main", "Break a stack under load, show whether anything was lost."),
)
"""Verbs with options of their own: name, module and function, help."""

Verb = Callable[["Settings"], int]

app = typer.Typer(
    name="tierlane",
    help="Tiered customers in front, GPU inference behind: limits, queues, batches, and exactly one answer.",
    epilog="Precedence: flag > environment > file > default. Exit codes: 0 done, 1 failed, 2 wrong usage.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # Plain help is drawn in half the time.
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; never returns."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tierlane {version('tierlane')}")
        raise typer.Exit


def _show_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit


# An own help option, because typer imports pydantic to check the built-in one when a verb is called.
@app.callback(add_help_option=False)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    help_: Annotated[
        bool, typer.Option("--help", "-h", help="Show this message and exit.", callback=_show_help, is_eager=True)
    ] = False,
) -> None:
    pass


def verb(*, flags: Sequence[str], required: Sequence[str] = ()) -> Callable[[Verb], Verb]:
    """Register a verb that is called with the settings; `flags`: settings that can be given by flag, but for secrets.

    `required`: settings without which the verb cannot run. The exit code is what the function returns.
    """

    def register(function: Verb) -> Verb:
        def command(config: Path | None = None, **given: object) -> None:
            raise typer.Exit(_run(function, config, given, required))

        shown = [name for name in flags if not SETTINGS[name].secret]
        parameters = [_config_parameter(), *(_flag_parameter(name) for name in shown)]
        # typer reads options from the signature, so the signature is made from the declared settings.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name=function.__name__, help=function.__doc__)(command)
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


def _config_parameter() -> inspect.Parameter:
    help_text = f"Settings file, TOML. [env: {CONFIG_VARIABLE}] [default: {DEFAULT_CONFIG_FILE} if there is one]"
    return _parameter("config", Path | None, typer.Option("--config", metavar="FILE", help=help_text))


def _flag_parameter(name: str) -> inspect.Parameter:
    setting = SETTINGS[name]
    help_text = setting.help(variable(name))
    if setting.switch:
        return _parameter(name, bool | None, typer.Option(flag(name), help=help_text))
    return _parameter(name, str | None, typer.Option(flag(name), metavar=setting.metavar, help=help_text))


def _parameter(name: str, kind: object, option: object) -> inspect.Parameter:
    # None stands for "not given", so that the environment and the file get their turn.
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _role(name: str) -> Verb:
    """The function that runs a role."""
    with lean_imports():
        run: Verb = import_module(f"tierlane.roles.{name}").run
    return run


@verb(flags=UP_FLAGS)
def up(settings: "Settings") -> int:
    """Start everything on this machine; Ctrl-C stops it."""
    from tierlane.up.command import run

    return run(settings)


@verb(
    flags=[*settings_of(*GATEWAY_SECTIONS), "pool", "serve_pools", "data_dir", *LOGGING],
    required=("redis_url", "database_url", "service_token"),
)
def gateway(settings: "Settings") -> int:
    """Run one gateway, the HTTP edge."""
    return _role("gateway")(settings)


@verb(
    flags=[*settings_of(SchedulerSettings, AuditorSettings, PoolTimeSettings), "pool", "serve_pools", *LOGGING],
    required=("redis_url", "database_url"),
)
def scheduler(settings: "Settings") -> int:
    """Run one scheduler, with the reaper and the auditor."""
    return _role("scheduler")(settings)


@verb(
    flags=[*settings_of(WorkerSettings, EndpointSettings, PoolTimeSettings), "traces_endpoint", "pool", *LOGGING],
    required=("redis_url",),
)
def worker(settings: "Settings") -> int:
    """Run one worker, with its model process."""
    return _role("worker")(settings)


@verb(flags=LOGGING, required=("database_url",))
def migrate(settings: "Settings") -> int:
    """Bring the database to the newest schema."""
    from tierlane.roles.migrate import run

    return run(settings)


def _hand_on(name: str, place: str, says: str) -> None:
    """Add a verb with options of its own: its function takes the arguments and returns the exit code."""

    @app.command(
        name=name,
        help=says,
        # Everything is handed on, --help included.
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def command(context: typer.Context) -> None:
        for word in context.args:
            # What a terminal in another encoding made of an argument: no server could be told of it.
            if any("\ud800" <= letter <= "\udfff" for letter in word):
                typer.echo(f"{word!r} is not text in UTF-8", err=True)
                raise typer.Exit(USAGE_ERROR)
        module, _, function = place.partition(":")
        raise typer.Exit(getattr(import_module(module), function)(list(context.args)))


for _name, _place, _says in TOOLS:
    _hand_on(_name, _place, _says)
