#!/usr/bin/env bash
# SMG and vLLM's router send a request that an engine refuses with `Retry-After: 30` five times within a second.
#
# Version: smg 1.13.0 and vllm-router 0.1.17 from PyPI, default options, one engine.
#
# Expected: 429 with `Retry-After: 30` says that the engine is full and when to come back. SMG documents that it repeats a
# 429, "to different workers" (docs/concepts/reliability/retries.md). With one engine there is no other, so a router
# passes the response on, or waits as the header says.
#
# Seen: the same engine gets the request four more times, 50 to 170 ms apart, and the client then gets the 429 with its
# header, which says 30 s after five attempts. An engine that refuses because it is full has to refuse five times as
# many requests, at the moment at which it has the least to spare; what a client's own retries add is multiplied by five
# too.
#
# Remedy: `--disable-retries`, or an engine that queues instead of refusing.
#
# Output seen:
#   smg: 429 with Retry-After 30 after less than a second, attempts at the engine: 5
#   vllm-router: 429 with Retry-After 30 after less than a second, attempts at the engine: 5
#   smg --disable-retries: 429 with Retry-After 30 after less than a second, attempts at the engine: 1
#   vllm-router --disable-retries: 429 with Retry-After 30 after less than a second, attempts at the engine: 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/smg"
"${PYTHON:-python3}" -m venv "$folder/vllm-router"
"$folder/smg/bin/pip" install --quiet --disable-pip-version-check smg==1.13.0
"$folder/vllm-router/bin/pip" install --quiet --disable-pip-version-check vllm-router==0.1.17
cd "$folder"

PYTHONDONTWRITEBYTECODE=1 "$folder/smg/bin/python" - <<'PYTHON'
import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Engine(BaseHTTPRequestHandler):
    """Refuses every chat while `full`, and counts them."""

    protocol_version = "HTTP/1.1"
    full, chats = False, 0

    def do_GET(self):
        self.reply(200, {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        Engine.chats += self.path == "/v1/chat/completions"
        if Engine.full:
            self.reply(429, {"error": {"message": "The engine is full.", "type": "RateLimitError", "code": 429}})
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": "A"}, "finish_reason": "stop"}
            self.reply(200, {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})

    def reply(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After", "30")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def chat(url):
    """The status and Retry-After of a chat."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, None
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Retry-After"]


def refused(command):
    port = free_port()
    command = [*command, "--worker-urls", f"http://127.0.0.1:{server.server_port}", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while True:
            try:
                if chat(url)[0] == 200:
                    break
            except OSError:
                pass
            assert router.poll() is None and time.monotonic() < until, "the router does not start"
            time.sleep(0.2)
        Engine.full, Engine.chats, began = True, 0, time.monotonic()
        status, wait = chat(url)
        return status, wait, time.monotonic() - began < 1, Engine.chats
    finally:
        Engine.full = False
        router.kill()
        router.wait()


server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
threading.Thread(target=server.serve_forever, daemon=True).start()
found = []
for options in ([], ["--disable-retries"]):
    for name, command in (("smg", ["smg/bin/smg", "launch"]), ("vllm-router", ["vllm-router/bin/vllm-router"])):
        status, wait, soon, chats = refused([*command, *options])
        found.append((status, wait, soon, chats))
        after = "less than a second" if soon else "more than a second"
        print(f"{' '.join([name, *options])}: {status} with Retry-After {wait} after {after}, attempts at the engine: {chats}")
assert found == [(429, "30", True, 5)] * 2 + [(429, "30", True, 1)] * 2, "the behaviour has changed"
PYTHON
