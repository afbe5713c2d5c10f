"""Members that ask for nothing: null, an empty list or an empty object under a name that a body does not have.

Clients with types write every member that they know, also those of other servers. Such a member has no effect, so it is no
reason to reject the body; with a value it is.
"""

import json
import re
from typing import Any

_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$?(.*)`)?", re.DOTALL)
"""A name may have any character."""
_STEPS = re.compile(r"\.([^.\[]+)|\[[^\]]*\]")
NOTHING: tuple[Any, ...] = (None, [], {})


def without_absent_member(raw: bytes, error: str) -> bytes | None:
    """The body without the unknown member that a validation error names; None if it has a value, or the error is another one.

    All elements of a list on the way are corrected, since the error does not name the one.
    """
    found = _UNKNOWN.fullmatch(error)
    if found is None:
        return None
    unknown, path = found[1], found[2] or ""
    removed = False
    try:
        document = json.loads(raw)
        # The values at a path such as `.messages[...].content[...]`.
        places = [document]
        for step in _STEPS.finditer(path):
            if (name := step[1]) is not None:
                places = [place[name] for place in places if isinstance(place, dict) and name in place]
            else:
                places = [each for place in places if isinstance(place, list) for each in place]
        for place in places:
            if isinstance(place, dict) and unknown in place and place[unknown] in NOTHING:
                del place[unknown]
                removed = True
    except (ValueError, RecursionError):
        return None
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass") if removed else None
