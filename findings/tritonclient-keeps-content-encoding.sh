#!/usr/bin/env bash
# The HTTP client of Triton marks uncompressed requests as compressed after a compressed one.
#
# Version: tritonclient 2.73.0 from PyPI, with geventhttpclient 2.6.1 and numpy 2.4.6.
#
# Expected: an option of one call concerns this call only.
#
# Seen: `infer(request_compression_algorithm="gzip", headers=headers)` adds `Content-Encoding` to the caller's own dict.
# A program that keeps its headers in one dict, as for an API key, sends `Content-Encoding: gzip` with every later plain
# body. A server that decodes bodies rejects those.
#
# Remedy: a copy of the headers for each call.
#
# Output seen:
#   compressed: Content-Encoding gzip, body gzip
#   plain, the same headers: Content-Encoding gzip, body JSON
#   plain, a copy of the headers: Content-Encoding None, body JSON
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check tritonclient[http]==2.73.0 geventhttpclient==2.6.1 numpy==2.4.6

"$folder/bin/python" - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy
import tritonclient.http as triton

received = []


class Server(BaseHTTPRequestHandler):
    protocol_version, timeout = "HTTP/1.1", 10

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        received.append((self.headers.get("Content-Encoding"), "gzip" if body[:2] == b"\x1f\x8b" else "JSON"))
        answer = json.dumps({"model_name": "m", "outputs": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = triton.InferenceServerClient(f"127.0.0.1:{server.server_port}")
tensor = triton.InferInput("x", [1], "FP32")
tensor.set_data_from_numpy(numpy.ones(1, numpy.float32), binary_data=False)
headers = {"Authorization": "Bearer key"}
copied = dict(headers)
client.infer("m", [tensor], headers=headers, request_compression_algorithm="gzip")
client.infer("m", [tensor], headers=headers)
client.infer("m", [tensor], headers=copied)
for name, (coding, body) in zip(("compressed", "plain, the same headers", "plain, a copy of the headers"), received):
    print(f"{name}: Content-Encoding {coding}, body {body}")
client.close()
server.shutdown()
assert received == [("gzip", "gzip"), ("gzip", "JSON"), (None, "JSON")], "the behaviour has changed"
PYTHON
