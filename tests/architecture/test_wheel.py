"""What is shipped: the wheel holds the six rooms whole, and nothing else."""

import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"gateway", "ratelimit", "scheduler", "gpu_pool", "ledger", "tierlane"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a freshly built wheel."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_rooms_and_nothing_else(wheel: list[str]) -> None:
    """No tests, no training script, no top-level migrations."""
    tops = {name.split("/")[0] for name in wheel}

    assert {top for top in tops if not top.endswith(".dist-info")} == ROOMS


@pytest.mark.parametrize(
    "pattern",
    [
        "**/*.py",
        "**/*.lua",
        "**/*.sql",
        "**/*.safetensors",
        "**/*.html",
        "**/*.css",
        "**/*.js",
        "**/*.svg",
        "**/*LICENSE.txt",
        "**/py.typed",
    ],
)
def test_the_wheel_holds_every_file_of_a_room(wheel: list[str], pattern: str) -> None:
    """Scripts, statements and weights travel with the code that reads them."""
    here = {str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).glob(pattern)}

    assert here - set(wheel) == set()


def test_the_wheel_carries_the_migrations(wheel: list[str]) -> None:
    """An installation without a checkout can still migrate."""
    here = {path.name for path in (ROOT / "migrations" / "versions").iterdir() if path.is_file()}
    shipped = {name.rsplit("/", 1)[1] for name in wheel if name.startswith("ledger/migrations/versions/")}

    assert here == shipped
    assert "ledger/migrations/env.py" in wheel


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_no_other_package_owns_our_names(room: str) -> None:
    """Some of these names exist on package indexes: here each has one owner, and it is us."""
    spec = find_spec(room)

    assert set(packages_distributions().get(room, [])) <= {"tierlane"}  # an editable install lists none
    assert spec is not None
    assert Path(spec.origin or "") == ROOT / room / "__init__.py"
