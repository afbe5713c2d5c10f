"""The limits of a request follow the kind of its pool's backend, and settings override them."""

import math
from typing import Any

import msgspec
import pytest

from configs import gateway_config
from gateway.api.chat import read_chat
from gateway.api.format import check_size
from gateway.api.inference import read_inference
from gateway.direct.workers import call_timeout_s
from gateway.limits.capacity import LiveLimits
from ledger.catalog.snapshot import Model, Snapshot, Tier
from ratelimit.request_limits import FUNCTION, LANGUAGE_MODEL, RequestLimits, limits_of_backend, limits_of_workers
from scheduler.errors import ErrorCode, RequestError
from scheduler.protocol.pool_view import Observation, WorkerView
from tierlane.check.model_times import limits_line
from tierlane.settings.model import Settings, SettingsError, load_settings

ENDPOINT = "openai:http://127.0.0.1:8000/v1"
MODEL = Model("m", "default", 32, None, 40, 100.0, 0.8, 0, enabled=True)


def worker_view(backend: str, slots: int = 0, *, healthy: bool = True) -> WorkerView:
    return WorkerView("w", "ready", 0.5, 1, 100.0, 50.0, backend, "v1", age_ms=10.0, healthy=healthy, slots=slots)


@pytest.mark.parametrize(
    ("workers", "before", "expected"),
    [
        ([], LANGUAGE_MODEL, LANGUAGE_MODEL),
        ([], FUNCTION, FUNCTION),
        ([("simulated", 0, True)], LANGUAGE_MODEL, FUNCTION),
        ([("tiny", 8, True)], FUNCTION, LANGUAGE_MODEL),
        ([("tiny", 0, False)], LANGUAGE_MODEL, LANGUAGE_MODEL),
        ([("shout:shout", 0, False)], FUNCTION, FUNCTION),
        ([(ENDPOINT, 0, False)], FUNCTION, LANGUAGE_MODEL),
        ([("simulated", 0, True), (ENDPOINT, 0, True)], FUNCTION, LANGUAGE_MODEL),
    ],
)
def test_limits_follow_the_workers_of_a_pool(
    workers: list[tuple[str, int, bool]], before: RequestLimits, expected: RequestLimits
) -> None:
    """Slots or an endpoint: a language model; else a healthy worker: a function; else what held before."""
    views = [worker_view(backend=backend, slots=slots, healthy=healthy) for backend, slots, healthy in workers]

    assert limits_of_workers(views, before) == expected


@pytest.mark.parametrize(
    ("backend", "total_s"),
    [("simulated:50", 4), ("shout:shout", 4), ("tiny", 600), ("hf:models/x", 600), (ENDPOINT, 600)],
)
def test_limits_before_a_worker_is_known_follow_the_name_of_the_backend(backend: str, total_s: int) -> None:
    """For `tierlane check`, and for the rule between two settings."""
    assert limits_of_backend(backend).total_ms == 1000 * total_s


@pytest.mark.parametrize(
    ("contexts", "before", "context", "body_bytes", "text_bytes"),
    [
        ([0], 0, 0, 8 << 20, 8 << 20),
        ([0], 4096, 4096, 8 << 20, 4096 * 32),
        ([4096], 0, 4096, 8 << 20, 4096 * 32),
        ([8192, 0, 4096], 0, 4096, 8 << 20, 4096 * 32),
        ([1 << 20], 4096, 1 << 20, 32 << 20, 32 << 20),
    ],
)
def test_the_context_length_bounds_the_text_of_a_request(
    contexts: list[int], before: int, context: int, body_bytes: int, text_bytes: int
) -> None:
    """The shortest of those that workers report; without a report, the last one. A long context raises the default."""
    views = [msgspec.structs.replace(worker_view(ENDPOINT), context_tokens=each) for each in contexts]

    limits = limits_of_workers(views, LANGUAGE_MODEL.with_context(before))

    assert (limits.context_tokens, limits.body_bytes, limits.text_bytes) == (context, body_bytes, text_bytes)
    assert limits.override(None, 1 << 20).text_bytes == min(1 << 20, text_bytes)


def test_a_text_that_cannot_fit_into_the_context_is_rejected_by_name() -> None:
    """With the context's length; images do not count, and a text within the bound is the server's to judge."""
    limits = LANGUAGE_MODEL.with_context(100)

    def check(content: Any) -> None:
        raw = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": content}]})
        check_size(read_chat(raw, 1 << 20), len(raw), limits)

    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 40_000}"}}
    check("x" * 3000)
    check([{"type": "text", "text": "x"}, image])
    with pytest.raises(RequestError, match="maximum context length is 100 tokens") as caught:
        check("x" * 3201)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_settings_override_the_limits_of_the_backend() -> None:
    """The part of a body that may be text stays that of the backend; a wait is not longer than the total."""
    assert FUNCTION.override(None, None) == FUNCTION
    assert FUNCTION.override(1000, 1 << 20) == RequestLimits(1000, 1000, 1 << 20, 1 << 19)
    assert LANGUAGE_MODEL.override(60_000, 1 << 20) == RequestLimits(60_000, 30_000, 1 << 20, 1 << 20)


def test_a_body_fits_into_the_budget_of_its_key() -> None:
    """A gateway whose budget is below the default size accepts bodies of that budget, as it started before."""
    config = gateway_config(key_body_memory_bytes=1 << 20)

    assert config.longest.body_bytes == config.longest.input_bytes == 1 << 20


@pytest.mark.parametrize(
    ("backend", "flags", "fault"),
    [
        ("shout:shout", {"gpu_timeout_ms": "5000"}, "must be less than TIERLANE_TOTAL_REQUEST_MS (4000)"),
        (ENDPOINT, {"gpu_timeout_ms": "590000"}, ""),
        (ENDPOINT, {"gpu_timeout_ms": "590000", "total_request_ms": "5000"}, "TIERLANE_TOTAL_REQUEST_MS (5000)"),
        (ENDPOINT, {"key_body_memory_bytes": "1048576"}, ""),
        (ENDPOINT, {"key_body_memory_bytes": "1048576", "max_body_bytes": "2097152"}, "TIERLANE_MAX_BODY_BYTES"),
    ],
)
def test_a_rule_between_settings_takes_the_limits_of_the_backend(
    backend: str, flags: dict[str, str], fault: str
) -> None:
    """A batch must end before its request also where only one of both times is set."""
    if not fault:
        load_settings({"backend": backend, **flags})
        return
    with pytest.raises(SettingsError) as raised:
        load_settings({"backend": backend, **flags})
    assert fault in str(raised.value)


@pytest.mark.parametrize(
    ("max_queue_ms", "backend", "shed_wait_ms"),
    [(None, "simulated", 1000), (None, ENDPOINT, 15_000), (8000, ENDPOINT, 1000)],
)
def test_waits_that_shed_a_tier_are_longer_before_a_language_model(
    max_queue_ms: int | None, backend: str, shed_wait_ms: int
) -> None:
    """In proportion to the longest wait, unless the tier states that one as well."""
    free = Tier("free", 1, 0.1, (10.0, 20.0, 8, None), 500, max_queue_ms, None, 1000)
    snapshot, limits = Snapshot(1, (free,), {}, {}, {"m": MODEL}, ()), LiveLimits("default")
    limits.observe(Observation(0, {}, [worker_view(backend)], [], 0, 0, 0, 0), snapshot, 0.0)

    assert [each.shed_wait_ms for each in limits.current(snapshot).tiers] == [shed_wait_ms]


@pytest.mark.parametrize(("backend", "seconds"), [("simulated", 1.0), (ENDPOINT, math.inf)])
def test_a_direct_call_to_a_language_model_ends_at_its_deadline(backend: str, seconds: float) -> None:
    """The call of a function ends after eight runs of its p95, which says nothing about the next answer of a model."""
    assert call_timeout_s(worker_view(backend)) == seconds


@pytest.mark.parametrize(
    ("backend", "line"),
    [
        ("simulated", "wait 2 s (max_queue_ms), run 3 s, total 4 s, body 256 KiB, text 128 KiB"),
        ("tiny", "wait 30 s (max_queue_ms), silence 3 s, total 600 s, body 8 MiB"),
        (ENDPOINT, "wait 30 s (max_queue_ms), first token 120 s, silence 60 s, total 600 s, body 8 MiB"),
    ],
)
def test_limits_are_printed_in_one_line(backend: str, line: str) -> None:
    """By `tierlane up` and `tierlane check`."""
    assert limits_line(backend, limits_of_backend(backend), Settings()) == line


def chat(text: str) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": text}]})


@pytest.mark.parametrize(
    ("raw", "read", "what"),
    [
        (chat("x" * 10_000), read_chat, "The body of a request to this model"),
        (chat("x" * 1100), read_chat, "The text of a request to this model"),
        (msgspec.json.encode({"input": "x" * 1100}), read_inference, "The text of a request to this model"),
        (chat("x" * 900), read_chat, ""),
        (msgspec.json.encode({"input": "x" * 1000}), read_inference, ""),
    ],
)
def test_a_body_is_checked_by_the_limits_of_its_pool(raw: bytes, read: object, what: str) -> None:
    """It was read with the limits of the largest pool; the error names the setting."""
    limits = FUNCTION._replace(body_bytes=2000, input_bytes=1000)
    body = read(raw, LANGUAGE_MODEL.input_bytes)  # type: ignore[operator]
    if not what:
        check_size(body, len(raw), limits)
        return
    with pytest.raises(RequestError, match=f"{what} must not be larger than .*TIERLANE_MAX_BODY_BYTES") as raised:
        check_size(body, len(raw), limits)
    assert raised.value.code is ErrorCode.REQUEST_TOO_LARGE
