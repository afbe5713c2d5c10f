"""How one address is described: what it takes, what it says, which errors it gives. The table is gateway/openapi/endpoints.py.

Types are those that decode and encode, so the description cannot promise another form than the one that is checked.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.http.response import JSON
from scheduler.errors import ErrorCode

Schema = dict[str, Any]
Token = Literal["key", "service"]

LIMITS = (
    "RateLimit-Policy",
    "RateLimit",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
)
"""With every answer to a customer who is known,"""

TOKEN_LIMITS = ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens")
"""and these where its tokens have a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Says:
    """An answer that is no error. `content`: media type -> the type of the body; `headers` always, `sometimes` not always."""

    sentence: str
    content: Mapping[str, Any] = field(default_factory=dict)
    headers: tuple[str, ...] = ()
    sometimes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A header or a part of the path that a client sends."""

    name: str
    place: Literal["header", "path", "query"]
    sentence: str
    schema: Schema = field(default_factory=lambda: {"type": "string"})

    def document(self) -> Schema:
        """The parameter object. A part of the path is always there."""
        required = {"required": True} if self.place == "path" else {}
        return {"name": self.name, "in": self.place, "description": self.sentence, **required, "schema": self.schema}


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """One address. `methods` that are told apart by nothing but the body (GET and HEAD) share a description.

    `body` is the struct that decodes; `rules` narrows its fields to what is checked after decoding,
    `conditions` say what fields must not be together. `wants` says which
    token, if any. `errors` are all codes that it can answer, also those that come from before its handler.
    """

    path: str
    methods: tuple[str, ...]
    tag: str
    summary: str
    answers: Mapping[int, Says]
    errors: frozenset[ErrorCode]
    wants: Token | None = None
    body: type | None = None
    example: Mapping[str, Any] | None = None
    rules: Mapping[str, Schema] = field(default_factory=dict)
    conditions: tuple[Schema, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    text: str = ""

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it: it has no sign for a part that may hold slashes."""
        return self.path.replace("...}", "}")

    def types(self) -> list[Any]:
        """Every type that its bodies have."""
        told = [kind for says in self.answers.values() for kind in says.content.values()]
        return told if self.body is None else [self.body, *told]


def only(*values: Any) -> Schema:
    """The rule of a field that takes these values and no others."""
    return {"enum": list(values)}


def in_json(kind: Any) -> dict[str, Any]:
    """The content of an answer with one JSON body."""
    return {JSON: kind}
