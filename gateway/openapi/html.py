"""The public pages `/`, `/docs` and `/openapi.json`, made once at start.

The reference is HTML without a script, so nothing can be loaded. Packaged viewers do not fit: the one on the index
ships Swagger UI 4, which cannot show OpenAPI 3.1, and all of them want inline styles allowed.
"""

import json
from collections.abc import Iterable, Mapping
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from gateway.http.response import JSON, encode_json
from gateway.http.static import HTML, STYLE, StaticPage
from gateway.openapi.document import openapi
from gateway.openapi.endpoints import DOORS
from gateway.openapi.model import SOMETIMES

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


def reference(document: Schema) -> str:
    """The whole page."""
    parts = [f"<h1>Tierlane API</h1>\n{_paragraphs(document['info']['description'])}"]
    parts.append(f'<p>Version {escape(document["info"]["version"])}. <a href="/">To begin</a>, {_RAW}. {_NOTE}</p>\n')
    components = document["components"]
    parts += [_tag(tag, document["paths"], components["responses"]) for tag in document["tags"]]
    parts.append("<h2>Tokens</h2>\n" + _table(("Name", "What it is"), _schemes(components["securitySchemes"])))
    parts.append("<h2>Schemas</h2>\n" + "".join(_schema(*each) for each in sorted(components["schemas"].items())))
    parts.append(
        "<h2>Headers</h2>\n" + _table(("Header", "What it says", "For example"), _headers(components["headers"]))
    )
    return _HEAD + "".join(parts) + "</main>\n</body>\n</html>\n"


_NOTE = "A header with a question mark is not always there."
_RAW = '<a href="/openapi.json">the same for machines</a>'


def _tag(tag: Schema, paths: Mapping[str, Schema], shared: Mapping[str, Schema]) -> str:
    operations = [
        _operation(path, methods, shared)
        for path, methods in paths.items()
        if next(iter(methods.values()))["tags"] == [tag["name"]]
    ]
    return f"<h2>{escape(tag['name'].capitalize())}</h2>\n{_paragraphs(tag['description'])}" + "".join(operations)


def _operation(path: str, methods: Mapping[str, Schema], shared: Mapping[str, Schema]) -> str:
    """One address: its methods differ in nothing but the body."""
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
        parts.append(_table(("Parameter", "In", "What it is"), rows))
    if "requestBody" in operation:
        parts.append(_body(operation["requestBody"]["content"]["application/json"]))
    told = ((status, shared.get(_referred(each), each)) for status, each in operation["responses"].items())
    parts.append(_table(("Status", "Says", "Body", "Headers"), map(_response, told)))
    return "".join(parts) + "</details>\n"


def _body(media: Schema) -> str:
    example = json.dumps(media["example"], indent=2) if "example" in media else ""
    return f"<p>Body: {_kind(media['schema'])}</p>\n" + (f"<pre>{escape(example)}</pre>\n" if example else "")


def _response(item: tuple[str, Schema]) -> list[str]:
    status, response = item
    bodies = (f"{escape(media)}: {_kind(each['schema'])}" for media, each in response.get("content", {}).items())
    headers = (
        _code(name) + ("?" if each["$ref"].endswith(SOMETIMES) else "") for name, each in response["headers"].items()
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
    """The name that a reference has, or nothing."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _kind(schema: Schema) -> str:
    """The type of a value in words, with links to schemas."""
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


_RULES = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties", "pattern", "default")


def _rules(schema: Schema) -> str:
    return ", ".join(f"{rule} {escape(json.dumps(schema[rule]))}" for rule in _RULES if rule in schema)


def _schemes(schemes: Mapping[str, Schema]) -> Iterable[list[str]]:
    return ([_code(name), _inline(scheme["description"])] for name, scheme in schemes.items())


def _headers(headers: Mapping[str, Schema]) -> Iterable[list[str]]:
    told = {name.removesuffix(SOMETIMES): header for name, header in headers.items()}
    return ([_code(n), _inline(h["description"]), _code(str(h["example"]))] for n, h in told.items())


def _table(names: Iterable[str], rows: Iterable[list[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n"


def _paragraphs(text: str) -> str:
    """Paragraphs and lists of one level, which is all that our descriptions have."""
    blocks = (block.strip() for block in text.split("\n\n"))
    return "".join(
        _list(block) if block.startswith("* ") else f"<p>{_inline(block)}</p>\n" for block in blocks if block
    )


def _list(block: str) -> str:
    return "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>\n" for line in block.splitlines()) + "</ul>\n"


def _inline(text: str) -> str:
    """Text with its `code`."""
    pieces = text.split("`")
    return "".join(_code(piece) if at % 2 else escape(piece) for at, piece in enumerate(pieces))


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


class Pages:
    """The handlers."""

    def __init__(self) -> None:
        document = openapi(DOORS, _version())
        self.description = StaticPage(encode_json(document), JSON)
        self.landing = _html(files("gateway").joinpath("static", "landing.html").read_text("utf-8"))
        self.reference = _html(reference(document))


def _html(text: str) -> StaticPage:
    return StaticPage(text.replace("/* style */", STYLE).encode(), HTML)


def _version() -> str:
    try:
        return version("tierlane")
    except PackageNotFoundError:  # A checkout that was never installed.
        return "0"
