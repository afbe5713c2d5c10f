"""`GET /metrics` of the engine, with the names and labels of vLLM or SGLang."""

from collections.abc import Iterator

from engine.steps import Scheduler

FORMS = ("vllm", "sglang", "none")


def page(form: str, model: str, scheduler: Scheduler, kv_tokens: int) -> str:
    """The page in Prometheus' text format. `kv_tokens`: the tokens that the cache holds."""
    used = min(1.0, scheduler.used_tokens / kv_tokens)
    lines = _vllm(model, scheduler, used) if form == "vllm" else _sglang(model, scheduler, used)
    return "\n".join(lines) + "\n"


def _vllm(model: str, scheduler: Scheduler, used: float) -> Iterator[str]:
    totals, labels = scheduler.totals, f'engine="0",model_name="{model}"'
    for name, kind, value in (
        ("num_requests_running", "gauge", float(len(scheduler.running))),
        ("num_requests_waiting", "gauge", float(scheduler.waiting)),
        ("kv_cache_usage_perc", "gauge", used),
        ("num_preemptions_total", "counter", 0.0),
        ("prompt_tokens_total", "counter", float(totals.prompt_tokens)),
        ("generation_tokens_total", "counter", float(totals.generated_tokens)),
    ):
        yield f"# TYPE vllm:{name} {kind}"
        yield f"vllm:{name}{{{labels}}} {value}"
    yield "# TYPE vllm:request_success_total counter"
    for reason, count in (("stop", 0), ("length", totals.finished), ("abort", totals.aborted)):
        yield f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="{model}"}} {float(count)}'


def _sglang(model: str, scheduler: Scheduler, used: float) -> Iterator[str]:
    labels = f'engine_type="unified",model_name="{model}",tp_rank="0"'
    for name, kind, value in (
        ("num_running_reqs", "gauge", float(len(scheduler.running))),
        ("num_queue_reqs", "gauge", float(scheduler.waiting)),
        ("token_usage", "gauge", used),
        ("generation_tokens_total", "counter", float(scheduler.totals.generated_tokens)),
    ):
        yield f"# TYPE sglang:{name} {kind}"
        yield f"sglang:{name}{{{labels}}} {value}"
