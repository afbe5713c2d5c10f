"""The JSON files of a model directory, and the error for a directory that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Unusable(Exception):
    """The directory cannot be used; the message says why, without its name and without a full stop."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises Unusable."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise Unusable(f"{path.name} is no JSON object")
    return found


def read_json(path: Path) -> Any:
    """The JSON in a file. Raises Unusable."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise Unusable(f"{path.name} is missing") from None
    except OSError as error:
        raise Unusable(f"{path.name} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise Unusable(f"{path.name} is no JSON") from None
