"""PostgreSQL is unavailable for half a minute under load: no request fails, and the audit is complete afterwards."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chaos.conftest import FOUR_GPUS
from load import ALL_WELL, load, unwell, verdict
from stack import start_stack
from tierlane_local.child_process import family
from tierlane_local.embedded import EmbeddedPostgres

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

UNAVAILABLE_S = 30.0


@pytest.fixture
async def postgres(tmp_path: Path) -> AsyncIterator[EmbeddedPostgres]:
    """A PostgreSQL that no supervisor restarts."""
    server = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    yield server
    await server.stop()


async def stopped(server: EmbeddedPostgres) -> None:
    """Stop and start it."""
    await server.stop()
    await asyncio.sleep(UNAVAILABLE_S)
    await server.start()


async def suspended(server: EmbeddedPostgres) -> None:
    """Suspend all its processes: connections stay open without a response."""
    processes = family(server.pid)
    for process in processes:
        process.suspend()
    await asyncio.sleep(UNAVAILABLE_S)
    for process in processes:
        process.resume()


@pytest.mark.parametrize("outage", [stopped, suspended])
async def test_half_a_minute_without_postgres(postgres: EmbeddedPostgres, tmp_path: Path, outage: object) -> None:
    """At 500 requests/s no request fails, health reports the lag, and all rows are written 10 s after the outage."""
    assert callable(outage)
    with start_stack(tmp_path / "stack", *FOUR_GPUS, environment={"TIERLANE_DATABASE_URL": postgres.url}) as stack:
        loading = asyncio.create_task(load(stack, 500, UNAVAILABLE_S + 8.0, ("enterprise", "paid", "free")))
        await asyncio.sleep(3.0)
        unavailable = asyncio.create_task(outage(postgres))
        await asyncio.sleep(UNAVAILABLE_S - 5.0)
        reasons = str((await stack.health())["reasons"])
        await unavailable
        back = time.monotonic()
        answers = await loading

        assert verdict(answers) == ALL_WELL, unwell(answers)[:5]
        assert "audit" in reasons
        assert "catalog" in reasons
        rows = await stack.audited([a.request_id for a in answers if a.request_id])
        assert {row["status"] for row in rows.values()} == {"completed"}
        assert time.monotonic() - back < 10.0
