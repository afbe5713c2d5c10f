"""The wheel contains the packages with all their files, the migrations, the runbooks, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"gateway", "ratelimit", "scheduler", "gpu_pool", "ledger", "tierlane"}
KINDS = ("*.py", "*.lua", "*.sql", "*.safetensors", "*.html", "*.css", "*.js", "*.svg", "*LICENSE.txt", "py.typed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a freshly built wheel."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        return set(archive.namelist())


def test_the_wheel_contains_the_packages_and_the_migrations(wheel: set[str]) -> None:
    """No tests, no scripts; an installation without a checkout can migrate, and serves the runbooks."""
    tops = {name.split("/")[0] for name in wheel}
    files = {str(f.relative_to(ROOT)) for name in PACKAGES for kind in KINDS for f in (ROOT / name).rglob(kind)}
    versions = {f"ledger/migrations/versions/{path.name}" for path in (ROOT / "migrations/versions").glob("*.*")}

    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert files - wheel == set()
    runbooks = {f"gateway/static/runbooks/{path.name}" for path in (ROOT / "docs/runbooks").glob("*.md")}
    assert (versions | runbooks | {"ledger/migrations/env.py"}) - wheel == set()
