"""`tierlane bench` as a command: its options, and its exit codes.

0: every request was answered and every objective met. 1: not so. 2: wrong usage. Options are made from the table of
texts and reach the plan as text, so that a bad flag is told like a bad variable is.
"""
# ruff: noqa: PLC0415 - help must be quick, so what a run needs is imported when it runs

import inspect
from typing import Annotated

import typer

from tierlane.bench.option_texts import OPTIONS, bench_variable
from tierlane.setting_texts import flag

USAGE_ERROR = 2
HELP = "Load a gateway over all tiers, show what came back."
EPILOG = "Exit codes: 0 all answered and all objectives met, 1 not so, 2 wrong usage."


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    try:
        _application()(args=argv, prog_name="tierlane bench")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def _application() -> typer.Typer:
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,  # Plain help is drawn in half the time.
        pretty_exceptions_enable=False,
        context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
    )

    def command(**given: str | None) -> None:
        raise typer.Exit(_run(given))

    parameters = [_parameter(option) for option in OPTIONS]
    # typer reads options from the signature, so the signature is made from the table of texts.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name="bench", help=HELP, epilog=EPILOG)(command)
    return app


def _parameter(option: str) -> inspect.Parameter:
    text, variable = OPTIONS[option], bench_variable(option)
    shown = f"{text.description} [env: {variable}] [default: {text.default or 'none'}]"
    info = typer.Option(flag(option), metavar=text.metavar, help=shown, envvar=variable, show_envvar=False)
    return inspect.Parameter(
        option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, info]
    )


def _run(given: dict[str, str | None]) -> int:
    from tierlane.bench.plan import UsageError, read_plan
    from tierlane.bench.run import run
    from tierlane.bench.stack_info import StackError

    try:
        return run(read_plan(given))
    except (UsageError, StackError) as error:
        typer.echo(str(error), err=True)
        return USAGE_ERROR
