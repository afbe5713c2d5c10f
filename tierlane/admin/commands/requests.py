"""`tierlane requests`: its options."""

from typing import Annotated, Literal

from tierlane.admin.options import CustomerOption, Limit, OnlyCustomer, Work, reads
from tierlane.command import option, single_verb
from tierlane.lazy import requests, values

app = single_verb()


@reads(app, "requests", "requests acme --status failed\nrequests --code queue_timeout --since 2h")
def requests_(
    customer: OnlyCustomer = None,
    *,
    named: CustomerOption = None,
    status: Annotated[
        Literal["queued", "processing", "completed", "failed"] | None,
        option("--status", "Only requests with this status.", "all"),
    ] = None,
    code: Annotated[
        str | None, option("--code", "Only requests that failed with this error code.", "all", metavar="CODE")
    ] = None,
    model: Annotated[str | None, option("--model", "Only requests for this model.", "all", metavar="NAME")] = None,
    since: Annotated[
        str, option("--since", "Only requests of this time, such as 2h or 7d.", "1d", metavar="TIME")
    ] = "1d",
    limit: Limit = 100,
) -> Work:
    """Show accepted requests, the newest first. Rejected requests are not in the audit: `tierlane explain` shows them."""
    age = values.duration("--since", since)
    owner = values.one_of("CUSTOMER", customer, "--customer", named)
    return requests.show_requests(limit, owner, age, status=status, error_code=code, model=model)
