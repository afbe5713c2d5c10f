"""The gateways' port: whether it can be had, asked before anything is started, and kept from others until it is used.

Minutes may pass until a gateway listens, and it may end and begin again: meanwhile the kernel would give its port to
whoever asks for any free one, a worker's direct endpoint for example, and the gateway could never listen.
"""

import contextlib
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tierlane.up.errors import StackError


@contextmanager
def held_port(host: str, port: int) -> Iterator[int]:
    """The port to use, a free one for 0; while it is held, only servers of this user that share it (`SO_REUSEPORT`) get it.

    Raises StackError when the port is taken or may not be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        held = _held(family, _tried(family, address))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StackError(
                f"Port {port} is in use on {host}{_by(port)}: stop what listens there, or choose --port."
            ) from error
        raise StackError(f"Cannot listen on {host} port {port}: {error.strerror or error}.") from error
    with held:
        yield int(held.getsockname()[1])


def _by(port: int) -> str:
    """Who listens, as far as we may know."""
    with contextlib.suppress(psutil.Error, OSError):
        pids = {
            each.pid
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
        }
        found = [f"{psutil.Process(pid).name()}, pid {pid}" for pid in sorted(filter(None, pids))]
        return f" by {'; '.join(found)}" if found else ""
    return ""


def _tried(family: int, address: tuple[object, ...]) -> tuple[object, ...]:
    """The address, with its port. Gateways share theirs, so the trial must not: it has to fail when somebody else listens,
    of another stack too.
    """
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Closed connections are no obstacle.
        trial.bind(address)
        trial.listen(1)
        return tuple(trial.getsockname())


def _held(family: int, address: tuple[object, ...]) -> socket.socket:
    """A socket that never listens: no connection comes to it, and who shares the port listens beside it."""
    try:
        return _bound(family, address, socket.SO_REUSEPORT)
    except OSError as error:
        # Closed connections of a server that did not share its port are in the way of one that only shares.
        if error.errno != errno.EADDRINUSE:
            raise
        return _bound(family, address, socket.SO_REUSEPORT, socket.SO_REUSEADDR)


def _bound(family: int, address: tuple[object, ...], *options: int) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            held.setsockopt(socket.SOL_SOCKET, option, 1)
        held.bind(address)
    except OSError:
        held.close()
        raise
    return held
