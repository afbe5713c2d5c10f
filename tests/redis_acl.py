"""A server with deploy/redis/users.acl, started as deployments start it, and which scripts are whose."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scheduler.redis_client.scripts import source

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "redis"
ROLES = ("gateway", "scheduler", "worker")
SCRIPTS = {
    "gateway": (
        *("admit", "cancel", "adopt", "stored", "gateway_beat", "limit_state", "observe"),
        *("history_add", "history_refill", "limits_leave", "limits_arrive"),
    ),
    "scheduler": (
        *("form_batch", "look", "reap", "repair", "rebuild", "expire", "share", "census", "cordon"),
        *("observe", "quota_restore", "audit_take", "audit_drop", "allot", "withdraw"),
    ),
    "worker": (
        *("claim", "bodies", "renew", "finish", "finish_part", "fail", "release", "push_back"),
        *("share", "worker_beat"),
    ),
}
"""The verbs of each role. `admin` uses those of the gateway, for `tierlane dlq requeue` and `explain`."""


def touched(role: str) -> tuple[set[str], set[str]]:
    """The names of keys, and the commands, in the scripts of a role. A name that ends with `:` is the beginning of a name.

    A name that begins with `/` is shared by all pools.
    """
    text = "\n".join(re.sub(r"--[^\n]*", "", source(name)) for name in SCRIPTS[role])
    keys = set(re.findall(r"P \.\. '([a-z_:]+)'", text)) | {
        f"/{name}" for name in re.findall(r"T \.\. '([a-z_:]+)'", text)
    }
    return keys - {"responses:"}, set(re.findall(r"call\('([A-Z]+)'", text))


def password(user: str) -> str:
    """One with characters that sed, a shell and a URL could stumble over."""
    return f"{user}-&\\$1 '"


@contextmanager
def acl_server(home: Path, binary: Path) -> Iterator[Path]:
    """Run it; gives its socket. A user `root` without password is added, who may do everything."""
    folder, socket = home / "redis", home / "acl.sock"
    shutil.copytree(FOLDER, folder)
    with (folder / "users.acl").open("a") as file:
        file.write("user root on nopass ~* &* +@all\n")
    passwords = {f"{user.upper()}_PASSWORD": password(user) for user in (*ROLES, "scaler", "admin")}
    env = os.environ | passwords | {"REDIS_SERVER": str(binary), "ACL_FILE": str(home / "users.acl")}
    options = {"port": "0", "unixsocket": str(socket), "dir": str(home), "save": ""}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    process = subprocess.Popen([str(folder / "start.sh"), *words], env=env, stdout=subprocess.DEVNULL)
    try:
        yield socket
    finally:
        process.terminate()
        process.wait(10)
