"""Real programs before a running stack, each with a task of its own: `make clients`.

Only address, key and model are set, and what docs/clients.md names. The stand-in for the engine answers as the task asks.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from endpoint_stand_in import StandIn, serving
from gateway.http.error_responses import ErrorResponses
from gateway.http.errors import RejectionError
from gateway.translations.message_endpoints import MESSAGE_FORM
from hf_models import make_causal
from scheduler.errors import ErrorCode
from stack import free_port, start_stack
from tierlane_local.running import bare_environment

SCRIPTS = Path(__file__).resolve().parents[1] / "clients"
PACKAGES = Path(sys.prefix)
"""Has the folders `clients-GROUP` with the packages of each group; those of the group `npm` are beside the scripts, and
those of the group `pip` are among the packages of the tests or in the folder `clients`.
"""

GROUPS = ("npm", "pip", "frameworks", "llama-index", "litellm-proxy", "lm-eval", "guidellm", "vllm")

CODEX = """codex exec --skip-git-repo-check -s danger-full-access -c model=openai -c model_provider=tierlane \
    -c "model_providers.tierlane={name='Tierlane', base_url='$API', env_key='CLIENT_KEY'}" \
    'CALL<<exec_command {"cmd": "echo made > made.txt"}>>' < /dev/null && cat made.txt"""
OPENCODE = """echo 'CALL<<bash {"command": "echo made > made.txt", "description": "Make a file"}>>' \
    | $SCRIPTS/node_modules/opencode-linux-*/bin/opencode run && cat made.txt"""
OPENCODE_CONFIG = """{"model": "tierlane/openai", "provider": {"tierlane": {"npm": "@ai-sdk/openai-compatible",
"options": {"baseURL": "{env:API}", "apiKey": "{env:CLIENT_KEY}"}, "models": {"openai": {}}}}}"""
TASK = """
dataset_path: json
dataset_kwargs: {data_files: questions.json}
test_split: train
doc_to_text: "{{question}}"
"""
LM_EVAL_FILES = {
    "questions.json": '[{"question": "Is it so?"}, {"question": "Is water wet?"}]',
    "choice.yaml": f"{TASK}task: choice\noutput_type: multiple_choice\ndoc_to_target: 0\ndoc_to_choice: ['yes', 'no, never']\n"
    "metric_list: [{metric: acc}]",
    "write.yaml": f"{TASK}task: write\noutput_type: generate_until\ndoc_to_target: any\n"
    "generation_kwargs: {until: ['x']}\nmetric_list: [{metric: exact_match}]",
}
LM_EVAL = """python -m lm_eval run --model local-completions --include_path . --tasks choice,write \
    --model_args model=openai,base_url=$API/completions,tokenizer=$TOKENIZER,num_concurrent=2"""
GUIDELLM = """python -m guidellm run --backend kind=openai_http,target=$CLIENT_URL,api_key=$CLIENT_KEY \
    --profile kind=concurrent,streams=2 --constraint kind=max_requests,count=6 --tokenizer kind=hf_auto,model=$TOKENIZER \
    --data kind=synthetic_text,prompt_tokens=16,output_tokens=8 --disable-console --output kind=json,path=found.json \
    && python -c "import json; print(json.load(open('found.json'))['benchmarks'][0]['metrics']['request_totals'])" """
VLLM_BENCH = """for api in openai:completions openai-chat:chat/completions; do
    python bench.py --backend ${api%:*} --endpoint /v1/${api#*:} --base-url $CLIENT_URL --model openai \
    --tokenizer $TOKENIZER --dataset-name random --num-prompts 6 --input-len 16 --output-len 8 --max-concurrency 2 \
    | grep -E '(Successful|Failed) requests:' | tr -s ' \\n' ' '; done"""
VLLM_BENCH_FILES = {
    # `vllm bench serve`; the command `vllm` asks for the version of a package of that name, which the build for CPUs is not.
    "bench.py": "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())\n"
}

RETRY_AFTER_S = 3
"""Longer than the wait of clients that are not told one: `ai` of npm waits 2 s."""

LATEST_RETRY_S = 10.0
FORWARDED = ("Authorization", "Content-Type", "x-api-key")


class Program(NamedTuple):
    """`command` for bash, run in a new folder with `files`; its output must contain `expected`."""

    command: str
    expected: str
    files: Mapping[str, str] = {}


PROGRAMS = {
    "npm-codex": Program(CODEX, "made"),
    "npm-opencode": Program(OPENCODE, "made", {"opencode.json": OPENCODE_CONFIG}),
    **{
        f"{group}-{name}": Program(f"python $SCRIPTS/frameworks.py {name}", "C° 12 :emoR")
        for group, names in {
            "frameworks": ("openai_agents", "pydantic_ai", "dspy", "smolagents", "haystack", "inspect_ai"),
            "llama-index": ("llama_index",),
        }.items()
        for name in names
    },
    "litellm-proxy": Program("python $SCRIPTS/proxy.py", "all three APIs"),
    "lm-eval": Program(LM_EVAL, "|acc        |↑  |    1|", LM_EVAL_FILES),
    "guidellm": Program(GUIDELLM, "'successful': 6, 'errored': 0, 'incomplete': 0"),
    "vllm": Program(VLLM_BENCH, 2 * "Successful requests: 6 Failed requests: 0 ", VLLM_BENCH_FILES),
}
"""`make clients` selects by the beginning of the name, which is the group."""

RETRYING = {
    **{f"npm-{name}": Program(f"node $SCRIPTS/retries.js {name}", "olleh") for name in ("openai", "ai")},
    **{
        f"pip-{name}": Program(f"python $SCRIPTS/retries.py {name}", "olleh")
        for name in ("openai", "anthropic", "langchain")
    },
    "pip-litellm": Program("PYTHONPATH=$APART python $SCRIPTS/retries.py litellm", "olleh"),
    **{name: PROGRAMS[name] for name in PROGRAMS if name.startswith(("npm-codex", "frameworks-", "llama-index-"))},
}
"""Clients that wait before they try again, with their default settings."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The variables of the commands, for a stack whose model has the default capabilities."""
    with (
        serving(StandIn()) as endpoint,
        start_stack(tmp_path_factory.mktemp("stack"), "--backend", f"openai:{endpoint.url}") as stack,
    ):
        key = stack.key("enterprise")
        yield {
            **bare_environment(),
            "CLIENT_URL": stack.url,
            "API": f"{stack.url}/v1",
            "CLIENT_KEY": key,
            "OPENAI_API_KEY": key,
            "SCRIPTS": str(SCRIPTS),
            "TOKENIZER": str(make_causal(tmp_path_factory.mktemp("model"))),
            "PATH": f"{SCRIPTS / 'node_modules' / '.bin'}{os.pathsep}{PACKAGES / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "APART": str(PACKAGES / "clients"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }


def prepare(folder: Path, files: Mapping[str, str]) -> None:
    """Make a folder with these files."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


async def run(name: str, program: Program, environment: Mapping[str, str], folder: Path) -> None:
    """Run a program in this folder: it must end without an error, and its output must have the result of the task."""
    (group,) = [each for each in GROUPS if name.startswith(each)]
    prepare(folder, program.files)
    own = {"HOME": str(folder), "FREE_PORT": str(free_port()), "PYTHONPATH": str(PACKAGES / f"clients-{group}")}
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", program.command),
        cwd=folder,
        env={**environment, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, f"{output.decode()[-3000:]}\n{errors.decode()[-3000:]}"
    assert program.expected in output.decode()


@pytest.mark.clients
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROGRAMS)
async def test_program(environment: Mapping[str, str], tmp_path: Path, name: str) -> None:
    """It ends without an error, and its output has the result of the task."""
    await run(name, PROGRAMS[name], environment, tmp_path)


@asynccontextmanager
async def refusing(url: str, code: ErrorCode, posts: list[float]) -> AsyncIterator[str]:
    """The URL of a server before the stack: the first POST gets the gateway's refusal, all others go to the stack.

    `posts` gets the time of each.
    """

    async def handle(request: web.BaseRequest) -> web.Response:
        body = await request.read()
        if request.method == "POST":
            posts.append(time.monotonic())
            if len(posts) == 1:
                refusal = RejectionError(code, retry_after_ms=RETRY_AFTER_S * 1000)
                form = MESSAGE_FORM if request.path.endswith("/messages") else None
                answer = ErrorResponses(lambda: 0.0).answer(refusal, "req_refused", form=form)
                fields = {"Content-Type": answer.content_type} | dict(answer.headers)
                fields |= {
                    name: value for name, _, value in (line.partition(": ") for line in answer.lines.splitlines())
                }
                return web.Response(status=answer.status, body=answer.body, headers=fields)
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        async with http.request(request.method, f"{url}{request.path_qs}", data=body, headers=headers) as response:
            body, kind = await response.read(), response.headers["Content-Type"]
            return web.Response(status=response.status, body=body, headers={"Content-Type": kind})

    server = RawTestServer(handle)
    await server.start_server(access_log=None)
    async with aiohttp.ClientSession() as http, server:
        yield f"http://{server.host}:{server.port}"


@pytest.mark.clients
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", RETRYING)
async def test_waits_before_retry(environment: Mapping[str, str], tmp_path: Path, name: str) -> None:
    """After 429 and 503 it tries again when `Retry-After` has passed, and soon then; its task succeeds."""

    async def waited_s(code: ErrorCode) -> float:
        posts: list[float] = []
        async with refusing(environment["CLIENT_URL"], code, posts) as url:
            await run(name, RETRYING[name], {**environment, "CLIENT_URL": url, "API": f"{url}/v1"}, tmp_path / code)
        return posts[1] - posts[0]

    codes = (ErrorCode.RATE_LIMIT_EXCEEDED, ErrorCode.NO_CAPACITY)
    waits = await asyncio.gather(*map(waited_s, codes), return_exceptions=True)
    in_time = [isinstance(wait, float) and RETRY_AFTER_S - 0.05 <= wait <= LATEST_RETRY_S for wait in waits]
    assert in_time == [True, True], waits
