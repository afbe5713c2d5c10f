"""The arguments of Lua scripts: declared once, read by name, sent in the order of their declaration."""

from collections.abc import Sequence
from typing import Any

import pytest

from scheduler.redis_client import scripts
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.scripts import Script, preamble, script_fault


def declared(token: str, packed_ids: bytes, keep_ms: int, free: int | None = None) -> None: ...
def listed(share: float, points: Sequence[bytes]) -> None: ...


def test_the_preamble_reads_each_argument_into_a_local_of_its_name() -> None:
    """Numbers are converted; a Sequence is a table of the arguments that are left."""
    assert preamble(declared).splitlines() == [
        "local token = ARGV[2]",
        "local packed_ids = ARGV[3]",
        "local keep_ms = tonumber(ARGV[4])",
        "local free = tonumber(ARGV[5])",
    ]
    assert preamble(listed).splitlines() == [
        "local share = tonumber(ARGV[2])",
        "local points = {}",
        "for i = 3, #ARGV do points[i - 2] = ARGV[i] end",
    ]


@pytest.mark.parametrize(
    ("declaration", "args", "named", "sent"),
    [
        (declared, ("t",), {"keep_ms": 5, "packed_ids": b"\x90"}, ("t", b"\x90", 5)),
        (declared, ("t", b"\x90", 5, 0), {}, ("t", b"\x90", 5, 0)),
        (declared, ("t", b"\x90", 5), {"free": None}, ("t", b"\x90", 5)),
        (listed, (0.5,), {"points": [b"a", b"b"]}, (0.5, b"a", b"b")),
        (listed, (0.5, []), {}, (0.5,)),
    ],
)
async def test_arguments_are_sent_in_order(
    monkeypatch: pytest.MonkeyPatch, declaration: Any, args: Any, named: Any, sent: Any
) -> None:
    """By position or by name. None is not sent, so that it is nil in Lua; a list is sent as its items."""
    monkeypatch.setattr(scripts, "pack", lambda command: command)
    client = command_client("redis://127.0.0.1:1")
    script = Script("share", declaration, client, Keys())

    found: Any = script.packed(*args, **named)

    assert found[5:] == sent  # After EVALSHA, the hash, the number of keys, the key and the prefix.
    await client.aclose()


def test_a_line_that_is_in_no_file_or_in_several_is_printed() -> None:
    """As one with a constant, which is a literal in the text that Redis has; errors outside of scripts have no line."""
    sent = "#!lua\n  if x > 3 then\nend"

    assert (
        script_fault("admit", sent, "ERR a @user_script:2.")
        == "The script admit failed: `if x > 3 then`: ERR a @user_script:2."
    )
    assert (
        script_fault("admit", sent, "ERR a @user_script:3.") == "The script admit failed: `end`: ERR a @user_script:3."
    )
    assert script_fault("admit", sent, "LOADING Redis is loading") is None
