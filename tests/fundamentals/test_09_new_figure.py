"""Step 9: a new figure in health.

CONTRIBUTING.md lists the files: one declares the figure, one computes it from the observation. The declaration is a type, from
which the OpenAPI document is made. Declare a figure of your own, and see this test fail; then compute it. One that is computed
but not declared is in no document; mypy names it.
"""

from typing import Any

import pytest

from eventually import eventually
from integration.gateway_fixtures import Stack, stack

__all__ = ["stack"]


async def documents(stack: Stack) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schemas of the OpenAPI document, and the health document with the figures of the three tiers."""

    async def health() -> dict[str, Any] | None:
        _, document = await stack.internal("/internal/health")
        return document if len(document["tiers"]) == 3 else None

    async with stack.http.get(f"{stack.url}/openapi.json") as response:
        schemas = (await response.json())["components"]["schemas"]
    return schemas, await eventually(health, "health has the tiers")


@pytest.mark.parametrize("part", ["pool", "tier"])
async def test_every_figure_is_declared_and_computed(stack: Stack, part: str) -> None:
    """The document has exactly the figures of its type, for the pool and for each tier."""
    schemas, document = await documents(stack)

    name, figures = ("HealthNow", document) if part == "pool" else ("TierHealth", document["tiers"]["free"])
    assert set(figures) == set(schemas[name]["properties"])
