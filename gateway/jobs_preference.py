"""`Prefer: respond-async` (RFC 7240): what a client would like, and never an error: what is not understood is passed over."""

from multidict import CIMultiDictProxy

HEADER = "Prefer"
RESPOND_ASYNC = "respond-async"
APPLIED = ("Preference-Applied", RESPOND_ASYNC)


def prefers_async(headers: CIMultiDictProxy[str]) -> bool:
    """Whether the client would rather be told where the answer will be than wait for it.

    Of preferences that are there twice the first counts, as the RFC has it. This one has no value; parameters and other
    preferences (`wait=10`) are passed over.
    """
    for line in headers.getall(HEADER, ()):
        for preference in line.split(","):
            name, equals, value = preference.partition(";")[0].partition("=")
            if name.strip().lower() == RESPOND_ASYNC:
                return not equals or value.strip() in ("", '""')
    return False
