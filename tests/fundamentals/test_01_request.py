"""Step 1: one request through a gateway.

The gateway runs in this process and uses a real Redis. `stack` also has a catalog with one customer of each tier, and a
worker that returns its input reversed.
"""

from integration.gateway_fixtures import Stack, stack

__all__ = ["stack"]


async def test_a_request_gets_one_response(stack: Stack) -> None:
    """The key names the customer, the customer has a tier. Headers report the remaining limits and the time of each stage."""
    status, document, headers = await stack.infer({"input": "hello"}, "paid")

    assert (status, document["output"]) == (200, "olleh")
    assert document["request_id"] == headers["x-request-id"]
    assert (document["metadata"]["tier"], document["metadata"]["batch_size"]) == ("paid", 1)
    assert "x-ratelimit-remaining-requests" in headers
    assert headers["server-timing"].startswith("queue;dur=")


async def test_an_unknown_field_is_named(stack: Stack) -> None:
    """Bad input never reaches a queue: the error names the field."""
    status, document, _ = await stack.infer({"input": "hello", "temperatur": 1})

    assert (status, document["error"]["code"]) == (400, "invalid_request")
    assert "temperatur" in document["error"]["message"]
    assert stack.worker.seen == []
