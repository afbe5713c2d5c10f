"""The lock files: complete for every supported platform, hashed, and without a package index."""

import json
import re
import runpy
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from distributions import DISTRIBUTIONS

REQUIREMENTS = Path(__file__).parent.parent.parent / "requirements"
LOCKS = ("lock.txt", "lock-edge.txt", "lock-worker.txt", "lock-test.txt")
PLATFORMS = [
    {"python_version": version[:4], "python_full_version": version, "sys_platform": system, "platform_system": name}
    for version in ("3.11.2", "3.11.9", "3.12.4", "3.13.1")
    for system, name in (("linux", "Linux"), ("darwin", "Darwin"))
]


def _locked(lock: str) -> dict[str, str]:
    lines = (REQUIREMENTS / lock).read_text().splitlines()
    pins = [re.match(r"([A-Za-z0-9._-]+)==([^ ;\\]+)", line) for line in lines]
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


CLIENT_LOCKS = sorted(path.name for path in REQUIREMENTS.glob("clients*.txt"))
ENGINE_LOCKS = ("llama-cpp.txt", "vllm.txt", "mlserver.txt", "infinity.txt", "transformers.txt")


@pytest.mark.parametrize("lock", [*LOCKS, *CLIENT_LOCKS, *ENGINE_LOCKS, "docs.txt", "uv.txt"])
def test_every_line_is_a_pin_with_hashes(lock: str) -> None:
    """No version floats, and no server is named."""
    text = (REQUIREMENTS / lock).read_text()

    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text
    blocks = re.split(r"\n(?=[A-Za-z0-9])", text.strip())
    assert all("==" in block and "--hash=sha256:" in block for block in blocks if not block.startswith("#"))


def test_packages_of_npm_are_pinned() -> None:
    """Each has a hash, and no server is named."""
    locked = json.loads((REQUIREMENTS.parent / "tests" / "clients" / "package-lock.json").read_text())["packages"]
    packages = {name: each for name, each in locked.items() if name}

    assert packages
    assert [name for name, each in packages.items() if "resolved" in each or "integrity" not in each] == []


def test_the_locks_agree() -> None:
    """The tests run with the installed versions; those of images have all dependencies of `tierlane` without an extra."""
    base, edge, worker, test = (_locked(lock) for lock in LOCKS)
    needs = {
        name: {canonicalize_name(Requirement(text).name) for text in project["dependencies"]} - DISTRIBUTIONS.keys()
        for name, (folder, _) in DISTRIBUTIONS.items()
        for project in [tomllib.loads((folder / "pyproject.toml").read_text())["project"]]
    }

    assert {name: test.get(name) for name in base} == base
    assert {name: base.get(name) for name in edge | worker} == edge | worker
    assert needs["tierlane"] <= edge.keys() & worker.keys()
    assert needs["tierlane-local"] | needs["tierlane-tools"] <= base.keys()


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_is_complete_on_every_platform(lock: str) -> None:
    """Each dependency of a locked package on a supported Python and system is locked, since pip installs only hashed ones."""
    locked = _locked(lock)
    missing = set()
    for distribution in distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        for text in (distribution.requires or []) if name in locked else []:
            needed = Requirement(text)
            wanted = any(needed.marker is None or needed.marker.evaluate({**p, "extra": ""}) for p in PLATFORMS)
            if wanted and canonicalize_name(needed.name) not in locked:
                missing.add(f"{name} needs {text}")

    assert not missing


@pytest.mark.parametrize(
    ("pip_config", "expected"),
    [
        ("", {}),
        ("global.timeout='60'", {}),
        ("global.index-url='https://mirror.example/simple'", {"UV_DEFAULT_INDEX": "https://mirror.example/simple"}),
        ("global.extra-index-url='https://a.example https://b.example'", {"UV_INDEX": "https://a.example https://b.example"}),
        ("global.extra-index-url='https://a.example\\nhttps://b.example'", {"UV_INDEX": "https://a.example https://b.example"}),
        ("global.find-links='/one /two'", {"UV_FIND_LINKS": "/one,/two"}),
        ("global.trusted-host='a.example b.example'", {"UV_INSECURE_HOST": "a.example b.example"}),
        ("download.index-url='https://other.example'", {}),
        ("global.index-url='https://all.example'\ninstall.index-url='https://own.example'", {"UV_DEFAULT_INDEX": "https://own.example"}),
        ("global.index-url='https://file.example'\n:env:.index-url='https://env.example'", {"UV_DEFAULT_INDEX": "https://env.example"}),
        (":env:.index-url='https://env.example'\nglobal.index-url='https://file.example'", {"UV_DEFAULT_INDEX": "https://env.example"}),
    ],
)  # fmt: skip
def test_uv_uses_the_index_that_pip_is_configured_for(pip_config: str, expected: dict[str, str]) -> None:
    """What names an index, a certificate or a constraint is passed on to uv, which does not read pip's configuration."""
    install = runpy.run_path(str(REQUIREMENTS / "install.py"))

    assert install["uv_settings"](pip_config) == expected


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        ("Would install 1 package\n + torch==2.13.0+cpu\n", ": about 200 MB to download, 700 MB installed"),
        ("Would install 2 packages\n + nvidia-cublas==13.1.0\n + torch==2.13.0\n", ": several GB"),
        ("Would install 1 package\n + torch==2.13.0+cu130\n", ": several GB"),
        ("Would make no changes\n", ""),
        (None, ""),
    ],
)
def test_the_size_of_torch_is_known_before_its_download(plan: str | None, size: str) -> None:
    """Of the build that would be installed; nothing is said if it is installed, or not known."""
    install = runpy.run_path(str(REQUIREMENTS / "install.py"))

    assert install["size_of"](plan) == size
