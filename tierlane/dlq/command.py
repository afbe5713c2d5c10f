"""`tierlane dlq` as a command: its verbs, their options and exit codes. What a verb does is imported when it is run.

0: done. 1: failed, or not all of it was done. 2: wrong usage or a bad setting.
"""
# ruff: noqa: PLC0415 - help must be quick, so what a verb does is imported when it is run

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from tierlane.setting_texts import CONFIG_VARIABLE, DEFAULT_CONFIG_FILE, TEXTS, flag, variable

if TYPE_CHECKING:
    from tierlane.settings import Settings

USAGE_ERROR = 2
HELP = "Dead letters: requests that were given up. List, show, requeue, purge."
EPILOG = "Works on the local stack unless TIERLANE_DATABASE_URL is set. Exit codes: 0 done, 1 failed, 2 wrong usage."
OUTPUT_VARIABLE, LIMIT_VARIABLE = "TIERLANE_DLQ_OUTPUT", "TIERLANE_DLQ_LIMIT"

app = typer.Typer(
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # Plain help is drawn in half the time.
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
)


def _setting(name: str) -> Any:
    text = TEXTS[name]
    shown = f"{text.description} [env: {variable(name)}] [default: {text.default or 'none'}]"
    return typer.Option(flag(name), metavar=text.metavar, help=shown)


def _no_variable(name: str, text: str, default: str = "none", **options: Any) -> Any:
    """An option that says what to do now, and so is not to come from an environment."""
    return typer.Option(name, help=f"{text} [env: none] [default: {default}]", **options)


_CONFIG_HELP = f"Settings file, TOML. [env: {CONFIG_VARIABLE}] [default: {DEFAULT_CONFIG_FILE} if there is one]"
Config: TypeAlias = Annotated[Path | None, typer.Option("--config", metavar="FILE", help=_CONFIG_HELP)]
DataDir: TypeAlias = Annotated[str | None, _setting("data_dir")]
Pool: TypeAlias = Annotated[str | None, _setting("pool")]
Output: TypeAlias = Annotated[
    Literal["table", "json"],
    typer.Option(
        "--output",
        "-o",
        envvar=OUTPUT_VARIABLE,
        show_envvar=False,
        show_default=False,
        help=f"Form of the output. [env: {OUTPUT_VARIABLE}] [default: table]",
    ),
]
Ids: TypeAlias = Annotated[list[str], typer.Argument(metavar="ID", help="Request ids.")]
Verb: TypeAlias = Callable[["Settings"], int]


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    try:
        app(args=argv, prog_name="tierlane dlq")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def _show_help(context: typer.Context, *, wanted: bool) -> None:
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit


# An own help option, because typer imports pydantic to check the built-in one when a verb is called.
@app.callback(add_help_option=False)
def _root(
    *,
    help_: Annotated[
        bool, typer.Option("--help", "-h", help="Show this message and exit.", callback=_show_help, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command("list")
def list_(
    *,
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            max=10_000,
            envvar=LIMIT_VARIABLE,
            show_envvar=False,
            show_default=False,
            help=f"Most to show. [env: {LIMIT_VARIABLE}] [default: 20]",
        ),
    ] = 20,
    customer: Annotated[str | None, _no_variable("--customer", "Of this customer, by name or id.")] = None,
    code: Annotated[str | None, _no_variable("--code", "With this error code.")] = None,
    output: Output = "table",
    config: Config = None,
    data_dir: DataDir = None,
) -> None:
    """Show the newest, without their inputs."""

    def prepare() -> Verb:
        from tierlane.dlq.listing import show_list

        return lambda settings: show_list(settings, limit, customer, code, output)

    _run(prepare, config, data_dir=data_dir)


@app.command()
def show(
    *,
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Request id.")],
    body: Annotated[
        bool, _no_variable("--body", "Print the customer's input, too.", "off", show_default=False)
    ] = False,
    output: Output = "table",
    config: Config = None,
    data_dir: DataDir = None,
) -> None:
    """Show all that is known of one."""

    def prepare() -> Verb:
        from tierlane.dlq.listing import show_one

        return lambda settings: show_one(settings, request_id, output, with_input=body)

    _run(prepare, config, data_dir=data_dir)


@app.command()
def requeue(
    *,
    ids: Ids,
    again: Annotated[
        bool, _no_variable("--again", "Also what was requeued before.", "off", show_default=False)
    ] = False,
    config: Config = None,
    data_dir: DataDir = None,
    pool: Pool = None,
) -> None:
    """Run them again now under new ids, and say how each ended. Their customers are not charged, nor answered."""

    def prepare() -> Verb:
        from tierlane.dlq.requeue import requeue_all

        return lambda settings: requeue_all(settings, ids, again=again)

    _run(prepare, config, data_dir=data_dir, pool=pool)


@app.command()
def purge(
    *,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Request ids.")] = None,
    older_than: Annotated[
        str | None, _no_variable("--older-than", "All that died longer ago, such as 12h or 7d.", metavar="AGE")
    ] = None,
    all_: Annotated[bool, _no_variable("--all", "All of them.", "off", show_default=False)] = False,
    yes: Annotated[bool, _no_variable("--yes", "Do not ask.", "off", show_default=False)] = False,
    config: Config = None,
    data_dir: DataDir = None,
    pool: Pool = None,
) -> None:
    """Delete them for good, inputs included."""

    def prepare() -> Verb:
        from tierlane.dlq.purge import Selection, purge_selected

        selection = Selection.of(ids or [], older_than, everything=all_)
        return lambda settings: purge_selected(settings, selection, sure=yes)

    _run(prepare, config, data_dir=data_dir, pool=pool)


def _run(prepare: Callable[[], Verb], config: Path | None, **given: object) -> None:
    """Call what `prepare` returns with the settings; every way to fail is one sentence and an exit code."""
    from scheduler.errors import TierlaneError
    from tierlane.dlq.reach import UsageError, reachable
    from tierlane.setting_errors import SettingsError
    from tierlane.settings import load_settings

    try:
        verb = prepare()
        code = verb(reachable(load_settings(given, config=config)))
    except (SettingsError, UsageError) as error:
        typer.echo(str(error), err=True)
        code = USAGE_ERROR
    except TierlaneError as error:
        typer.echo(str(error), err=True)
        code = 1
    raise typer.Exit(code)
