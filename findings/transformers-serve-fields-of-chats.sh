#!/usr/bin/env bash
# `transformers serve` fails on whole numbers in `logit_bias`, and accepts `n` and `response_format` without an effect.
#
# Version: transformers 5.24.0 from PyPI with the extra `serving`, torch 2.13.0.
#
# Expected: OpenAI's API documents `logit_bias` as token ids with numbers from -100 to 100, which clients send as 5; `n: 2`
# gives two choices; with a `json_schema` the text is JSON of this schema. A server rejects what it does not support, as
# this one rejects unknown fields with 422.
#
# Seen: 5 gets 500 `Internal Server Error`, 5.0 is accepted. `n` gives one choice, and `response_format` the text without
# it. A client of several kinds of servers cannot tell this from success.
#
# Remedy: fractions in `logit_bias`; a client compares the number of choices, and parses the text.
#
# Output seen:
#   plain: 200, 1 choice
#   n of 2: 200, 1 choice
#   response_format: 200, 1 choice, the plain text
#   logit_bias of 5.0: 200, 1 choice
#   logit_bias of 5: 500
#   unknown field: 422
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'transformers[serving]==5.24.0' torch==2.13.0
cd "$folder"

TMPDIR="$folder" HF_HOME="$folder/cache" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(["<s>", "</s>", *letters])}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
fast.save_pretrained("model")
torch.manual_seed(1)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(vocab_size=len(letters) + 2, bos_token_id=0, eos_token_id=1, **sizes)).save_pretrained("model")

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
URL = f"http://127.0.0.1:{port}/v1"
SCHEMA = {"type": "object", "properties": {"size": {"enum": ["small"]}}, "required": ["size"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
REQUESTS = {
    "plain": {},
    "n of 2": {"n": 2},
    "response_format": {"response_format": FORMAT},
    "logit_bias of 5.0": {"logit_bias": {"40": 5.0}},
    "logit_bias of 5": {"logit_bias": {"40": 5}},
    "unknown field": {"unknown": 5},
}


def send(fields):
    body = {"model": "model", "messages": [{"role": "user", "content": "A"}], "max_tokens": 8, "temperature": 0, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{URL}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, [each["message"]["content"] for each in json.load(response)["choices"]]
    except urllib.error.HTTPError as error:
        return error.code, []


command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", "model"]
server = subprocess.Popen(
    [*command, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)
try:
    until = time.monotonic() + 180
    while True:
        try:
            urllib.request.urlopen(f"{URL}/models", timeout=5).close()
            break
        except OSError:
            assert server.poll() is None and time.monotonic() < until, "the server does not start"
            time.sleep(0.2)
    found = {name: send(fields) for name, fields in REQUESTS.items()}
finally:
    server.terminate()
    server.wait(30)
for name, (status, texts) in found.items():
    choices = f", {len(texts)} choice" if texts else ""
    plain = ", the plain text" if name == "response_format" and texts == found["plain"][1] else ""
    print(f"{name}: {status}{choices}{plain}")
seen = {name: (status, len(texts)) for name, (status, texts) in found.items()}
accepted = dict.fromkeys(list(REQUESTS)[:4], (200, 1))
assert seen == accepted | {"logit_bias of 5": (500, 0), "unknown field": (422, 0)}, "the behaviour has changed"
assert found["response_format"] == found["plain"], "the behaviour has changed"
PYTHON
