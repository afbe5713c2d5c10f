"""The key set follows its source, and outlives it for a while."""

import asyncio
import time
from pathlib import Path

import pytest

from eventually import eventually
from gateway.auth.jwks import MAX_BYTES, JwksSource, KeySetError, read_file
from jwt_issuer import config, jwk, jwks
from scheduler.redis_client.pipeline import Backoff

DAY_S = 86_400.0


class ScriptedReader:
    """Gives what the test says, or fails; notes when it was asked."""

    def __init__(self) -> None:
        self.answer: bytes | Exception = jwks()
        self.asked: list[float] = []

    async def read(self) -> bytes:
        self.asked.append(time.monotonic())
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Clock:
    """Monotonic seconds that stand still."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def reader() -> ScriptedReader:
    """The source's reader."""
    return ScriptedReader()


@pytest.fixture
def clock() -> Clock:
    """The source's clock."""
    return Clock()


@pytest.fixture
def source(reader: ScriptedReader, clock: Clock) -> JwksSource:
    """What is tested: a URL's source, with another reader."""
    return JwksSource(config(jwks="https://issuer.example/keys"), read=reader.read, clock=clock)


async def test_before_the_first_look_there_is_no_set_and_a_problem(source: JwksSource, reader: ScriptedReader) -> None:
    """Then there is a set and none."""
    assert source.keys is None
    assert source.problem == "The JWKS at https://issuer.example/keys was not read yet."

    await source.refresh()

    assert source.keys is not None
    assert source.problem is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (KeySetError("does not respond: TimeoutError"), "does not respond: TimeoutError"),
        (b"<html>", "is not JSON"),
        (b'{"keys": []}', "has no public key for RS256, ES256, EdDSA"),
        (KeyError("what nobody thought of"), "cannot be refreshed: KeyError"),
    ],
)
async def test_the_last_good_set_is_kept_while_the_source_is_bad_or_away(
    source: JwksSource, reader: ScriptedReader, answer: bytes | Exception, words: str
) -> None:
    """Health is told in a sentence; when it is back, all is well."""
    await source.refresh()
    good, reader.answer = source.keys, answer

    await source.refresh()

    assert source.keys is good
    assert source.problem == f"The JWKS at https://issuer.example/keys {words}."
    reader.answer = jwks()
    await source.refresh()
    assert source.problem is None


async def test_it_is_not_kept_for_ever(source: JwksSource, reader: ScriptedReader, clock: Clock) -> None:
    """Keys are taken out of a set because they leaked, and we would not hear of it."""
    await source.refresh()
    clock.now += DAY_S
    reader.answer = KeySetError("responds with status 500")
    await source.refresh()
    assert source.keys is not None

    clock.now += 1

    assert source.keys is None
    reader.answer = jwks()
    await source.refresh()
    assert source.keys is not None


async def test_an_unchanged_set_stays_the_same_object(source: JwksSource, reader: ScriptedReader) -> None:
    """Verified tokens are forgotten only for a change."""
    await source.refresh()
    first = source.keys

    await source.refresh()
    assert source.keys is first
    reader.answer = jwks(jwk("ES256", 1))
    await source.refresh()

    assert source.keys is not first
    assert source.keys is not None
    assert not source.keys.knows("ES256-0")


async def gaps(source: JwksSource, reader: ScriptedReader) -> tuple[float, float]:
    """Seconds between the first three looks, while somebody wants another one all the time."""

    def wish_and_count() -> bool:
        source.wanted()
        return len(reader.asked) >= 3

    task = asyncio.create_task(source.run())
    try:
        await eventually(wish_and_count, "three looks")
    finally:
        task.cancel()
    first, second, third = reader.asked
    return second - first, third - second


async def test_unknown_keys_hasten_the_next_look_but_not_past_the_least_gap(
    reader: ScriptedReader, clock: Clock
) -> None:
    """However many they are; without them it would be five minutes."""
    source = JwksSource(config(jwks="https://issuer.example/keys"), read=reader.read, clock=clock, least_gap_s=0.1)

    assert min(await gaps(source, reader)) >= 0.099


async def test_a_failing_source_is_asked_with_growing_pauses(reader: ScriptedReader, clock: Clock) -> None:
    """However much its keys are wanted."""
    reader.answer = KeySetError("responds with status 500")
    source = JwksSource(config(jwks="https://issuer.example/keys"), read=reader.read, clock=clock, least_gap_s=0.0)
    source._backoff = Backoff(0.05, 1.0, draw=lambda _, most: most)

    first, second = await gaps(source, reader)

    assert first >= 0.049
    assert second >= 0.099


async def test_a_file_is_read_again_and_its_absence_is_told(tmp_path: Path) -> None:
    """By its name, also after it was replaced."""
    path = tmp_path / "jwks.json"
    source = JwksSource(config(jwks=str(path)))
    await source.refresh()
    assert source.problem == f"The JWKS at {path} cannot be read: No such file or directory."

    path.write_bytes(jwks())
    await source.refresh()
    assert source.problem is None
    (tmp_path / "new").write_bytes(jwks(jwk("ES256", 1)))
    (tmp_path / "new").replace(path)
    await source.refresh()

    assert source.keys is not None
    assert source.keys.knows("ES256-1")
    assert not source.keys.knows("ES256-0")


async def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """It is read no further than that."""
    path = tmp_path / "jwks.json"
    path.write_bytes(b" " * (MAX_BYTES + 1))

    with pytest.raises(KeySetError, match="more than 262144 bytes"):
        await read_file(path)
