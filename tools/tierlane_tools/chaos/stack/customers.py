"""The customers of a chaos stack.

Each tier has ten customers of different weights, with limits that the load does not reach; one of tier paid floods. Others
have batches, and the hostile client has a customer. Shedding, queue times and the capacity of the GPUs are unchanged.
"""

from collections.abc import Mapping

import asyncpg

from ledger.postgres import asyncpg_dsn, closing
from scheduler.redis_client.keys import DEFAULT_CELL
from tierlane_local.up.demo_data import TIERS
from tierlane_tools.chaos.echo import MEAN_S
from tierlane_tools.chaos.history import LoadCustomer

CUSTOMERS_PER_TIER = 10
WEIGHTS = (1.0, 1.0, 2.0, 4.0)
FLOODED_TIER, FLOODS = TIERS[1], 1
FLOOD_PART = 20.0  # Of all requests, where the part of each other customer is 1.
IN_FLIGHT = {FLOODS: 90, 2: 16, 3: 30, 4: 60}  # By number of the customer, in the saturating load.
BATCH_TIERS = (TIERS[0], TIERS[-1])
HIGH_LIMIT = 100_000.0

RAISE_LIMITS = """
UPDATE tiers SET requests_per_second = $1::float8, burst = $1::float8, max_concurrency = $1::int,
    max_queue_depth = $1::int, tokens_per_minute = NULL
"""
# The rate of the model; after some seconds of load it would be measured.
RATE_MODELS = "UPDATE models SET rps_per_gpu = max_batch_size / $1::float8"
ADD_CUSTOMERS = """
INSERT INTO customers (name, tier, weight)
SELECT 'chaos-' || tier || '-' || number, tier, ($3::float8[])[1 + (number - 1) % cardinality($3::float8[])]
FROM unnest($1::text[]) AS tier, generate_series(1, $2::int) AS number
"""
ADD_BATCH_CUSTOMERS = (
    "INSERT INTO customers (name, tier) SELECT 'batches-' || tier, tier FROM unnest($1::text[]) AS tier"
)
ISSUE_KEYS = """
SELECT id::text, name, tier, weight, issue_api_key(name, 'chaos') AS key
FROM customers WHERE name LIKE $1 ORDER BY name
"""
PIN_CUSTOMERS = "UPDATE customers SET cell = $1 WHERE name = ANY($2::text[])"
ADD_HOSTILE = "INSERT INTO customers (name, tier) VALUES ('hostile', $1)"


async def seed_customers(database_url: str, per_tier: int = CUSTOMERS_PER_TIER) -> tuple[LoadCustomer, ...]:
    """Raise the limits of tiers, and create the customers with a key each."""
    async with closing(await asyncpg.connect(asyncpg_dsn(database_url), timeout=10)) as connection:
        await connection.execute(RAISE_LIMITS, HIGH_LIMIT)
        await connection.execute(RATE_MODELS, MEAN_S)
        await connection.execute(ADD_CUSTOMERS, list(TIERS), per_tier, WEIGHTS)
        rows = await connection.fetch(ISSUE_KEYS, "chaos-%")
    customers = []
    for row in rows:
        number = int(row["name"].rpartition("-")[2])
        flooded = row["tier"] == FLOODED_TIER
        part = FLOOD_PART if flooded and number == FLOODS else 1.0
        customers.append(LoadCustomer(**row, part=part, in_flight=IN_FLIGHT.get(number, 0) if flooded else 0))
    return tuple(customers)


async def seed_batch_customers(database_url: str) -> tuple[LoadCustomer, ...]:
    """Create the customers with batches."""
    async with closing(await asyncpg.connect(asyncpg_dsn(database_url), timeout=10)) as connection:
        await connection.execute(ADD_BATCH_CUSTOMERS, list(BATCH_TIERS))
        rows = await connection.fetch(ISSUE_KEYS, "batches-%")
    return tuple(LoadCustomer(**row) for row in rows)


async def seed_hostile(database_url: str) -> str:
    """Create the customer of the hostile client in the lowest tier; returns its key."""
    async with closing(await asyncpg.connect(asyncpg_dsn(database_url), timeout=10)) as connection:
        await connection.execute(ADD_HOSTILE, TIERS[-1])
        return str(await connection.fetchval("SELECT issue_api_key('hostile', 'chaos')"))


async def seed_cells(database_url: str, urls: Mapping[str, str | None]) -> None:
    """Open the cells at these URLs, None for a slot of the cluster.

    The customers of the saturating load share one: shares by weight hold inside a cell.
    """
    if not urls:
        return
    saturating = [f"chaos-{FLOODED_TIER}-{number}" for number in IN_FLIGHT]
    async with closing(await asyncpg.connect(asyncpg_dsn(database_url), timeout=10)) as connection:
        rows = [(DEFAULT_CELL, None), *urls.items()]
        await connection.executemany("INSERT INTO cells (name, redis_url) VALUES ($1, $2)", rows)
        await connection.execute(PIN_CUSTOMERS, DEFAULT_CELL, saturating)
