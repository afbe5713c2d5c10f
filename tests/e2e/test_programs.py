"""Real programs before a running stack, each with a task of its own: `make clients`.

Only address, key and model are set, and what docs/clients.md names. The stand-in for the engine answers as the task asks.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from endpoint_stand_in import StandIn, serving
from hf_models import make_causal
from stack import free_port, start_stack

SCRIPTS = Path(__file__).resolve().parents[1] / "clients"
PACKAGES = Path(sys.prefix)
"""Has the folders `clients-GROUP` with the packages of each group; those of the group `npm` are beside the scripts."""

GROUPS = ("npm", "frameworks", "llama-index", "litellm-proxy", "lm-eval", "guidellm")

CODEX = """codex exec --skip-git-repo-check -s danger-full-access -c model=openai -c model_provider=tierlane \
    -c "model_providers.tierlane={name='Tierlane', base_url='$API', env_key='CLIENT_KEY'}" \
    'CALL<<exec_command {"cmd": "echo made > made.txt"}>>' < /dev/null && cat made.txt"""
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


class Program(NamedTuple):
    """`command` for bash, run in a new folder with `files`; its output must contain `expected`."""

    command: str
    expected: str
    files: Mapping[str, str] = {}


PROGRAMS = {
    "npm-codex": Program(CODEX, "made"),
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
}
"""`make clients` selects by the beginning of the name, which is the group."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The variables of the commands, for a stack whose model has the default capabilities."""
    with (
        serving(StandIn()) as endpoint,
        start_stack(tmp_path_factory.mktemp("stack"), "--backend", f"openai:{endpoint.url}") as stack,
    ):
        key = stack.key("enterprise")
        yield {
            **{name: value for name, value in os.environ.items() if not name.startswith("TIERLANE_")},
            "CLIENT_URL": stack.url,
            "API": f"{stack.url}/v1",
            "CLIENT_KEY": key,
            "OPENAI_API_KEY": key,
            "SCRIPTS": str(SCRIPTS),
            "TOKENIZER": str(make_causal(tmp_path_factory.mktemp("model"))),
            "PATH": f"{SCRIPTS / 'node_modules' / '.bin'}{os.pathsep}{PACKAGES / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
        }


@pytest.mark.clients
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROGRAMS)
async def test_program(environment: Mapping[str, str], tmp_path: Path, name: str) -> None:
    """It ends without an error, and its output has the result of the task."""
    program = PROGRAMS[name]
    (group,) = [each for each in GROUPS if name.startswith(each)]
    for file, text in program.files.items():
        (tmp_path / file).write_text(text)
    own = {"HOME": str(tmp_path), "FREE_PORT": str(free_port()), "PYTHONPATH": str(PACKAGES / f"clients-{group}")}
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", program.command),
        cwd=tmp_path,
        env={**environment, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, f"{output.decode()[-3000:]}\n{errors.decode()[-3000:]}"
    assert program.expected in output.decode()
