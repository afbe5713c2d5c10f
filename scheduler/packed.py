"""Strings as Lua's msgpack writes them: it has no bin type, so packed bytes inside a packed array come as a str of any bytes."""

_HEADERS = {0xD9: 2, 0xDA: 3, 0xDB: 5, 0xC4: 2, 0xC5: 3, 0xC6: 5}


def inner(packed: bytes) -> bytes:
    """The content of a msgpack str or bin, whatever its bytes. Raises ValueError for anything else."""
    head = packed[0] if packed else 0
    if 0xA0 <= head <= 0xBF:
        return packed[1:]
    if head not in _HEADERS:
        raise ValueError("not a packed string")
    return packed[_HEADERS[head] :]
