"""Custom tools of `POST /v1/responses`: their input is a text. In a chat each is a function with one argument."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

CUSTOM, CUSTOM_INPUT = "custom", "input"
"""The type of tools whose input is a text, and the argument of the function that has it in a chat."""
_arguments = msgspec.json.Decoder(dict[str, Any])


class CustomTool(msgspec.Struct, frozen=True):
    """A tool whose input is a text. In a chat it is a function with one argument, `input`."""

    type: str
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None

    def function(self) -> dict[str, Any]:
        """The function. The grammar of the input is part of its description: servers have no other place for it."""
        grammar = (self.format or {}).get("definition")
        texts = [self.description, f"`input` must match this grammar:\n{grammar}" if grammar else None]
        description = "\n\n".join(filter(None, texts))
        properties = {CUSTOM_INPUT: {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": [CUSTOM_INPUT]}
        return {"name": self.name, "parameters": parameters} | ({"description": description} if description else {})


def custom_tools(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names of the custom tools."""
    return frozenset(str(tool.get("name")) for tool in tools if tool.get("type") == CUSTOM)


def custom_input(arguments: str) -> str:
    """The input of a custom tool, from the arguments of the function; arguments of another form are the input as they are."""
    try:
        found = _arguments.decode(arguments)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return arguments
    value = found.get(CUSTOM_INPUT)
    return value if isinstance(value, str) else arguments
