"""A tool as a command, such as `tierlane bench`: its options are made from a table of texts, its exit code is handed back.

Options reach the tool as text, so that a bad flag is told like a bad variable is.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from tierlane.setting_text import Text
from tierlane.settings.descriptions import PREFIX, flag

FAILED = 1
USAGE_ERROR = 2

Run = Callable[[dict[str, Any]], int]
"""Called with every option by name (text, None where not given; a bool for a switch); returns the exit code."""


@dataclass(frozen=True)
class Tool:
    """One tool: its name, its options, and its switches, which take no value and are off unless given."""

    name: str
    options: Mapping[str, Text]
    switches: Mapping[str, str] = field(default_factory=dict)

    def variable(self, option: str) -> str:
        """The environment variable of an option."""
        return f"{PREFIX}{self.name}_{option}".upper()

    def both_names(self, option: str) -> str:
        """The option as errors name it."""
        return f"{flag(option)} ({self.variable(option)})"


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
    # typer reads options from the signature, so the signature is made from the table of texts.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name=tool.name, help=says, epilog=epilog)(command)
    return app


def _valued(tool: Tool, option: str) -> inspect.Parameter:
    text, variable = tool.options[option], tool.variable(option)
    shown = f"{text.description} [env: {variable}] [default: {text.default or 'none'}]"
    info = typer.Option(flag(option), metavar=text.metavar, help=shown, envvar=variable, show_envvar=False)
    return _parameter(option, Annotated[str | None, info])


def _switch(tool: Tool, name: str) -> inspect.Parameter:
    variable = tool.variable(name)
    shown = f"{tool.switches[name]} [env: {variable}] [default: off]"
    info = typer.Option(flag(name), help=shown, envvar=variable, show_envvar=False, show_default=False)
    return _parameter(name, Annotated[bool, info], default=False)


def _parameter(name: str, annotation: object, default: object = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
