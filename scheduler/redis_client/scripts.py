"""Lua scripts: read with their includes, called by their hash; and strings in Lua's msgpack.

A script names its includes in a line `-- include: prelude, wake, ratelimit/bucket`; they are inserted before its own text
in that order. Its arguments are declared in Python, as the parameters of a function without a body, and read in Lua as
locals of the same names (`preamble`). A script that Redis does not have (restart, failover, SCRIPT FLUSH) is sent in full.
Lua's msgpack has no bin type, so packed bytes inside a packed array are a str of any bytes.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from inspect import signature
from typing import Any, Generic, ParamSpec, get_args, get_origin

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, OutOfMemoryError

from scheduler.errors import RedisUnavailable, TierlaneError
from scheduler.redis_client.compact_lua import compact
from scheduler.redis_client.connections import FAULTS, pipelined, unavailable
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.pipeline import Argument, pack
from scheduler.redis_client.setup_faults import login_fault

_BODY = "return (function()"
_INCLUDE = re.compile(r"^-- include: (.+)$", re.MULTILINE)
_LINE = re.compile(r"user_script:(\d+)")  # Of the text as it was sent.

MAX_CALL_BYTES = 2 << 20
"""The maximum size of bodies or outputs in one call: 33 MB blocked Redis for 150 to 200 ms. A larger one is sent alone."""

_HEADERS = {0xD9: 2, 0xDA: 3, 0xDB: 5, 0xC4: 2, 0xC5: 3, 0xC6: 5}

_P = ParamSpec("_P")


class RedisFull(TierlaneError):
    """Redis has no memory left for new requests; nothing was written."""


@cache
def source(name: str) -> str:
    """The complete text of a script with its includes, shebang first."""
    text = files("scheduler").joinpath("lua", f"{name}.lua").read_text("utf-8")
    shebang, body = text.split("\n", 1)
    if not shebang.startswith("#!lua"):
        raise ValueError(f"{name}.lua must begin with #!lua")
    parts = [_read(include) for include in _included(body)]
    # Capturing a local takes time in proportion to those captured before, and locals of the prelude, which nearly every
    # function captures, are at the end. Captured from an enclosing function, they take one step.
    return "\n".join([shebang, *parts[:1], _BODY, *parts[1:], body, "end)()"])


def _included(text: str) -> list[str]:
    """The files that a script includes, from the root of the packages."""
    found = _INCLUDE.search(text)
    names = [name.strip().rpartition("/") for name in found.group(1).split(",")] if found else []
    return [
        f"{package}/lua/{part}.lua" if package else f"scheduler/lua/includes/{part}.lua" for package, _, part in names
    ]


def _read(path: str) -> str:
    package, *rest = path.split("/")
    return files(package).joinpath(*rest).read_text("utf-8")


def script_fault(name: str, sent: str, error: str) -> str | None:
    """The sentence for an error inside a script, with the line of its file; None for other errors. `sent`: the text as sent.

    That text has neither comments nor unused functions, so the line is found by what it says; without a match in a file, or with
    several, the sentence has its text.
    """
    number = _LINE.search(error)
    if number is None:
        return None
    line = sent.split("\n")[int(number[1]) - 1]
    own = f"scheduler/lua/{name}.lua"
    places = [
        f"{path}:{position}"
        for path in (own, *_included(_read(own)))
        for position, text in enumerate(_read(path).split("\n"), 1)
        if text.partition("--")[0].rstrip() == line
    ]
    place = places[0] if len(places) == 1 else f"`{line.strip()}`"
    return f"The script {name} failed: {place}: {error}"


@cache
def preamble(declaration: Callable[..., None]) -> str:
    """The Lua that reads each declared argument into a local of its name.

    A number is a number, a Sequence, which is the last argument, a table; texts and bytes are strings.
    """
    lines = []
    for position, (name, parameter) in enumerate(signature(declaration).parameters.items(), 2):
        value = f"ARGV[{position}]"
        if get_origin(parameter.annotation) is Sequence:
            lines += [f"local {name} = {{}}", f"for i = {position}, #ARGV do {name}[i - {position - 1}] = ARGV[i] end"]
        elif {int, float} & {parameter.annotation, *get_args(parameter.annotation)}:
            lines.append(f"local {name} = tonumber({value})")
        else:
            lines.append(f"local {name} = {value}")
    return "\n".join(lines)


class Script(Generic[_P]):
    """One script of one pool, called with the arguments of its declaration: in order, or by name.

    None is nil in Lua; it is not sent, so only None may follow. KEYS[1] and the prefix, which are the same for all scripts, are
    added here.
    """

    def __init__(self, name: str, declaration: Callable[_P, None], client: Redis, keys: Keys) -> None:
        text = compact(source(name)).replace(_BODY, f"{_BODY}\n{preamble(declaration)}", 1)
        parameters = signature(declaration).parameters
        self._name = name
        self._names = tuple(parameters)
        self._has_list = any(get_origin(each.annotation) is Sequence for each in parameters.values())
        head = (1, keys.leases, keys.prefix)
        self._by_hash = (b"EVALSHA", sha1(text.encode(), usedforsecurity=False).hexdigest(), *head)
        self._whole = (b"EVAL", text, *head)
        self._pipelined = pipelined(client)

    async def __call__(self, *args: _P.args, **named: _P.kwargs) -> Any:
        """Run the script. Raises RedisFull, or RedisUnavailable if the outcome is unknown."""
        values = self._values(args, named)
        try:
            try:
                return await self._pipelined.call(self._by_hash + values)
            except NoScriptError:
                return await self._pipelined.call(self._whole + values)
        except OutOfMemoryError as error:
            raise RedisFull("Redis has reached its memory limit: raise maxmemory, or drain the queues.") from error
        except FAULTS as error:
            fault = None if login_fault(error) else script_fault(self._name, str(self._whole[1]), str(error))
            raise (RedisUnavailable(fault) if fault else unavailable(error)) from error

    def packed(self, *args: _P.args, **named: _P.kwargs) -> bytes:
        """The bytes of a call, for `PipelinedClient.send_now`. Redis must have the script, which is named by its hash."""
        return pack(self._by_hash + self._values(args, named))

    def _values(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Argument, ...]:
        """The arguments in the order of their declaration."""
        values = (*args, *map(named.get, self._names[len(args) :])) if named else args
        while values and values[-1] is None:
            values = values[:-1]
        return (*values[:-1], *values[-1]) if self._has_list else values


def inner(packed: bytes) -> bytes:
    """The content of a msgpack str or bin. Raises ValueError for other types."""
    head = packed[0] if packed else 0
    if 0xA0 <= head <= 0xBF:
        return packed[1:]
    if head not in _HEADERS:
        raise ValueError("not a packed string")
    return packed[_HEADERS[head] :]
