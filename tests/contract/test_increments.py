"""Increments of streams on a gateway's channel."""

import pytest

from eventually import eventually
from pool import Pool
from scheduler.protocol.increments import (
    Increment,
    IncrementChannel,
    IncrementTarget,
    decode_increments,
    encode_increments,
    read_address,
)
from scheduler.protocol.replies import decode_replies

GOLDEN = b"+\x91\x95\xa1r\xa1n\x01\x04\xa3\xc3\xa9x"


def test_the_encoding_is_stable() -> None:
    """Gateways and workers of different versions exchange these bytes; replies and increments are never confused."""
    increments = [Increment("r", "n", 1, 4, "éx")]

    assert encode_increments(increments) == GOLDEN
    assert decode_increments(GOLDEN) == increments
    with pytest.raises(ValueError, match="list of replies"):
        decode_replies(GOLDEN)
    with pytest.raises(ValueError, match="list of increments"):
        decode_increments(b"+\x91\x91\xa1r")


@pytest.mark.parametrize(
    ("text", "address"),
    [("gw-1 abc", IncrementTarget("gw-1", "abc")), ("", None), ("gw-1", None), ("gw-1 ", None), (" abc", None)],
)
def test_the_address_in_the_payload(text: str, address: IncrementTarget | None) -> None:
    """A text that is not valid has no address."""
    assert read_address(text) == address
    assert address is None or address.written() == text


async def test_a_message_is_published_to_one_gateway(pool: Pool) -> None:
    """All increments of one step are in one message."""
    sent = [Increment("r1", "n1", 1, 0, "a"), Increment("r2", "n2", 2, 7, "b")]
    pubsub = pool.client.pubsub()
    await pubsub.subscribe(pool.keys.responses("g1"), pool.keys.responses("g2"))

    await IncrementChannel(pool.client, pool.keys).publish("g1", sent)

    async def received() -> tuple[bytes, bytes] | None:
        message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=0.05)
        return (message["channel"], message["data"]) if message else None

    channel, data = await eventually(received, "the message")
    await pubsub.aclose()
    assert channel.decode() == pool.keys.responses("g1")
    assert decode_increments(data) == sent
