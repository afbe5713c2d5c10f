"""What groups of verbs share, such as `tierlane dlq` and `tierlane tier`: how they look, common options, exit codes.

Help must be quick, so only typer and texts are imported here; what a verb does is imported when it runs.

0: done. 1: failed, or not all of it was done. 2: wrong usage or a bad setting.
"""
# ruff: noqa: PLC0415 - see above

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from tierlane.settings.descriptions import CONFIG_VARIABLE, DEFAULT_CONFIG_FILE, TEXTS, flag, variable

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

USAGE_ERROR = 2
EPILOG = "Works on the local stack unless TIERLANE_DATABASE_URL is set. Exit codes: 0 done, 1 failed, 2 wrong usage."
STYLE = {"max_content_width": 110, "help_option_names": ["-h", "--help"]}

Verb: TypeAlias = Callable[["Settings"], int]


def _show_help(context: typer.Context, *, wanted: bool) -> None:
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit


def verb_group(says: str) -> typer.Typer:
    """An empty group of verbs; `says` is what its help begins with."""
    app = typer.Typer(
        help=says,
        epilog=EPILOG,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # Plain help is drawn in half the time.
        pretty_exceptions_enable=False,
        context_settings=STYLE,
    )

    # An own help option, because typer imports pydantic to check the built-in one when a verb is called.
    @app.callback(add_help_option=False)
    def root(
        *,
        help_: Annotated[
            bool, typer.Option("--help", "-h", help="Show this message and exit.", callback=_show_help, is_eager=True)
        ] = False,
    ) -> None:
        pass

    return app


def run_group(app: typer.Typer, name: str, argv: list[str]) -> int:
    """Run the group that is called `tierlane <name>` with these arguments; return the exit code."""
    try:
        app(args=argv, prog_name=f"tierlane {name}")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def setting(name: str) -> Any:
    """The option of a setting, without a default: so the environment and the file get their turn."""
    text = TEXTS[name]
    shown = f"{text.description} [env: {variable(name)}] [default: {text.default or 'none'}]"
    return typer.Option(flag(name), metavar=text.metavar, help=shown)


def from_variable(*names: str, variable: str, says: str, default: str, **options: Any) -> Any:
    """An option of the tool's own that an environment variable can give, too."""
    shown = f"{says} [env: {variable}] [default: {default}]"
    return typer.Option(*names, envvar=variable, show_envvar=False, show_default=False, help=shown, **options)


def no_variable(name: str, text: str, default: str = "none", **options: Any) -> Any:
    """An option that says what to do now, and so is not to come from an environment."""
    return typer.Option(name, help=f"{text} [env: none] [default: {default}]", show_default=False, **options)


def output(variable: str) -> Any:
    """The option for the form of the output, a Literal of table and json."""
    return from_variable("--output", "-o", variable=variable, says="Form of the output.", default="table")


_CONFIG_HELP = f"Settings file, TOML. [env: {CONFIG_VARIABLE}] [default: {DEFAULT_CONFIG_FILE} if there is one]"
Config: TypeAlias = Annotated[Path | None, typer.Option("--config", metavar="FILE", help=_CONFIG_HELP)]
DataDir: TypeAlias = Annotated[str | None, setting("data_dir")]
Pool: TypeAlias = Annotated[str | None, setting("pool")]


def carry_out(prepare: Callable[[], Verb], config: Path | None, *, database: bool = True, **given: object) -> None:
    """Call what `prepare` returns with the settings; every way to fail is one sentence and an exit code.

    `database`: the verb needs one, so that a missing one is told before it runs.
    """
    from scheduler.errors import TierlaneError
    from tierlane.connect import UsageError, reachable
    from tierlane.setting_errors import SettingsError
    from tierlane.settings.model import load_settings

    try:
        verb = prepare()
        settings = load_settings(given, config=config)
        code = verb(reachable(settings) if database else settings)
    except (SettingsError, UsageError) as error:
        typer.echo(str(error), err=True)
        code = USAGE_ERROR
    except TierlaneError as error:
        typer.echo(str(error), err=True)
        code = 1
    raise typer.Exit(code)
