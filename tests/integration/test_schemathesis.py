"""Schemathesis with all checks against the description that a gateway serves: valid and invalid requests, missing keys,
other methods, and sequences of requests, from a fixed seed.
"""

import asyncio
import json
import re
import sys
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from redis.asyncio import Redis

from configs import batch_config, job_config, response_config
from gateway.admin_api.routes import ROUTES
from gateway.openapi.endpoints import ENDPOINTS
from integration.admin_api_fixtures import AdminApi, api
from integration.gateway_fixtures import SERVICE_TOKEN, TIERS, Stack, model, reverse_or_vector, running_stack, tier
from integration.jobs_fixtures import JobCatalog, add_customers, customer_id
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["api", "database_url", "db", "postgres_server"]

EXAMPLES = 20  # Per operation and phase.
SEED = 1
LONG_MS = 60_000
CONFIG = """
[auth.openapi.key]
bearer = "{key}"

[auth.openapi.service]
bearer = "{token}"

[warnings]
fail-on = ["missing_auth"]

# Two valid bodies under one Idempotency-Key are a 422; an invalid body is a 400.
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx"]

[checks.positive_data_acceptance]
expected-statuses = ["2xx", "3xx", "401", "403", "404", "409", "422", "429", "5xx"]

# A schema cannot relate the shape of a tensor to its number of elements.
[[operations]]
include-name = "POST /v2/models/{{id}}/infer"

[operations.checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "404", "409", "422", "429", "5xx"]
# Only a background response can be cancelled; OpenAI's API has a 400 for others, too.
[[operations]]
include-name = "POST /v1/responses/{{id}}/cancel"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "404", "429", "5xx"]
# A schema cannot say that `starting_after` needs `stream`, and only a background response has a stream.
[[operations]]
include-name-regex = "(GET|HEAD|DELETE) /v1/responses/{{id}}$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "404", "429", "5xx"]
# A schema cannot relate two days.
[[operations]]
include-name-regex = "(GET|HEAD) /v1/usage$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "429", "5xx"]
# A schema cannot say that a burst needs a rate, that a limit is at most that of the calling key, or that an expiry is to come.
[[operations]]
include-name = "POST /v1/keys"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "403", "404", "429", "5xx"]
# A batch that has ended cannot be cancelled, and the input of an open one cannot be deleted.
[[operations]]
include-name = "POST /v1/batches/{{id}}/cancel"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "404", "429", "5xx"]
"""

ADMIN_CONFIG = """
[auth.openapi.operator]
bearer = "{token}"

[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "406", "409", "412", "413", "415", "429", "5xx"]

[checks.positive_data_acceptance]
expected-statuses = ["2xx", "401", "403", "404", "409", "412", "429", "5xx"]

# A schema cannot name the rows of a list, nor the times and numbers that a rule of the catalog allows.
[[operations]]
include-method = ["GET", "POST", "PUT", "PATCH"]
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "403", "404", "409", "412", "429", "5xx"]
[[operations]]
include-name-regex = "DELETE /admin/v1/prices/"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "403", "404", "409", "412", "429", "5xx"]

# A change of the operator that sends the requests would end its token.
[[operations]]
include-path-regex = "/operators/"
parameters = {{ "path.name" = "viewer" }}
"""


@pytest.fixture
async def stack(
    client: Redis, redis_url: str, database_url: str, db: "asyncpg.Connection[asyncpg.Record]"
) -> AsyncIterator[Stack]:
    """A ready gateway without a limit of failed authentications, with long deadlines for a busy machine."""
    await add_customers(db)
    async with running_stack(
        client,
        redis_url,
        catalog=JobCatalog(),
        database_url=database_url,
        jobs=job_config(database_url, callback_secret=b"a secret of thirty-two bytes 123"),
        batches=batch_config(database_url, max_open=1000),
        responses=response_config(database_url),
        auth_failures="off",
        total_ms=LONG_MS,
        gone_ms=LONG_MS,
    ) as running:
        tiers = tuple(tier(name, at + 1, 0.1, max_queue_ms=LONG_MS) for at, name in enumerate(TIERS))
        running.worker.answerer = reverse_or_vector
        running.worker.backend = "openai:http://127.0.0.1/v1"  # All fields of a chat are accepted.
        running.catalog.set(tiers=tiers, models=(model(), model("org/small")))
        await db.execute("UPDATE customers SET manages_keys = true")
        for name, key in running.catalog.keys.items():
            statement = "INSERT INTO api_keys (id, customer_id, name, secret_hash) VALUES ($1, $2, $3, $4)"
            await db.execute(statement, key.id, customer_id(name), name, key.secret_hash)
        yield running


async def schemathesis(folder: Path, config: str, description: bytes, url: str, phases: str) -> str:
    """Run all checks of these phases with a description against a server; the output. No check may fail."""
    (folder / "schemathesis.toml").write_text(config)
    (folder / "openapi.json").write_bytes(description)
    program = Path(sysconfig.get_path("scripts")) / "schemathesis"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(program), "--config-file", "schemathesis.toml", "run", "openapi.json", "--url", url),
        *("--checks", "all", "--mode", "all", "--phases", phases),
        *("--seed", str(SEED), "--max-examples", str(EXAMPLES), "--generation-database", "none"),
        *("--continue-on-failure", "--suppress-health-check", "all", "--no-color", "--workers", "1"),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output
    made = re.search(r"(\d+) generated, (\d+) passed", output)
    assert made is not None, output
    assert int(made[1]) == int(made[2]) > 500
    return output


@pytest.mark.timeout(600)  # Half a minute on an idle machine.
async def test_responses_are_as_described(stack: Stack, tmp_path: Path) -> None:
    """No check fails for any operation, in more than 500 requests, of which more than 50 reached the worker."""
    async with stack.http.get(f"{stack.url}/openapi.json") as response:
        # Lists of 10,000 messages would take minutes to generate; tests of request limits send such lists.
        description = re.sub(rb'"maxItems":\s*10000', b'"maxItems":1024', await response.read())
    config = CONFIG.format(key=stack.catalog.keys["enterprise"].text, token=SERVICE_TOKEN)

    # The description is read from a file: by its address, the operation that serves it would be left out.
    output = await schemathesis(tmp_path, config, description, stack.url, "examples,coverage,fuzzing,stateful")

    operations = sum(len(endpoint.methods) for endpoint in ENDPOINTS)
    assert f"Selected: {operations}/{operations}" in output
    assert f"Tested: {operations}" in output
    assert len(stack.worker.seen) > 50


@pytest.mark.timeout(600)  # Half a minute on an idle machine.
async def test_responses_of_the_admin_api_are_as_described(api: AdminApi, tmp_path: Path) -> None:
    """No check fails for any operation, with the token of an admin."""
    reply = await api("GET", "/openapi.json", role=None)
    config = ADMIN_CONFIG.format(token=api.tokens["admin"])

    # Each request opens a connection to PostgreSQL, so random requests are left to those that cover the schema.
    description = json.dumps(reply.body).encode()
    output = await schemathesis(tmp_path, config, description, api.url, "examples,coverage,stateful")

    operations = sum(len(methods) for methods in reply.body["paths"].values())
    assert operations > len(ROUTES)
    assert "Authentication failed: 1 operation " in output  # That of the session, which needs a cookie.
    assert f"Tested: {operations}" in output
