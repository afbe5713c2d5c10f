"""`tierlane dlq list`, `show` and `purge`. Inputs are shown only with --body."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Self

import msgspec
import typer

from ledger.admin.transaction import as_actor
from ledger.dead_letters import DeadLetterRow, count_letters, find_letter, list_letters, note, purge_letters, read_body
from scheduler.payload import decode_payload
from scheduler.protocol.cancellation import DeadLetterList
from scheduler.redis_client.connections import tag_at
from scheduler.redis_client.keys import Keys
from tierlane.admin.options import VerbCall
from tierlane.admin.runner import actor_of
from tierlane.admin.values import duration
from tierlane.connect import UsageError, VerbError, database
from tierlane.operate.cells import redis_at, urls_of_cells
from tierlane.output import Column, aligned, counted, named, print_json, print_rows, printable, readable
from tierlane.settings.model import Settings

APPLICATION = "tierlane-dlq"
DIGEST_DIGITS = 8
COLUMNS = (
    Column("request_id", "ID", whole=True),
    Column("dead_at", "DIED"),
    *named("customer", "tier", "model"),
    Column("error_code", "CODE"),
    Column("attempts", "RUNS"),
    Column("worker_ids", "WORKERS"),
    Column("body_bytes", "BYTES"),
    Column("requeued_as", "REQUEUED AS"),
)


async def show_list(call: VerbCall, limit: int, customer: str | None, code: str | None) -> int:
    """Print the newest dead letters."""
    async with database(call.settings, APPLICATION) as connection:
        letters = await list_letters(connection, limit, customer, code)
    rows = [msgspec.to_builtins(letter) for letter in letters]
    if call.output == "table":
        for row, letter in zip(rows, letters, strict=True):
            row["dead_at"] = letter.dead_at
            row["customer"] = letter.customer or letter.customer_id
    print_rows(call.output, COLUMNS, rows, "dead letters")
    return 0


async def show_one(call: VerbCall, request_id: str, *, with_input: bool) -> int:
    """Print a dead letter. Raises VerbError if there is none."""
    async with database(call.settings, APPLICATION) as connection:
        letter = await find_letter(connection, request_id)
        body = await read_body(connection, request_id)
    if letter is None:
        raise VerbError(no_such(request_id))
    described = describe(body, with_input=with_input)
    if call.output == "json":
        print_json(msgspec.to_builtins(letter) | {"body": described})
    else:
        typer.echo("\n".join(lines_of(letter, described, with_input=with_input)))
    return 0


def no_such(request_id: str) -> str:
    return f"There is no dead letter {printable(request_id)}."


def describe(body: bytes | None, *, with_input: bool) -> dict[str, Any] | None:
    """Size, model and digest of a body; `with_input` adds input and parameters. None if there is no body."""
    if body is None:
        return None
    try:
        payload = decode_payload(body)
    except ValueError:
        payload = None
    described: dict[str, Any] = {
        "bytes": len(body),
        "model": payload.model if payload else None,
        "sha256": sha256(body).hexdigest()[:DIGEST_DIGITS],
    }
    if with_input:
        described |= {
            "input": payload.input if payload else None,
            "parameters": payload.parameters if payload else None,
        }
    return described


def lines_of(letter: DeadLetterRow, body: dict[str, Any] | None, *, with_input: bool) -> list[str]:
    """A dead letter as text; the input is the last part, after an empty line."""
    size = f"{body['bytes']} bytes for {body['model'] or 'an unknown model'}, sha256 {body['sha256']}" if body else ""
    fields = {
        "request": letter.request_id,
        "died": readable(letter.dead_at),
        "customer": f"{letter.customer or 'deleted'} ({letter.customer_id or 'unknown'})",
        "tier": letter.tier or "-",
        "model": letter.model or "-",
        "code": letter.error_code,
        "runs": str(letter.attempts),
        "workers": ", ".join(letter.worker_ids) or "-",
        "body": size or "not kept",
        "requeued": f"{readable(letter.requeued_at)} as {letter.requeued_as}" if letter.requeued_as else "no",
    }
    lines = aligned((name, printable(value)) for name, value in fields.items())
    if with_input:
        text: str | None = body["input"] if body else None
        lines += ["", "There is no readable input." if text is None else printable(text, keep="\n\t")]
    return lines


class Selection(NamedTuple):
    """The dead letters to delete: by id, of at least an age, or with neither all of them."""

    ids: list[str] | None
    age_s: float | None

    def words(self) -> str:
        """The selection for config_changes."""
        if self.ids is not None:
            return "by id"
        return "all" if self.age_s is None else f"older than {self.age_s:.0f} s"

    @classmethod
    def of(cls, ids: Sequence[str], older_than: str | None, *, everything: bool) -> Self:
        """From the command line. Raises UsageError unless exactly one selection is given."""
        if bool(ids) + (older_than is not None) + everything != 1:
            raise UsageError("Specify exactly one of: ids, --older-than AGE, --all.")
        age_s = None if older_than is None else duration("--older-than", older_than).total_seconds()
        return cls(list(dict.fromkeys(ids)) or None, age_s)


async def purge(call: VerbCall, selection: Selection, *, sure: bool) -> int:
    """Delete dead letters, after a confirmation unless `sure` or selected by id. The exit code is 1 if an id is missing."""
    actor = actor_of(call)
    urls: dict[str, str] = {}
    async with database(call.settings, APPLICATION) as connection:
        if call.settings.redis_url:
            urls = await urls_of_cells(connection, call.settings)
        if selection.ids is None and not sure:
            count = await count_letters(connection, None, selection.age_s)
            typer.confirm(f"Delete {counted(count, 'dead letter')} permanently?", abort=True)
        async with as_actor(connection, actor):
            purged = await purge_letters(connection, selection.ids, selection.age_s)
            if purged:
                record = {"count": len(purged), "request_ids": sorted(purged)}
                await note(connection, selection.words(), record, None)
    typer.echo(f"Deleted {counted(len(purged), 'dead letter')}.")
    await forget_dead(call.settings, urls, purged)
    missing = [request_id for request_id in selection.ids or [] if request_id not in set(purged)]
    for request_id in missing:
        typer.echo(no_such(request_id), err=True)
    return 1 if missing else 0


async def forget_dead(settings: Settings, urls: Mapping[str, str], ids: Sequence[str]) -> None:
    """Remove ids from the lists that health counts, in all cells; a failure is only a warning."""
    if not urls:
        typer.echo("Warning: TIERLANE_REDIS_URL is not set, so health still counts them.", err=True)
    for url in urls.values():
        try:
            async with redis_at(url) as client:
                await DeadLetterList(client, Keys(settings.pool, tag_at(client))).remove(ids)
        except VerbError as error:
            typer.echo(f"Warning: {str(error).rstrip('.')}, so health still counts them.", err=True)
