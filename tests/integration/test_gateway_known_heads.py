"""Requests whose head was parsed before: they go past the parser, and nobody can tell but by the time it takes."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from gateway.http.connection import MAX_CACHE_MISSES, EdgeConnection
from gateway.inference.fast_path import FastPath
from integration.gateway_fixtures import Stack, head_of, running_stack
from integration.test_gateway_fast_lane import VARIANTS, VARYING, Client, handled, request


@pytest.fixture
async def stack(client: Redis, redis_url: str) -> AsyncIterator[Stack]:
    """A gateway and a worker behind it."""
    async with running_stack(client, redis_url) as running:
        yield running


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the parser is given."""
    given: list[bytes] = []
    parse = EdgeConnection._parse

    def note(self: EdgeConnection, data: bytes, *rest: Any) -> None:
        given.append(data)
        parse(self, data, *rest)

    monkeypatch.setattr(EdgeConnection, "_parse", note)
    return given


async def asked(client: Client, data: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    client.writer.write(data)
    return await client.answer()


async def test_the_second_request_is_not_parsed_whoever_sends_it(stack: Stack, parses: list[bytes]) -> None:
    """On the same connection and on others, with another body, with another key, and with none that is known."""
    one, other = await Client.of(stack), await Client.of(stack)
    answers = [
        await asked(one, request(stack)),
        await asked(one, request(stack, body=b'{"input":"another"}')),
        await asked(other, request(stack)),
        await asked(other, request(stack, key=b"Bearer tl_abcdefghijkl_abcdefghijklmnopqrstuvwxyzAB000000")),
        await asked(other, request(stack, key=b"Basic YTpi")),
        await asked(one, request(stack)),
    ]

    assert [document.get("output") for _, _, document in answers] == ["olleh", "rehtona", "olleh", None, None, "olleh"]
    assert [status for status, _, _ in answers] == [200, 200, 200, 401, 401, 200]
    assert (len(parses), handled(stack.gateway)) == (1, 0)
    for client in (one, other):
        client.writer.close()


@pytest.mark.parametrize("variant", VARIANTS)
async def test_what_is_not_parsed_is_answered_as_what_is(stack: Stack, variant: dict[str, Any]) -> None:
    """Status, names of headers and the error are the same the second time, and after an ordinary one."""
    lines = variant.get("lines", ())
    data = request(stack, *lines, **{name: value for name, value in variant.items() if name != "lines"})
    answers = []
    for sent in (request(stack), data, data):
        client = await Client.of(stack)  # Each its own, since some answers end theirs.
        answers.append(await asked(client, sent))
        client.writer.close()
    fresh = head_of(await stack.raw(request(stack, b"Connection: close", *lines, **_but_lines(variant))))

    for status, headers, document in answers[1:]:
        assert (status, set(headers) - VARYING) == (fresh[0], set(fresh[1]) - VARYING)
        assert document.get("error", document).get("code") == fresh[2].get("error", fresh[2]).get("code")


def _but_lines(variant: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in variant.items() if name != "lines"}


async def test_a_head_without_its_end_is_waited_for(stack: Stack, parses: list[bytes]) -> None:
    """Though it is known so far, and its length fits what is there: what comes then is the body, and no request."""
    client = await Client.of(stack)
    inner = request(stack, body=b'{"input":"smuggled"}')
    outer = request(stack, b"X-Long: " + b"x" * 100, body=inner)
    await asked(client, outer)
    piece = outer[: -len(inner) - 3]
    length = len(piece) - 3
    piece = piece.replace(b"Content-Length: %d" % len(inner), b"Content-Length: %d" % length)
    client.writer.write(piece)
    await eventually(lambda: len(parses) == 2, "the beginning is there")
    status, _, document = await asked(client, b"\n\r\n" + inner + b" " * (length - len(inner)))

    assert (status, document["error"]["code"]) == (400, "invalid_request")
    assert stack.worker.seen == []
    client.writer.close()


async def test_strangers_teach_nothing(stack: Stack, parses: list[bytes]) -> None:
    """Else anybody could fill the room that there is for heads."""
    client = await Client.of(stack)
    for _ in range(2):
        status, _, _ = await asked(client, request(stack, key=b"Bearer nobody"))
        assert status == 401
    edge = stack.gateway._edge
    assert edge is not None
    assert (len(parses), len(edge.header_cache)) == (2, 0)
    client.writer.close()


async def test_who_never_repeats_a_head_is_not_learnt_from_for_ever(stack: Stack) -> None:
    """Each connection may fill so many places, no more."""
    client = await Client.of(stack)
    for number in range(MAX_CACHE_MISSES + 5):
        status, _, _ = await asked(client, request(stack, b"X-Number: %d" % number))
        assert status == 200
    client.writer.close()

    edge = stack.gateway._edge
    assert edge is not None
    assert len(edge.header_cache) == MAX_CACHE_MISSES


@pytest.mark.parametrize("lines", [(), (b"Idempotency-Key: one",)])
async def test_what_the_handler_answers_is_parsed_and_the_next_one_not(
    stack: Stack, parses: list[bytes], lines: tuple[bytes, ...]
) -> None:
    """A look at the models, or a request that cannot ride, costs its connection nothing for later."""
    client = await Client.of(stack)
    await asked(client, request(stack))
    other = request(stack, *lines) if lines else b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
    statuses = [(await asked(client, each))[0] for each in (other, request(stack), other, request(stack))]

    assert statuses == [200] * 4
    assert (len(parses), handled(stack.gateway)) == (3, 2)
    client.writer.close()


async def test_what_was_known_before_an_outage_is_known_after_it(
    stack: Stack, parses: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nothing rides all is parsed, and no connection is given up for that."""
    client = await Client.of(stack)
    await asked(client, request(stack))
    with monkeypatch.context() as patch:
        patch.setattr(FastPath, "open", False)
        for _ in range(MAX_CACHE_MISSES + 1):
            assert (await asked(client, request(stack)))[0] == 200
    await asked(client, request(stack))

    assert (len(parses), handled(stack.gateway)) == (MAX_CACHE_MISSES + 2, MAX_CACHE_MISSES + 1)
    client.writer.close()
