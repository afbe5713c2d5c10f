"""Which requests may share, and what names those that do: tables without Redis."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.inference.submission import (
    SAMPLING_BACKENDS,
    deterministic,
    greedy_by_default,
    let_share,
    one_version,
    same,
)
from gpu_pool.config import PREFIX
from ledger.catalog.snapshot import Model
from ratelimit.limits import NO_LIMITS
from scheduler.payload import Payload, Task
from scheduler.protocol.admission import Submission
from scheduler.protocol.pool_view import WorkerView

CACHED = Model("tiny", "default", 32, None, 40, 3000, 50.0, 0.8, 60, enabled=True)


@pytest.mark.parametrize(
    ("parameters", "shares"),
    [
        ({}, True),
        ({"temperature": None}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "max_tokens": 5, "stop": ["x"], "top_p": 0.5}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.7, "seed": None}, False),
        ({"temperature": 0.7, "seed": "1"}, False),
        ({"temperature": 0.7, "seed": True}, False),
        ({"temperature": 0.7, "seed": 0}, True),
        ({"temperature": False}, False),  # No number: the model will say so.
        ({"temperature": "0"}, False),
        ({"do_sample": True}, False),
        ({"do_sample": True, "seed": 7}, True),
        ({"do_sample": False}, True),
    ],
)
def test_what_leaves_nothing_to_chance(parameters: dict[str, Any], *, shares: bool) -> None:
    """Greedy, or drawn with a seed."""
    assert deterministic(parameters, greedy=True) == shares


@pytest.mark.parametrize(
    ("parameters", "shares"),
    [
        ({}, False),
        ({"temperature": None}, False),
        ({"max_tokens": 5}, False),
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "seed": 7}, True),
        ({"temperature": False}, False),
        ({"temperature": 0, "do_sample": True}, False),
        ({"temperature": 0.7, "seed": 7}, False),
        ({"seed": 7}, False),
    ],
)
def test_what_leaves_nothing_to_chance_behind_an_endpoint(parameters: dict[str, Any], *, shares: bool) -> None:
    """Its default is its own, and often samples; of a seed it promises nothing. Temperature 0 must be said."""
    assert deterministic(parameters, greedy=False) == shares


ASKED = Payload("tiny", "hello", {"max_tokens": 5, "stop": ["a", "b"]})


@pytest.mark.parametrize(
    "other",
    [
        ("c2", ASKED, "v1"),
        ("", ASKED, "v1"),
        ("c1", ASKED, "v2"),
        ("c1", ASKED, ""),
        ("c1", replace(ASKED, model="big"), "v1"),
        ("c1", replace(ASKED, input="hello "), "v1"),
        ("c1", replace(ASKED, task=Task.EMBED), "v1"),
        ("c1", replace(ASKED, parameters={"max_tokens": 6, "stop": ["a", "b"]}), "v1"),
        ("c1", replace(ASKED, parameters={"max_tokens": 5, "stop": ["b", "a"]}), "v1"),
        ("c1", replace(ASKED, parameters={"max_tokens": 5}), "v1"),
        ("c1t", replace(ASKED, model="iny"), "v1"),
    ],
)
def test_whatever_the_output_depends_on_is_in_the_name(other: tuple[str, Payload, str]) -> None:
    """Customer, model, version, task, input and each parameter; no two parts run into each other."""
    assert same(*other) != same("c1", ASKED, "v1")


def test_the_order_of_parameters_is_not_in_the_name() -> None:
    """Nor what only the door knows, such as whether the output is streamed."""
    turned = replace(ASKED, parameters={"stop": ["a", "b"], "max_tokens": 5}, stream="g n")

    assert same("c1", turned, "v1") == same("c1", ASKED, "v1")
    assert len(same("c1", ASKED, "v1")) == 32


def submission() -> Submission:
    return Submission(
        id="req_1",
        tier="free",
        customer_id="c1",
        api_key_id="k",
        nonce="n",
        model="tiny",
        input_bytes=5,
        total_ms=1,
        queue_ms=1,
        limits=NO_LIMITS,
        body=b"",
    )


def told(
    payload: Payload = ASKED, model: Model = CACHED, version: str = "v1", *, greedy: bool = True
) -> tuple[str, int, str]:
    asked = submission()
    let_share(asked, payload, model, version, greedy=greedy)
    return asked.same, asked.keep_answer_ms, asked.model_version


def test_who_shares_with_whom() -> None:
    """Each customer's requests with one another; all customers' where the model says so."""
    assert told() == (same("c1", ASKED, "v1"), 60_000, "v1")
    assert told(model=replace(CACHED, cache_scope="global")) == (same("", ASKED, "v1"), 60_000, "v1")


def test_nothing_is_kept_while_the_version_is_not_known() -> None:
    """In a rollout requests that are under way share all the same."""
    assert told(version="") == (same("c1", ASKED, ""), 0, "")


@pytest.mark.parametrize("payload", [replace(ASKED, stream="g n"), replace(ASKED, parameters={"temperature": 1})])
def test_who_shares_with_nobody(payload: Payload) -> None:
    """Who wants its output by the piece, or another one each time."""
    assert told(payload) == ("", 0, "")


def test_a_vector_is_the_same_each_time() -> None:
    """There is nothing to sample, whatever serves it."""
    assert told(replace(ASKED, task=Task.EMBED), greedy=False)[0] != ""
    assert told(ASKED, greedy=False) == ("", 0, "")


def worker(version: str, *, healthy: bool = True, backend: str = "tiny") -> WorkerView:
    return WorkerView("w", "ready", 0.0, 0, 1.0, healthy, 1.0, 1.0, backend, version)


@pytest.mark.parametrize(
    ("backends", "greedy"),
    [
        ([], False),
        (["tiny", "hf:/models/a", "simulated:50"], True),
        (["openai:http://127.0.0.1:8000/v1"], False),
        (["tiny", "openai:http://127.0.0.1:8000/v1#m"], False),
    ],
)
def test_whether_a_pool_is_greedy(backends: list[str], *, greedy: bool) -> None:
    """One endpoint is enough, healthy or not; a pool of which nothing is known may be one."""
    assert greedy_by_default([worker("v1", healthy=False, backend=each) for each in backends]) is greedy


def test_the_prefix_is_that_of_the_backend() -> None:
    """What a worker with an endpoint says in its heartbeat."""
    assert PREFIX in SAMPLING_BACKENDS


@pytest.mark.parametrize(
    ("workers", "version"),
    [
        ([], ""),
        ([worker("v1")], "v1"),
        ([worker("v1"), worker("v1")], "v1"),
        ([worker("v1"), worker("v2")], ""),
        ([worker("v1"), worker("v2", healthy=False)], "v1"),
        ([worker("v1", healthy=False)], ""),
    ],
)
def test_the_version_of_a_pool(workers: list[WorkerView], version: str) -> None:
    """What all healthy workers run, where that is one."""
    assert one_version(workers) == version
