"""The description of an endpoint: what it accepts and returns, its errors and headers.

The table is gateway/openapi/endpoints.py. Types are those that decode and encode, so document and behaviour cannot
differ. A new response header is one entry in gateway/http/response_headers.py; building the document fails for a header
that is not there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.http.error_responses import ErrorBody
from gateway.http.response import JSON
from gateway.http.response_headers import Schema
from scheduler.errors import ErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseDescription:
    """A response that is not an error. `content`: media type -> type of the body. `optional_headers` may be absent."""

    description: str
    content: Mapping[str, Any] = field(default_factory=dict)
    headers: tuple[str, ...] = ("x-request-id",)
    optional_headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A request header, a part of the path, or a parameter of the query."""

    name: str
    place: Literal["header", "path", "query"]
    description: str
    schema: Schema = field(default_factory=lambda: {"type": "string"})
    required: bool = False

    def document(self) -> Schema:
        """The parameter object. A part of the path is required."""
        required = {"required": True} if self.required or self.place == "path" else {}
        return {"name": self.name, "in": self.place, "description": self.description, **required, "schema": self.schema}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiEndpoint:
    """One path, or some of its methods. Methods that differ only in whether they return a body (GET and HEAD) share a description.

    `errors` are all codes that it can return, including those from before its handler; `error` is their body. `body` is the
    struct that decodes; `rules` and `conditions` describe what is checked after decoding: schemas of single fields, and of
    combinations. `beside`: a header -> those that its API sends with the same meaning.
    """

    path: str
    methods: tuple[str, ...]
    tag: str
    summary: str
    responses: Mapping[int, ResponseDescription]
    errors: frozenset[ErrorCode]
    token: Literal["key", "service", "operator"] | None = None
    error: type = ErrorBody
    body: type | None = None
    media: str = JSON  # Of the body.
    body_required: bool = True
    example: Mapping[str, Any] | None = None
    rules: Mapping[str, Schema] = field(default_factory=dict)
    conditions: tuple[Schema, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    description: str = ""
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def template(self) -> str:
        """The path in OpenAPI's syntax, which has no form for a part that may contain slashes."""
        return self.path.replace("...}", "}")

    def types(self) -> list[Any]:
        """The types of all bodies."""
        types = [kind for response in self.responses.values() for kind in response.content.values()]
        return [*([] if self.body is None else [self.body]), self.error, *types]
