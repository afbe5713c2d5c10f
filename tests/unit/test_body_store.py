"""Large chats beside Redis: what is stored, how much, and how long."""

import asyncio
import os
import resource
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from eventually import eventually
from gateway.jobs.dead_letter_rerun import NotRerun, submission_for
from ledger.dead_letters import DeadLetterRow, RequeueTerms
from scheduler import body_store
from scheduler.body_store import BodyStore, StoredChat, is_reference, keep_freed_memory
from scheduler.errors import StartError
from scheduler.payload import Payload, Task, encode_payload
from scheduler.request_id import new_request_id

CHAT = b'{"messages":[]}'


def read(directory: Path, name: str) -> bytes | None:
    try:
        return b"".join(StoredChat(str(directory), name).pieces(0, 4))
    except OSError:
        return None


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
    assert bodies.put(name, [CHAT[:5], memoryview(CHAT)[5:]])
    assert (directory / name).stat().st_mode & 0o777 == 0o600
    assert read(directory, name) == CHAT
    assert bodies.stored_bytes == len(CHAT)

    bodies.discard(name)
    bodies.discard(name)

    assert read(directory, name) is None
    assert bodies.stored_bytes == 0


def test_a_file_is_written_over_by_the_next_chat(tmp_path: Path) -> None:
    """A worker that is late does not read it; within the limit; and files that are not used again are removed."""
    bodies = store(tmp_path, max_bytes=40)
    first, second, third = [new_request_id() for _ in range(3)]
    assert bodies.put(first, [CHAT, CHAT])
    inode = (tmp_path / first).stat().st_ino
    late = StoredChat(str(tmp_path), first).pieces(0, 4)
    assert next(late) == CHAT[:4]
    bodies.discard(first)
    assert read(tmp_path, first) is None
    with pytest.raises(FileNotFoundError):
        next(late)
    assert bodies.put(second, [CHAT])
    assert (tmp_path / second).stat().st_ino == inode
    assert read(tmp_path, second) == CHAT
    bodies.discard(second)
    assert bodies.put(second, [CHAT])
    bodies.discard(second)
    (tmp_path / f"spare_{second}").unlink()
    assert bodies.put(third, [CHAT])
    assert read(tmp_path, third) == CHAT
    bodies.discard(third)
    assert bodies.put(second, [CHAT])
    assert [path.name for path in tmp_path.iterdir()] == [second]


def test_no_more_than_the_limit_is_stored(tmp_path: Path) -> None:
    """A chat without room is not stored, and leaves no file; nothing is stored without a directory."""
    bodies = store(tmp_path, max_bytes=20)
    assert bodies.put(new_request_id(), [CHAT])
    assert not bodies.put(new_request_id(), [CHAT])
    assert len(list(tmp_path.iterdir())) == 1
    assert not BodyStore().takes(1 << 30)


def test_files_of_dead_gateways_are_removed(tmp_path: Path) -> None:
    """At a start, and while others run, if they are older than any request can be; no other files of the directory."""
    old, new, other = new_request_id(), new_request_id(), "notes.txt"
    for name, age_s in ((old, 65), (f"spare_{old}", 65), (new, 63), (other, 1000)):
        (tmp_path / name).write_bytes(CHAT)
        os.utime(tmp_path / name, (1000 - age_s, 1000 - age_s))
    store(tmp_path, now=1000.0)
    assert {path.name for path in tmp_path.iterdir()} == {new, other}


async def test_files_of_a_gateway_that_died_a_moment_ago_are_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway that replaces it finds them too young at its start, and removes them once they are old enough."""
    monkeypatch.setattr(body_store, "SWEEP_S", 0.01)
    left, now = tmp_path / new_request_id(), [1000.0]
    left.write_bytes(CHAT)
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


@pytest.mark.parametrize(
    "name", ["", "../etc/passwd", "req_1", CHAT.decode(), "spare_" + new_request_id(), "req_" + "g" * 32], ids=range(6)
)
def test_only_ids_are_names(tmp_path: Path, name: str) -> None:
    """No input of a client can name a file."""
    assert not is_reference(name)
    assert read(tmp_path, name) is None


def test_a_directory_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    """The sentence names the setting and the directory."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"TIERLANE_BODY_DIR: .*file.*cannot be used"):
        store(tmp_path / "file")


def test_a_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user of a host may make a directory in shared memory."""
    other = SimpleNamespace(st_uid=os.getuid() + 1)
    monkeypatch.setattr("scheduler.body_store.os", SimpleNamespace(getuid=os.getuid, stat=lambda path: other))
    with pytest.raises(StartError, match="another user"):
        store(tmp_path)


def test_a_dead_letter_without_its_file_is_not_requeued() -> None:
    """Its stored request only has the name of the file; the operator gets a sentence."""
    letter = DeadLetterRow("req_1", datetime.now(UTC), "c", "acme", "free", "m", "worker_lost", 2, [], 1, None, None)
    body = encode_payload(Payload("m", new_request_id(), {}, Task.CHAT_DOCUMENT))
    terms = RequeueTerms("free", active=True, queue_ms=1, model_served=True)
    with pytest.raises(NotRerun, match="file"):
        submission_for(letter, body, terms, 1, again=False)
