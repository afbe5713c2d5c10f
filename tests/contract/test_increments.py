"""Increments on a gateway's channel, and how a worker hears who left: codec and scripts against a real Redis."""

import pytest

from eventually import eventually
from pool import Pool, done
from scheduler.errors import ErrorCode
from scheduler.protocol.replies import (
    LOST,
    Increment,
    IncrementChannel,
    IncrementTarget,
    decode_increments,
    decode_replies,
    encode_increments,
    read_address,
)

GOLDEN = b"+\x91\x95\xa1r\xa1n\x01\x04\xa3\xc3\xa9x"


def test_the_bytes_of_a_message() -> None:
    """Gateways and workers of different versions meet on the channel."""
    increments = [Increment("r", "n", 1, 4, "éx")]

    assert encode_increments(increments) == GOLDEN
    assert decode_increments(GOLDEN) == increments
    assert decode_increments(encode_increments([Increment("r", "n", 1, LOST, "")]))[0].offset == LOST


def test_no_message_is_taken_for_the_other_kind() -> None:
    """A list of replies begins with an array, increments with their mark."""
    with pytest.raises(ValueError, match="list of replies"):
        decode_replies(GOLDEN)
    with pytest.raises(ValueError, match="list of increments"):
        decode_increments(b"+\x91\x91\xa1r")


@pytest.mark.parametrize(
    ("text", "address"),
    [("gw-1 abc", IncrementTarget("gw-1", "abc")), ("", None), ("gw-1", None), ("gw-1 ", None), (" abc", None)],
)
def test_an_address_is_one_text(text: str, address: IncrementTarget | None) -> None:
    """As the stored request carries it; what is none sends nothing."""
    assert read_address(text) == address
    assert address is None or address.written() == text


async def test_a_message_goes_to_one_gateway(pool: Pool) -> None:
    """All that was added in one step, in one message."""
    sent = [Increment("r1", "n1", 1, 0, "a"), Increment("r2", "n2", 2, 7, "b")]
    pubsub = pool.client.pubsub()
    await pubsub.subscribe(pool.keys.responses("g1"), pool.keys.responses("g2"))

    await IncrementChannel(pool.client, pool.keys).publish("g1", sent)

    async def heard() -> tuple[bytes, bytes] | None:
        message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=0.05)
        return (message["channel"], message["data"]) if message else None

    channel, data = await eventually(heard, "the message")
    await pubsub.aclose()
    assert channel.decode() == pool.keys.responses("g1")
    assert decode_increments(data) == sent


async def test_a_stream_is_cancelled_while_it_runs(pool: Pool) -> None:
    """It ends there and then, its owner hears who is left, once, and finishes those alone."""
    claimed = await pool.running(3)
    first, second, third = (request.id for request in claimed.requests)
    assert await pool.batches.renew("b1", "token", 3) is True

    await pool.terminations.cancel([(second, ErrorCode.CANCELLED, True)])

    assert await pool.batches.renew("b1", "token", 3) == {first, third}
    assert await pool.batches.renew("b1", "token", 2) is True
    assert await pool.batches.renew("b1", "token") is True
    assert await pool.batches.renew("b1", "other", 2) is False
    assert await pool.batches.finish("b1", "token", [done(first), done(second), done(third)]) == 1
    assert await pool.states([first, second, third]) == ["completed", "failed", "completed"]
    _, ended = await pool.audit()
    assert [(each.id, each.error_code) for each in ended if each.error_code] == [(second, "cancelled")]


async def test_the_last_one_may_leave(pool: Pool) -> None:
    """A batch of which nobody is left is told so, and closed as usual."""
    claimed = await pool.running(1)
    await pool.terminations.cancel([(claimed.requests[0].id, ErrorCode.CANCELLED, True)])

    assert await pool.batches.renew("b1", "token", 1) == frozenset()
    assert await pool.batches.finish("b1", "token", []) == 0
    assert await pool.inflight() == {}


async def test_who_left_is_not_run_again(pool: Pool) -> None:
    """The worker is lost with a batch that one member has left: the others alone are retried."""
    claimed = await pool.running(2)
    gone, stays = (request.id for request in claimed.requests)
    await pool.terminations.cancel([(gone, ErrorCode.CANCELLED, True)])

    await pool.reaped()

    assert [request.id for request in (await pool.claim_next(token="again")).requests] == [stays]
