"""The one error of the embedded servers: a sentence that names the fault and says what to do."""


class EmbeddedServerError(Exception):
    """An embedded server cannot be found, started or reached; the message says which one, why, and what to do."""
