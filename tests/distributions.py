"""The three distributions of the repository, with their packages; what they may import is in tests/architecture."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

DISTRIBUTIONS = {
    "tierlane": (ROOT, ("gateway", "ratelimit", "scheduler", "gpu_pool", "ledger", "tierlane")),
    "tierlane-local": (ROOT / "local", ("tierlane_local",)),
    "tierlane-tools": (ROOT / "tools", ("tierlane_tools",)),
}
"""The folder of its pyproject.toml, and its packages in it, by distribution."""

FOLDERS = {package: folder / package for folder, packages in DISTRIBUTIONS.values() for package in packages}
"""The folder of each package."""

PRODUCT = DISTRIBUTIONS["tierlane"][1]


def module_name(path: Path) -> str:
    """The dotted name of a file of one of the packages."""
    folder = next(folder for folder in FOLDERS.values() if path.is_relative_to(folder))
    return ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
