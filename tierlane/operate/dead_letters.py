"""`tierlane dlq list` and `show`, and how the verbs on dead letters reach PostgreSQL.

An input is shown only where it is asked for.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ledger.dead_letters import DeadLetterRow, find_letter, list_letters, read_body
from ledger.postgres import Connection
from scheduler.payload import Payload, decode_payload
from tierlane import connect
from tierlane.connect import UsageError, reachable, run
from tierlane.connect import VerbError as DlqError

if TYPE_CHECKING:
    from tierlane.settings.model import Settings


__all__ = ["DlqError", "UsageError", "database", "reachable", "run"]


def database(settings: "Settings") -> AbstractAsyncContextManager[Connection]:
    """One connection. Raises DlqError where PostgreSQL does not serve it."""
    return connect.database(settings, "tierlane-dlq")


WIDE = 400  # Columns of output that goes to a file or a program: nothing is cut off there.
DIGEST_DIGITS = 8
HEADINGS = ("ID", "DIED (UTC)", "CUSTOMER", "TIER", "MODEL", "CODE", "RUNS", "WORKERS", "BYTES", "REQUEUED AS")


def show_list(settings: "Settings", limit: int, customer: str | None, code: str | None, output: str) -> int:
    """Print the newest; the exit code."""

    async def work() -> int:
        async with database(settings) as connection:
            letters = await list_letters(connection, limit, customer, code)
        if output == "json":
            _print_json([msgspec.to_builtins(letter) for letter in letters])
        elif letters:
            _print_table(letters)
        else:
            typer.echo("There are no dead letters." if customer is code is None else "There are no such dead letters.")
        return 0

    return run(work)


def show_one(settings: "Settings", request_id: str, output: str, *, with_input: bool) -> int:
    """Print all that is known of one; the exit code. Raises DlqError for one that is not there."""

    async def work() -> int:
        async with database(settings) as connection:
            letter = await find_letter(connection, request_id)
            body = await read_body(connection, request_id)
        if letter is None:
            raise DlqError(no_such(request_id))
        if output == "json":
            _print_json(msgspec.to_builtins(letter) | {"body": describe(body, with_input=with_input)})
        else:
            typer.echo("\n".join(lines_of(letter, body, with_input=with_input)))
        return 0

    return run(work)


def no_such(request_id: str) -> str:
    """The sentence for an id without a dead letter."""
    return f"There is no dead letter {printable(request_id)}."


def describe(body: bytes | None, *, with_input: bool) -> dict[str, Any] | None:
    """What may be said of a body; its input and parameters only where asked for."""
    if body is None:
        return None
    payload = _payload(body)
    said: dict[str, Any] = {
        "bytes": len(body),
        "model": payload.model if payload else None,
        "sha256": sha256(body).hexdigest()[:DIGEST_DIGITS],
    }
    if with_input:
        said |= {"input": payload.input if payload else None, "parameters": payload.parameters if payload else None}
    return said


def lines_of(letter: DeadLetterRow, body: bytes | None, *, with_input: bool) -> list[str]:
    """One dead letter for people; its input stands last, behind an empty line."""
    said = describe(body, with_input=with_input)
    rows = {
        "request": letter.request_id,
        "died": _moment(letter),
        "customer": f"{letter.customer or 'gone'} ({letter.customer_id or 'not known'})",
        "tier": letter.tier or "-",
        "model": letter.model or "-",
        "code": letter.error_code,
        "runs": str(letter.attempts),
        "workers": ", ".join(letter.worker_ids) or "-",
        "body": f"{said['bytes']} bytes for {said['model'] or 'no known model'}, sha256 {said['sha256']}"
        if said
        else "not kept",
        "requeued": f"{letter.requeued_at:%Y-%m-%d %H:%M:%S} as {letter.requeued_as}" if letter.requeued_as else "no",
    }
    lines = [f"{name:<10}{printable(value)}" for name, value in rows.items()]
    if with_input:
        text: str | None = said["input"] if said else None
        lines += ["", "There is no input that can be read." if text is None else printable(text, keep="\n\t")]
    return lines


def printable(text: str, keep: str = "") -> str:
    """Text from outside, made harmless for a terminal: control characters are shown, not obeyed."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def _payload(body: bytes) -> Payload | None:
    try:
        return decode_payload(body)
    except ValueError:
        return None


def _moment(letter: DeadLetterRow) -> str:
    return f"{letter.dead_at:%Y-%m-%d %H:%M:%S}"


def _print_json(value: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _print_table(letters: Iterable[DeadLetterRow]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        right = heading in {"RUNS", "BYTES"}
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading == "ID", overflow="fold")
    for letter in letters:
        table.add_row(*(Text(printable(cell)) for cell in _cells(letter)))
    console.print(table)


def _cells(letter: DeadLetterRow) -> Sequence[str]:
    return (
        letter.request_id,
        _moment(letter),
        letter.customer or letter.customer_id or "-",
        letter.tier or "-",
        letter.model or "-",
        letter.error_code,
        str(letter.attempts),
        " ".join(letter.worker_ids) or "-",
        "-" if letter.body_bytes is None else str(letter.body_bytes),
        letter.requeued_as or "-",
    )
