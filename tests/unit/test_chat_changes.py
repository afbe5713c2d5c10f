"""The changes that lines of a model's server make: which call a part belongs to where the server sends no index."""

import json
from typing import Any

import pytest

from gateway.translations.chat_changes import CallChange, ChangeReader


def call(name: str = "", index: int | None = None) -> dict[str, Any]:
    return {"index": index, "function": {"name": name, "arguments": "{}"}}


@pytest.mark.parametrize(
    ("form", "calls", "numbers"),
    [
        ("delta", [call("f", 1), call(index=0), call(index=1)], [1, 0, 1]),
        ("delta", [call("f"), call(), call("g"), call()], [0, 0, 1, 1]),
        ("delta", [call(), call("f"), call()], [0, 0, 0]),  # The name arrives late.
        ("message", [call("f"), call(), call("g")], [0, 1, 2]),
    ],
)
def test_numbers_of_calls(form: str, calls: list[dict[str, Any]], numbers: list[int]) -> None:
    """Without an index, a part with a name begins a call, except the first name; in a whole message every call is new."""
    line = json.dumps({"choices": [{form: {"tool_calls": calls}}]})
    changes = ChangeReader().changes(line)
    assert [each.number for each in changes if isinstance(each, CallChange)] == numbers
