"""`python -m tierlane.check`: generate the tables of backends and capabilities in docs/endpoint.md."""

from collections.abc import Iterable

from gateway.api import chat, completions, embeddings
from gpu_pool.model_process.backend_registry import BACKENDS
from ratelimit.__main__ import Pages, update
from scheduler.capabilities import Capability, capabilities

_NEEDS = chat.NEEDS | completions.NEEDS | embeddings.NEEDS
_OTHERS = {
    Capability.TOOLS: "messages with `tool_calls` or the role `tool`",
    Capability.EXTENSIONS: "every unknown field, such as those in `extra_body` of OpenAI's client",
}
"""What needs a capability without being a field or a part of its own."""


def pages() -> Pages:
    """Backends with what each does, and capabilities with the fields that need them."""
    fields: dict[Capability, str] = {}
    for capability in Capability:
        names = [name for name, needed in _NEEDS.items() if needed == capability]
        parts = [str(kind.__struct_config__.tag) for kind, needed in chat.PART_NEEDS.items() if needed is capability]
        texts = [*map("`{}`".format, names), *map("the part `{}`".format, parts), _OTHERS.get(capability, "")]
        if text := ", ".join(filter(None, texts)):
            fields[capability] = text
    rows = [
        ("texts, chats", *(each.texts for each in BACKENDS)),
        ("streams in steps", *(each.steps for each in BACKENDS)),
        ("vectors", *(each.vectors for each in BACKENDS)),
    ]
    groups: dict[tuple[str, ...], list[str]] = {}  # Capabilities that the same backends have share a row.
    for capability in fields:
        cells = tuple(_cell(capability, passes_on=each.passes_on) for each in BACKENDS)
        groups.setdefault(cells, []).append(f"`{capability}`")
    rows += [(", ".join(names), *cells) for cells, names in groups.items()]
    backends = _table(("Backend", *(f"`{each.form}`" for each in BACKENDS)), rows)
    needs = _table(("Capability", "Fields"), ((f"`{capability}`", text) for capability, text in fields.items()))
    return {"endpoint.md": {"capabilities": f"{needs}\n{backends}"}}


def _cell(capability: Capability, *, passes_on: bool) -> str:
    """Whether a model of the backend has the capability: by default, if its row allows it, or never."""
    if capability in capabilities(None, passes_on=passes_on):
        return "yes"
    return "by its row" if capability in capabilities(frozenset(Capability), passes_on=passes_on) else "-"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    update(pages())
