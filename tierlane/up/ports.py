"""Whether the gateways' port can be had, asked before anything is started."""

import errno
import socket

from tierlane.up.errors import StackError


def claim_port(host: str, port: int) -> int:
    """Return the port to use, a free one for 0. Raises StackError when the port is taken or may not be used.

    Gateways share their port, so the trial must not: it has to fail when somebody else listens, of another stack too.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Closed connections are no obstacle.
            trial.bind(address)
            trial.listen(1)
            return int(trial.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StackError(f"Port {port} is in use on {host}: stop what listens there, or choose --port.") from error
        raise StackError(f"Cannot listen on {host} port {port}: {error.strerror or error}.") from error
