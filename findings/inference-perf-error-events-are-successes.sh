#!/usr/bin/env bash
# inference-perf counts streams that end with an error event, or in the middle, as successes, and its tokens/s are those of the text in
# tokens of its own tokenizer, even where the server has reported the number.
#
# Version: inference-perf 0.7.0 from PyPI, `type: completion`, `streaming: true`.
#
# Expected: an answer whose stream has `{"error": ...}` after half of its tokens is a failure, as in guidellm 0.8.1; and tokens/s
# are those of `usage`, which it also shows.
#
# Seen: an event without choices is skipped, whatever it has, and the end of the connection ends an answer: the broken answers are
# successes. With a tokenizer for which the text has three times the tokens, tokens/s are three times as high. `output_tokens` in the
# same file is that of `usage`; a broken answer has none, gets the number of its text, and so looks longer than a whole one.
#
# Remedy: compare servers by `output_tokens` x `requests_per_sec`, with the tokenizer of the model, and `output_tokens` with the
# number that was asked for.
#
# Output seen (a whole answer has 20 tokens):
#   whole: 8 successes, 0 failures, output_tokens 20, output_tokens_per_sec over requests_per_sec 60
#   error event: 8 successes, 0 failures, output_tokens 30, output_tokens_per_sec over requests_per_sec 30
#   cut off: 8 successes, 0 failures, output_tokens 30, output_tokens_per_sec over requests_per_sec 30
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    aiofiles==25.1.0 aiohttp==3.14.5 av==18.1.0 boto3==1.44.8 datasets==5.2.0 google-cloud-storage==3.17.1 jinja2==3.1.6 \
    numpy==2.4.6 pillow==13.0.0 prometheus-client==0.26.0 pydantic==2.14.4 pyyaml==6.0.4 rich==15.0.0 tiktoken==0.14.0 \
    tqdm==4.70.1 transformers==5.13.0 uvloop==0.23.0
# Its metadata ask for Python 3.12; what runs here does not need it.
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --ignore-requires-python inference-perf==0.7.0
cd "$folder"

HF_HUB_OFFLINE=1 PATH="$folder/venv/bin:$PATH" PYTHONDONTWRITEBYTECODE=1 python - <<'PYTHON'
import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

COUNT, TOKENS = 8, 20
DONE = "[DONE]"
ABOUT = {"id": "1", "object": "text_completion", "created": 1, "model": "m"}


def event(text="abc", reason=None):
    return json.dumps({**ABOUT, "choices": [{"index": 0, "text": text, "finish_reason": reason, "logprobs": None}]})


USAGE = {"prompt_tokens": 8, "completion_tokens": TOKENS, "total_tokens": TOKENS + 8}
LAST = json.dumps({**ABOUT, "choices": [], "usage": USAGE})
ERROR = json.dumps({"error": {"message": "The engine failed.", "type": "server_error", "param": None, "code": 500}})
HALF = [event()] * (TOKENS // 2)
STREAMS = {
    "whole": [*HALF, *HALF[1:], event(reason="length"), LAST, DONE],
    "error event": [*HALF, ERROR, DONE],
    "cut off": HALF,
}
name = ""


class Server(BaseHTTPRequestHandler):
    """Answers each request with the stream `name`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for each in STREAMS[name]:
            text = f"data: {each}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_):
        pass


characters = Tokenizer(models.BPE({chr(code): code - 32 for code in range(32, 127)}, []))
characters.decoder = decoders.Fuse()
PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="~", pad_token="~").save_pretrained("tokenizer")
server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
found = []
for name in STREAMS:
    lengths = {"type": "fixed", "total_count": COUNT}
    config = {
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": "m", "base_url": url, "api_key": "none"},
        "tokenizer": {"pretrained_model_name_or_path": "tokenizer"},
        "data": {
            "type": "random",
            "input_distribution": lengths | dict.fromkeys(("min", "max", "mean"), 8),
            "output_distribution": lengths | dict.fromkeys(("min", "max", "mean"), TOKENS),
        },
        "load": {"type": "concurrent", "num_workers": 1, "stages": [{"num_requests": COUNT, "concurrency_level": 2}]},
        "storage": {"local_storage": {"path": name}},
    }
    Path("config.yaml").write_text(json.dumps(config))
    subprocess.run(["inference-perf", "-c", "config.yaml"], check=True, capture_output=True)
    summary = json.loads((Path(name) / "summary_lifecycle_metrics.json").read_text())
    successes, failures = summary["successes"], summary["failures"]["count"]
    rates = successes["throughput"]
    each = round(rates["output_tokens_per_sec"] / rates["requests_per_sec"])
    reported = round(successes["output_tokens"]["mean"])
    found.append((successes["count"], failures, reported, each))
    print(
        f"{name}: {successes['count']} successes, {failures} failures, output_tokens {reported}, "
        f"output_tokens_per_sec over requests_per_sec {each}"
    )
assert found == [(COUNT, 0, 20, 60), (COUNT, 0, 30, 30), (COUNT, 0, 30, 30)], "the behaviour has changed"
PYTHON
