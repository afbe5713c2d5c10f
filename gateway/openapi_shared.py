"""What several addresses answer alike stands in the description once: whole responses become components with references."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from gateway.openapi_door import Schema


def share_responses(paths: Mapping[str, Schema]) -> dict[str, Schema]:
    """Put references in the place of every response that is there more than once, and return what they refer to.

    A component is named for the tag of the first address that has it, and the status.
    """
    uses = Counter(_text(response) for operation in _operations(paths) for response in operation["responses"].values())
    names: dict[str, str] = {}
    components: dict[str, Schema] = {}
    for operation in _operations(paths):
        responses = operation["responses"]
        for status, response in responses.items():
            text = _text(response)
            if uses[text] > 1:
                name = names.setdefault(text, _name(f"{operation['tags'][0]}-{status}", components))
                components[name] = response
                responses[status] = {"$ref": f"#/components/responses/{name}"}
    return components


def headers_in(paths: Mapping[str, Schema]) -> set[str]:
    """The names of the header components that responses refer to, before they are shared."""
    told = (response for operation in _operations(paths) for response in operation["responses"].values())
    return {reference["$ref"].rpartition("/")[2] for response in told for reference in response["headers"].values()}


def _operations(paths: Mapping[str, Schema]) -> Iterator[Schema]:
    return (operation for operations in paths.values() for operation in operations.values())


def _text(response: Schema) -> str:
    return json.dumps(response)


def _name(wanted: str, taken: Iterable[str]) -> str:
    count = sum(name.partition(".")[0] == wanted for name in taken)
    return f"{wanted}.{count + 1}" if count else wanted
