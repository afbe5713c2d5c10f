"""How many Redis commands the scripts that each request passes call: so many a call, and so many a request in it."""

from collections.abc import Awaitable, Callable

from redis.asyncio import Redis

from pool import TIERS, Pool, done

FEW, MANY = 8, 32
BUDGETS = {"admit": (26, 2), "form_batch": (19, 2), "claim": (10, 1), "finish": (13, 2)}
"""Of one customer and one tier, without backlogs: commands of a call, and of each request in it."""


async def commands(client: Redis, call: Callable[[], Awaitable[object]]) -> int:
    """The number of commands that the scripts of this call use."""
    await client.config_resetstat()
    await call()
    stats = await client.info("commandstats")
    return sum(stats[name]["calls"] for name in stats.keys() - {"cmdstat_evalsha", "cmdstat_config|resetstat"})


async def life(pool: Pool, count: int) -> dict[str, int]:
    """The commands of each verb for requests that are admitted, formed into one batch, claimed and finished together."""
    found = {}
    submissions = [pool.submission() for _ in range(count)]
    found["admit"] = await commands(pool.client, lambda: pool.admit(submissions))
    batch = f"b{count}"
    found["form_batch"] = await commands(pool.client, lambda: pool.batches.form(batch, [("free", count)], 100, TIERS))
    assert await pool.pop() == batch
    found["claim"] = await commands(pool.client, lambda: pool.batches.claim(batch, "w1", "token"))
    outcomes = [done(submission.id) for submission in submissions]
    found["finish"] = await commands(pool.client, lambda: pool.batches.finish(batch, "token", outcomes))
    return found


async def test_commands_by_call_and_by_request(pool: Pool) -> None:
    """Most of the time of a script is that of its commands: a change that adds one changes the budget."""
    await life(pool, 1)  # Redis gets the scripts, and the keys of the customer.

    few, many = await life(pool, FEW), await life(pool, MANY)

    by_request = {verb: (many[verb] - few[verb]) / (MANY - FEW) for verb in BUDGETS}
    assert {verb: (few[verb] - FEW * by_request[verb], by_request[verb]) for verb in BUDGETS} == BUDGETS
