"""`python -m gateway.openapi`: generate the list of endpoints in docs/http.md from the OpenAPI document."""

from gateway.openapi.document import openapi
from gateway.openapi.endpoints import ENDPOINTS
from gateway.version import installed_version
from ratelimit.__main__ import Pages, update


def pages() -> Pages:
    """Methods, path, token and summary of each endpoint."""
    rows = []
    for path, methods in openapi(ENDPOINTS, installed_version())["paths"].items():
        operation = next(iter(methods.values()))
        tokens = ", ".join(name for each in operation["security"] for name in each)
        names = ", ".join(method.upper() for method in methods)
        rows.append(f"* {names} `{path}`{f' ({tokens})' * bool(tokens)}: {operation['summary']}\n")
    return {"http.md": {"endpoints": "".join(rows)}}


if __name__ == "__main__":
    update(pages())
