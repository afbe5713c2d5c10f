"""Installs locked requirements into .venv with uv, from the package index that pip is configured for.

    .venv/bin/python requirements/install.py locked FILE     what a lock file pins, with its hashes
    .venv/bin/python requirements/install.py apart FILE DIR  the same into a folder of its own
    .venv/bin/python requirements/install.py exact FILE [DIR] the same without dependencies
    .venv/bin/python requirements/install.py torch [INDEX]   the build of torch that fits this machine
    .venv/bin/python requirements/install.py needs FILE...   print what these pyproject.toml files need of other projects

uv does not read pip's configuration, so indexes, certificate and constraints are passed on. Standard library only: it
runs before anything else is installed.
"""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

HERE = Path(__file__).parent
UV_OF_PIP = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
}
"""Options of pip, and the environment variables with which uv takes the same values."""

DOWNLOAD_MB = {"lock.txt": 130}
"""Megabytes to download for a lock file, on Linux x86_64."""

BUILD_SIZES = {True: "several GB", False: "about 200 MB to download, 700 MB installed"}
"""The size of torch, by whether the build is for CUDA."""

SECTIONS = ("global", "install", ":env:")
"""The sections of pip's configuration that `pip install` reads; a later one overrides."""


def uv_settings(pip_config: str) -> dict[str, str]:
    """The environment of uv for the output of `pip config list`, in which the environment overrides the files."""
    found: dict[str, tuple[int, str]] = {}
    for line in pip_config.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        name = UV_OF_PIP.get(option)
        if name is None or section not in SECTIONS or (name in found and found[name][0] > SECTIONS.index(section)):
            continue
        values = value.strip("'\"").replace("\\n", " ").split()
        found[name] = SECTIONS.index(section), ("," if name == "UV_FIND_LINKS" else " ").join(values)
    return {name: value for name, (_, value) in found.items()}


def uv_environment() -> dict[str, str]:
    """The environment for uv. Variables of uv that are set already win."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True, check=False
    )
    # pip takes a file from whichever index has it; without this, uv takes it from the first index that has the name.
    defaults = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_LINK_MODE": "copy"}
    return defaults | uv_settings(listed.stdout) | dict(os.environ)


def uv(arguments: list[str], environment: dict[str, str]) -> int:
    """Run `uv pip install` for this interpreter; its exit status."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def planned(arguments: list[str], environment: dict[str, str]) -> str | None:
    """What `uv pip install` would install, a line for each package; None if it would fail. Nothing is downloaded but metadata."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--dry-run", *arguments]
    found = subprocess.run(command, env=environment, check=False, stderr=subprocess.PIPE, text=True)
    return found.stderr if found.returncode == 0 else None


def install_locked(options: list[str], file: str) -> int:
    """Install what a lock file pins. Everything in it is pinned, and uv rejects constraints that are not."""
    environment = uv_environment()
    environment.pop("UV_CONSTRAINT", None)
    if size_mb := DOWNLOAD_MB.get(Path(file).name):
        print(f"Installing locked packages: about {size_mb} MB to download, unless they are cached.", flush=True)
    return uv(["--require-hashes", *options, "-r", file], environment)


def torch_source(index: str, environment: dict[str, str]) -> tuple[list[str], str, str | None]:
    """The options of uv that choose a build of torch, a description of it, and what is `planned`."""
    wanted = ["-r", str(HERE / "torch.txt")]
    if index:
        options = ["--default-index", index]
        return options, "from the index in TORCH_INDEX_URL", planned([*options, *wanted], environment)
    automatic = ["--torch-backend", environment.get("UV_TORCH_BACKEND") or "auto"]
    # Resolves only, so that a network without torch's own index costs seconds and no attempt to install.
    probe = environment | {"UV_HTTP_TIMEOUT": "5", "UV_HTTP_CONNECT_TIMEOUT": "5", "UV_HTTP_RETRIES": "0"}
    if (plan := planned([*automatic, *wanted], probe)) is not None:
        return automatic, "that fits the GPU driver of this machine, or the CPU, from torch's own index", plan
    fallback = "from the configured package index, because torch's own index does not respond"
    return [], fallback, planned(wanted, environment)


def size_of(plan: str | None) -> str:
    """How large torch is, before it is installed; "" if that is not known, or torch is installed already."""
    lines = (plan or "").splitlines()
    if not any(line.startswith(" + torch==") for line in lines):
        return ""
    cuda = any(line.startswith((" + nvidia-", " + triton")) or "+cu" in line for line in lines)
    return f": {BUILD_SIZES[cuda]}"


def installed_mb(name: str) -> int:
    """The size of an installed distribution, in MB."""
    files = distribution(name).files or []
    return sum(Path(str(file.locate())).stat().st_size for file in files if Path(str(file.locate())).is_file()) // 10**6


def gpu_packages() -> list[str]:
    """The names of the installed distributions that only a build for CUDA needs."""
    found = PathDistribution.discover()
    names = {str(each.metadata["Name"]) for each in found}
    return sorted(name for name in names if name.startswith(("nvidia-", "triton")))


def install_torch(index: str) -> int:
    """Install torch and print which build that is, and how large."""
    environment = uv_environment()
    options, description, plan = torch_source(index, environment)
    print(f"Installing the build of torch {description}{size_of(plan)}.", flush=True)
    status = uv([*options, "-r", str(HERE / "torch.txt")], environment)
    if status == 0:
        extra = gpu_packages()
        size_mb = sum(installed_mb(name) for name in ["torch", *extra])
        build = f"with {len(extra)} packages for CUDA" if extra else "for the CPU"
        print(f"torch {distribution('torch').version} {build} is installed: {size_mb:,} MB.")
    return status


def needs(files: list[str]) -> int:
    """Print the requirements of these projects with all their extras, without those of this repository."""
    for file in files:
        project = tomllib.loads(Path(file).read_text("utf-8"))["project"]
        extras = project.get("optional-dependencies", {}).values()
        for requirement in [*project["dependencies"], *(each for extra in extras for each in extra)]:
            if not requirement.startswith("tierlane"):
                print(requirement)
    return 0


def main(arguments: list[str]) -> int:
    """The exit status of uv; 2 for wrong arguments."""
    match arguments:
        case ["locked", file]:
            return install_locked([], file)
        case ["apart", file, folder]:
            return install_locked(["--target", folder], file)
        case ["exact", file, *folder]:
            return install_locked(["--no-deps", *(["--target", *folder] if folder else [])], file)
        case ["torch", *index]:
            return install_torch("".join(index))
        case ["needs", *files]:
            return needs(files)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
