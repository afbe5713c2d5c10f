"""The description of every endpoint of a gateway: one `ApiEndpoint` for each route of `build_routes` (gateway/wiring.py).

All inference endpoints have the same errors, since they have the same pipeline. tests/architecture/test_openapi.py
compares this table with the routes, both ways.
"""

from typing import Any

from gateway.account.page import ASSETS
from gateway.api.models import ModelEntry, ModelList
from gateway.http.response import JSON
from gateway.http.static import ASSET_TYPES, HTML
from gateway.openapi.account_endpoints import ACCOUNT
from gateway.openapi.batch_endpoints import BATCHES
from gateway.openapi.endpoint_kinds import ANY_PATH_ERRORS, account_endpoint, probe_endpoint, static_page
from gateway.openapi.inference_endpoints import INFERENCE
from gateway.openapi.message_endpoints import MESSAGES
from gateway.openapi.model import ApiEndpoint, Parameter
from gateway.openapi.open_inference_endpoints import OPEN_INFERENCE
from gateway.openapi.operator_endpoints import ACTIONS, DASHBOARD, METRICS_PAGE, OPERATIONS
from gateway.openapi.response_endpoints import RESPONSES
from gateway.openapi.schemas import NOT_EMPTY, only
from gateway.operations.health.model import Liveness, Readiness
from scheduler.errors import ErrorCode

ENDPOINTS: tuple[ApiEndpoint, ...] = (
    *INFERENCE,
    *RESPONSES,
    account_endpoint("/v1/models", "List the models", ModelList),
    account_endpoint(
        "/v1/models/{id...}",
        "Read one model",
        ModelEntry,
        ErrorCode.MODEL_NOT_FOUND,
        parameters=(Parameter("id", "path", "The name of the model, which may contain slashes.", NOT_EMPTY),),
    ),
    *ACCOUNT,
    *BATCHES,
    *MESSAGES,
    *OPEN_INFERENCE,
    *OPERATIONS,
    *DASHBOARD,
    *ACTIONS,
    probe_endpoint("/livez", "Liveness of the process", {200: ("The process is alive.", Liveness)}),
    *(
        probe_endpoint(path, summary, {200: ("Ready.", Readiness), 503: ("Not ready, with the reason.", Readiness)})
        for path, summary in (
            ("/readyz", "Readiness for traffic"),
            ("/health", "The same, at the path of vLLM's server"),
        )
    ),
    METRICS_PAGE,
    static_page("/", "Introduction, and the account of who signs in with a key", HTML),
    static_page(
        "/assets/{id}",
        "A file of that page",
        *ASSET_TYPES.values(),
        parameters=(Parameter("id", "path", "The name of the file.", only(*ASSETS)),),
        errors=ANY_PATH_ERRORS | {ErrorCode.NOT_FOUND},
    ),
    static_page("/docs", "This reference", HTML),
    static_page("/openapi.json", "This description as OpenAPI", JSON, kind=dict[str, Any]),
)
