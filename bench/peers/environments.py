"""A virtual environment for each peer, made once from its requirements.txt and made anew when that changes."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import subprocess
import sys
import venv
from pathlib import Path

INSTALL_S = 900.0
STAMP = ".requirements"


class InstallError(Exception):
    """A peer cannot be installed; the message is pip's last word."""


def prepare(folder: Path, requirements: Path) -> Path:
    """The Python of an environment that has these requirements. Raises InstallError."""
    python, stamp = folder / "bin" / "python", folder / STAMP
    wanted = requirements.read_text("utf-8")
    if not (stamp.exists() and stamp.read_text("utf-8") == wanted):
        venv.create(folder, with_pip=True, clear=True)
        _install(python, requirements)
        stamp.write_text(wanted, "utf-8")
    return python.absolute()


def _install(python: Path, requirements: Path) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise InstallError(f"not installed within {INSTALL_S:.0f} s") from None
    if done.returncode:
        raise InstallError(f"cannot be installed: {(done.stderr.strip().splitlines() or ['pip said nothing'])[-1]}")


def pinned(requirements: Path, package: str) -> str:
    """The version of a package that is asked for."""
    for line in requirements.read_text("utf-8").splitlines():
        name, _, version = line.partition("==")
        if name.lower() == package:
            return version
    raise SystemExit(f"{requirements} does not pin {package}.")


def python_version() -> str:
    """Of this interpreter, of which the environments are made."""
    return ".".join(str(part) for part in sys.version_info[:3])
