"""The auditor holds requests without an end, so that a request is written once."""

import asyncio
import subprocess
import sys
import time
from typing import Any

from redis.asyncio import Redis

from eventually import eventually
from integration.auditor_bench import KEYS, accepted, auditor_for, drained, ended, new_ids, put, running
from integration.ledger_fixtures import database_url, db, postgres_server
from ledger.audit.maintenance import MaintenancePolicy
from ledger.audit.queries import count_requests
from ledger.audit.window import HoldPolicy
from scheduler.errors import RedisUnavailable
from scheduler.protocol.audit_outbox import Outbox, Taken

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
DEEP = HoldPolicy(hold_s=0.02, deep_s=60, deep_open=10)

# An auditor that holds a deep queue and prints it.
HOLDS = """
import asyncio, sys
from ledger.audit.window import HoldPolicy
from ledger.audit.auditor import Auditor, AuditPolicy
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.protocol.audit_outbox import Outbox

async def main(database, redis):
    outbox = Outbox(command_client(redis), Keys(), "doomed")
    hold = HoldPolicy(hold_s=0.02, deep_s=60, deep_open=10)
    auditor = Auditor(database, outbox, AuditPolicy(take_limit=20, interval_s=0.05, hold=hold))
    running = asyncio.create_task(auditor.run())
    while auditor.rows_written < 10 or auditor.lag() > 0.2:
        await asyncio.sleep(0.01)
    print("holds", flush=True)
    await running

asyncio.run(main(*sys.argv[1:]))
"""


class LosesAnswers(Outbox):
    """Every other take is done, and its answer lost."""

    lost = 0
    calls = 0

    async def take(self, limit: int, held: int = 0, newest: str = "") -> Taken:
        taken = await super().take(limit, held, newest)
        self.calls += 1
        if self.calls % 2:
            self.lost += 1
            raise RedisUnavailable("Redis did not answer: cut off behind a take")
        return taken


async def test_a_beginning_waits_for_its_end(client: Redis, database_url: str, db: Connection) -> None:
    """An open request is held and written with its end; others are written meanwhile."""
    waiting, whole = new_ids(2)
    auditor = auditor_for(database_url, client, hold=HoldPolicy(hold_s=60))
    async with running(auditor):
        await put(client, [accepted(waiting)], [accepted(whole), ended(whole)])
        await eventually(lambda: auditor.rows_written, "what is whole is written")
        assert await count_requests(db) == {"completed": 1}
        assert await client.llen(KEYS.auditor_outbox("a1")) == 2
        assert auditor.last_error is None
        await put(client, [ended(waiting)])
        await eventually(lambda: drained(client), "all is written")
        assert auditor.rows_written == 2

    assert await count_requests(db) == {"completed": 2}


async def test_what_waits_for_its_end_is_written_at_the_stop(client: Redis, database_url: str, db: Connection) -> None:
    """Held requests are written at the stop."""
    (request_id,) = new_ids(1)
    auditor = auditor_for(database_url, client, hold=HoldPolicy(hold_s=60))
    async with running(auditor):
        await put(client, [accepted(request_id)])
        await eventually(lambda: client.llen(KEYS.auditor_outbox("a1")), "it is taken")

    assert await drained(client)
    assert await count_requests(db) == {"queued": 1}


async def test_a_deep_queue_is_held_for_longer(client: Redis, database_url: str, db: Connection) -> None:
    """A deep queue larger than a take is held, new requests are written meanwhile, and each is written once."""
    ids, whole = new_ids(100), new_ids(10)
    auditor = auditor_for(database_url, client, hold=DEEP, take_limit=20)
    async with running(auditor):
        await put(client, *([accepted(i)] for i in ids))
        await put(client, *([accepted(i), ended(i)] for i in whole))
        await eventually(lambda: auditor.rows_written == 10, "what is whole is written")
        assert await count_requests(db) == {"completed": 10}
        assert await client.llen(KEYS.auditor_outbox("a1")) == 110
        await put(client, *([ended(i)] for i in ids))
        await eventually(lambda: drained(client), "all is written")
        assert auditor.rows_written == 110

    assert await count_requests(db) == {"completed": 110}


async def test_a_killed_auditor_leaves_its_deep_queue_to_the_next(
    client: Redis, redis_url: str, database_url: str, db: Connection
) -> None:
    """After SIGKILL the next auditor writes entries behind the held ones again, with one row each."""
    ids, whole = new_ids(100), new_ids(10)
    await put(client, *([accepted(i)] for i in ids), *([accepted(i), ended(i)] for i in whole))
    doomed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDS, database_url, redis_url, stdout=subprocess.PIPE
    )
    assert doomed.stdout is not None
    assert await doomed.stdout.readline() == b"holds\n"
    doomed.kill()
    await doomed.wait()
    assert await count_requests(db) == {"completed": 10}
    assert await client.llen(KEYS.auditor_outbox("doomed")) == 110

    auditor = auditor_for(database_url, client, hold=DEEP, take_limit=20)
    async with running(auditor):
        await put(client, *([ended(i)] for i in ids))
        await eventually(lambda: drained(client), "the heir has written all")

    assert await count_requests(db) == {"completed": 110}


async def test_lost_answers_cost_a_held_queue_nothing(client: Redis, database_url: str, db: Connection) -> None:
    """Entries of a lost response are taken again, behind the held ones."""
    ids = new_ids(100)
    outbox = LosesAnswers(client, KEYS, "a1")
    auditor = auditor_for(database_url, client, outbox=outbox, hold=DEEP, take_limit=20)
    async with running(auditor):
        await put(client, *([accepted(i)] for i in ids))
        await eventually(lambda: len(auditor._window) == 100 and outbox.lost > 5, "all is held", 10.0)
        await put(client, *([ended(i)] for i in ids))
        await eventually(lambda: drained(client), "all is written", 10.0)
        assert auditor.rows_written == 100

    assert await count_requests(db) == {"completed": 100}


async def test_what_is_held_is_not_abandoned_and_what_never_ends_is(
    client: Redis, database_url: str, db: Connection
) -> None:
    """Held requests are not closed as abandoned; those that never end get a row, which is closed."""
    ids = ["req_" + f"{int(i[4:16], 16) - 60_000:012x}" + i[16:] for i in new_ids(30)]
    passed_s = 0.0
    auditor = auditor_for(
        database_url,
        client,
        clock=lambda: time.monotonic() + passed_s,
        hold=DEEP,
        maintenance=MaintenancePolicy(close_every_s=0.01),
    )
    async with running(auditor):
        await put(client, [accepted(i) for i in ids])
        await eventually(lambda: len(auditor._window), "they are held")
        await put(client, [ended(i) for i in ids[:10]])
        await eventually(lambda: auditor.rows_written == 10, "what has ended is written")
        assert (await count_requests(db), auditor.maintenance.closed) == ({"completed": 10}, 0)
        passed_s = 60.0
        await eventually(lambda: auditor.maintenance.closed == 20, "the others are closed")

    assert await count_requests(db) == {"completed": 10, "failed": 20}
