"""`openai:URL` until it is ready, and its probes: start errors, loading, the model, priorities, TLS."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from certificates import certificates
from configs import endpoint_access
from endpoint_stand_in import MODEL, StandIn, serving
from eventually import eventually
from gpu_pool.backends.openai_endpoint.availability import SILENT, EndpointAvailability
from gpu_pool.backends.openai_endpoint.capabilities import PRIORITY_OWNER
from gpu_pool.backends.openai_endpoint.endpoint import Endpoint, EndpointAway, HandBack
from gpu_pool.backends.openai_endpoint.errors import LOADING, NO_KEY
from gpu_pool.backends.openai_endpoint.faults import FaultCause, cause_of
from gpu_pool.backends.openai_endpoint.probe import NO_MODEL
from gpu_pool.backends.openai_endpoint.settings import read_address
from integration.endpoint_fixtures import Reader, answered, answers, chat, codes, items, loaded, outputs, stand_in
from scheduler.errors import StartError

__all__ = ["stand_in"]


async def test_replaced_model_is_reported(stand_in: StandIn) -> None:
    """A chosen model stays while the server lists it, in any order; another one is loaded by a new process."""
    stand_in.models = ["a", "b"]
    async with loaded(stand_in) as (endpoint, reports):
        replaced: list[str] = []
        endpoint.replaced = lambda: replaced.append(endpoint.model)
        stand_in.models = ["b", "a"]
        assert (await endpoint.probe(), endpoint.model, replaced) == ("", "a", [])
        stand_in.fault = lambda route, body: "404" if body else ""
        stand_in.models = []
        assert codes(await answered(endpoint, items("ab"))) == ["-"]
        assert reports == ["The endpoint has no model yet."]
        stand_in.models = ["b"]
        await eventually(lambda: replaced == ["b"], "another model is found")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loading": True}, LOADING),
        ({"models": ["b", "c"]}, "The endpoint has no model 'stand-in-1'; it has b, c."),
        ({"models": []}, NO_MODEL),
        ({"api_key": "sk-new"}, NO_KEY),
        ({"absent": frozenset({"completions", "chat/completions"})}, "The endpoint lacks a route that it had before."),
    ],
)
async def test_states_of_a_running_server(stand_in: StandIn, changes: dict[str, object], reason: str) -> None:
    """Each is reported by its reason, and the endpoint opens again when the state has ended."""
    async with loaded(stand_in, fragment=f"#{MODEL}") as (endpoint, reports):
        before = {name: getattr(stand_in, name) for name in changes}
        stand_in.fault = lambda route, body: "404" if body and body["model"] not in stand_in.models else ""
        for name, value in changes.items():
            setattr(stand_in, name, value)
        assert codes(await answered(endpoint, items("ab"))) == ["-"]
        assert reports == [reason]
        for name, value in before.items():
            setattr(stand_in, name, value)
        await eventually(lambda: reports[-1] == "open", "the endpoint is open")
        assert outputs(await answered(endpoint, items("ab"))) == ["ba"]


async def test_state_that_changes_is_reported_anew(stand_in: StandIn) -> None:
    """A server that is gone, then loads."""
    async with loaded(stand_in, fragment=f"#{MODEL}") as (endpoint, reports):
        stand_in.api_key = "sk-new"
        await answered(endpoint, items("ab"))
        stand_in.api_key, stand_in.loading = "", True
        await eventually(lambda: reports == [NO_KEY, LOADING], "the second state is reported")


async def test_silence_of_a_server_with_requests_is_reported(stand_in: StandIn) -> None:
    """It is stopped or hangs: requests go on, and are answered when it goes on."""
    async with loaded(stand_in) as (endpoint, reports):
        stand_in.stopped = True
        call = asyncio.create_task(answered(endpoint, items("ab", seconds=60)))
        endpoint.availability.report = lambda wanted, why, brief: reports.append(why or "open")
        await eventually(lambda: endpoint.watch() or reports, "the silence is reported")
        assert (reports, endpoint.availability.closed) == ([SILENT], "")
        assert cause_of(reports[0]) == FaultCause.TIMEOUT
        stand_in.stopped = False
        stand_in.go_on.set()
        assert outputs(await call) == ["ba"]
        endpoint.watch()
        assert reports == [SILENT, "open"]


async def test_reason_for_which_loading_waits(stand_in: StandIn) -> None:
    """It is reported before the model is ready."""
    stand_in.loading = True
    endpoint, reasons = Endpoint(read_address(f"openai:{stand_in.url}"), endpoint_access()), list[str]()
    endpoint.waiting = reasons.append
    loading = asyncio.create_task(endpoint.load())
    await eventually(lambda: reasons, "a reason is reported")
    stand_in.loading = False
    await loading
    await endpoint.close()

    assert (reasons[0], reasons[-1]) == (LOADING, "")


async def test_probe_ends_with_its_request(stand_in: StandIn) -> None:
    """A probe that hangs does not outlast the request."""
    async with loaded(stand_in) as (endpoint, reports):
        stand_in.fault = lambda route, body: "403" if body else "silence"
        began = time.monotonic()

        (found,) = await answered(endpoint, items("ab", seconds=0.6))

        assert isinstance(found, HandBack)
        assert (found.counted, reports) == (False, ["The endpoint answers 403."])
        assert time.monotonic() - began < 0.6


async def test_failing_probe_is_repeated() -> None:
    """An exception in a probe does not leave the endpoint closed."""
    results = iter([ValueError("a bug"), ""])
    reports: list[str] = []

    async def probe() -> str:
        if isinstance(result := next(results), Exception):
            raise result
        return result

    availability = EndpointAvailability(probe)
    availability.report = lambda wanted, why, brief: reports.append(why)
    availability.broken("away")
    await eventually(lambda: reports == ["away", "The endpoint cannot be probed.", ""], "the endpoint is open")
    await availability.close()


@pytest.mark.parametrize(
    ("owner", "accepts"), [(PRIORITY_OWNER, True), (PRIORITY_OWNER, False), ("organization-owner", True)]
)
async def test_priorities_are_sent_to_vllm_that_accepts_them(stand_in: StandIn, owner: str, accepts: bool) -> None:
    """A vLLM is probed with one token. Other servers are neither probed nor sent any."""
    stand_in.owner, stand_in.takes_priority = owner, accepts
    batch = [replace(item, priority=n) for item, n in zip(items("ab", "cd"), (1, 3), strict=True)]

    (results,) = await answers(stand_in, [*batch, replace(chat("gh"), priority=3)])

    assert outputs(results) == ["ba", "dc", "hg"]
    sent = [(str(body["prompt"]), body.get("priority")) for body in stand_in.asked("completions")]
    probe, calls = (sent[:1], sent[1:]) if owner == PRIORITY_OWNER else ([], sent)
    used = owner == PRIORITY_OWNER and accepts
    assert [priority for _, priority in probe] == ([1] if owner == PRIORITY_OWNER else [])
    assert sorted(calls) == [("ab", 1 if used else None), ("cd", 3 if used else None)]
    assert [body.get("priority") for body in stand_in.asked("chat/completions")] == [3 if used else None]


async def test_priority_that_is_rejected_later_costs_no_request(stand_in: StandIn) -> None:
    """A server restarted without priorities gets the call once more without, streams too; other rejections are final."""
    stand_in.owner, stand_in.takes_priority = PRIORITY_OWNER, True
    reader = Reader()
    texts = [replace(item, priority=1, parameters={"seed": n}) for n, item in enumerate(items("ab", "cd"))]
    async with loaded(stand_in) as (endpoint, _):
        before = len(stand_in.calls)
        assert codes(await answered(endpoint, [replace(items("unfit")[0], priority=3)])) == ["invalid_request"]
        assert len(stand_in.calls) - before == 1
        stand_in.takes_priority = False
        first = await answered(endpoint, [*texts, replace(chat("gh", reader), priority=1)])
        before = len(stand_in.calls)
        second = await answered(endpoint, texts[:1])

    assert (outputs(first), outputs(second), reader.text) == (["ba", "dc", "hg"], ["ba"], "hg")
    assert ["priority" in body for _, body in stand_in.calls[before:]] == [False]


@pytest.mark.parametrize(
    ("changes", "fragment", "fault"),
    [
        ({"models": ["a", "b"]}, "#c", "has no model 'c'; it has a, b"),
        ({"absent": {"completions", "chat/completions", "embeddings"}}, "", "has neither /completions nor"),
        ({"api_key": "right"}, "", "TIERLANE_ENDPOINT_API_KEY"),
    ],
)
async def test_start_error(stand_in: StandIn, changes: dict[str, object], fragment: str, fault: str) -> None:
    """Only another setting helps."""
    vars(stand_in).update(changes)
    with pytest.raises(StartError, match=fault):
        async with loaded(stand_in, fragment=fragment):
            pass


@pytest.mark.parametrize(
    ("changes", "fragment", "model"),
    [
        ({"models": ["a", "b"]}, "", "a"),
        ({"models": ["a", "b"]}, "#b", "b"),
        ({"models": []}, "#b", "b"),
        ({"absent": {"models"}}, "", "default"),  # /health is enough.
        ({"fault": lambda route, body: "" if body else "500"}, "#named", "named"),
        ({"api_key": "right"}, "", MODEL),
    ],
)
async def test_model_is_the_named_or_the_first(
    stand_in: StandIn, changes: dict[str, object], fragment: str, model: str
) -> None:
    """Servers that list no model, or cannot list, still serve."""
    vars(stand_in).update(changes)
    async with loaded(stand_in, endpoint_access("right"), fragment, within_s=5.0) as (endpoint, _):
        assert endpoint.model == model
        assert outputs(await answered(endpoint, items("ab"))) == ["ba"]


async def test_loading_server_is_waited_for(stand_in: StandIn) -> None:
    """Up to a limit, after which the supervisor retries."""
    stand_in.fault = lambda route, body: "503" if stand_in.model_list_calls < 3 else ""
    assert outputs((await answers(stand_in, items("ab")))[0]) == ["ba"]

    stand_in.fault = lambda route, body: "503"
    with pytest.raises(EndpointAway, match="503"):
        async with loaded(stand_in, within_s=0.1):
            pass


async def test_tls_verifies_both_sides(tmp_path: Path) -> None:
    """With an own CA and a client certificate; without either the key is never sent; unusable files are a StartError."""
    made = certificates(tmp_path)
    files = {"ca_file": str(made.authority.cert), "cert_file": str(made.client.cert), "key_file": str(made.client.key)}
    with serving(StandIn(api_key="sk-1"), made.demanding()) as server:
        async with loaded(server, endpoint_access("sk-1", **files)) as (endpoint, _):
            assert outputs(await answered(endpoint, items("hello"))) == ["olleh"]
        calls = server.model_list_calls
        for access, fault in (
            (endpoint_access("sk-1", files["ca_file"]), "The endpoint"),
            (endpoint_access("sk-1"), "certificate is not accepted"),
        ):
            with pytest.raises(EndpointAway, match=fault):
                async with loaded(server, access, within_s=0.0):
                    pass
        assert server.model_list_calls == calls

    with serving(StandIn()) as plain:
        plain.scheme = "https"
        with pytest.raises(EndpointAway, match="does the URL need http://"):
            async with loaded(plain, within_s=0.0):
                pass

    for change, setting in (
        ({"ca_file": "absent.pem"}, "CA_FILE"),
        ({"cert_file": "absent.pem"}, "CERT_FILE"),
        ({"key_file": ""}, "CERT_FILE"),
    ):
        with pytest.raises(StartError, match=f"^TIERLANE_ENDPOINT_{setting}: "):
            Endpoint(read_address("openai:https://127.0.0.1:1/v1"), endpoint_access(**files | change))
