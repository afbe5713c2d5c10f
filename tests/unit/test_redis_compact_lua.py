"""The text of a script as it is sent: shorter, with the same effect."""

import pytest

from scheduler.redis_client.compact_lua import compact

HEAD = "#!lua flags=allow-oom"


@pytest.mark.parametrize(
    ("lines", "sent"),
    [
        # Comments and empty lines.
        (["-- a", "call('A') -- b", "", "return 1"], ["call('A')", "return 1"]),
        # Functions that nothing uses, or only those that nothing uses.
        (
            ["local function f() return 1 end", "local function g()", "  return f()", "end", "return 2"],
            ["return 2"],
        ),
        (
            ["local t = {}", "function t.a()", "  return 1", "end", "function t.b() return t.a() end", "return t.a()"],
            ["local t = {}", "function t.a()", "  return 1", "end", "return t.a()"],
        ),
        # Constants of the script; not in strings, of a table, or of an inner block.
        (["local A, B = 1, 'b'", "return A + t.A .. B .. 'A'"], ["return 1 + t.A .. 'b' .. 'A'"]),
        (["local A = 1", "local t = {A = A}", "return t"], ["local t = {A = 1}", "return t"]),
        (
            ["local A = 1", "local function f()", "  local A = g()", "  return A", "end", "return A + f()"],
            ["local A = 1", "local function f()", "  local A = g()", "  return A", "end", "return A + f()"],
        ),
        # A constant that is declared again has its first value until then.
        (
            ["local A = 1", "f(A)", "local A = 2", "f(A)", "local A = {}", "f(A)"],
            ["f(1)", "f(2)", "local A = {}", "f(A)"],
        ),
        # Other values stay variables: negative numbers, calls, tables.
        (["local A, B = -1, f()", "return A + B"], ["local A, B = -1, f()", "return A + B"]),
    ],
)
def test_what_a_call_does_not_need_is_left_out(lines: list[str], sent: list[str]) -> None:
    """Comments, unused functions and names of constants."""
    assert compact("\n".join([HEAD, *lines])).split("\n") == [HEAD, *sent]
