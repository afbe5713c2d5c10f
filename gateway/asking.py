"""A request, as far as the steps of inference look at it, whichever lane it came by."""

from typing import Protocol

from multidict import CIMultiDictProxy


class Asking(Protocol):
    """A request, as far as its handler looks at it; `remote` is the client's address."""

    @property
    def request_id(self) -> str: ...
    @property
    def headers(self) -> CIMultiDictProxy[str]: ...
    @property
    def remote(self) -> str | None: ...
