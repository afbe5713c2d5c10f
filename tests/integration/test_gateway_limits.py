"""Each limit of a customer as a client sees it, against a real Redis: status, code, wait, headers, and `GET /v1/me`."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from eventually import eventually
from gateway.api.account import AccountHome
from gateway.inference.pipeline import InferencePipeline
from gateway.openapi.endpoints import ENDPOINTS
from integration.gateway_fixtures import Stack, accepted, lower, stack, tier
from ledger.audit.queries import Usage
from ledger.catalog.api_key import mint
from scheduler.errors import ErrorCode, RedisUnavailable
from scheduler.protocol.batches import Outcome
from scheduler.protocol.pool_view import CustomerGpuTime, GatewayStats
from scheduler.states import Admission

__all__ = ["stack"]

DAY_MS = 86_400_000
PROBLEM = "application/problem+json"
LIMITS: dict[str, Any] = {"requests_per_second": 0.001, "burst": 40.0}
DAY = (("1day", 100),)


def error_of(response: tuple[int, dict[str, Any], dict[str, str]]) -> tuple[int, str]:
    status, document, _ = response
    return status, document["error"]["code"]


@pytest.mark.parametrize(
    ("key", "policy"),
    [
        ({"requests_per_second": 2.0, "burst": 8.0}, '"requests";q=8;w=4, '),
        ({"key_rate": 2.0, "key_burst": 8.0}, '"requests";q=8;w=4, '),
    ],
)
async def test_request_rate(stack: Stack, key: dict[str, float], policy: str) -> None:
    """Over the rate of the account or of the key a request gets 429, the wait in both units, and the limit's headers."""
    stack.catalog.set(key=key)
    responses = [await stack.infer() for _ in range(5)]
    rejected = [response for response in responses if response[0] != 200]

    assert error_of(rejected[-1]) == (429, "rate_limit_exceeded")
    _, document, headers = rejected[-1]
    wait_ms = document["error"]["retry_after_ms"]
    assert 0 < wait_ms <= 625
    assert (headers["retry-after-ms"], headers["retry-after"]) == (str(wait_ms), "1")
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["ratelimit-policy"].startswith(policy)


async def test_a_used_up_quota(stack: Stack) -> None:
    """Over a quota a request gets 429 without a retry and waits for the end of the window; headers count down before."""
    stack.catalog.set(key={"quotas": (("1day", 2), ("1month", 1000))})
    first, second, third = [await stack.infer() for _ in range(3)]

    assert '"day";q=2;w=86400, "month";q=1000;w=2678400' in first[2]["ratelimit-policy"]
    assert ['"day";r=1;t=' in first[2]["ratelimit"], '"day";r=0;t=' in second[2]["ratelimit"]] == [True, True]
    assert error_of(third) == (429, "quota_exceeded")
    document, headers = third[1], third[2]
    assert headers["x-should-retry"] == "false"
    until_midnight_s = int(headers["ratelimit"].partition('"day";r=0;t=')[2].partition(",")[0])
    assert until_midnight_s * 1000 - 1000 <= document["error"]["retry_after_ms"] <= DAY_MS + 15_000
    assert '"month";r=998;' in headers["ratelimit"]


@pytest.mark.parametrize(
    ("key", "header", "limit"),
    [
        ({"tokens_per_minute": 4000}, "x-ratelimit-limit-tokens", "1000"),
        ({"requests_per_second": 0.001, "burst": 40.0}, "x-ratelimit-limit-requests", "10"),
    ],
)
async def test_requests_rejected_by_a_reduced_limit_get_503(
    stack: Stack, key: dict[str, Any], header: str, limit: str
) -> None:
    """A request that the full limit would admit gets 503 `reduced_capacity`, and headers show the limit in force."""
    stack.catalog.set(key=key)
    stack.gateway.limits.factor = lambda tier: 0.25
    body = {"input": "a", "parameters": {"max_tokens": 900}}
    *_, rejected = [await stack.infer(body) for _ in range(4)]

    assert error_of(rejected) == (503, "reduced_capacity")
    assert (rejected[2][header], "x-should-retry" in rejected[2]) == (limit, False)


SAID = [{"role": "user", "content": "a"}]
TENSOR = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/inference", {"input": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": SAID}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 5}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 5, "stream": True}),
        ("/v1/responses", {"input": "a", "store": False}),
        ("/v2/models/tiny/infer", {"inputs": [TENSOR]}),
    ],
)
async def test_what_waiting_does_not_mend_is_not_to_be_retried(stack: Stack, path: str, body: dict[str, Any]) -> None:
    """Each API has the header: some clients repeat every error, or sleep until the end of a quota."""

    async def sent(change: dict[str, Any], key: dict[str, str] | None = None) -> tuple[int, str | None]:
        model = change.pop("model", "tiny")
        url = f"{stack.url}{path.replace('tiny', model)}"
        document = body | change if "models" in path else {"model": model} | body | change
        async with stack.http.post(url, json=document, headers=stack.key() if key is None else key) as response:
            return response.status, response.headers.get("x-should-retry")

    assert await sent({"model": "nowhere"}) == (404, "false")
    assert await sent({"max_tokens": "x", "inputs": 1, "dimensions": "x"}) == (400, "false")
    assert await sent({}, {"Authorization": "Bearer nobody"}) == (401, "false")
    stack.catalog.set(key={"suspended": True})
    assert await sent({}) == (403, "false")
    stack.catalog.set(key={"quotas": (("1day", 1),)})
    await stack.infer()
    assert await sent({}) == (429, "false")
    stack.catalog.set(key={"requests_per_second": 0.5, "burst": 1.0})
    await stack.infer()
    assert await sent({}) == (429, None)


async def test_problem_details(stack: Stack) -> None:
    """With Accept `application/problem+json` errors of limits, of bodies and of the router are RFC 9457 documents."""
    stack.catalog.set(key={"quotas": (("1day", 1),)})
    await stack.infer()
    status, document, headers = await stack.infer(Accept=PROBLEM)

    assert (status, headers["content-type"], document["code"]) == (429, PROBLEM, "quota_exceeded")
    assert document["type"] == "https://iana.org/assignments/http-problem-types#quota-exceeded"
    assert (document["status"], document["violated-policies"]) == (429, ["day"])
    assert (document["request_id"], document["retry_after_ms"] > 0) == (headers["x-request-id"], True)
    for method, path, key, status in (
        ("POST", "/v1/inference", stack.key(), 400),
        ("POST", "/v1/inference", {}, 401),
        ("GET", "/internal/health", {}, 401),
        ("GET", "/nowhere", {}, 404),
        ("GET", "/v1/inference", {}, 405),
    ):
        sent = {"Accept": f"application/json, {PROBLEM}", "Content-Type": "application/json", **key}
        async with stack.http.request(method, stack.url + path, data=b"{}", headers=sent) as response:
            document = await response.json(content_type=PROBLEM)
        assert (response.status, document["status"], document["type"]) == (status, status, "about:blank")
    assert set((await stack.infer(b"{}", Accept="*/*"))[1]) == {"error"}


async def test_all_responses_to_a_key_have_limit_headers(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that were not admitted, that failed, and internal errors carry all limits and the request id."""
    stack.catalog.set(key={"tokens_per_minute": 4000, "quotas": (("1day", 100),)})
    stack.worker.answerer = lambda member: Outcome(member.id, "worker_lost", 1.0, 0, "v1", "")
    responses = [await stack.infer(b"{}"), await stack.infer({"input": "a"}), await stack.infer(b"{}")]
    monkeypatch.setattr(InferencePipeline, "build_pending", lambda *_, **__: 1 / 0)
    responses.append(await stack.infer())

    assert [response[0] for response in responses] == [400, 503, 400, 500]
    for _, document, headers in responses:
        assert headers["ratelimit-policy"].count(";q=") == 4
        assert {"x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"} <= set(headers)
        assert headers["x-request-id"] == document["error"]["request_id"]
    # What is left of a quota is not known before the first admission.
    assert ['"day";r=' in headers["ratelimit"] for _, _, headers in responses] == [False, True, True, True]


async def test_a_tier_in_shadow_mode_counts_and_admits(stack: Stack) -> None:
    """No request of the tier is rejected; those that its limits would reject are counted."""
    stack.catalog.set(tiers=(tier("free", 3, 0.1, shadow=True),), key={"requests_per_second": 0.001, "burst": 1.0})
    counted: list[str] = []
    stack.gateway._demand_meter.shadowed = counted.append

    assert [(await stack.infer())[0] for _ in range(3)] == [200, 200, 200]
    await eventually(lambda: len(counted) >= 2, "requests over the limit are counted")


async def test_rejections_are_recorded(stack: Stack) -> None:
    """The rejection log gets each request that a limit or missing capacity rejected, and no invalid request."""
    recorded: list[tuple[Any, ...]] = []
    inference = stack.gateway.inference
    inference._parts = replace(inference._parts, record_rejection=lambda *rejection: recorded.append(rejection))
    stack.catalog.set(key={"quotas": (("1day", 1),)})
    await stack.infer()
    await stack.infer(b"{}")
    _, _, headers = await stack.infer()
    stack.gateway.limits.no_gpu = lambda now: True
    _, _, later = await stack.infer()

    assert [
        (sent.id, sent.endpoint, identity.customer_id, error.code, verdict and verdict.outcome, factor)
        for sent, identity, error, verdict, factor in recorded
    ] == [
        (headers["x-request-id"], "/v1/inference", "customer-free", ErrorCode.QUOTA_EXCEEDED, Admission.QUOTA, 1.0),
        (later["x-request-id"], "/v1/inference", "customer-free", ErrorCode.NO_CAPACITY, None, 1.0),
    ]


async def test_rejected_callers_are_recorded(stack: Stack) -> None:
    """A revoked key and a suspended customer count by tier and code, and are kept with their ids; an unknown key does not."""
    recorded: list[tuple[str, str, str, ErrorCode]] = []
    refused: list[tuple[str, ErrorCode]] = []
    gateway, returned = stack.gateway, list[str]()
    gateway.rejection_log.note = lambda sent, identity, error, *_: recorded.append(  # type: ignore[method-assign]
        (sent.id, sent.endpoint, identity.customer_id, error.code)
    )
    gateway._demand_meter.outcomes.refused = lambda tier, code: refused.append((tier, code))  # type: ignore[method-assign]
    await stack.infer()  # The connection knows its headers from here on.
    for key in ({"revoked": True}, {"suspended": True}):
        stack.catalog.set(key=key)
        returned += [(await stack.infer(**more))[2]["x-request-id"] for more in ({}, {"Prefer": "wait=1"})]
    await stack.infer(Authorization=f"Bearer {mint().text}")

    codes = [ErrorCode.INVALID_API_KEY] * 2 + [ErrorCode.ACCOUNT_SUSPENDED] * 2
    assert recorded == [
        (name, "/v1/inference", "customer-free", code) for name, code in zip(returned, codes, strict=True)
    ]
    assert refused == [("free", code) for code in codes]


async def test_each_input_of_a_rejected_list_counts(stack: Stack) -> None:
    """As arrival, as demand and as rejection: with and without a call of admission."""
    counted: dict[str, int] = dict.fromkeys(("arrived", "passed", "shed"), 0)

    def counter(name: str) -> Callable[..., None]:
        def count(*_: object) -> None:
            counted[name] += 1

        return count

    for name in counted:
        setattr(stack.gateway._demand_meter, name, counter(name))
    stack.catalog.set(tiers=(tier("free", 3, 0.1, max_queue_depth=1),))
    url, body = f"{stack.url}/v1/completions", {"model": "tiny", "prompt": ["a", "b", "c"]}
    returned: list[str] = []
    for no_gpu in (False, True):
        stack.gateway.limits.no_gpu = lambda now, no_gpu=no_gpu: no_gpu  # type: ignore[misc]
        async with stack.http.post(url, json=body, headers=stack.key()) as response:
            returned.append((await response.json())["error"]["code"])

    assert returned == ["queue_full", "no_capacity"]
    assert counted == dict.fromkeys(counted, 6)


async def test_a_quota_of_tokens_and_of_money(stack: Stack) -> None:
    """The estimate has to fit; afterwards the used tokens count. Headers and `GET /v1/me` have the units."""
    stack.catalog.set(key={"quotas": (("1day:tokens", 25), ("1month:usd", 10**9))})
    first = await stack.infer()
    _, document, _ = await get(stack)
    second, third = [await stack.infer() for _ in range(2)]

    assert [error_of(third), first[0], second[0]] == [(429, "quota_exceeded"), 200, 200]
    assert "25 tokens per day" in third[1]["error"]["message"]
    assert "month" not in third[1]["error"]["message"]
    assert third[2]["x-should-retry"] == "false"
    assert '"day-tokens";r=7;t=' in first[2]["ratelimit"]
    left = [(quota["quota"], quota["unit"], quota["remaining"]) for quota in document["remaining"]["quotas"]]
    assert left == [("day", "tokens", 20), ("month", "usd", 1.0)]


async def get(stack: Stack, method: str = "GET", **headers: str) -> tuple[int, Any, dict[str, str]]:
    async with stack.http.request(method, f"{stack.url}/v1/me", headers=stack.key() | headers) as response:
        document = await response.json(content_type=None) if method == "GET" else None
        return response.status, document, lower(response.headers)


QUEUED = {
    "/v1/inference",
    "/v1/predict",
    "/api/inference",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/responses",
    "/v2/models/{id...}/infer",
}
"""The paths whose POST requests reach admission."""


async def test_every_route_of_customers_is_limited(stack: Stack) -> None:
    """By admission if its requests join a queue, else by the limit of auxiliary requests, and by nothing else."""
    stack.catalog.set(tiers=(tier("free", 3, 0.1, auxiliary_rate=0.001, auxiliary_burst=1.0),))
    routes = stack.gateway._routes
    assert (await get(stack))[0] == 200
    queued, limited, others = set(), set(), set()
    for endpoint in (each for each in ENDPOINTS if each.token == "key"):
        path = endpoint.path.replace("{id...}", "x").replace("{id}", "x")
        for method in endpoint.methods:
            found = routes.find(path)
            assert found is not None
            async with stack.http.request(method, stack.url + path, headers=stack.key()) as response:
                is_limited = '"auxiliary-requests";r=0;' in response.headers.get("RateLimit", "")
                assert is_limited == (response.status == 429)
            kind = queued if found[0][method].queued else limited if is_limited else others
            kind.add((method, endpoint.path))

    assert queued == {("POST", path) for path in QUEUED}
    assert others == set()
    assert len(limited) > 30
    assert (await stack.infer())[0] == 200

    async def is_up() -> bool:
        status, health = await stack.internal("/internal/health")
        assert status == 200 or health["reasons"]
        return status == 200

    await eventually(is_up, "health is not limited, and not down for long")


async def test_an_auxiliary_request_above_the_limit(stack: Stack) -> None:
    """It gets the usual error in the form of its path, with wait and headers, and is counted with its tier and endpoint."""
    stack.catalog.set(tiers=(tier("free", 3, 0.1, auxiliary_rate=0.5, auxiliary_burst=1.0),))
    url, count = (
        f"{stack.url}/v1/messages/count_tokens",
        {"model": "tiny", "messages": [{"role": "user", "content": "x" * 20_000}]},
    )
    statuses = []
    for _ in range(2):
        async with stack.http.post(url, json=count, headers=stack.key()) as response:
            statuses.append(response.status)
            document, headers = await response.json(), lower(response.headers)
    _, problem, _ = await get(stack, Accept=PROBLEM)
    async with stack.http.get(f"{stack.url}/metrics") as response:
        metrics = await response.text()

    assert statuses == [200, 429]
    assert (document["error"]["type"], document["error"]["details"]["error_code"]) == (
        "rate_limit_error",
        "rate_limit_exceeded",
    )
    assert 0 < int(headers["retry-after-ms"]) <= 2500
    assert '"auxiliary-requests";q=1;w=2' in headers["ratelimit-policy"]
    assert headers["ratelimit-policy"].startswith('"requests";q=1000;')
    assert "anthropic-ratelimit-requests-remaining" in headers
    assert (problem["code"], problem["violated-policies"]) == ("rate_limit_exceeded", ["auxiliary-requests"])
    assert 'tierlane_rate_limited_total{scope="auxiliary_limit",tier="free"} 2.0' in metrics
    labels = 'endpoint="/v1/messages/count_tokens",outcome="rate_limit_exceeded",tier="free"'
    assert f"tierlane_requests_total{{{labels}}} 1.0" in metrics


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("inference", {"input": "a"}),
        ("completions", {"model": "tiny", "prompt": ["a", "b"]}),  # A list counts once.
        ("chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stream": True}),
    ],
)
async def test_stored_responses_are_auxiliary_requests(stack: Stack, path: str, body: dict[str, Any]) -> None:
    """Admission does not count the repetitions of an Idempotency-Key; other requests are admitted all the same."""
    stack.catalog.set(tiers=(tier("free", 3, 0.1, auxiliary_rate=0.001, auxiliary_burst=2.0),))
    found = []
    for _ in range(4):
        key = stack.key() | {"Idempotency-Key": "k"}
        async with stack.http.post(f"{stack.url}/v1/{path}", json=body, headers=key) as response:
            text, headers = await response.text(), lower(response.headers)
            found.append((response.status, headers.get("idempotent-replayed")))

    assert found == [(200, None), (200, "true"), (200, "true"), (429, None)]
    assert "requests that run no model" in text
    assert '"auxiliary-requests";r=0;' in headers["ratelimit"]
    assert (await stack.infer())[0] == 200


def replace_parts(stack: Stack, **changes: Any) -> None:
    """Replace what the endpoint reads from."""
    stack.gateway.me._parts = replace(stack.gateway.me._parts, **changes)


async def test_it_shows_limits_what_is_left_and_usage(stack: Stack) -> None:
    """The document has customer, limits, what Redis has left of them and usage. Reading it, also by HEAD, costs nothing."""
    reads: list[str] = []

    async def find_usage(customer_id: str) -> Usage:
        reads.append(customer_id)
        return Usage(requests=12, completed=10, failed=2, tokens_used=345, as_of=1_800_000_000)

    replace_parts(stack, find_usage=find_usage)
    stack.catalog.set(key=LIMITS | {"tokens_per_minute": 4000, "max_concurrency": 5, "quotas": DAY})
    stack.worker.hold = True
    waiting = [asyncio.create_task(stack.infer({"input": "hell"})) for _ in range(3)]
    await accepted(stack, 3)
    responses = await asyncio.gather(*(get(stack) for _ in range(30)))
    status, _, head = await get(stack, "HEAD")
    stack.worker.hold = False
    await asyncio.gather(*waiting)

    assert [code for code, _, _ in responses] == [200] * 30
    _, document, headers = responses[-1]
    remaining = document["remaining"]
    (quota,) = remaining["quotas"]
    assert (quota["quota"], quota["amount"], quota["remaining"], quota["reset_ms"] > 0) == ("day", 100, 97, True)
    assert (remaining["requests"], remaining["concurrency"]) == (7, 2)  # A new bucket holds a quarter of its burst.
    seconds, micros = await stack.redis.time()
    refilled = 4000 / 60 * (seconds + micros / 1e6 - int(await stack.redis.get("epoch")) / 1e6)  # Since the epoch.
    assert 949 <= remaining["tokens"] <= 950 + refilled  # A quarter, less the estimates of 17 tokens each.
    assert document["limits"]["base"] == LIMITS | {"tokens_per_minute": 4000, "max_concurrency": 5}
    names = ("customer", "customer_id", "tier", "key_id", "as_of")
    assert [document[name] for name in names] == [
        "free", "customer-free", "free", stack.catalog.keys["free"].id, "now",
    ]  # fmt: skip
    assert document["usage"] == {
        "requests": 12, "completed": 10, "failed": 2, "tokens_used": 345, "as_of": 1_800_000_000, "alerts": [],
    }  # fmt: skip
    assert (headers["x-ratelimit-remaining-requests"], '"day";r=97;t=' in headers["ratelimit"]) == ("7", True)
    assert (headers["cache-control"], "x-request-id" in headers) == ("no-store", True)
    assert (status, head["x-ratelimit-remaining-requests"]) == (200, "7")
    assert reads == ["customer-free"]


async def test_it_shows_the_share_of_gpu_time(stack: Stack) -> None:
    """Of all gateways, in the last minute; null while the tier has used none. And the weight of the customer."""
    _, before, _ = await get(stack)
    used = CustomerGpuTime("free", "free", 1.0, 10.0, 0.0, 0)
    stats = GatewayStats("g2", 0.0, {}, gpu_ms={"free": 40.0}, gpu_times=[used])

    async def share() -> float | None:
        await stack.worker.presence.gateway_beat(stats)
        _, document, _ = await get(stack)
        found: float | None = document["gpu_share"]
        return found

    assert (before["weight"], before["gpu_share"]) == (1.0, None)
    assert await eventually(share, "the share is known") == 0.25


async def test_a_cached_read_includes_later_admissions(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests admitted after a read that is still cached are deducted from it, in the document and in headers."""
    stack.catalog.set(key=LIMITS | {"quotas": DAY})
    monkeypatch.setattr(stack.gateway.me._looks, "_keep_s", 60.0)
    left = []
    for _ in range(3):
        await stack.infer()
        _, document, headers = await get(stack)
        assert headers["x-ratelimit-remaining-requests"] == str(document["remaining"]["requests"])
        left.append((document["remaining"]["requests"], document["remaining"]["quotas"][0]["remaining"]))

    assert left == [(9, 99), (8, 98), (7, 97)]


async def test_without_redis_and_postgresql(stack: Stack) -> None:
    """Without Redis the values are an estimate; without PostgreSQL usage is null. No part of the fault is shown."""

    async def unavailable(*_: Any) -> Any:
        raise RedisUnavailable("redis://user:secret@host")

    home = AccountHome(stack.gateway.inference.customer_limits, unavailable)
    replace_parts(stack, home=lambda _: home, find_usage=unavailable)
    status, document, headers = await get(stack)

    assert (status, document["as_of"], document["remaining"]["requests"] >= 250) == (200, "estimate", True)
    assert "ratelimit" in headers
    assert (document["usage"], "secret" in str(document)) == (None, False)
    assert document["usage_problem"]


async def test_it_needs_a_key(stack: Stack) -> None:
    """Without a valid key the response is a 401."""
    status, document, headers = await get(stack, Authorization="Bearer nonsense")

    assert (status, document["error"]["code"], headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
