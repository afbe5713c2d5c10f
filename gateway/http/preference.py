"""The header `Prefer: respond-async` (RFC 7240)."""

from multidict import CIMultiDictProxy

PREFER = "Prefer"
RESPOND_ASYNC = "respond-async"
PREFERENCE_APPLIED = ("Preference-Applied", RESPOND_ASYNC)


def prefers_async(headers: CIMultiDictProxy[str]) -> bool:
    """Whether the client prefers a job to waiting for the result (`Prefer: respond-async`, RFC 7240).

    Of duplicate preferences the first counts, according to the RFC. This preference has no value. Parameters and other
    preferences (`wait=10`) are ignored.
    """
    for line in headers.getall(PREFER, ()):
        for preference in line.split(","):
            name, equals, value = preference.partition(";")[0].partition("=")
            if name.strip().lower() == RESPOND_ASYNC:
                return not equals or value.strip() in ("", '""')
    return False
