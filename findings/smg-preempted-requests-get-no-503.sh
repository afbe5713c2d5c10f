#!/usr/bin/env bash
# A request that SMG's priority scheduler preempts ends as an empty stream with 200, or its connection is closed without a
# response; the documented 503 with `Retry-After: 1` does not arrive.
#
# Version: smg 1.13.0 from PyPI, its priority scheduler with floors of 0.
#
# Expected: docs/reference/priority-scheduler.md of SMG: a request that is cancelled before its first byte to make room
# for a higher class gets 503 with `X-SMG-Preempted: true` and `Retry-After: 1`, after which clients repeat it, and the
# higher class gets its slot. SMG's own metric counts it as such. The page on concepts warns that the first data of a
# request whose handler does not notice may be truncated.
#
# Seen: an engine that sends the head of its stream at once, as servers on Starlette do, has its stream replaced by a
# complete but empty one with status 200: no text, no `[DONE]`, no error, so no client repeats it. Its slot is not free
# before the engine sends, so the requests of the higher class begin when other requests end, as without preemption.
# With an engine that sends the head with the first token, the client's connection is closed without a byte; whether the
# higher class begins then, or when other requests end, differs from run to run.
#
# Remedy: `can_preempt: false` for all classes, in the file for `--priority-scheduler-config`.
#
# Output seen:
#   head at once: 3 of 70 bulk requests preempted: [(200, 0, None)], when the engine sends; interactive ones begin when others end
#   head with the first token: 3 of 70 bulk requests preempted: ['RemoteDisconnected'], at once
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check smg==1.13.0
cd "$folder"

PATH="$folder/venv/bin:$PATH" PYTHONDONTWRITEBYTECODE=1 python - <<'PYTHON'
import http.client
import json
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BULK, INTERACTIVE = 70, 3  # More than the 64 that SMG takes for the capacity of an engine.
FIRST_S = 4.0
LIMITS = {"queue_size": 128, "queue_timeout_secs": 30, "starvation_threshold_secs": 30}
CLASSES = {
    name: {**LIMITS, "reserved_floor": 0, "reserved_per_slot": 0, "can_preempt": name in ("system", "interactive")}
    for name in ("system", "interactive", "default", "bulk")
}


class Engine(BaseHTTPRequestHandler):
    """Streams two tokens after FIRST_S; the head of the response is sent before or after this wait."""

    protocol_version = "HTTP/1.1"
    head_at_once = True

    def do_GET(self):
        body = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        try:
            if self.head_at_once:
                self.head()
            time.sleep(FIRST_S)
            if not self.head_at_once:
                self.head()
            for text in ("A", "B"):
                choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop" if text == "B" else None}
                self.event({"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})
            self.event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True  # SMG cancelled the call.

    def head(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()

    def event(self, document):
        text = f"data: {document if isinstance(document, str) else json.dumps(document)}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 256

    def handle_error(self, *_):
        pass


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stream(port, priority):
    """What a client gets: the name of the error, or status, size and `X-SMG-Preempted` of the response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    try:
        headers = {"Content-Type": "application/json", "x-smg-priority": priority}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, len(response.read()), response.getheader("X-SMG-Preempted")
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def preempted(port):
    """The results of the bulk requests that are not whole, the seconds until the last of them, and until the first
    interactive request began at the engine.
    """
    found, began = [], time.monotonic()

    def run(priority):
        result = stream(port, priority)
        found.append((priority, result, time.monotonic() - began))

    threads = [threading.Thread(target=run, args=["bulk"]) for _ in range(BULK)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    threads += [threading.Thread(target=run, args=["interactive"]) for _ in range(INTERACTIVE)]
    for thread in threads[BULK:]:
        thread.start()
    for thread in threads:
        thread.join()
    broken = [(result, seconds) for name, result, seconds in found if name == "bulk" and not (result[0] == 200 and result[1])]
    begun = min(seconds for name, _, seconds in found if name == "interactive") - FIRST_S
    return [result for result, _ in broken], max((seconds for _, seconds in broken), default=0.0), begun


Path("classes.yaml").write_text(json.dumps({"classes": CLASSES}))
server = Server(("127.0.0.1", 0), Engine)
threading.Thread(target=server.serve_forever, daemon=True).start()
port = free_port()
command = ["smg", "launch", "--worker-urls", f"http://127.0.0.1:{server.server_port}", "--host", "127.0.0.1", "--port", str(port)]
command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--max-concurrent-requests", "64"]
command += ["--priority-scheduler-enabled", "--priority-scheduler-default-max-class", "interactive"]
command += ["--priority-scheduler-config", "classes.yaml"]
gateway = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
seen = []
try:
    until = time.monotonic() + 60
    while stream(port, "bulk")[0] != 200:
        assert gateway.poll() is None and time.monotonic() < until, "the gateway does not start"
        time.sleep(0.2)
    for name, at_once in (("head at once", True), ("head with the first token", False)):
        Engine.head_at_once = at_once
        results, last_s, begun_s = preempted(port)
        kinds = sorted(set(results), key=str)
        when = "when the engine sends" if last_s > FIRST_S - 0.2 else "at once"
        if at_once:  # Else it differs from run to run.
            when += f"; interactive ones begin {'when others end' if begun_s > FIRST_S - 0.2 else 'at once'}"
        print(f"{name}: {len(results)} of {BULK} bulk requests preempted: {kinds}, {when}")
        seen.append((kinds, when))
finally:
    gateway.kill()
    gateway.wait()
assert seen == [
    ([(200, 0, None)], "when the engine sends; interactive ones begin when others end"),
    (["RemoteDisconnected"], "at once"),
], "the behaviour has changed"
PYTHON
