"""Tools of `POST /v1/responses` that a chat does not have.

The input of a custom tool is a text; in a chat it is a function with one argument. The tools of a namespace are offered
with the others, and a call of one has the name of the namespace.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

CUSTOM, CUSTOM_INPUT = "custom", "input"
"""The type of tools whose input is a text, and the argument of the function that has it in a chat."""
NAMESPACE = "namespace"
NOT_OFFERED = frozenset({"web_search", "web_search_preview"})
"""Tools that OpenAI runs, and that agents offer unasked: the model goes without them."""

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


def offered_tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Place, tool and namespace of each tool that the model gets."""
    for number, tool in enumerate(tools):
        place, members = f"tools[{number}]", tool.get("tools")
        if tool.get("type") == NAMESPACE and isinstance(members, list):
            named = enumerate(each for each in members if isinstance(each, dict))
            yield from ((f"{place}.tools[{at}]", each, str(tool.get("name"))) for at, each in named)
        elif tool.get("type") not in NOT_OFFERED:
            yield place, tool, ""


def custom_input(arguments: str) -> str:
    """The input of a custom tool, from the arguments of the function; arguments of another form are the input as they are."""
    try:
        found = _arguments.decode(arguments)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return arguments
    value = found.get(CUSTOM_INPUT)
    return value if isinstance(value, str) else arguments
