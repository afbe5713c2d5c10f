"""`tierlane dlq purge`: dead letters deleted for good, and their ids taken out of the list in Redis."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import typer

from ledger.admin.transaction import as_actor
from ledger.dead_letters import count_letters, note, purge_letters
from scheduler.errors import RedisUnavailable
from scheduler.protocol.cancellation import DeadLetterList
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from tierlane.admin.runner import actor_named
from tierlane.operate.dead_letters import UsageError, database, no_such, run

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

_AGE = re.compile(r"([1-9][0-9]{0,5})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Selection(NamedTuple):
    """Which to delete: those ids, those of at least that age, or with neither all of them."""

    ids: list[str] | None
    age_s: float | None

    def words(self) -> str:
        """For the record."""
        if self.ids is not None:
            return "by id"
        return "all" if self.age_s is None else f"older than {self.age_s:.0f} s"

    @classmethod
    def of(cls, ids: Sequence[str], older_than: str | None, *, everything: bool) -> Self:
        """From the command line. Raises UsageError unless exactly one way to choose is used."""
        if bool(ids) + (older_than is not None) + everything != 1:
            raise UsageError("Say which to delete, in one way: ids, or --older-than AGE, or --all.")
        return cls(list(dict.fromkeys(ids)) or None, None if older_than is None else age_s(older_than))


def age_s(text: str) -> float:
    """Seconds of an age such as 90s, 12h or 7d. Raises UsageError."""
    form = _AGE.fullmatch(text)
    if form is None:
        raise UsageError(f"{text!r} is not an age: give a number and s, m, h, d or w, such as 12h or 7d.")
    return float(int(form[1]) * _SECONDS[form[2]])


def purge_selected(settings: "Settings", selection: Selection, *, sure: bool, actor: str | None) -> int:
    """Delete, and ask before unless `sure` or told which ids; the exit code: 1 where an id was not there."""
    by = actor_named(actor)
    return run(lambda: _purge(settings, selection, by, sure=sure))


async def _purge(settings: "Settings", selection: Selection, by: str, *, sure: bool) -> int:
    async with database(settings) as connection:
        if selection.ids is None and not sure:
            count = await count_letters(connection, None, selection.age_s)
            typer.confirm(f"Delete {_counted(count)} for good?", abort=True)
        async with as_actor(connection, by):
            purged = await purge_letters(connection, selection.ids, selection.age_s)
            if purged:
                told = {"count": len(purged), "request_ids": sorted(purged)}
                await note(connection, selection.words(), told, None)
    typer.echo(f"Deleted {_counted(len(purged))}.")
    await _forget(settings, purged)
    missing = [request_id for request_id in selection.ids or [] if request_id not in set(purged)]
    for request_id in missing:
        typer.echo(no_such(request_id), err=True)
    return 1 if missing else 0


async def _forget(settings: "Settings", ids: Sequence[str]) -> None:
    """Take ids out of Redis, where health counts them; it is no fault where that cannot be done now."""
    if not settings.redis_url:
        typer.echo("Warning: TIERLANE_REDIS_URL is not set, so health still counts them.", err=True)
        return
    client = command_client(settings.redis_url)
    try:
        await DeadLetterList(client, Keys(settings.pool)).remove(ids)
    except RedisUnavailable as error:
        typer.echo(f"Warning: {str(error).rstrip('.')}, so health still counts them.", err=True)
    finally:
        await client.aclose()


def _counted(count: int) -> str:
    return "1 dead letter" if count == 1 else f"{count} dead letters"
