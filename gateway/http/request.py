"""What authentication and the records of a request need to know about it."""

from typing import Protocol

from multidict import CIMultiDictProxy


class HttpRequest(Protocol):
    """A request, for authentication and its records. `remote` is the client's address.

    `auxiliary`: it runs no model, so admission will not count it, and no other limit has counted it yet.
    """

    auxiliary: bool

    @property
    def request_id(self) -> str: ...
    @property
    def headers(self) -> CIMultiDictProxy[str]: ...
    @property
    def remote(self) -> str | None: ...

    def occupy(self, customer_id: str) -> None:
        """Count the connection to this customer. Raises RequestError 429 `too_many_connections`."""
