"""The header by which OpenAI's client marks a retry."""

from multidict import CIMultiDictProxy


def is_retry(headers: CIMultiDictProxy[str]) -> bool:
    """Whether OpenAI's client marks this as a retry: `x-stainless-retry-count` over 0."""
    count = headers.get("x-stainless-retry-count")
    return count is not None and count.isascii() and count.isdigit() and count.strip("0") != ""
