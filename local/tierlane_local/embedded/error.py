"""The error of embedded servers."""


class EmbeddedServerError(Exception):
    """An embedded server cannot be found or started; the message contains the reason and what to do."""
