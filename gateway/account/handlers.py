"""The handlers of `/v1/usage`, `/v1/jobs` and `/v1/keys`. All count against the limit of auxiliary requests."""

from collections.abc import Callable, Collection

from gateway.account.jobs import JOB_PAGE, MAX_JOB_PAGE, JobItem, job_item
from gateway.account.keys import KEY_PAGE, MAX_KEY_PAGE, KeyItem, NewKeyItem, key_item, new_key_item, read_new_key
from gateway.account.store import AccountStore
from gateway.account.usage import UsageItem, UsageReports
from gateway.http.body.reading import check_media, read_body
from gateway.http.error_responses import ErrorResponses
from gateway.http.pages import ObjectList, page_of, read_page
from gateway.http.router import RoutedRequest
from gateway.inference.customer_endpoints import CustomerEndpoints, customer_endpoint
from gateway.inference.entry import Entry
from ledger.catalog.api_key import mint
from ledger.catalog.snapshot import Identity
from ledger.jobs import list_jobs
from ledger.keys import create_own_key, list_own_keys, revoke_own_key
from scheduler.errors import ErrorCode, RequestError

MAX_BODY_BYTES = 65_536
NO_KEY = "There is no such key."


class AccountHandlers(CustomerEndpoints):
    """The handlers. `served`: the names of the models of all pools."""

    def __init__(
        self,
        entry: Entry,
        faults: ErrorResponses,
        reports: UsageReports,
        store: AccountStore,
        served: Callable[[], Collection[str]],
    ) -> None:
        super().__init__(entry, faults)
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
        page = read_page(request.request.query, JOB_PAGE, MAX_JOB_PAGE)
        rows = await self._store.run(lambda c: list_jobs(c, identity.customer_id, page.after, page.limit + 1))
        return page_of([job_item(row) for row in rows], page.limit)

    @customer_endpoint
    async def keys(self, request: RoutedRequest, identity: Identity) -> ObjectList[KeyItem]:
        """GET /v1/keys."""
        page = read_page(request.request.query, KEY_PAGE, MAX_KEY_PAGE)
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
            raise RequestError(ErrorCode.NOT_FOUND, NO_KEY)
        row = await self._store.run(lambda c: revoke_own_key(c, identity, request.tail))
        if row is None:
            raise RequestError(ErrorCode.NOT_FOUND, NO_KEY)
        return key_item(row)

    async def close(self) -> None:
        """End what is under way."""
        await self._reports.close()
        await self._store.close()
