"""The command line: verbs, their flags, exit codes. The code of a verb is imported when it runs.

So that `--help` is fast, this module imports only typer and the declared settings. Flags are passed to the settings as
text, so that invalid flags and invalid variables give the same errors.

Exit codes: 0 done, 1 failed, 2 wrong usage or an invalid setting.
"""
# ruff: noqa: PLC0415, FBT001, FBT002 - verbs import what they run, and typer reads switches from the signature

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierlane.command import (
    STYLE,
    USAGE_ERROR,
    CompleteHelp,
    HelpOption,
    Verb,
    add_settings_verb,
    run_group,
    with_example,
)
from tierlane.settings.declaration import settings_of
from tierlane.settings.gateway_sections import (
    AutoscaleSettings,
    BatchSettings,
    GatewaySettings,
    JobSettings,
    MetricsSettings,
    TraceSettings,
)
from tierlane.settings.role_sections import (
    AdminSettings,
    AuditorSettings,
    EndpointSettings,
    PoolTimeSettings,
    SchedulerSettings,
    WorkerSettings,
)

if TYPE_CHECKING:
    from tierlane.settings.model import Settings


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
COMPLETION = "_TIERLANE_COMPLETE"
"""The variable that a shell sets, with the name that typer gives it."""
COMMANDS = "tierlane.commands"
"""The group of entry points with the verbs of other distributions: functions of the arguments that return the exit code."""
FOLDERS = {"tierlane-local": "local/", "tierlane-tools": "tools/"}

_places: dict[str, str] = {}
"""Verbs with options of their own: module and function or typer application, or another distribution."""

app = typer.Typer(
    name="tierlane",
    help="A multi-tenant gateway and scheduler in front of an existing GPU model.",
    epilog=with_example(
        "up\nexplain acme",
        "Precedence: flag > environment > file > default. Exit codes: 0 done, 1 failed, 2 wrong usage.",
    ),
    no_args_is_help=True,
    add_completion=False,  # The built-in options import pydantic.
    rich_markup_mode=None,  # Plain help takes half the time.
    pretty_exceptions_enable=False,
    context_settings=STYLE,
)


def main() -> None:
    """Run the command line and exit. A shell that completes a line sets COMPLETION."""
    if COMPLETION in os.environ:
        import_module("typer.completion").completion_init()
    app(prog_name="tierlane" if COMPLETION in os.environ else None)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tierlane {version('tierlane')}")
        raise typer.Exit


def _install_completion(context: typer.Context, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:  # A line that is being completed installs nothing.
        shell, path = import_module("typer.completion").install(prog_name="tierlane", complete_var=COMPLETION)
        typer.echo(f"Completion for {shell} is in {path}; it begins with the next shell.")
        raise typer.Exit


@app.callback(add_help_option=False)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    completion: Annotated[
        bool,
        typer.Option(
            "--install-completion",
            help="Install completion for the current shell (bash, zsh, fish).",
            callback=_install_completion,
            is_eager=True,
        ),
    ] = False,
    help_: HelpOption = False,
) -> None:
    pass


def role(*, example: str, flags: Sequence[str], required: Sequence[str] = ()) -> Callable[[Verb], Verb]:
    """Register a verb that is called with the settings; see `add_settings_verb`."""

    def register(function: Verb) -> Verb:
        add_settings_verb(app, function, example=example, flags=flags, required=required)
        return function

    return register


class _ToolCommand(CompleteHelp):
    """A verb with options of its own. Shell completion shows its verbs and options."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        tool = _load(self.name or "")
        if not isinstance(tool, typer.Typer):
            tool = getattr(sys.modules[tool.__module__], "app", None)
        if tool is None:
            return []
        command: Any = typer.main.get_command(tool)
        for word in ctx.args:
            command = getattr(command, "commands", {}).get(word, command)
        found: list[Any] = command.shell_complete(command.make_context("", [], resilient_parsing=True), incomplete)
        return found


def _add_tool(name: str, place: str, help_text: str) -> None:
    """Add a verb; `place` as in `_places`."""
    _places[name] = place

    @app.command(
        name=name,
        help=help_text,
        cls=_ToolCommand,
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
        tool = _load(name)
        if isinstance(tool, typer.Typer):
            raise typer.Exit(run_group(tool, name, context.args))
        raise typer.Exit(tool(context.args))


def _load(name: str) -> Any:
    module, _, attribute = _places[name].partition(":")
    return getattr(import_module(module), attribute) if attribute else _entry(name, module)


def _entry(name: str, distribution: str) -> Any:
    """The function of an entry point in the group COMMANDS. Only that distribution's metadata is read."""
    from importlib import metadata

    try:
        entries = metadata.distribution(distribution).entry_points.select(group=COMMANDS, name=name)
    except metadata.PackageNotFoundError:
        entries = metadata.EntryPoints()
    for entry in entries:
        return entry.load()
    typer.echo(
        f"`tierlane {name}` is in the package {distribution}, which is not installed; "
        f"install {FOLDERS[distribution]} of the repository.",
        err=True,
    )
    raise typer.Exit(USAGE_ERROR)


_add_tool("up", "tierlane-local", "Start everything on this machine; Ctrl-C stops it.")


def _role(name: str) -> Verb:
    from tierlane.roles.lean_imports import lean_imports

    with lean_imports():
        run: Verb = import_module(f"tierlane.roles.{name}").run
    return run


@role(
    example="gateway --host 0.0.0.0 --port 8080",
    flags=[*settings_of(*GATEWAY_SECTIONS), "pool", "serve_pools", "data_dir", *LOGGING],
    required=("redis_url", "database_url", "service_token"),
)
def gateway(settings: "Settings") -> int:
    """Run one gateway, the HTTP edge."""
    return _role("gateway")(settings)


@role(
    example="scheduler",
    flags=[*settings_of(SchedulerSettings, AuditorSettings, PoolTimeSettings), "pool", "serve_pools", *LOGGING],
    required=("redis_url", "database_url"),
)
def scheduler(settings: "Settings") -> int:
    """Run one scheduler, with the reaper and the auditor."""
    return _role("scheduler")(settings)


@role(
    example="worker --backend tiny --worker-id worker-1",
    flags=[*settings_of(WorkerSettings, EndpointSettings, PoolTimeSettings), "traces_endpoint", "pool", *LOGGING],
    required=("redis_url",),
)
def worker(settings: "Settings") -> int:
    """Run one worker, with its model process."""
    return _role("worker")(settings)


@role(
    example="admin --admin-port 8081",
    flags=[*settings_of(AdminSettings), "auth_failures", "trusted_proxies", "data_dir", *LOGGING],
)
def admin(settings: "Settings") -> int:
    """Run the admin API and its page, for operators with tokens of `tierlane operator`, on the local stack or TIERLANE_DATABASE_URL."""
    from tierlane.connect import reachable
    from tierlane.roles.admin import run

    return run(reachable(settings))


@role(example="migrate", flags=LOGGING, required=("database_url",))
def migrate(settings: "Settings") -> int:
    """Bring the database to the newest schema."""
    from tierlane.roles.migrate import run

    return run(settings.session_url)


for _name, _place, _help in (
    ("tier", "tierlane.admin.commands.tier_and_model:tier_app", "List, show or change tiers, the service classes."),
    ("customer", "tierlane.admin.commands.customer:app", "List, show or change customers."),
    ("key", "tierlane.admin.commands.key:app", "List, issue, rotate or revoke API keys."),
    ("quota", "tierlane.admin.commands.quota:app", "List or change quotas per day, week, month or other period."),
    ("model", "tierlane.admin.commands.tier_and_model:model_app", "List, show or change models."),
    ("price", "tierlane.admin.commands.price:app", "List or change prices of models, for usage and budgets."),
    ("apply", "tierlane.admin.commands.catalog:apply_app", "Make the catalog that of a YAML file."),
    ("export", "tierlane.admin.commands.catalog:export_app", "Print the catalog as a YAML file."),
    ("operator", "tierlane.admin.commands.operator:app", "List or change operators of the admin API and their tokens."),
    ("requests", "tierlane.admin.commands.requests:app", "Show accepted requests, by customer, status, code or model."),
    ("config-changes", "tierlane.admin.commands.config_changes:app", "Show who changed which row from what to what."),
    ("cell", "tierlane.operate.commands.cell:app", "List, open, drain or close cells, each with a Redis of its own."),
    ("gpu", "tierlane.operate.commands.gpu:app", "List, cordon or uncordon GPUs and their workers."),
    ("queue", "tierlane.operate.commands.queue:app", "List, pause or resume tier queues."),
    ("top", "tierlane.operate.commands.top:app", "Watch a running system in the terminal."),
    ("check", "tierlane.check.command:main", "Check all servers and components."),
    ("explain", "tierlane.explain.command:main", "Show limits and their sources, or why a request was rejected."),
    ("dlq", "tierlane.operate.commands.dlq:app", "List, show, requeue or purge dead letters."),
    ("batch", "tierlane.operate.commands.batch:app", "List, show or cancel batches of /v1/batches."),
    ("usage", "tierlane.operate.commands.usage:app", "Export requests, tokens, GPU time and cost by customer."),
    ("bench", "tierlane-tools", "Load test a gateway with requests of all tiers."),
    ("simulate", "tierlane-tools", "Simulate a scenario or recorded requests in virtual time."),
    ("chaos", "tierlane-tools", "Cause faults under load, and check all guarantees."),
):
    _add_tool(_name, _place, _help)
