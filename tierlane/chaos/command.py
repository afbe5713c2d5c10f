"""`tierlane chaos` as a command: its options, and its exit codes.

0: every invariant held. 1: not so, or the stack could not be started. 2: wrong usage. Options are made from the table
of texts and reach the plan as text, so that a bad flag is told like a bad variable is.
"""
# ruff: noqa: PLC0415 - help must be quick, so what a run needs is imported when it runs

import inspect
from typing import Annotated

import typer

from tierlane.chaos.option_texts import OPTIONS, QUIET, chaos_variable
from tierlane.setting_texts import flag

FAILED = 1
USAGE_ERROR = 2
LIST = "list"
HELP = "Break a stack under load, and show whether anything was lost."
EPILOG = "Exit codes: 0 every invariant held, 1 not so, 2 wrong usage."


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    try:
        _application()(args=argv, prog_name="tierlane chaos")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    return 0


def _application() -> typer.Typer:
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,  # Plain help is drawn in half the time.
        pretty_exceptions_enable=False,
        context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
    )

    def command(*, quiet: bool, **given: str | None) -> None:
        raise typer.Exit(_run(given, quiet=quiet))

    parameters = [*(_parameter(option) for option in OPTIONS), _quiet()]
    # typer reads options from the signature, so the signature is made from the table of texts.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name="chaos", help=HELP, epilog=EPILOG)(command)
    return app


def _parameter(option: str) -> inspect.Parameter:
    text, variable = OPTIONS[option], chaos_variable(option)
    shown = f"{text.description} [env: {variable}] [default: {text.default or 'none'}]"
    info = typer.Option(flag(option), metavar=text.metavar, help=shown, envvar=variable, show_envvar=False)
    return inspect.Parameter(
        option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, info]
    )


def _quiet() -> inspect.Parameter:
    variable = chaos_variable("quiet")
    shown = f"{QUIET} [env: {variable}] [default: off]"
    info = typer.Option(flag("quiet"), help=shown, envvar=variable, show_envvar=False, show_default=False)
    return inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, info])


def _run(given: dict[str, str | None], *, quiet: bool) -> int:
    from tierlane.chaos.options import UsageError, fault_list, read_options

    if given.get("faults") == LIST:
        typer.echo(fault_list())
        return 0
    from tierlane.chaos.run import run
    from tierlane.chaos.series import run_series
    from tierlane.embedded import EmbeddedServerError
    from tierlane.up.errors import StackError

    try:
        options = read_options(given, quiet=quiet)
        return run_series(options) if options.seeds else run(options)
    except UsageError as error:
        typer.echo(str(error), err=True)
        return USAGE_ERROR
    except (StackError, EmbeddedServerError) as error:
        typer.echo(f"cannot start: {error}", err=True)
        return FAILED
