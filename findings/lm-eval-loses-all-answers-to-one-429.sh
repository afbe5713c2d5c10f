#!/usr/bin/env bash
# lm_eval repeats a request that gets 429 twice within three seconds, whatever `Retry-After` says, and then ends without the answers of
# all other requests. A 400 is repeated just as often.
#
# Version: lm_eval 0.4.13 from PyPI with the extra `api`, model `local-completions`, four requests at a time.
#
# Expected: a client of an API with rate limits waits as long as `Retry-After: 30` says, at most repeats a 429, never a 400, and keeps
# the answers that it has.
#
# Seen: every exception is repeated up to `max_retries` (3 requests) with waits of one second; headers are not read. The error of
# the third one ends the evaluation: 19 of 20 answers were there, no file has them. The exit code is 1.
#
# Remedy: before an API with limits, `num_concurrent` below them, `max_retries` high enough for the waits of 1, 2, 4, 8, 10 seconds to
# reach the end of the longest `Retry-After`, and `--use_cache`, which keeps answers.
#
# Output seen:
#   429 with Retry-After: 30: sent 3 times within 5 s, others answered 19, exit code 1, files with results 0
#   400: sent 3 times within 5 s, others answered 19, exit code 1, files with results 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'lm-eval[api]==0.4.13'
cd "$folder"

HF_HUB_OFFLINE=1 HOME=$folder OPENAI_API_KEY=none PYTHONDONTWRITEBYTECODE=1 "$folder/venv/bin/python" - <<'PYTHON'
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

QUESTIONS, REFUSED = 20, "Question 17"
TASK = {
    "task": "write",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": "questions.json"},
    "test_split": "train",
    "doc_to_text": "{{question}}",
    "doc_to_target": "yes",
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}
refusal = 0
refused, answered = [], []


class Server(BaseHTTPRequestHandler):
    """Refuses one of the questions, and answers all others."""

    def do_POST(self):
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        text = prompt[0] if isinstance(prompt, list) else prompt
        if text == REFUSED:
            refused.append(time.monotonic())
            self.reply(refusal, {"error": {"message": "Not this one.", "type": "error", "code": refusal}})
        else:
            answered.append(text)
            choice = {"index": 0, "text": "yes", "finish_reason": "stop", "logprobs": None}
            usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
            about = {"id": "1", "object": "text_completion", "created": 1, "model": "m"}
            self.reply(200, {**about, "choices": [choice], "usage": usage})

    def reply(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "30")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
Path("questions.json").write_text(json.dumps([{"question": f"Question {number}"} for number in range(QUESTIONS)]))
Path("write.yaml").write_text(json.dumps(TASK))
arguments = f"model=m,base_url=http://127.0.0.1:{server.server_port}/v1/completions,num_concurrent=4"
command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--include_path", ".", "--tasks", "write"]
command += ["--model_args", f"{arguments},tokenizer_backend=None,tokenized_requests=False"]
command += ["--output_path", "found", "--log_samples"]
found = []
for refusal, name in ((429, "429 with Retry-After: 30"), (400, "400")):
    refused.clear()
    answered.clear()
    code = subprocess.run(command, capture_output=True, check=False).returncode
    files = len([path for path in Path("found").rglob("*") if path.is_file()])
    within = refused[-1] - refused[0] < 5
    found.append((len(refused), within, len(answered), code, files))
    print(
        f"{name}: sent {len(refused)} times {'within' if within else 'in more than'} 5 s, others answered {len(answered)}, "
        f"exit code {code}, files with results {files}"
    )
assert found == [(3, True, QUESTIONS - 1, 1, 0)] * 2, "the behaviour has changed"
PYTHON
