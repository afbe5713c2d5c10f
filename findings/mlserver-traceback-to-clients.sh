#!/usr/bin/env bash
# MLServer sends its traceback to the client of a request on which the model fails.
#
# Version: mlserver 1.7.1 from PyPI, with fastapi 0.115.14 and starlette 0.46.2, which it installs; default settings.
#
# Expected: a response of status 500 with a JSON object, `{"error": "..."}`, as for its other errors and as the Open
# Inference Protocol says. Its body is the plain text of the whole Python traceback instead, with the paths of files on
# the server and the message of the exception, which may quote inputs. The setting `debug`, which does this, is on by
# default.
#
# With `"debug": false` in settings.json the body is the text `Internal Server Error`, which is no JSON either. A gateway
# must not pass such a body on, and cannot rely on an `error` member.
#
# Output seen:
#   debug by default: 500 text/plain, a traceback with the path of the runtime: True
#   debug off: 500 text/plain, a traceback with the path of the runtime: False
set -euo pipefail
cd "$(dirname "$0")"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check mlserver==1.7.1 fastapi==0.115.14 starlette==0.46.2

PYTHONDONTWRITEBYTECODE=1 "$folder/bin/python" - "$folder" <<'PYTHON'
import json
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

home = Path(sys.argv[1]) / "models"
home.mkdir()
(home / "failing_runtime.py").write_text(
    "from mlserver import MLModel\n\n\nclass Failing(MLModel):\n"
    "    async def predict(self, payload):\n        raise ValueError(payload.inputs[0].data[0])\n"
)
(home / "model-settings.json").write_text(json.dumps({"name": "m", "implementation": "failing_runtime.Failing"}))
BODY = json.dumps({"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a secret"]}]})


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def call(port, method, path, body=None):
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.getheader("Content-Type", "").partition(";")[0], response.read().decode()


def failure(**settings):
    port = free_port()
    ports = {"http_port": port, "grpc_port": free_port(), "metrics_port": free_port()}
    settings |= {"host": "127.0.0.1", "parallel_workers": 0, **ports}
    (home / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-c", "from mlserver.cli import main; main()", "start", str(home)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                if call(port, "GET", "/v2/health/ready")[0] == 200:
                    break
            except OSError:
                pass
            assert time.monotonic() < deadline and process.poll() is None, "the server does not start"
            time.sleep(0.2)
        status, kind, text = call(port, "POST", "/v2/models/m/infer", BODY)
    finally:
        process.terminate()
        process.wait(30)
    return status, kind, "Traceback" in text and "failing_runtime.py" in text and "a secret" in text


found = [failure(), failure(debug=False)]
for name, (status, kind, shown) in zip(("debug by default", "debug off"), found):
    print(f"{name}: {status} {kind}, a traceback with the path of the runtime: {shown}")
assert found == [(500, "text/plain", True), (500, "text/plain", False)], "the behaviour has changed"
PYTHON
