"""Compares a response with the API's description: status, required headers, and the schema of the body."""

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator


class Described:
    """The OpenAPI document of a gateway."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def faults(self, path: str, method: str, status: int, headers: Mapping[str, str], body: bytes) -> list[str]:
        """Return the differences. `path` is the one in the document; header names are in lower case."""
        responses = self.document["paths"][path][method.lower()]["responses"]
        if str(status) not in responses:
            return [f"status {status} is not described"]
        response = self.resolved(responses[str(status)])
        return [*self._headers(response, headers), *self._body(response, headers, body)]

    def resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the target of a reference, or the schema itself."""
        found: Any = self.document
        for part in schema.get("$ref", "").split("/")[1:]:
            found = found[part]
        return found if "$ref" in schema else schema

    def required(self, response: dict[str, Any]) -> set[str]:
        """Return the names of the required headers."""
        return {name for name, header in response["headers"].items() if self.resolved(header)["required"]}

    def _headers(self, response: dict[str, Any], headers: Mapping[str, str]) -> list[str]:
        return [f"no {name}" for name in self.required(response) if name.lower() not in headers]

    def _body(self, response: dict[str, Any], headers: Mapping[str, str], body: bytes) -> list[str]:
        content = response.get("content")
        if content is None or not body:
            return []
        if headers["content-type"] not in content:
            return [f"content type {headers['content-type']} is not described"]
        schema = content[headers["content-type"]]["schema"]
        whole = Draft202012Validator({**schema, "components": self.document["components"]})
        value = json.loads(body) if "json" in headers["content-type"] else body.decode()
        return [error.message for error in whole.iter_errors(value)]
