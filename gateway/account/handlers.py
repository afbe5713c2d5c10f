"""The handlers of `/v1/usage`, `/v1/jobs`, `/v1/keys` and `/v1/webhook-secret`. All count against the limit of auxiliary requests."""

from collections.abc import Awaitable, Callable, Collection

from gateway.account.jobs import JOB_IDS, JOB_PAGE, MAX_JOB_PAGE, JobItem, job_item
from gateway.account.keys import (
    KEY_IDS,
    KEY_PAGE,
    MAX_KEY_PAGE,
    KeyItem,
    NewKeyItem,
    key_item,
    new_key_item,
    read_new_key,
)
from gateway.account.store import AccountStore
from gateway.account.usage import UsageItem, UsageReports
from gateway.account.webhook_secret import WebhookSecretItem, read_grace, webhook_secret_item
from gateway.http.body.reading import check_media, read_body
from gateway.http.error_responses import ErrorResponses
from gateway.http.pages import PAGE_PARAMETERS, ObjectList, check_parameters, page_of, read_page
from gateway.http.router import RoutedRequest
from gateway.inference.customer_endpoints import CustomerEndpoints, customer_endpoint
from gateway.inference.entry import Entry
from ledger.catalog.api_key import mint
from ledger.catalog.snapshot import Identity
from ledger.catalog.webhook_secret import WebhookSecrets
from ledger.jobs import list_jobs
from ledger.keys import create_own_key, list_own_keys, revoke_own_key
from ledger.postgres import Connection
from ledger.webhook_secrets import read_webhook_secrets, rotate_webhook_secret
from scheduler.errors import ErrorCode, RequestError

MAX_BODY_BYTES = 65_536
NO_KEY = "There is no such key."
WHOLE_KEY = "There is no such key: its id is its middle part, between the underscores."
NOT_SIGNED = "Callbacks are not signed in this deployment, so there is no webhook secret: ask the administrator."


class AccountHandlers(CustomerEndpoints):
    """The handlers. `served`: the names of the models of all pools. `callback_secret`: the deployment's, empty without one."""

    def __init__(
        self,
        entry: Entry,
        faults: ErrorResponses,
        reports: UsageReports,
        store: AccountStore,
        *,
        callback_secret: bytes,
        served: Callable[[], Collection[str]],
    ) -> None:
        super().__init__(entry, faults)
        self._callback_secret = callback_secret
        self._served = served
        self._reports = reports
        self._store = store

    @customer_endpoint
    async def usage(self, request: RoutedRequest, identity: Identity) -> ObjectList[UsageItem]:
        """GET /v1/usage."""
        return await self._reports.page(request.request.query, identity)

    @customer_endpoint
    async def jobs(self, request: RoutedRequest, identity: Identity) -> ObjectList[JobItem]:
        """GET /v1/jobs."""
        check_parameters(request.request.query, PAGE_PARAMETERS)
        page = read_page(request.request.query, JOB_PAGE, MAX_JOB_PAGE, ids=JOB_IDS)
        rows = await self._store.run(lambda c: list_jobs(c, identity.customer_id, page.after, page.limit + 1))
        return page_of([job_item(row) for row in rows], page.limit)

    @customer_endpoint
    async def keys(self, request: RoutedRequest, identity: Identity) -> ObjectList[KeyItem]:
        """GET /v1/keys."""
        check_parameters(request.request.query, PAGE_PARAMETERS)
        page = read_page(request.request.query, KEY_PAGE, MAX_KEY_PAGE, ids=KEY_IDS)
        rows = await self._store.run(lambda c: list_own_keys(c, identity, page.after, page.limit + 1))
        return page_of([key_item(row) for row in rows], page.limit)

    @customer_endpoint
    async def create_key(self, request: RoutedRequest, identity: Identity) -> NewKeyItem:
        """POST /v1/keys."""
        check_media(request.headers, request.request.content_length or 0, MAX_BODY_BYTES)
        raw = await read_body(request.request, MAX_BODY_BYTES, self.entry.bodies.share(identity))
        name, wanted = read_new_key(raw, identity, self._served())
        key = mint()
        row = await self._store.run(lambda c: create_own_key(c, identity, key, name, wanted))
        return new_key_item(row, key.text)

    @customer_endpoint
    async def revoke_key(self, request: RoutedRequest, identity: Identity) -> KeyItem:
        """DELETE /v1/keys/{id}."""
        if not (request.tail.isascii() and request.tail.isalnum()):
            raise RequestError(ErrorCode.NOT_FOUND, WHOLE_KEY if request.tail.startswith("tl_") else NO_KEY)
        row = await self._store.run(lambda c: revoke_own_key(c, identity, request.tail))
        if row is None:
            raise RequestError(ErrorCode.NOT_FOUND, NO_KEY)
        return key_item(row)

    @customer_endpoint
    async def webhook_secret(self, _: RoutedRequest, identity: Identity) -> WebhookSecretItem:
        """GET /v1/webhook-secret."""
        return await self._secret(identity, lambda c: read_webhook_secrets(c, identity))

    @customer_endpoint
    async def rotate_webhook_secret(self, request: RoutedRequest, identity: Identity) -> WebhookSecretItem:
        """POST /v1/webhook-secret/rotate."""
        raw = await read_body(request.request, MAX_BODY_BYTES, self.entry.bodies.share(identity))
        if raw:  # Some clients name a type of a body that is empty.
            check_media(request.headers, len(raw), MAX_BODY_BYTES)
        grace = read_grace(raw)
        return await self._secret(identity, lambda c: rotate_webhook_secret(c, identity, grace))

    async def _secret(
        self, identity: Identity, operation: Callable[[Connection], Awaitable[WebhookSecrets]]
    ) -> WebhookSecretItem:
        """The item of what an operation returns. Raises RequestError, without a call if there are no secrets."""
        if not self._callback_secret:
            raise RequestError(ErrorCode.NOT_FOUND, NOT_SIGNED)
        secrets = await self._store.run(operation)
        return webhook_secret_item(self._callback_secret, identity.customer_id, secrets)

    async def close(self) -> None:
        """End what is under way."""
        await self._reports.close()
        await self._store.close()
