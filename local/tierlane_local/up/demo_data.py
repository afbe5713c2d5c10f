"""The demo data: a customer with a key in each default tier, and the rows of the models that the workers run.

A later start adds only missing rows, so changes are kept.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import asyncpg

from ledger.postgres import asyncpg_dsn
from tierlane.settings.model import Settings
from tierlane.settings.pools import default_batch_size, parse_pools
from tierlane_local.up.data_dir import DataDir, StackError

TIERS = ("enterprise", "paid", "free")
KEYS_FILE = "demo-keys.json"
MODELS_FILE = "demo-models.json"
ADMIN_FILE = "admin-token.json"
OPERATOR = "up"
KEY_NAME = "demo"
MAX_WAIT_MS = 40
TARGET_UTILIZATION = 0.95
DEFAULT_SIMULATED_MS = 50.0
# Requests per second of a worker until it is measured: low values, because limits are reduced faster than raised.
TINY_RPS = 20.0
OTHER_RPS = 20.0

UPSERT_MODEL = """
INSERT INTO models (name, pool, max_batch_size, max_wait_ms, rps_per_gpu, target_utilization, enabled)
VALUES ($1, $2, $3, $4, $5, $6, true)
ON CONFLICT (name) DO UPDATE
SET pool = EXCLUDED.pool, max_batch_size = coalesce($7, models.max_batch_size), enabled = true
"""


@dataclass(frozen=True)
class DemoModel:
    """The row of `models` for a backend. `wanted_batch_size` is that of the flag, which overrides an existing row."""

    name: str
    pool: str
    max_batch_size: int
    wanted_batch_size: int | None
    rps_per_gpu: float


def demo_model(backend: str, pool: str, max_batch_size: int | None) -> DemoModel:
    """The row of the model for a backend."""
    kind, _, rest = backend.partition(":")
    size = max_batch_size or default_batch_size(backend)
    name, rate = kind, TINY_RPS if kind == "tiny" else OTHER_RPS
    if kind == "simulated":
        batch_ms = DEFAULT_SIMULATED_MS
        with suppress(ValueError):  # The worker reports the error.
            batch_ms = float(rest or batch_ms)
        rate = min(1e6, size * 1000 / max(batch_ms, 1.0))
    elif kind != "tiny":
        if kind in ("openai", "oip"):
            rest = rest.partition("#")[2] or kind  # The name at the server, as its clients know it.
        name = rest.rstrip("/").rpartition("/")[2] if kind in ("hf", "openai", "oip") else rest
        # Characters that the column does not accept become a dash.
        name = re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:128] or "model"
    return DemoModel(name, pool, size, max_batch_size, rate)


def demo_models(settings: Settings) -> list[DemoModel]:
    """The rows for the stack's own pool and its other pools; a name that is in use is replaced by that of the pool."""
    found = [demo_model(settings.backend, settings.pool, settings.max_batch_size)]
    for other in parse_pools(settings.pools, settings.pool):
        model = demo_model(other.backend, other.pool, None)
        taken = model.name in {each.name for each in found}
        found.append(replace(model, name=other.pool) if taken else model)
    return found


async def seed_demo(database_url: str, data_dir: DataDir, models: Sequence[DemoModel]) -> dict[str, str]:
    """Add missing demo data and return the keys by tier. Raises StackError."""
    try:
        connection = await asyncpg.connect(asyncpg_dsn(database_url), timeout=10)
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise StackError(f"Cannot connect to PostgreSQL for the demo data: {error}") from error
    try:
        keys = await _demo_keys(connection, data_dir.read_json(KEYS_FILE))
        data_dir.write_json(KEYS_FILE, dict(keys))
        # A model of an earlier start has no worker now, so requests for it would wait.
        ours = [str(name) for name in data_dir.read_json(MODELS_FILE).get("models", [])]
        names = [model.name for model in models]
        await connection.execute(
            "UPDATE models SET enabled = false WHERE name = ANY($1) AND name <> ALL($2) AND enabled", ours, names
        )
        for model in models:
            await connection.execute(
                UPSERT_MODEL,
                model.name,
                model.pool,
                model.max_batch_size,
                MAX_WAIT_MS,
                model.rps_per_gpu,
                TARGET_UTILIZATION,
                model.wanted_batch_size,
            )
        data_dir.write_json(MODELS_FILE, {"models": sorted({*ours, *names})})
    except asyncpg.PostgresError as error:
        raise StackError(f"PostgreSQL rejected the demo data: {error}") from error
    finally:
        await connection.close()
    return keys


async def admin_token(database_url: str, data_dir: DataDir) -> str:
    """The token of an operator `up` of the admin API: that of an earlier start, if it is valid. Raises StackError."""
    # SQLAlchemy, which only this needs, takes a third of a second.
    from ledger.admin.changes import changing  # noqa: PLC0415
    from ledger.admin.operators import (  # noqa: PLC0415
        create_operator,
        find_operator,
        hash_of,
        list_operators,
        rotate_operator,
    )

    kept = data_dir.read_json(ADMIN_FILE).get("token")
    hashed = hash_of(kept) if isinstance(kept, str) else None
    try:
        connection = await asyncpg.connect(asyncpg_dsn(database_url), timeout=10)
        try:
            if hashed is not None and await find_operator(connection, hashed):
                return str(kept)
            async with changing(connection, "tierlane up", dry_run=False):
                if await list_operators(connection, OPERATOR):
                    token, _ = await rotate_operator(connection, OPERATOR, None)
                else:
                    token, _ = await create_operator(connection, OPERATOR, "admin", None)
        finally:
            await connection.close()
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise StackError(f"Cannot create an operator of the admin API: {error}") from error
    data_dir.write_json(ADMIN_FILE, {"token": token.text})
    return token.text


async def _demo_keys(connection: "asyncpg.Connection[asyncpg.Record]", kept: dict[str, object]) -> dict[str, str]:
    keys: dict[str, str] = {}
    for tier in TIERS:
        customer = f"demo-{tier}"
        await connection.execute(
            "INSERT INTO customers (name, tier) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING", customer, tier
        )
        key = kept.get(tier)
        parts = key.split("_") if isinstance(key, str) else []
        # The database may have been replaced since the key was kept.
        is_known = len(parts) > 1 and await connection.fetchval(
            "SELECT count(*) FROM api_keys AS k JOIN customers AS c ON c.id = k.customer_id "
            "WHERE k.id = $1 AND c.name = $2 AND k.revoked_at IS NULL",
            parts[1],
            customer,
        )
        if not is_known:
            key = str(await connection.fetchval("SELECT issue_api_key($1, $2)", customer, KEY_NAME))
        keys[tier] = str(key)
    return keys
