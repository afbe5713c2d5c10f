"""Large chats beside Redis: what is stored, how much, and how long."""

import asyncio
import os
import resource
from pathlib import Path

import pytest

from eventually import eventually
from scheduler import body_store
from scheduler.body_store import BodyStore, is_reference, keep_freed_memory, read_stored
from scheduler.errors import StartError
from scheduler.request_id import new_request_id

CHAT = '{"messages":[]}'


def store(directory: Path, **changes: float) -> BodyStore:
    opened = BodyStore(directory, 10, int(changes.get("max_bytes", 100)), 4.0, lambda: changes.get("now", 0.0))
    opened.open()
    return opened


def test_a_stored_chat_is_read_until_its_request_ends(tmp_path: Path) -> None:
    """The file has the mode of a secret, and is removed with its request; so is its size. A lost directory is made again."""
    directory, name = tmp_path / "bodies", new_request_id()
    bodies = store(directory)
    directory.rmdir()
    assert bodies.takes(11)
    assert not bodies.takes(10)
    assert bodies.put(name, CHAT)
    assert (directory / name).stat().st_mode & 0o777 == 0o600
    assert read_stored(str(directory), name) == CHAT
    assert bodies.stored_bytes == len(CHAT)

    bodies.discard(name)
    bodies.discard(name)

    assert read_stored(str(directory), name) is None
    assert bodies.stored_bytes == 0


def test_no_more_than_the_limit_is_stored(tmp_path: Path) -> None:
    """A chat without room is not stored, and leaves no file; nothing is stored without a directory."""
    bodies = store(tmp_path, max_bytes=20)
    assert bodies.put(new_request_id(), CHAT)
    assert not bodies.put(new_request_id(), CHAT)
    assert len(list(tmp_path.iterdir())) == 1
    assert not BodyStore().takes(1 << 30)


def test_files_of_dead_gateways_are_removed_at_the_next_start(tmp_path: Path) -> None:
    """Only those older than any request can be, and no other files of the directory."""
    old, new, other = new_request_id(), new_request_id(), "notes.txt"
    for name, age_s in ((old, 65), (new, 63), (other, 1000)):
        (tmp_path / name).write_text(CHAT)
        os.utime(tmp_path / name, (1000 - age_s, 1000 - age_s))
    store(tmp_path, now=1000.0)
    assert {path.name for path in tmp_path.iterdir()} == {new, other}


async def test_files_of_a_gateway_that_died_a_moment_ago_are_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway that replaces it finds them too young at its start, and removes them once they are old enough."""
    monkeypatch.setattr(body_store, "SWEEP_S", 0.01)
    left, now = tmp_path / new_request_id(), [1000.0]
    left.write_text(CHAT)
    os.utime(left, (999.0, 999.0))
    bodies = BodyStore(tmp_path, 10, 100, 4.0, lambda: now[0])
    bodies.open()
    assert left.exists()
    (loop,) = bodies.loops().values()
    sweeping = asyncio.create_task(loop())
    now[0] += 64.0
    await eventually(lambda: not left.exists(), "the file is removed")
    sweeping.cancel()


def test_memory_of_large_chats_is_used_again() -> None:
    """Once a process has had a large chat, it needs no new pages for the copies of the next one."""
    keep_freed_memory()
    chats = [bytes(3 << 20) for _ in range(4)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        chats.clear()
        chats += [bytes([1]) * (3 << 20) for _ in range(4)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 3000  # Thirty thousand without it.


@pytest.mark.parametrize("name", ["", "../etc/passwd", "req_1", CHAT, "req_" + "g" * 32])
def test_only_ids_are_names(tmp_path: Path, name: str) -> None:
    """No input of a client can name a file."""
    assert not is_reference(name)
    assert read_stored(str(tmp_path), name) is None


def test_a_directory_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    """The sentence names the setting and the directory."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"TIERLANE_BODY_DIR: .*file.*cannot be used"):
        store(tmp_path / "file")
