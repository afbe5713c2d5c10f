#!/usr/bin/env bash
# SMG's priority scheduler runs two requests of its lowest class at a time on an idle engine; the other 62 slots stay empty.
#
# Version: smg 1.13.0 from PyPI, `--priority-scheduler-enabled` without further options.
#
# Expected: a priority decides who runs first when slots are scarce. SMG documents that a class may reserve some slots,
# which lower classes do not get, and that its scheduler is off if the reservations are over the capacity
# (docs/reference/priority-scheduler.md). Without requests of other classes, the class `bulk` gets most of an engine.
#
# Seen: the capacity of an engine that does not report one is taken as 64 requests. The classes above reserve 103 slots
# without any configuration; they keep 62 of the 64 in proportion, also while none of their requests is there, and the
# scheduler stays on (one warning in the log: "capacity is below the configured reservations"). Only with
# `--max-concurrent-requests 64` do the same numbers switch it off, as documented: one line in the log ("falling back to
# legacy admission"), and the header `x-smg-priority` has no effect.
#
# Remedy: floors that fit the engine, in a file for `--priority-scheduler-config` that names all fields of each class.
#
# Output seen:
#   default options, interactive: at most 32 of 32 at a time
#   default options, bulk: at most 2 of 32 at a time
#   --max-concurrent-requests 64, bulk: at most 32 of 32 at a time
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check smg==1.13.0
cd "$folder"

PATH="$folder/venv/bin:$PATH" PYTHONDONTWRITEBYTECODE=1 python - <<'PYTHON'
import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CALLS, ANSWER_S = 32, 0.2


class Engine(BaseHTTPRequestHandler):
    """Answers each chat after ANSWER_S, however many there are, and counts those that run at a time."""

    protocol_version = "HTTP/1.1"
    lock, running, most = threading.Lock(), 0, 0

    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            Engine.running += 1
            Engine.most = max(Engine.most, Engine.running)
        time.sleep(ANSWER_S)
        with self.lock:
            Engine.running -= 1
        message = {"role": "assistant", "content": "A"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self.reply({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage})

    def reply(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def chat(url, priority):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}).encode()
    headers = {"Content-Type": "application/json", "x-smg-priority": priority}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers), timeout=60) as response:
        assert response.status == 200


def most_at_a_time(priorities, *options):
    """The most chats that the engine runs at a time, for each class, while nothing else is sent."""
    port = free_port()
    command = ["smg", "launch", "--worker-urls", f"http://127.0.0.1:{server.server_port}", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--priority-scheduler-enabled", "--priority-scheduler-default-max-class", "interactive", *options]
    gateway = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while True:
            try:
                chat(url, "interactive")
                break
            except OSError:
                assert gateway.poll() is None and time.monotonic() < until, "the gateway does not start"
                time.sleep(0.2)
        time.sleep(5)  # The capacity of the engine is read after the start.
        found = []
        for priority in priorities:
            Engine.most = 0
            threads = [threading.Thread(target=chat, args=(url, priority)) for _ in range(CALLS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found.append(Engine.most)
        return found
    finally:
        gateway.kill()
        gateway.wait()


server = Server(("127.0.0.1", 0), Engine)
threading.Thread(target=server.serve_forever, daemon=True).start()
found = most_at_a_time(["interactive", "bulk"]) + most_at_a_time(["bulk"], "--max-concurrent-requests", "64")
names = ("default options, interactive", "default options, bulk", "--max-concurrent-requests 64, bulk")
for name, most in zip(names, found):
    print(f"{name}: at most {most} of {CALLS} at a time")
assert found[1] == 2 and min(found[0], found[2]) > CALLS // 2, "the behaviour has changed"
PYTHON
