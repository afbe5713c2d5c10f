"""Request coalescing: which requests share a run, by their parameters and the workers of the pool."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.inference.coalescing import coalescing, coalescing_key, deterministic
from gateway.inference.worker_views import SAMPLING_BACKENDS, greedy_by_default, one_version
from gpu_pool.backends.openai_endpoint.settings import PREFIX
from ledger.catalog.snapshot import Model
from scheduler.payload import Payload, Task
from scheduler.protocol.pool_view import WorkerView

CACHED = Model("tiny", "default", 32, None, 40, 50.0, 0.8, 60, enabled=True)
PAYLOAD = Payload("tiny", "hello", {"max_tokens": 5, "stop": ["a", "b"]})


@pytest.mark.parametrize(
    ("parameters", "greedy", "behind_endpoint"),
    [
        ({}, True, False),
        ({"temperature": 0}, True, True),
        ({"temperature": 0.0, "seed": 7}, True, True),
        ({"temperature": 0.7}, False, False),
        ({"temperature": 0.7, "seed": True}, False, False),
        ({"temperature": 0.7, "seed": 0}, True, False),
        ({"seed": 7}, True, False),
        ({"temperature": "0"}, False, False),
        ({"do_sample": True}, False, False),
        ({"temperature": 0, "do_sample": True}, False, False),
        ({"do_sample": True, "seed": 7}, True, False),
    ],
)
def test_deterministic_requests(parameters: dict[str, Any], greedy: bool, behind_endpoint: bool) -> None:
    """Greedy, or sampled with a seed. An endpoint has its own defaults and seeds: there temperature 0 must be explicit."""
    assert deterministic(parameters, greedy=True) is greedy
    assert deterministic(parameters, greedy=False) is behind_endpoint


@pytest.mark.parametrize(
    "other",
    [
        ("c2", PAYLOAD, "v1"),
        ("c1", PAYLOAD, "v2"),
        ("c1", replace(PAYLOAD, model="big"), "v1"),
        ("c1", replace(PAYLOAD, input="hello "), "v1"),
        ("c1", replace(PAYLOAD, task=Task.EMBED), "v1"),
        ("c1", replace(PAYLOAD, parameters={"max_tokens": 6, "stop": ["a", "b"]}), "v1"),
        ("c1", replace(PAYLOAD, parameters={"max_tokens": 5, "stop": ["b", "a"]}), "v1"),
        ("c1t", replace(PAYLOAD, model="iny"), "v1"),
    ],
)
def test_the_coalescing_key_covers_all_inputs(other: tuple[str, Payload, str]) -> None:
    """Customer, model, version, task, input and each parameter, unambiguously; not the order of parameters or the stream."""
    key = coalescing_key("c1", PAYLOAD, "v1")
    reordered = replace(PAYLOAD, parameters={"stop": ["a", "b"], "max_tokens": 5}, stream="g n")

    assert coalescing_key(*other) != key
    assert coalescing_key("c1", reordered, "v1") == key
    assert len(key) == 32


@pytest.mark.parametrize(
    ("payload", "model", "version", "greedy", "expected"),
    [
        (PAYLOAD, CACHED, "v1", True, (coalescing_key("c", PAYLOAD, "v1"), 60_000, "v1")),
        (PAYLOAD, replace(CACHED, cache_scope="global"), "v1", True, (coalescing_key("", PAYLOAD, "v1"), 60_000, "v1")),
        # Nothing is kept without a known version.
        (PAYLOAD, CACHED, "", True, (coalescing_key("c", PAYLOAD, ""), 0, "")),
        (PAYLOAD, CACHED, "v1", False, ("", 0, "")),
        (replace(PAYLOAD, stream="g n"), CACHED, "v1", True, ("", 0, "")),
        (replace(PAYLOAD, parameters={"temperature": 1}), CACHED, "v1", True, ("", 0, "")),
        (
            replace(PAYLOAD, task=Task.EMBED),
            CACHED,
            "v1",
            False,  # Nothing is sampled for a vector.
            (coalescing_key("c", replace(PAYLOAD, task=Task.EMBED), "v1"), 60_000, "v1"),
        ),
    ],
)
def test_which_requests_are_coalesced(
    payload: Payload, model: Model, version: str, greedy: bool, expected: tuple[str, int, str]
) -> None:
    """Deterministic requests of one customer, or of all customers where the model's cache is global; no streams."""
    assert coalescing("c", payload, model, version, greedy=greedy) == expected


def worker(version: str, *, healthy: bool = True, backend: str = "tiny") -> WorkerView:
    return WorkerView("w", "ready", 0.0, 0, 1.0, 1.0, backend, version, age_ms=1.0, healthy=healthy)


@pytest.mark.parametrize(
    ("backends", "greedy"),
    [
        ([], False),
        (["tiny", "hf:/models/a", "simulated:50"], True),
        (["tiny", f"{PREFIX}http://127.0.0.1:8000/v1#m"], False),
    ],
)
def test_a_pool_with_an_endpoint_is_not_greedy(backends: list[str], greedy: bool) -> None:
    """One endpoint backend is enough, healthy or not; an unknown pool may have one."""
    assert greedy_by_default([worker("v1", healthy=False, backend=each) for each in backends]) is greedy
    assert PREFIX in SAMPLING_BACKENDS


@pytest.mark.parametrize(
    ("workers", "version"),
    [
        ([], ""),
        ([worker("v1"), worker("v1")], "v1"),
        ([worker("v1"), worker("v2")], ""),
        ([worker("v1"), worker("v2", healthy=False)], "v1"),
        ([worker("v1", healthy=False)], ""),
    ],
)
def test_the_model_version_of_a_pool(workers: list[WorkerView], version: str) -> None:
    """The version that all healthy workers run, if it is one."""
    assert one_version(workers) == version
