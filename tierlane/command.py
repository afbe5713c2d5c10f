"""Shared parts of the verbs: style, common options, exit codes, and commands whose options are declared in a table.

So that help is fast, this module imports only typer and declarations; the code of a verb is imported when it runs. Options
are passed as text, so that invalid flags and invalid variables give the same errors.

Exit codes: 0 done; 1 failed, or done in part; 2 wrong usage or an invalid setting.
"""
# ruff: noqa: PLC0415 - see above

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand

from tierlane.settings.declaration import CONFIG_VARIABLE, DEFAULT_CONFIG_FILE, PREFIX, Option, flag, variable
from tierlane.settings.sections import SETTINGS

if TYPE_CHECKING:
    from tierlane.settings.model import Settings


FAILED = 1
USAGE_ERROR = 2
EPILOG = "Works on the local stack unless TIERLANE_DATABASE_URL is set. Exit codes: 0 done, 1 failed, 2 wrong usage."
STYLE = {"max_content_width": 110, "help_option_names": ["-h", "--help"]}

Verb: TypeAlias = Callable[["Settings"], int]

Run = Callable[[dict[str, Any]], int]
"""Called with all options by name (text, None if not given; a bool for a switch); returns the exit code."""


def _show_help(context: typer.Context, *, wanted: bool) -> None:
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit


# typer imports pydantic to check its built-in help option when a verb is called.
HelpOption: TypeAlias = Annotated[
    bool, typer.Option("--help", "-h", help="Show this message and exit.", callback=_show_help, is_eager=True)
]


class CompleteHelp(TyperCommand):
    """A command whose line in the list of commands is wrapped at the width of the terminal, not cut."""

    def get_short_help_str(self, limit: int = 0) -> str:  # noqa: ARG002 - the limit at which it would be cut
        return super().get_short_help_str(10_000)


class VerbCommand(CompleteHelp):
    """A verb. Its epilog has an example. A quota below 0 is named as such, since it would be taken for an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any("QUOTA" in (each.metavar or "") for each in self.params):
            for word in args:
                if re.match(r"-[0-9]", word):
                    ctx.fail(f"The quota must be positive, such as 10000/day, got {word!r}.")
        return super().parse_args(ctx, args)


def with_example(example: str, text: str = "") -> str:
    """An epilog: lines of `example`, each a command line without `tierlane` or a continuation with an indent, then `text`."""
    lines = "".join(f"\n  {line}" if line.startswith(" ") else f"\n  tierlane {line}" for line in example.splitlines())
    # A paragraph with \b is not wrapped.
    return f"\b\nExample:{lines}" + (f"\n\n{text}" if text else "")


def verb_group(says: str, example: str) -> typer.Typer:
    """An empty group of verbs; `says` is the first line of its help."""
    app = typer.Typer(
        help=says,
        epilog=with_example(example, EPILOG),
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # Plain help takes half the time.
        pretty_exceptions_enable=False,
        context_settings=STYLE,
    )

    @app.callback(add_help_option=False)
    def root(*, help_: HelpOption = False) -> None:
        pass

    return app


def single_verb() -> typer.Typer:
    """An application for one verb without a group."""
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,  # Plain help takes half the time.
        pretty_exceptions_enable=False,
        context_settings=STYLE,
    )


def run_group(app: typer.Typer, name: str, argv: list[str]) -> int:
    """Run `tierlane <name>` with these arguments; return the exit code."""
    try:
        app(args=argv, prog_name=f"tierlane {name}")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    return 0


def add_settings_verb(
    app: typer.Typer, function: Verb, *, example: str, flags: Sequence[str], required: Sequence[str] = ()
) -> None:
    """Add a verb that is called with the settings and returns the exit code. Its name and docstring are those of the verb.

    It may raise SettingsError.

    `flags`: settings that get a flag, unless they are secret. `required`: settings that must be set; secret ones are
    variables, which the help names.
    """

    def command(config: Path | None = None, **given: object) -> None:
        from tierlane.settings.model import SettingsError, load_settings

        try:
            code = function(load_settings(given, config=config, required=required))
        except SettingsError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(USAGE_ERROR) from None
        raise typer.Exit(code)

    shown = {name: SETTINGS[name] for name in flags if not SETTINGS[name].secret}
    set_options(command, [parameter("config", Config), *parameters(shown, variable)])
    variables = ", ".join(variable(name) for name in required)
    needs = f"Required: {variables}, from the environment or the settings file." if variables else ""
    epilog = with_example(example, needs)
    app.command(name=function.__name__, help=function.__doc__, epilog=epilog, cls=VerbCommand)(command)


def typer_option(declared: Option, names: str, variable: str = "none", *, reads: bool = False, **more: Any) -> Any:
    """A declared option for typer. `reads`: typer reads the variable; those of settings are read with the settings file."""
    return typer.Option(
        *names.split(),
        metavar=declared.metavar,
        help=declared.help(variable),
        envvar=variable if reads else None,
        show_envvar=False,
        show_default=False,
        **more,
    )


def option(
    names: str, text: str, default: str = "none", *, variable: str = "", metavar: str | None = None, **more: Any
) -> Any:
    """An option of a verb. Without an environment variable it applies to one call."""
    return typer_option(Option(default, text, metavar), names, variable or "none", reads=bool(variable), **more)


def setting(name: str) -> Any:
    """The option of a setting; without a default, so that the environment and the file apply."""
    return typer_option(SETTINGS[name], flag(name), variable(name))


def output(variable: str) -> Any:
    """The option for the output format, table or json."""
    return option("--output -o", "Output format.", "table", variable=variable)


def gateway_url(variable: str) -> Any:
    """The option for the address of a gateway."""
    text = "Address of a gateway; needs TIERLANE_SERVICE_TOKEN."
    return option("--url", text, "the local stack's", variable=variable, metavar="URL")


Config: TypeAlias = Annotated[
    Path | None,
    typer_option(
        Option(f"{DEFAULT_CONFIG_FILE} if it exists", "Settings file, TOML.", "FILE"), "--config", CONFIG_VARIABLE
    ),
]
DataDir: TypeAlias = Annotated[str | None, setting("data_dir")]
Pool: TypeAlias = Annotated[str | None, setting("pool")]


def carry_out(prepare: Callable[[], Verb], config: Path | None, *, database: bool = True, **given: object) -> None:
    """Call the function that `prepare` returns with the settings; report an error as one sentence, and exit.

    `database`: the verb needs PostgreSQL, so a missing URL is reported before it runs.
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
        code = FAILED
    raise typer.Exit(code)


@dataclass(frozen=True)
class Tool:
    """A tool with its options."""

    name: str
    options: Mapping[str, Option]

    def variable(self, option: str) -> str:
        """The environment variable of an option."""
        return f"{PREFIX}{self.name}_{option}".upper()

    def both_names(self, option: str) -> str:
        """The option and its variable, for errors."""
        return f"{flag(option)} ({self.variable(option)})"


class OptionReader:
    """The values of a tool's options, with their defaults. An invalid value raises `error` with one sentence."""

    def __init__(self, tool: Tool, given: Mapping[str, str | None], error: type[Exception]) -> None:
        self._tool = tool
        self._given = given
        self._error = error

    def fault(self, option: str, sentence: str) -> Exception:
        """The error to raise for an option."""
        return self._error(f"{self._tool.both_names(option)}: {sentence}")

    def text(self, option: str) -> str:
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
            allowed = f"from {least:,.10g} to {most:,.10g}" if least else f"{zero}, at most {most:,.10g}"
            raise self.fault(option, f"must be a number {allowed}, got {text!r}.")
        return value

    def _range(self, option: str) -> tuple[float, float]:
        declared = self._tool.options[option]
        return declared.minimum or 0, math.inf if declared.maximum is None else declared.maximum


def run_tool(tool: Tool, run: Run, argv: list[str], *, says: str, epilog: str) -> int:
    """Run a tool with these arguments; return the exit code. `says` and `epilog` (with an example) begin and end its help."""
    app = single_verb()

    def command(**given: Any) -> None:
        raise typer.Exit(run(given))

    set_options(command, parameters(tool.options, tool.variable, reads=True))
    app.command(name=tool.name, help=says, epilog=epilog, cls=VerbCommand)(command)
    return run_group(app, tool.name, argv)


def set_options(command: Callable[..., None], options: list[inspect.Parameter]) -> None:
    """Give a function these parameters. typer reads options from the signature."""
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in options}


def parameter(name: str, annotation: object, default: object = None) -> inspect.Parameter:
    """An option of a command. The default None lets the environment and the settings file apply."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def parameters(
    options: Mapping[str, Option], variable: Callable[[str], str] = lambda _: "none", *, reads: bool = False
) -> list[inspect.Parameter]:
    """Declared options by name, with the variable of each: text, or a bool for a switch, and None if not given."""
    found = []
    for name, declared in options.items():
        info = typer_option(declared, flag(name), variable(name), reads=reads)
        found.append(parameter(name, Annotated[bool | None, info] if declared.switch else Annotated[str | None, info]))
    return found
