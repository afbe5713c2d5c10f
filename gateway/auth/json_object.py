"""JSON objects of tokens and key sets, read strictly: duplicate names and NaN are errors."""

import json
from typing import Any, NoReturn


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises ValueError for anything else, NaN, and duplicate names at any depth."""
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_object, parse_constant=_reject_constant)
    except RecursionError as error:
        raise ValueError("It is nested too deeply.") from error
    if not isinstance(document, dict):
        raise ValueError("It is not a JSON object.")  # noqa: TRY004  # one type of error for all invalid text
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("It has two members of one name.")
    return members


def _reject_constant(_: str) -> NoReturn:
    raise ValueError("It is not JSON.")
