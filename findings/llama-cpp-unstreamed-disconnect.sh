#!/usr/bin/env bash
# llama.cpp's server continues an unstreamed request whose client has disconnected, as long as another client reads a
# stream.
#
# Version: xllamacpp 2026.10.11549 from PyPI, which contains llama.cpp's own server (build 11549), on the CPU.
#
# Expected: the server ends the sequence of a client that has disconnected.
#
# Seen: it does so for a stream, and for an unstreamed request within about a second if nothing else runs. While any
# other client receives tokens, it does not: it generates all tokens for a client that has gone, and the request keeps
# its slot. A monitor that reads /metrics more than once a second has the same effect.
#
# Reason: the thread of an unstreamed request waits on a condition variable which the results of all requests notify
# (server_response::recv_with_timeout in tools/server/server-queue.cpp). It checks its connection only when a wait of
# one second ends without a notification, and every token of another stream starts the wait anew, as does every
# result for /metrics.
#
# Remedy: a gateway that has to free the slot requests a stream, whatever its client wants.
#
# Output seen:
#   streamed, beside a stream: ended
#   unstreamed, alone: ended
#   unstreamed, beside a stream: still running after 4 s
#   unstreamed, beside a reader of /metrics: still running after 4 s
set -euo pipefail
cd "$(dirname "$0")"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6

PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 "$folder/bin/python" - <<'PYTHON'
import contextlib
import http.client
import threading
import time

from llama_cpp import running_server, wait_for

LONG = {"prompt": "Hello", "max_tokens": 30_000, "temperature": 0}
WAIT_S = 4.0


def read(call):
    with contextlib.suppress(http.client.IncompleteRead, OSError):  # The connection is ended below.
        call.getresponse().read()


def outcome(server, stream, beside, monitored):
    """Whether a request ended in WAIT_S after its client had disconnected. Only a monitor reads the metrics meanwhile."""
    other = server.begin({**LONG, "prompt": "Other", "stream": True}) if beside else None
    if other is not None:
        reader = threading.Thread(target=read, args=[other])
        reader.start()
    call = server.begin({**LONG, "stream": stream})
    wait_for(lambda: server.running() == 1 + beside)
    call.close()
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        time.sleep(0.2)
        if monitored:
            server.running()
    found = server.running()
    if other is not None:
        assert found >= 1, "the other stream ended too early"
        other.sock.shutdown(2)
        reader.join()
    return "ended" if found == beside else f"still running after {WAIT_S:.0f} s"


CASES = {
    "streamed, beside a stream": (True, 1, False),
    "unstreamed, alone": (False, 0, False),
    "unstreamed, beside a stream": (False, 1, False),
    "unstreamed, beside a reader of /metrics": (False, 0, True),
}
found = []
for name, case in CASES.items():
    with running_server() as server:
        found.append(outcome(server, *case))
    print(f"{name}: {found[-1]}")
assert found == ["ended", "ended", *["still running after 4 s"] * 2], "the behaviour has changed"
PYTHON
