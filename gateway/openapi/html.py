"""The public pages `/docs` and `/openapi.json`, built once at start.

The reference is HTML without a script, so that the Content-Security-Policy can forbid everything. Packaged viewers do not
fit: Swagger UI 4 cannot show OpenAPI 3.1, and all of them need inline styles.
"""

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from gateway.http.response import JSON, encode_json
from gateway.http.static import HTML, STYLE, StaticPage
from gateway.openapi.document import OPTIONAL, openapi
from gateway.openapi.endpoints import ENDPOINTS
from gateway.version import installed_version
from scheduler.errors import HTTP

Schema = Mapping[str, Any]
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tierlane API</title>
<style>/* style */</style>
</head>
<body>
<main>
"""
_LINKS = (
    '<a href="/">Introduction</a>, <a href="/openapi.json">OpenAPI document</a>. A question mark marks a header that may be '
    "absent."
)

_RULES = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties", "pattern", "default")


class Pages:
    """The handlers of the pages."""

    def __init__(self) -> None:
        document = openapi(ENDPOINTS, installed_version())
        self.description = StaticPage(encode_json(document), JSON)
        self.reference = StaticPage(reference(document).replace("/* style */", STYLE).encode(), HTML)


def reference(document: Schema) -> str:
    """The reference of the API, from its OpenAPI document."""
    info, paths, components = document["info"], document["paths"], document["components"]
    parts = [f"<h1>Tierlane API</h1>\n{_paragraphs(info['description'])}"]
    parts.append(f"<p>Version {escape(info['version'])}. {_LINKS}</p>\n")
    for tag in document["tags"]:
        parts.append(f"<h2>{escape(tag['name'].capitalize())}</h2>\n{_paragraphs(tag['description'])}")
        parts += [
            _operation(path, methods, components["responses"])
            for path, methods in paths.items()
            if next(iter(methods.values()))["tags"] == [tag["name"]]
        ]
    schemes = ([_code(name), _inline(each["description"])] for name, each in components["securitySchemes"].items())
    parts.append("<h2>Tokens</h2>\n" + _table(("Name", "Description"), schemes))
    parts.append("<h2>Schemas</h2>\n" + "".join(_schema(*each) for each in sorted(components["schemas"].items())))
    headers = {name.removesuffix(OPTIONAL): header for name, header in components["headers"].items()}
    rows = ([_code(n), _inline(h["description"]), _code(str(h["example"]))] for n, h in headers.items())
    parts.append("<h2>Headers</h2>\n" + _table(("Header", "Description", "Example"), rows))
    codes = (
        [f'<code id="error-{escape(code)}">{escape(code)}</code>', str(http.status), escape(http.message)]
        for code, http in HTTP.items()
    )
    parts.append("<h2>Error codes</h2>\n" + _table(("Code", "Status", "Meaning"), codes))
    return _HEAD + "".join(parts) + "</main>\n</body>\n</html>\n"


def _operation(path: str, methods: Mapping[str, Schema], shared: Mapping[str, Schema]) -> str:
    """One path. Its methods differ only in whether they return a body."""
    operation = next(iter(methods.values()))
    names = ", ".join(method.upper() for method in methods)
    token = ", ".join(name for each in operation["security"] for name in each) or "none"
    parts = [
        f'<details id="{operation["operationId"]}"><summary><b>{names}</b> <code>{escape(path)}</code> ',
        f"{escape(operation['summary'])}</summary>\n",
        _paragraphs(operation.get("description", "")),
        f"<p>Token: {token}</p>\n",
    ]
    if operation["parameters"]:
        rows = ([_code(each["name"]), each["in"], escape(each["description"])] for each in operation["parameters"])
        parts.append(_table(("Parameter", "In", "Description"), rows))
    if "requestBody" in operation:
        media = operation["requestBody"]["content"][JSON]
        parts.append(f"<p>Body: {_kind(media['schema'])}</p>\n")
        if "example" in media:
            parts.append(f"<pre>{escape(json.dumps(media['example'], indent=2))}</pre>\n")
    responses = ((status, shared.get(_referred(each), each)) for status, each in operation["responses"].items())
    parts.append(_table(("Status", "Description", "Body", "Headers"), map(_response, responses)))
    return "".join(parts) + "</details>\n"


def _response(item: tuple[str, Schema]) -> list[str]:
    status, response = item
    bodies = (f"{escape(media)}: {_kind(each['schema'])}" for media, each in response.get("content", {}).items())
    headers = (
        _code(name) + ("?" if each["$ref"].endswith(OPTIONAL) else "") for name, each in response["headers"].items()
    )
    return [status, _inline(response["description"]), "<br>".join(bodies), ", ".join(headers)]


def _schema(name: str, schema: Schema) -> str:
    required = set(schema.get("required", ()))
    rows = (
        [_code(field), _kind(rule), "yes" if field in required else "", _rules(rule)]
        for field, rule in schema.get("properties", {}).items()
    )
    table = _table(("Field", "Type", "Required", "Rules"), rows) if "properties" in schema else ""
    return (
        f'<details id="schema-{escape(name)}"><summary><code>{escape(name)}</code></summary>\n'
        f"{_paragraphs(schema.get('description', ''))}{table}</details>\n"
    )


def _referred(schema: Schema) -> str:
    """The name in a reference, or ""."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _kind(schema: Schema) -> str:
    """The type of a value, with links to schemas."""
    if "$ref" in schema:
        name = escape(_referred(schema))
        return f'<a href="#schema-{name}">{name}</a>'
    if "enum" in schema:
        return " | ".join(_code(json.dumps(value)) for value in schema["enum"])
    for word, of in ((" | ", "anyOf"), (" with ", "allOf")):
        if of in schema:
            return word.join(dict.fromkeys(_kind(each) for each in schema[of] if "properties" not in each))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return escape(str(schema.get("type", "anything")))


def _rules(schema: Schema) -> str:
    return ", ".join(f"{rule} {escape(json.dumps(schema[rule]))}" for rule in _RULES if rule in schema)


def _table(names: Iterable[str], rows: Iterable[list[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n"


def _paragraphs(text: str) -> str:
    """Paragraphs and lists of one level, the only Markdown blocks in the descriptions."""
    html = ""
    for block in text.split("\n\n"):
        if block.startswith("* "):
            html += "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>\n" for line in block.splitlines()) + "</ul>\n"
        elif block.strip():
            html += f"<p>{_inline(block.strip())}</p>\n"
    return html


def _inline(text: str) -> str:
    """Text with `code`."""
    pieces = text.split("`")
    return "".join(_code(piece) if at % 2 else escape(piece) for at, piece in enumerate(pieces))


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"
