#!/usr/bin/env bash
# llama.cpp's server closes the connection after every stream, though it has announced that it keeps it open.
#
# Version: xllamacpp 2026.10.11549 from PyPI, which contains llama.cpp's own server (build 11549), on the CPU.
#
# Expected: after a whole response to an HTTP/1.1 request, a server that answers without `Connection: close` and with
# `Keep-Alive: timeout=5, max=100` keeps the connection open for the next request.
#
# Seen: it does so after an unstreamed response. After a stream, whose last chunk is complete, it has sent the same
# header and closes the connection at once. A client with a pool of connections may send its next request before it has
# seen the end of the connection, and loses it: a POST may not be repeated without the risk that it ran.
#
# Remedy: a client or gateway does not reuse a connection after a stream of this server.
#
# Output seen:
#   unstreamed: Connection None, Keep-Alive timeout=5, max=100; a second later: open
#   streamed: Connection None, Keep-Alive timeout=5, max=100; a second later: closed
set -euo pipefail
cd "$(dirname "$0")"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6

PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 "$folder/bin/python" - <<'PYTHON'
import select

from llama_cpp import running_server

found = []
with running_server() as server:
    for stream in (False, True):
        connection = server.begin({"prompt": "Hello", "max_tokens": 4, "temperature": 0, "stream": stream})
        socket = connection.sock
        response = connection.getresponse()
        body = response.read()  # To the last chunk, not to the end of the connection.
        assert response.status == 200 and response.version == 11 and body
        kept = [response.getheader(name) for name in ("Connection", "Keep-Alive")]
        readable, _, _ = select.select([socket], [], [], 1.0)
        closed = bool(readable) and socket.recv(1) == b""
        found.append((*kept, closed))
        name, state = "streamed" if stream else "unstreamed", "closed" if closed else "open"
        print("{}: Connection {}, Keep-Alive {}; a second later: {}".format(name, *kept, state))
        connection.close()
assert found == [(None, "timeout=5, max=100", False), (None, "timeout=5, max=100", True)], "the behaviour has changed"
PYTHON
