"""What verbs share: their style, common options, exit codes, and commands whose options are a table.

Help must be quick, so only typer and declarations are imported here; what a verb does is imported when it runs. Options of a
tool reach it as text, so that a bad flag is reported like a bad variable is.

0: done. 1: failed, or not all of it was done. 2: wrong usage or a bad setting.
"""
# ruff: noqa: PLC0415 - see above

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from tierlane.settings.declaration import CONFIG_VARIABLE, DEFAULT_CONFIG_FILE, PREFIX, Option, flag, variable
from tierlane.settings.sections import SETTINGS

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
    declared = SETTINGS[name]
    return typer.Option(flag(name), metavar=declared.metavar, help=declared.help(variable(name)))


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
    from tierlane.settings.model import SettingsError, load_settings

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


FAILED = 1

Run = Callable[[dict[str, Any]], int]
"""Called with every option by name (text, None where not given; a bool for a switch); returns the exit code."""


@dataclass(frozen=True)
class Tool:
    """One tool: its name, its options, and its switches, which take no value and are off unless given."""

    name: str
    options: Mapping[str, Option]
    switches: Mapping[str, str] = field(default_factory=dict)

    def variable(self, option: str) -> str:
        """The environment variable of an option."""
        return f"{PREFIX}{self.name}_{option}".upper()

    def both_names(self, option: str) -> str:
        """The option as errors name it."""
        return f"{flag(option)} ({self.variable(option)})"


class OptionReader:
    """The values of a tool's options; those of None have their default.

    `error` is raised with one sentence that names the option.
    """

    def __init__(self, tool: Tool, given: Mapping[str, str | None], error: type[Exception]) -> None:
        self._tool = tool
        self._given = given
        self._error = error

    def fault(self, option: str, sentence: str) -> Exception:
        """The error for an option, to be raised."""
        return self._error(f"{self._tool.both_names(option)}: {sentence}")

    def text(self, option: str) -> str:
        """The value as it was given."""
        value = self._given.get(option)
        return self._tool.options[option].default if value is None else value

    def path(self, option: str) -> Path | None:
        """A path; None for an empty value."""
        text = self.text(option)
        return Path(text) if text else None

    def integer(self, option: str) -> int:
        """An integer in the declared range."""
        text, (least, most) = self.text(option), self._range(option)
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise self.fault(option, f"must be an integer from {least} to {most}, got {text!r}.")
        return int(text)

    def number(self, option: str, *, positive: bool = False) -> float:
        """A number in the declared range; `positive`: and not 0."""
        text, (least, most) = self.text(option), self._range(option)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (positive and value == 0):
            zero = "above 0" if positive else "of 0 or more"
            allowed = f"from {least:g} to {most:g}" if least else f"{zero}, at most {most:g}"
            raise self.fault(option, f"must be a number {allowed}, got {text!r}.")
        return value

    def _range(self, option: str) -> tuple[float, float]:
        declared = self._tool.options[option]
        return declared.minimum or 0, math.inf if declared.maximum is None else declared.maximum


def run_tool(tool: Tool, run: Run, argv: list[str], *, says: str, epilog: str) -> int:
    """Run a tool with these arguments; return the exit code. `says` and `epilog` are what its help begins and ends with."""
    try:
        _application(tool, run, says, epilog)(args=argv, prog_name=f"tierlane {tool.name}")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    return 0


def _application(tool: Tool, run: Run, says: str, epilog: str) -> typer.Typer:
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,  # Plain help is drawn in half the time.
        pretty_exceptions_enable=False,
        context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
    )

    def command(**given: Any) -> None:
        raise typer.Exit(run(given))

    parameters = [_valued(tool, option) for option in tool.options] + [_switch(tool, name) for name in tool.switches]
    # typer reads options from the signature, so the signature is made from the table of options.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name=tool.name, help=says, epilog=epilog)(command)
    return app


def _valued(tool: Tool, option: str) -> inspect.Parameter:
    declared, variable = tool.options[option], tool.variable(option)
    shown = declared.help(variable)
    info = typer.Option(flag(option), metavar=declared.metavar, help=shown, envvar=variable, show_envvar=False)
    return _parameter(option, Annotated[str | None, info])


def _switch(tool: Tool, name: str) -> inspect.Parameter:
    variable = tool.variable(name)
    shown = f"{tool.switches[name]} [env: {variable}] [default: off]"
    info = typer.Option(flag(name), help=shown, envvar=variable, show_envvar=False, show_default=False)
    return _parameter(name, Annotated[bool, info], default=False)


def _parameter(name: str, annotation: object, default: object = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
