"""What text backends share: generation parameters and prompts of conversations."""

from typing import Any

import pytest

from gpu_pool.backends.backend import Item
from gpu_pool.backends.generation import (
    GenerationParameters,
    ParameterError,
    last_turn,
    named_turns,
    parse_parameters,
    prompt_of,
    running_text,
)
from scheduler.payload import Task
from scheduler.prompt_messages import PromptMessage, encode_messages

CHAT = Item(encode_messages([PromptMessage("system", "Be brief."), PromptMessage("user", "Hello")]), {}, Task.CHAT)


def test_limits_are_inclusive() -> None:
    """The last value of each range is accepted, and null means the default."""
    most: dict[str, object] = {
        "temperature": 2,
        "top_p": 1,
        "max_tokens": 256,
        "seed": 2**63 - 1,
        "stop": ["x" * 64] * 4,
    }
    assert parse_parameters(most) == GenerationParameters(2.0, 1.0, 256, 2**63 - 1, ("x" * 64,) * 4)
    least: dict[str, object] = {"temperature": 0, "max_tokens": 1, "seed": -(2**63), "stop": "end"}
    assert parse_parameters(least) == GenerationParameters(0.0, 1.0, 1, -(2**63), ("end",))
    assert parse_parameters({"seed": None, "stop": None}) == GenerationParameters()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.01, 2.01, 10**400, float("nan"), float("inf"), "0.7", True, None]),
        ("top_p", [0, 1.01, []]),
        ("max_tokens", [0, 257, 4.0, True]),
        ("seed", [2**63, -(2**63) - 1, 1.5]),
        ("stop", ["", ["a", ""], ["a"] * 5, ["é" * 33], [1], {"a": 1}]),
        ("best_of", [2]),
    ],
)
def test_bad_values_name_their_field(field: str, values: list[object]) -> None:
    """Unknown, wrong-typed and out-of-range values raise an error with the name of the field."""
    for value in values:
        with pytest.raises(ParameterError) as caught:
            parse_parameters({field: value})
        assert caught.value.field == field, value


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (named_turns, "system: Be brief.\nuser: Hello\nassistant:"),
        (running_text, "Be brief.\nHello"),
        (last_turn, "Hello"),
    ],
)
def test_prompt_of_a_conversation(template: Any, prompt: str) -> None:
    """Only conversations go through the template; a malformed one is a ValueError."""
    assert prompt_of(CHAT, template) == prompt
    assert prompt_of(Item(CHAT.input), template) == CHAT.input
    with pytest.raises(ValueError, match="not a conversation"):
        prompt_of(Item("[1]", {}, Task.CHAT), template)
