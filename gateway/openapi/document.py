"""The OpenAPI 3.1 document: a pure function of the endpoints (gateway/openapi/endpoints.py).

Schemas come from the types that decode and encode; statuses, retry headers and sentences of errors come from the one
table of errors. What several endpoints respond alike becomes a component with references.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gateway.http.errors import PROBLEM_JSON, TRY_LATER, ErrorBody, Problem
from gateway.http.response import JSON
from gateway.openapi.model import (
    EVENT_STREAM,
    LIMITS,
    SOMETIMES,
    TOKEN_LIMITS,
    ApiEndpoint,
    EndpointTexts,
    Schema,
    header_component,
)
from scheduler.errors import HTTP, ErrorCode


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


DIALECT = "3.1.1"
ABOUT = (
    "Inference for customers of several tiers. Every answer names its request in `x-request-id`; every answer to a known "
    "customer tells its limits. Errors have one form and a `code`; `Accept: application/problem+json` gets them as problem "
    "details (RFC 9457). Bodies are strict: a field that is not known, a key twice, NaN, or bytes that are no UTF-8 get a 400 "
    "that names the fault. What is at no address is answered 404 `not_found`."
)
TAGS = {
    "inference": "One request in several forms: the same limits, queues, deadlines and errors behind each.",
    "account": "What a customer can look up. It spends nothing.",
    "operations": "For operators and load balancers.",
    "pages": "The same for everybody.",
}
SCHEMES: dict[str, Schema] = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "A customer's API key, or a JWT where this gateway takes them.",
    },
    "service": {"type": "http", "scheme": "bearer", "description": "The service token, for `/internal/*`."},
}
BEFORE_IDENTITY = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_API_KEY,
        ErrorCode.CATALOG_UNAVAILABLE,
        ErrorCode.ACCOUNT_SUSPENDED,
        ErrorCode.METHOD_NOT_ALLOWED,
        ErrorCode.REQUEST_TIMEOUT,
        ErrorCode.RATE_LIMIT_EXCEEDED,
        ErrorCode.NO_CAPACITY,
        ErrorCode.INTERNAL_ERROR,
    }
)
"""Codes that can come before it is known whose limits there are to tell."""


def openapi(endpoints: Sequence[ApiEndpoint], version: str) -> dict[str, Any]:
    """The document. Raises KeyError for a header that is not in the table of headers."""
    kinds = [ErrorBody, Problem, *(kind for door in endpoints for kind in door.types())]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    known = dict(zip(kinds, schemas, strict=True))
    _narrow(components, endpoints)
    paths = {door.template: _path(door, known) for door in endpoints}
    return {
        "openapi": DIALECT,
        "info": {"title": "Tierlane", "version": version, "description": ABOUT},
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "securitySchemes": SCHEMES,
            "schemas": components,
            "headers": {name: header_component(name) for name in sorted(headers_in(paths))},
            "responses": share_responses(paths),
        },
    }


def _narrow(components: dict[str, Any], endpoints: Iterable[ApiEndpoint]) -> None:
    """Say in the schemas what is checked after decoding, and what each error code means."""
    for door in endpoints:
        if door.body is not None:
            schema = components[door.body.__name__]
            schema["properties"].update(door.rules)
            schema.update({"allOf": list(door.conditions)} if door.conditions else {})
    rows = "\n".join(f"* `{code}`: {HTTP[code].status}. {HTTP[code].message}" for code in ErrorCode)
    components["ErrorCode"]["description"] = f"Why a request was refused or failed, with its status.\n\n{rows}"


def _path(door: ApiEndpoint, known: Mapping[Any, Schema]) -> Schema:
    return {method.lower(): _operation(door, method, known) for method in door.methods}


def _operation(door: ApiEndpoint, method: str, known: Mapping[Any, Schema]) -> Schema:
    name = door.template.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace(".", "_")
    operation: Schema = {
        "operationId": f"{method.lower()}_{name or 'landing'}",
        "summary": door.summary,
        "tags": [door.tag],
        "security": [{door.wants: []}] if door.wants else [],
        "parameters": [parameter.document() for parameter in door.parameters],
        "responses": {str(status): _response(door, status, known, method) for status in _statuses(door)},
    }
    if door.text:
        operation["description"] = door.text
    if door.body is not None:
        media: Schema = {"schema": known[door.body]}
        if door.example is not None:
            media["example"] = door.example
        operation["requestBody"] = {"required": True, "content": {JSON: media}}
    return operation


def _statuses(door: ApiEndpoint) -> list[int]:
    return sorted({*door.answers, *(HTTP[code].status for code in door.errors)})


def _response(door: ApiEndpoint, status: int, known: Mapping[Any, Schema], method: str) -> Schema:
    """One status of one door: its own answer, its errors, or either."""
    says = door.answers.get(status)
    codes = sorted(code for code in door.errors if HTTP[code].status == status)
    told = [says] if says else []
    if codes:
        told.append(_says_errors(door, codes))
    content: dict[str, list[Schema]] = {}
    for each in told:
        for media, kind in each.content.items():
            schema = _error_schema(kind, codes, known) if each is not says else known[kind]
            content.setdefault(media, []).append(_events(schema, known) if media == EVENT_STREAM else schema)
    document: Schema = {
        "description": " ".join(each.sentence for each in told),
        "headers": _header_references(told),
    }
    if content and method != "HEAD":
        document["content"] = {media: {"schema": _either(schemas)} for media, schemas in content.items()}
    return document


def _events(schema: Schema, known: Mapping[Any, Schema]) -> Schema:
    """One event of a stream, as OpenAPI 3.2 describes them."""
    chunk = {
        "type": "string",
        "description": "A chunk; or, in the place of all that would follow, an error.",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": [schema, known[ErrorBody]]},
    }
    data = {"anyOf": [chunk, {"const": "[DONE]", "description": "The end."}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _says_errors(door: ApiEndpoint, codes: Sequence[ErrorCode]) -> EndpointTexts:
    """The headers of these errors, of one status: as gateway/http/errors.py writes them."""
    status = HTTP[codes[0]].status
    headers: list[str] = ["x-request-id"]
    sometimes: list[str] = []
    later = [code in TRY_LATER for code in codes]
    (headers if all(later) else sometimes).extend(["Retry-After", "retry-after-ms"] if any(later) else [])
    advised = [HTTP[code].retry is not None for code in codes]
    (headers if all(advised) else sometimes).extend(["x-should-retry"] if any(advised) else [])
    headers += {401: ["WWW-Authenticate"], 405: ["Allow"]}.get(status, [])
    if door.wants == "key" and status not in (401, 403, 405):
        (sometimes if BEFORE_IDENTITY.intersection(codes) else headers).extend(LIMITS)
        sometimes += TOKEN_LIMITS
    if door.wants == "key" and door.body is not None and not BEFORE_IDENTITY.issuperset(codes):
        sometimes.append("Idempotent-Replayed")
    sentence = " ".join(f"`{code}`: {HTTP[code].message}" for code in codes)
    content = {JSON: ErrorBody, PROBLEM_JSON: Problem}
    return EndpointTexts(sentence=sentence, content=content, headers=tuple(headers), sometimes=tuple(sometimes))


def _error_schema(kind: Any, codes: Sequence[ErrorCode], known: Mapping[Any, Schema]) -> Schema:
    """The form of an error, with the codes that it may have here."""
    told: Schema = {"type": "object", "properties": {"code": {"enum": [code.value for code in codes]}}}
    if kind is ErrorBody:
        told = {"type": "object", "properties": {"error": told}}
    return {"allOf": [known[kind], told]}


def _either(schemas: Sequence[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def _header_references(told: Sequence[EndpointTexts]) -> Schema:
    """Every header of these answers: required where each of them always has it."""
    names = dict.fromkeys(name for each in told for name in (*each.headers, *each.sometimes))
    always = [name for name in names if all(name in each.headers for each in told)]
    chosen = {name: name if name in always else name + SOMETIMES for name in names}
    return {name: {"$ref": f"#/components/headers/{component}"} for name, component in chosen.items()}
