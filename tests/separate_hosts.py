"""Separate hosts for a test: network namespaces on one switch, in which docs/platform.md and the systemd units are run.

Needs root. No packet leaves the namespaces: the switch has its own namespace without an uplink.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from deploy_files import DEPLOY, unit

NETWORK = "10.77.0."
ETC_NETNS = Path("/etc/netns")  # `ip netns exec` mounts files of a folder here over those of /etc.
PAGE = DEPLOY.parent / "docs" / "platform.md"
STOP_S = 20.0
PROGRAMS = ("ip", "redis-server", "openssl")
PACKAGES = "iproute2 redis-server openssl"


class CannotSeparate(AssertionError):
    """A requirement of network namespaces is missing."""


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {shlex.join(words)}: {done.stderr}"
    return done.stdout


@dataclass
class Host:
    """One namespace: its address, a folder for its /etc, /run and /var/lib, and its processes by name."""

    name: str
    namespace: str
    address: str
    home: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def command(self, words: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]

    def start(self, name: str, words: Sequence[str], environment: Mapping[str, str], cwd: Path) -> None:
        """Start a process; its output is appended to `<name>.log`."""
        cwd.mkdir(parents=True, exist_ok=True)
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.command(words), env=bare(environment), cwd=cwd, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def typed(self, line: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a shell command of an operator on this host."""
        words = self.command(["sh", "-c", line])
        return subprocess.run(words, env=bare(environment), cwd=self.home, capture_output=True, text=True, check=False)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def stop(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGTERM)
        assert self.processes.pop(name).wait(timeout=STOP_S) == 0, self.log(name)

    def log(self, name: str) -> str:
        """The end of the log of a process."""
        return f"{self.name} {name}:\n{(self.home / f'{name}.log').read_text(errors='replace')[-3000:]}"

    def ended(self) -> dict[str, int]:
        """Processes that have exited, with their exit codes."""
        return {name: code for name, each in self.processes.items() if (code := each.poll()) is not None}

    def stop_all(self) -> None:
        for each in self.processes.values():
            with suppress(ProcessLookupError):
                each.terminate()
        for each in self.processes.values():
            try:
                each.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()


def bare(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a service: nothing of the test but PATH, with the virtual environment first."""
    return {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **environment}


@dataclass
class Hosts:
    """All hosts by name, and the switch between them."""

    switch: str
    by_name: dict[str, Host]

    def __getitem__(self, name: str) -> Host:
        return self.by_name[name]

    def cut(self, name: str) -> None:
        """Cut one host off: packets are lost, and no connection is closed."""
        ip("-n", self.switch, "link", "set", name, "down")

    def restore(self, name: str) -> None:
        ip("-n", self.switch, "link", "set", name, "up")


@contextmanager
def separate_hosts(home: Path, names: Sequence[str], aliases: Mapping[str, str]) -> Iterator[Hosts]:
    """Create a host for each name, and remove it at the end. `aliases` are further names of these hosts."""
    if os.geteuid() != 0:
        raise CannotSeparate("Network namespaces need root: run this test as root.")
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        raise CannotSeparate(f"Not installed: {', '.join(missing)}. On Debian: apt-get install {PACKAGES}.")
    prefix = f"tierlane{os.getpid()}-"
    hosts = {name: Host(name, prefix + name, f"{NETWORK}{number}", home / name) for number, name in enumerate(names, 1)}
    addresses = {name: host.address for name, host in hosts.items()}
    addresses |= {alias: hosts[name].address for alias, name in aliases.items()}
    lines = "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **addresses}.items())
    found = Hosts(f"{prefix}switch", hosts)
    try:
        ip("netns", "add", found.switch)
        ip("-n", found.switch, "link", "add", "switch0", "type", "bridge")
        ip("-n", found.switch, "link", "set", "switch0", "up")
        for name, host in hosts.items():
            host.home.mkdir(parents=True)
            (ETC_NETNS / host.namespace).mkdir(parents=True)
            (ETC_NETNS / host.namespace / "hosts").write_text(lines)
            ip("netns", "add", host.namespace)
            ip("-n", found.switch, "link", "add", name, "type", "veth", "peer", "eth0", "netns", host.namespace)
            ip("-n", found.switch, "link", "set", name, "master", "switch0", "up")
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host.namespace, "link", "set", device, "up")
        yield found
    finally:
        for host in reversed(hosts.values()):  # The servers are the first host, and stop last.
            host.stop_all()
        for namespace in (found.switch, *(host.namespace for host in hosts.values())):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
            shutil.rmtree(ETC_NETNS / namespace, ignore_errors=True)
        with suppress(OSError):
            ETC_NETNS.rmdir()


class Typist:
    """Commands and files of docs/platform.md, with values for `<...>` and folders of this test."""

    def __init__(self, secrets: Mapping[str, str], tls: Path) -> None:
        self._secrets = secrets
        self._tls = tls
        self._page = PAGE.read_text("utf-8")

    def put(self, text: str) -> str:
        for name, value in self._secrets.items():
            text = text.replace(f"<{name}>", value)
        assert "<" not in text, text
        return text.replace("/etc/tls", str(self._tls))

    def block(self, begin: str) -> list[str]:
        """The lines of the fenced block of the page that begins with this text."""
        found = re.search(rf"^```\w+\n({re.escape(begin)}.*?)^```$", self._page, re.MULTILINE | re.DOTALL)
        assert found is not None, f"docs/platform.md has no block that begins with {begin!r}"
        return [line.strip() for line in found[1].splitlines()]

    def environment(self, name: str) -> dict[str, str]:
        """The lines of a file in /etc/tierlane."""
        lines = self.block(f"# /etc/tierlane/{name}\n"[:-1])[1:]
        return dict(self.put(line).split("=", 1) for line in lines)

    def start(self, host: Host, name: str, instance: str = "", **more: str) -> str:
        """Start a unit as systemd would, with `more` variables; returns the name of the process."""
        read = unit(DEPLOY / "systemd" / f"{name}.service")
        places = {
            "/opt/tierlane/bin/": "",
            "/opt/tierlane/redis": str(DEPLOY / "redis"),
            "/var/lib": str(host.home / "lib"),
            "/run": str(host.home / "run"),
            "%d": str(self._tls),
            "%i": instance,
            "%H": host.name,
        }

        def put(text: str) -> str:
            for place, ours in places.items():
                text = text.replace(place, ours)
            return text

        environment = dict(w.split("=", 1) for line in read.get("Environment", []) for w in shlex.split(put(line)))
        for path in read["EnvironmentFile"]:
            environment |= self.environment(Path(path).name)
        words = ["nice", "-n", read.get("Nice", ["0"])[0], *shlex.split(put(read["ExecStart"][0]))]
        cwd = host.home / "run" if "WorkingDirectory" not in read else Path(put(read["WorkingDirectory"][0]))
        process = f"{name}{instance}"
        host.start(process, words, environment | more, cwd)
        return process
