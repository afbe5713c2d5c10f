"""The one error of the local stack: a sentence that names the fault and says what to do."""


class StackError(Exception):
    """The local stack cannot start; the message says why and what to do."""
