"""The customers of a chaos stack: ten in each tier, with limits so wide that the load itself is never rejected; and one
who is none of the load, whose key the hostile client has.

Only what one customer may do is wide. The shed rules, the queue times and the capacity of the GPUs stay what they are.
"""

import asyncpg

from ledger.postgres import asyncpg_dsn
from tierlane.chaos.echo import MEAN_S
from tierlane.chaos.plan import Customer
from tierlane.up.demo_data import TIERS

CUSTOMERS_PER_TIER = 10
WIDE = 100_000.0

WIDEN = """
UPDATE tiers SET requests_per_second = $1::float8, burst = $1::float8, max_concurrency = $1::int,
    max_queue_depth = $1::int, tokens_per_minute = NULL
"""
# What the model does: measured, it would be the same after some seconds of load.
RATE_MODELS = "UPDATE models SET rps_per_gpu = max_batch_size / $1::float8"
ADD_CUSTOMERS = """
INSERT INTO customers (name, tier)
SELECT 'chaos-' || tier || '-' || number, tier
FROM unnest($1::text[]) AS tier, generate_series(1, $2::int) AS number
"""
ISSUE_KEYS = """
SELECT id::text, name, tier, issue_api_key(name, 'chaos') AS key
FROM customers WHERE name LIKE 'chaos-%' ORDER BY name
"""
ADD_HOSTILE = "INSERT INTO customers (name, tier) VALUES ('hostile', $1)"


async def seed_customers(database_url: str, per_tier: int = CUSTOMERS_PER_TIER) -> tuple[Customer, ...]:
    """Widen the tiers, make the customers and issue a key to each."""
    connection = await asyncpg.connect(asyncpg_dsn(database_url), timeout=10)
    try:
        await connection.execute(WIDEN, WIDE)
        await connection.execute(RATE_MODELS, MEAN_S)
        await connection.execute(ADD_CUSTOMERS, list(TIERS), per_tier)
        rows = await connection.fetch(ISSUE_KEYS)
    finally:
        await connection.close()
    return tuple(Customer(tier=row["tier"], id=row["id"], name=row["name"], key=row["key"]) for row in rows)


async def seed_hostile(database_url: str) -> str:
    """Make the customer of the hostile client, in the lowest tier; the key."""
    connection = await asyncpg.connect(asyncpg_dsn(database_url), timeout=10)
    try:
        await connection.execute(ADD_HOSTILE, TIERS[-1])
        return str(await connection.fetchval("SELECT issue_api_key('hostile', 'chaos')"))
    finally:
        await connection.close()
